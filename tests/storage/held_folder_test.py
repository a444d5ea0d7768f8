"""Files of a run go into the folder in which the process works, or nowhere."""

import pytest

from valkyrie.errors import StorageError
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.writers import create_writers
from valkyrie.run.configuration_files import write_operative_configuration
from valkyrie.storage import held_folder, whole_file
from valkyrie.storage.held_folder import HeldFolder
from valkyrie.storage.lease import DiskLock


def content(folder):
  return sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*'))


@pytest.fixture
def run(tmp_path):
  """The folder of a run with a file."""
  run = tmp_path / 'run'
  run.mkdir()
  (run / 'picture.png').write_text('first')
  return run


def move(run):
  run.rename(run.with_name('moved'))
  run.mkdir()
  (run / 'picture.png').write_text('of another run')
  return run.with_name('moved')


def swap_a_link(run):
  moved = run.with_name('moved')
  run.rename(moved)
  other = run.with_name('other')
  other.mkdir()
  (other / 'picture.png').write_text('of another run')
  run.symlink_to(other)
  return moved


@pytest.mark.parametrize('swap', [move, swap_a_link])
@pytest.mark.parametrize('hold', [held_folder.held, DiskLock])
def test_every_file_goes_where_the_process_began(run, swap, hold):
  holding = hold(run)
  if hold is held_folder.held:
    holding.__enter__()
  mine = swap(run)
  before = content(run)
  whole_file.write(run / 'picture.png', 'second')
  whole_file.write(run / 'eval' / 'data.json', '{}')
  with create_writers(run, name='eval') as writer:
    writer.write_scalars(1, {'loss': 1.0})
  write_operative_configuration(run)
  assert (run / 'picture.png').read_text() == 'of another run'
  assert content(run) == before
  assert (mine / 'picture.png').read_text() == 'second'
  written = content(mine)
  assert {'eval/data.json', 'eval/metrics.jsonl', 'operative_config.gin'} <= {*written}
  assert any('tfevents' in name for name in written)
  if hold is DiskLock:
    holding.release()
  else:
    holding.__exit__(None, None, None)
  whole_file.write(run / 'picture.png', 'third')
  assert (run / 'picture.png').read_text() == 'third'


def test_a_deleted_folder_gets_no_file(run):
  with held_folder.held(run):
    (run / 'picture.png').unlink()
    run.rmdir()
    run.mkdir()
    with pytest.raises(StorageError, match=f'{run}/picture.png cannot be written: No such file'):
      whole_file.write(run / 'picture.png', 'second')
    assert content(run) == []


def test_a_folder_that_is_not_there_is_not_held(tmp_path):
  with held_folder.held(tmp_path / 'run'):
    whole_file.write(tmp_path / 'run' / 'a', 'text')
  assert (tmp_path / 'run' / 'a').read_text() == 'text'


def test_a_lost_folder_gets_no_line_and_no_file(run):
  lost = []

  def check():
    if lost:
      raise StorageError('it was lost')

  folder = HeldFolder(run, check)
  lines = JsonLines(run / 'metrics.jsonl')
  lines.write({'step': 1})
  lost.append(True)
  with pytest.raises(StorageError, match='it was lost'):
    lines.write({'step': 2})
  with pytest.raises(StorageError, match='it was lost'):
    whole_file.write(run / 'picture.png', 'second')
  with pytest.raises(StorageError, match='it was lost'):
    lines.close()
  folder.release()
  folder.release()
  assert (run / 'metrics.jsonl').read_text() == '{"step": 1}\n'
  assert (run / 'picture.png').read_text() == 'first'
