"""Damaged and unfinished steps: never used, never deleted, and never a reason to start afresh."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.checkpoint import failed_saves, manager, manifest, steps
from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.errors import StorageError
from valkyrie.storage import owned

NAMES = (
  'manifest.sha256', 'record.json', 'state/_METADATA', 'state/_CHECKPOINT_METADATA',
  'state/manifest.ocdbt', 'state/d/*', 'state/ocdbt.process_0/d/*', 'state/array_metadatas/*',
)  # fmt: skip


def weights(step):
  return {'w': jnp.arange(300, dtype=jnp.float32) * step}


def target():
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {'w': jax.ShapeDtypeStruct((300,), jnp.float32, sharding=sharding)}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A run with the steps 1, 2 and 3, to copy."""
  path = tmp_path_factory.mktemp('saved') / 'run'
  with Checkpoints().open(path) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, weights(step), {'position': step})
  return path


@pytest.fixture
def run(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / 'run')


def present(run, folder='checkpoints'):
  return sorted(path.name for path in (run / folder).iterdir())


def steps_in(run):
  """The steps. What a save that fails leaves, since a thread of Orbax writes on, goes later."""
  return [name for name in present(run) if '.unfinished-' not in name]


def assert_continues_after(run, step):
  """Asserts that a reader and a trainer restore `step`, and that the next save follows it."""
  for read_only in (True, False):
    with open_to_read(run) if read_only else Checkpoints().open(run) as checkpoints:
      assert checkpoints.latest_step() == step
      state = checkpoints.restore(target())
      assert checkpoints.latest_record() == {'position': step}
      np.testing.assert_array_equal(state['w'], weights(step)['w'])
      if not read_only:
        checkpoints.save(step + 1, weights(step + 1), {'position': step + 1})
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == step + 1


def flip(path, place):
  data = bytearray(path.read_bytes())
  data[len(data) * place // 100] ^= 1 << place % 8
  path.write_bytes(data)


@pytest.mark.invariant(11)
@pytest.mark.parametrize('name', NAMES)
def test_one_flipped_bit_is_found(run, name):
  files = list((run / 'checkpoints' / '3').glob(name))
  assert files
  for file in files:
    whole = file.read_bytes()
    for place in (0, 35, 71, 99):
      flip(file, place)
      with open_to_read(run) as checkpoints:
        assert checkpoints.latest_step() == 2
      file.write_bytes(whole)
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == 3


def test_readers_of_a_process_hash_a_file_once_and_again_if_it_changes(run, monkeypatch):
  monkeypatch.setattr(manifest, '_TICK', 0)
  monkeypatch.setattr(manifest, '_digests', {})
  open_to_read(run, '3').close()
  digests = dict(manifest._digests)
  files = [path for path in (run / 'checkpoints/3').rglob('*') if path.is_file()]
  assert len(digests) == len(files) - 1  # but the manifest
  manifest._digests.update(dict.fromkeys(digests, 'of another file'))
  with pytest.raises(StorageError, match='has changed since it was saved'):
    open_to_read(run, '3')
  with Checkpoints().open(run) as checkpoints:  # a trainer reads all of them
    assert checkpoints.latest_step() == 3
  manifest._digests.update(digests)
  flip(run / 'checkpoints/3/record.json', 50)
  with pytest.raises(StorageError, match=r'record\.json has changed since it was saved'):
    open_to_read(run, '3')


def test_a_damaged_step_is_set_aside_and_the_run_continues_from_the_one_before(run, caplog):
  flip(next((run / 'checkpoints' / '3' / 'state' / 'd').iterdir()), 50)
  damaged = {p.name: p.read_bytes() for p in (run / 'checkpoints' / '3').rglob('*') if p.is_file()}
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == 2
  assert 'checkpoints/3 is damaged: ' in caplog.text
  assert 'Step 2 is used in its place' in caplog.text
  assert_continues_after(run, 2)
  kept = {p.name: p.read_bytes() for p in (run / 'set_aside' / '3').rglob('*') if p.is_file()}
  assert kept == damaged
  assert 'has changed since it was saved' in caplog.text
  # Step 3 exists again: the second damaged one gets a name beside the first.
  flip(run / 'checkpoints' / '3' / 'record.json', 50)
  assert_continues_after(run, 2)
  assert present(run, 'set_aside') == ['3', '3.1']


def cut(step):
  (file,) = (step / 'state' / 'd').iterdir()
  os.truncate(file, file.stat().st_size // 2)


def empty(step):
  shutil.rmtree(step)
  step.mkdir()


def replace_by_a_link(step):
  (step / 'record.json').rename(step.parent.parent / 'record.json')
  (step / 'record.json').symlink_to(step.parent.parent / 'record.json')


def replace_by_another_step(step):
  shutil.rmtree(step)
  shutil.copytree(step.parent / '1', step)


# Public report google/tensorstore#24: missing chunks that read as zeros.
@pytest.mark.invariant(11)
@pytest.mark.parametrize(
  'damage',
  [
    cut, empty, replace_by_a_link, replace_by_another_step,
    lambda step: (step / 'manifest.sha256').unlink(),
    lambda step: (step / 'manifest.sha256').write_text(''),
    lambda step: (step / 'state' / 'manifest.ocdbt').unlink(),
    lambda step: shutil.rmtree(step / 'state'),
  ],
)  # fmt: skip
def test_cut_missing_and_replaced_files_are_found(run, damage):
  damage(run / 'checkpoints' / '3')
  assert_continues_after(run, 2)
  assert present(run, 'set_aside') == ['3']


def test_a_file_that_was_put_into_a_state_is_found(run):
  (run / 'checkpoints' / '3' / 'notes.txt').write_text('mine')  # which nobody reads
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == 3
  (run / 'checkpoints' / '3' / 'state' / 'planted').write_text('{}')
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == 2
  with pytest.raises(StorageError, match=r'state/planted is not in manifest\.sha256'):
    open_to_read(run, '3')


def test_two_damaged_steps_are_set_aside(run):
  empty(run / 'checkpoints' / '2')
  cut(run / 'checkpoints' / '3')
  assert_continues_after(run, 1)
  assert present(run, 'set_aside') == ['2', '3']


@pytest.mark.parametrize('open_run', [open_to_read, Checkpoints().open])
def test_a_run_does_not_start_afresh_if_all_steps_are_damaged(run, open_run):
  for step in (1, 2, 3):
    cut(run / 'checkpoints' / str(step))
  with pytest.raises(StorageError, match=r'All steps in .* are damaged') as refusal:
    open_run(run)
  assert refusal.value.exit_code == 74
  assert 'step 2: state/d/' in str(refusal.value)
  assert present(run) == ['1', '2', '3'] and not (run / 'set_aside').exists()


@pytest.mark.parametrize('step', ['2', 'best'])
def test_a_damaged_step_that_was_asked_for_names_the_others(tmp_path, step):
  with Checkpoints(keep=3).open(tmp_path) as checkpoints:
    for number in (1, 2, 3):
      record = {'validation_loss': 1.0} if number == 2 else {}
      checkpoints.save(number, {'d': jnp.arange(9.0)}, record)
  cut(tmp_path / 'checkpoints' / '2')
  with pytest.raises(StorageError, match='asked for are damaged') as refusal:
    open_to_read(tmp_path, step)
  assert 'Name another one: 1, 3, or latest.' in str(refusal.value)


def test_a_step_that_is_a_symbolic_link_is_refused(run, tmp_path):
  (run / 'checkpoints' / '3').rename(tmp_path / 'elsewhere')
  (run / 'checkpoints' / '3').symlink_to(tmp_path / 'elsewhere')
  for open_run in (open_to_read, Checkpoints().open):
    with pytest.raises(StorageError, match='3 is a symbolic link'):
      open_run(run)


@pytest.mark.skipif(not shutil.which('sha256sum'), reason='needs sha256sum')
def test_sha256sum_checks_the_manifest(run):
  place = run / 'checkpoints' / '3'
  check = ['sha256sum', '--strict', '--quiet', '--check', 'manifest.sha256']
  assert subprocess.run(check, cwd=place, check=False).returncode == 0
  cut(place)
  assert subprocess.run(check, cwd=place, check=False).returncode == 1


@pytest.mark.invariant(11)
@pytest.mark.parametrize(
  'moment', ['steps.owned.mark', 'steps.write_manifest', 'steps.sync', 'steps.owned.delete_file']
)
def test_a_kill_during_a_save_leaves_the_steps_before(run, moment):
  """Kills in an empty folder, before and after the manifest, and while an old step is deleted."""
  script = f"""
import os, signal
import jax.numpy as jnp
from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.checkpoint import steps
checkpoints = Checkpoints().open({str(run)!r})
{moment} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save(4, {{'w': jnp.arange(300, dtype=jnp.float32) * 4}}, {{'position': 4}})
checkpoints.wait()
"""
  assert subprocess.run([sys.executable, '-c', script], check=False).returncode == -9
  assert any('.' in name for name in present(run)), 'no unfinished step was left'
  assert_continues_after(run, 4 if 'delete' in moment else 3)
  assert all(name.isdecimal() for name in present(run))
  assert not (run / 'set_aside').exists()


def test_what_cannot_be_deleted_is_said_and_tried_again(run, monkeypatch):
  said, stuck, remove = [], ['1'], owned.delete_file

  def busy(file):
    if set(stuck) & {part.split('.')[0] for part in file.parts}:
      raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(file))
    return remove(file)

  monkeypatch.setattr(owned, 'delete_file', busy)
  for step in (4, 5):
    with Checkpoints().open(run, say=said.append) as checkpoints:
      checkpoints.save(step, {'w': jnp.ones(3)}, {})
    (left,) = [name for name in present(run) if name.startswith('1.deleted-')]
  message = f'{run}/checkpoints/{left} cannot be deleted (Device or resource busy)'
  assert [line for line in said if message in line] == [
    f'{message}; it stays, and each save tries again'
  ] * 2  # once a run
  del stuck[:]
  with Checkpoints().open(run) as checkpoints:
    assert checkpoints.latest_step() == 5
  assert present(run) == ['3', '4', '5']


def test_what_is_no_file_among_the_lines_of_a_run_prevents_no_save(run):
  (run / 'supervise.jsonl').mkdir()
  os.mkfifo(run / 'pipe.jsonl')
  with Checkpoints().open(run) as checkpoints:
    checkpoints.save(4, {'w': jnp.ones(3)}, {})
  assert present(run)[-1] == '4'


def test_the_lines_before_a_step_are_on_disk_before_it_is_valid(run, monkeypatch):
  events = []
  move = owned.move

  def moved(place, target):
    events.append(target.name)
    return move(place, target)

  monkeypatch.setattr(owned, 'move', moved)
  monkeypatch.setattr(steps, 'sync', lambda path: events.append(path.name))
  (run / 'eval').mkdir()
  for name in ('metrics.jsonl', 'refused_steps.jsonl', 'eval/metrics.jsonl'):
    (run / name).write_text('{}\n')
  with Checkpoints().open(run) as checkpoints:
    checkpoints.save(4, {'w': jnp.ones(3)}, {})
  before = [name for name in events[: events.index('4')] if name.endswith('.jsonl')]
  assert sorted(before) == ['metrics.jsonl', 'metrics.jsonl', 'refused_steps.jsonl']


def test_a_process_that_sees_other_files_than_process_0_is_refused(run, monkeypatch):
  def exchange(name, value):
    return [[3, 'a trainer elsewhere'], value]

  monkeypatch.setattr(manager.processes, 'exchange', exchange)
  with pytest.raises(StorageError, match='does not see the files of process 0'):
    Checkpoints().open(run)


def test_a_step_of_another_owner_stays(run, monkeypatch):
  said, rename = [], os.rename

  def denied(path, target):
    if os.path.basename(path) == '1':
      raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
    return rename(path, target)

  monkeypatch.setattr(os, 'rename', denied)
  with Checkpoints().open(run, say=said.append) as checkpoints:
    checkpoints.save(4, {'w': jnp.ones(3)}, {})
  assert present(run) == ['1', '2', '3', '4']
  assert any('checkpoints/1 cannot be deleted (Operation not permitted)' in line for line in said)


def test_an_unfinished_step_that_cannot_be_deleted_makes_room(run, monkeypatch):
  def busy(path):
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

  monkeypatch.setattr(owned, 'delete_marked', busy)
  with Checkpoints(keep=9).open(run) as checkpoints:
    place = checkpoints._steps.unfinished(4)
    place.mkdir()
    checkpoints.save(4, {'w': jnp.ones(3)}, {})
  assert present(run) == ['1', '2', '3', '4', place.name.replace('unfinished', 'deleted')]


def test_what_no_run_has_made_stays_and_is_named(run):
  """Copies and folders of a user, whose names begin with a step, and what 0.2.0 has left."""
  place, token, said = run / 'checkpoints', '0' * 32, []
  shutil.copytree(place / '3', place / '3.before_i_deleted')
  shutil.copytree(place / '3', place / '3.deleted')
  for name in ('3.unfinished-forensics', '4.unfinished', f'4.unfinished-{token}', '2024'):
    (place / name).mkdir()
    (place / name / 'notes.txt').write_text('precious')
  owned.mark(place / '3.unfinished-forensics')
  (place / '3.unfinished-forensics').rename(place / '3.unfinished-of-mine')  # as `mv` does
  (place / 'readme').write_text('precious')
  before = {
    path.relative_to(place): path.read_bytes() for path in place.rglob('*.*') if path.is_file()
  }
  with Checkpoints(keep=1).open(run, say=said.append) as checkpoints:
    assert checkpoints.latest_step() == 3
    checkpoints.save(4, weights(4), {'position': 4})
  assert present(run) == [
    '3.before_i_deleted', '3.deleted', '3.unfinished-of-mine', '4', '4.unfinished',
    f'4.unfinished-{token}', 'readme',
  ]  # fmt: skip
  assert (run / 'set_aside' / '2024' / 'notes.txt').read_text() == 'precious'
  for path, content in before.items():
    if path.parts[0] not in ('1', '2', '3', '2024'):
      assert (place / path).read_bytes() == content
  text = '\n'.join(said)
  assert '3.before_i_deleted, 3.deleted, 3.unfinished-of-mine, 4.unfinished, readme' in text
  assert f'4.unfinished-{token} has notes.txt, which this program has not made' in text
  assert_continues_after(run, 4)


def test_a_folder_with_the_number_of_a_step_and_no_manifest_stays(run):
  shutil.rmtree(run / 'checkpoints' / '1')
  (run / 'checkpoints' / '1').mkdir()
  (run / 'checkpoints' / '1' / 'notes.txt').write_text('precious')
  (run / 'checkpoints' / '2' / 'notes.txt').write_text('precious')
  said = []
  with Checkpoints(keep=1).open(run, say=said.append) as checkpoints:
    checkpoints.save(4, weights(4), {'position': 4})
  assert (run / 'checkpoints' / '1' / 'notes.txt').read_text() == 'precious'
  (left,) = run.glob('checkpoints/2.deleted-*/notes.txt')
  assert left.read_text() == 'precious' and present(run)[1] == left.parent.name
  assert any(f'{left.parent} has notes.txt, which this program' in line for line in said)


def test_a_folder_that_was_put_in_the_place_of_a_step_is_set_aside(run):
  with Checkpoints(keep=9).open(run) as checkpoints:
    (run / 'checkpoints' / '4').mkdir()
    (run / 'checkpoints' / '4' / 'notes.txt').write_text('precious')
    checkpoints.save(4, weights(4), {'position': 4})
  assert (run / 'set_aside' / '4' / 'notes.txt').read_text() == 'precious'
  assert_continues_after(run, 4)


def test_a_damaged_step_on_another_disk_is_set_aside_there(run, tmp_path, monkeypatch, caplog):
  other, rename = tmp_path / 'other', os.rename
  (run / 'checkpoints').rename(other)
  (run / 'checkpoints').symlink_to(other)

  def across(path, target):
    if os.path.dirname(target) == str(run / 'set_aside'):
      raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
    rename(path, target)

  monkeypatch.setattr(os, 'rename', across)
  flip(other / '3' / 'record.json', 50)
  assert_continues_after(run, 2)
  assert (other / 'set_aside' / '3' / 'record.json').exists()
  assert not (run / 'set_aside').exists()
  assert f'Moved {run}/checkpoints/3 to {run}/checkpoints/set_aside/3' in caplog.text
  with Checkpoints().open(run) as checkpoints:
    assert checkpoints.latest_step() == 3


@pytest.mark.parametrize('open_run', [open_to_read, Checkpoints().open])
def test_a_step_that_cannot_be_read_is_named_with_its_file(run, monkeypatch, open_run):
  digest = manifest.hashlib.file_digest

  def broken(file, algorithm):
    if file.name.endswith('3/record.json'):
      raise OSError(errno.EIO, os.strerror(errno.EIO))  # as a read does, without a name
    return digest(file, algorithm)

  monkeypatch.setattr(manifest.hashlib, 'file_digest', broken)
  place = run / 'checkpoints'
  with pytest.raises(StorageError) as refusal:
    open_run(run)
  said = str(refusal.value)
  assert f'Step 3 in {place} cannot be read' in said
  assert f'Input/output error ({place}/3/record.json)' in said
  assert f'or move {place}/3 away to use the step before' in said
  (place / '3').rename(run / '3')
  with open_run(run) as checkpoints:
    assert checkpoints.latest_step() == 2


@pytest.mark.parametrize('change', ['moved', 'moved and made anew', 'unlocked', 'locked anew'])
def test_a_run_writes_nothing_into_a_directory_that_is_no_longer_its_own(run, change):
  moved = run.with_name('moved')
  with contextlib.ExitStack() as stack:
    first = stack.enter_context(Checkpoints(keep=1).open(run))
    if 'moved' in change:
      run.rename(moved)
    else:
      (run / 'trainer.lock').unlink()
    if 'anew' in change:
      second = stack.enter_context(Checkpoints().open(run))
      second.save(5, {'w': jnp.ones(3)}, {})
      second.wait()
    before = present(run) if run.exists() else None
    for step in (5, 6):  # 5.unfinished may be of the other run
      with pytest.raises(
        StorageError, match=r'is not the file that this run has locked.*--model_d'
      ):
        first.save(step, {'w': jnp.ones(3)}, {})
    assert (present(run) if run.exists() else None) == before
  assert not list(run.glob('checkpoints/*.unfinished'))


def test_only_steps_of_the_run_are_deleted(run):
  with Checkpoints(keep=1).open(run) as checkpoints:
    (run / 'checkpoints' / '3').rename(run / 'checkpoints' / '30')  # put there meanwhile
    checkpoints.save(4, {'w': jnp.ones(3)}, {})
  assert present(run) == ['30', '4']


@pytest.fixture
def small_disk(tmp_path):
  disk = tmp_path / 'disk'
  disk.mkdir()
  mounting = ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', disk]
  done = subprocess.run(mounting, capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip(f'a small disk cannot be mounted here: {done.stderr.strip()}')
  yield disk
  subprocess.run(['umount', '--lazy', disk], check=True)


def test_a_save_on_a_full_disk_fails_leaves_no_files_and_the_next_save_succeeds(small_disk):
  random = np.random.default_rng(0)  # noise does not compress
  small, large = ({'w': jnp.asarray(random.normal(size=n * 100_000))} for n in (1, 20))
  with Checkpoints(patience=0).open(small_disk / 'run') as checkpoints:
    checkpoints.save(1, small, {})
    checkpoints.wait()
    with pytest.raises(StorageError, match=r'in .*run/checkpoints') as failure:
      checkpoints.save(2, large, {})
      while checkpoints.latest_step() == 1:
        checkpoints.check()
    assert os.strerror(errno.ENOSPC) in str(failure.value)
    assert steps_in(small_disk / 'run') == ['1']
    assert checkpoints.latest_step() == 1
    checkpoints.save(2, small, {})
    checkpoints.wait()
    assert checkpoints.latest_step() == 2
  assert present(small_disk / 'run') == ['1', '2']


@pytest.fixture
def failing(monkeypatch):
  """A list of the reasons with which the next saves fail, and the pauses in seconds after them."""
  reasons, pauses = [], []
  sync = steps.sync

  def fail(path):
    if reasons and 'checkpoints' in path.parts:
      raise OSError(errno.EIO, reasons.pop(0), str(path))
    sync(path)

  monkeypatch.setattr(steps, 'sync', fail)
  monkeypatch.setattr(manager.time, 'sleep', pauses.append)
  return reasons, pauses


def test_a_save_that_fails_is_dropped_said_and_made_again_later(tmp_path, failing):
  reasons, _ = failing
  said = []
  with Checkpoints(patience=60.0).open(tmp_path, say=said.append) as checkpoints:
    saved = []
    for step in range(1, 20):
      time.sleep(0.05)  # with the pace of these steps, the pause of 10 s would be 200 steps
      if step == 4:
        reasons.append('a broken disk')
      if step % 4 == 0:
        checkpoints.save(step, {'w': jnp.full(3, step)}, {})
      if checkpoints.is_due(step):
        saved.append(step)
      checkpoints.check()
    assert not saved and checkpoints.latest_step() is None  # each save came within the pause
    checkpoints.save_now(19, {'w': jnp.full(3, 19)}, {})
  assert present(tmp_path) == ['19']
  assert 'step 4 could not be saved' in said[0] and 'a broken disk' in said[0]
  assert 'saved step 19' in said[1]


def test_the_next_save_is_due_after_the_pause(tmp_path, failing, monkeypatch):
  monkeypatch.setattr(failed_saves, '_FIRST_PAUSE', 1e-3)
  failing[0].append('a broken disk')
  due = []
  with Checkpoints(patience=60.0).open(tmp_path) as checkpoints:
    for step in range(1, 9):
      if step == 4:
        checkpoints.save(step, {'w': jnp.full(3, step)}, {})
      if checkpoints.is_due(step):
        due.append(step)
        checkpoints.save(step, {'w': jnp.full(3, step)}, {})
      checkpoints.wait()
  assert due == [int(name) for name in present(tmp_path)] and due[0] in (5, 6)


def test_the_end_of_a_run_tries_again_until_its_patience_ends(tmp_path, failing):
  reasons, pauses = failing
  reasons += ['broken'] * 3
  with Checkpoints(patience=60.0).open(tmp_path) as checkpoints:
    checkpoints.save_now(4, {'w': jnp.ones(3)}, {})
  assert pauses == [10.0, 20.0, 40.0] and present(tmp_path) == ['4']
  reasons += ['broken'] * 9
  refusal = pytest.raises(StorageError, match=r'failed for 0 s \(Checkpoints.patience=0\)')
  with refusal, Checkpoints(patience=0).open(tmp_path) as checkpoints:
    checkpoints.save_now(5, {'w': jnp.ones(3)}, {})
  refusal = pytest.raises(
    StorageError, match=r'The last save has failed: step 6 could not be saved'
  )
  with refusal, Checkpoints(patience=60.0).open(tmp_path) as checkpoints:
    checkpoints.save(6, {'w': jnp.ones(3)}, {})


@pytest.mark.parametrize('following', [4, 5])
def test_what_orbax_writes_after_the_deletion_of_a_step_goes_too(tmp_path, monkeypatch, following):
  """A thread of its own may write on after a save has failed; it makes the folder again."""
  discard, said = steps.DiskSteps.discard, []

  def written_on(self, step):
    was_there = self.unfinished(step).exists()
    discard(self, step)
    assert not self.unfinished(step).exists()
    if not was_there:
      return
    late = self.unfinished(step) / 'state.orbax-checkpoint-tmp' / 'd'
    late.mkdir(parents=True)
    (late / 'array').write_bytes(b'late')

  def fail(*arguments):
    raise OSError(errno.EIO, 'a broken disk')

  with Checkpoints(patience=60.0).open(tmp_path, say=said.append) as checkpoints:
    with monkeypatch.context() as patch:
      patch.setattr(steps.DiskSteps, 'discard', written_on)
      patch.setattr(steps, 'write_manifest', fail)
      checkpoints.save(4, weights(4), {})
      checkpoints.wait()
    assert present(tmp_path) != []
    checkpoints.save(following, weights(following), {})
    checkpoints.wait()
    assert present(tmp_path) == [str(following)]
  assert not any('which this program has not made' in line for line in said)


def test_a_save_that_fails_after_its_rename_is_made_again(tmp_path, monkeypatch):
  left, sync = [2], steps.sync

  def fail(path):
    if path.name == 'checkpoints' and left[0]:
      left[0] -= 1
      raise OSError(errno.EIO, 'a broken disk', str(path))
    sync(path)

  monkeypatch.setattr(steps, 'sync', fail)
  monkeypatch.setattr(manager.time, 'sleep', lambda seconds: None)
  with Checkpoints(patience=60.0).open(tmp_path) as checkpoints:
    checkpoints.save_now(4, weights(4), {})
    assert left == [0] and present(tmp_path) == ['4']
    np.testing.assert_array_equal(checkpoints.restore(target())['w'], weights(4)['w'])


def test_processes_agree_on_the_step_of_the_next_save(monkeypatch):
  """Each of three loops is elsewhere when it hears of the failure; none saves before the others."""
  barrier, told = threading.Barrier(3), {}

  def exchange(name, text, seconds=0):
    told[threading.current_thread().name] = text
    barrier.wait()
    return [told[f'commit{number}'] for number in range(3)]

  monkeypatch.setattr(failed_saves.processes, 'exchange', exchange)
  monkeypatch.setattr(failed_saves, '_FIRST_PAUSE', 1e-9)
  due = []
  for number, finished in enumerate((4, 6, 5)):
    saves = failed_saves.FailedSaves(60.0, 'here', lambda line: None)
    saves.is_due(finished)
    commit = threading.Thread(target=saves.add, args=(4, ''), name=f'commit{number}')
    commit.start()
    due.append((saves, finished, commit))
  for saves, finished, commit in due:
    assert next(step for step in range(finished + 1, 12) if saves.is_due(step)) == 8
    assert saves.is_too_early(7) and not saves.is_too_early(8)
    commit.join()


def fill(disk, left=0):
  room = os.statvfs(disk)
  (disk / 'ballast').write_bytes(bytes(room.f_bavail * room.f_frsize - left))


def test_a_full_disk_has_room_when_fewer_steps_are_kept(small_disk):
  """As docs/reliability.md says: also if not one byte is left when the run starts."""
  run, random = small_disk / 'run', np.random.default_rng(0)
  state = {'w': jnp.asarray(random.normal(size=50_000))}
  with Checkpoints(keep=3).open(run) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, state, {})
  fill(small_disk)
  with Checkpoints(keep=3).open(run) as checkpoints:
    with pytest.raises(StorageError, match=r'or lower Checkpoints\.keep'):
      checkpoints.make_room()
    assert present(run) == ['1', '2', '3']
  with Checkpoints(keep=1).open(run) as checkpoints:
    assert present(run) == ['1', '2', '3'], 'a start that fails has deleted nothing'
    checkpoints.make_room()
    assert present(run) == ['3'] and checkpoints._has_room
    checkpoints.save(4, state, {})
  assert present(run) == ['4']


def test_a_start_deletes_what_is_no_longer_kept_before_it_writes(tmp_path):
  """Also where the disk still takes a small file: the next one would wait for room."""
  with Checkpoints(keep=3).open(tmp_path) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, {'w': jnp.ones(3)}, {})
  with Checkpoints(keep=1).open(tmp_path) as checkpoints:
    assert present(tmp_path) == ['1', '2', '3'], 'a start that fails has deleted nothing'
    checkpoints.make_room()
    assert present(tmp_path) == ['3'] and checkpoints.latest_step() == 3
    np.testing.assert_array_equal(
      checkpoints.restore({'w': jax.ShapeDtypeStruct((3,), 'float32')})['w'], 1
    )


def test_on_a_full_disk_the_step_that_is_replaced_makes_room(small_disk):
  """`keep = 2` and room for two steps: the older one goes first, the newest valid one never."""
  run, random = small_disk / 'run', np.random.default_rng(0)
  state, said = {'w': jnp.asarray(random.normal(size=50_000))}, []
  with Checkpoints(keep=2).open(run, say=said.append) as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, state, {})
    checkpoints.wait()
    fill(small_disk, left=8192)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert steps_in(run) == ['1', '2'] and checkpoints.latest_step() == 2
    checkpoints.save_now(4, state, {}, patiently=False)
    assert present(run) == ['2', '4']
  assert any('are deleted before it is written' in line for line in said)
  fill(small_disk, left=8192)
  with Checkpoints(keep=1, patience=0).open(run, say=said.append) as checkpoints:
    assert present(run) == ['2', '4']
    with contextlib.suppress(StorageError):
      checkpoints.save_now(5, state, {}, patiently=False)
    assert checkpoints.latest_step() in (4, 5) and '2' not in present(run)


@pytest.mark.parametrize('left', range(0, 24, 4))
def test_a_full_disk_does_not_hide_the_first_error(small_disk, left):
  """Depending on the KiB that are left, the save fails at once or in the background."""
  state = {'w': jnp.ones(1000)}
  options = Checkpoints(patience=0)
  with pytest.raises(ZeroDivisionError), options.open(small_disk / 'run') as checkpoints:
    room = os.statvfs(small_disk)
    (small_disk / 'ballast').write_bytes(bytes(room.f_bavail * room.f_frsize - 1024 * left))
    with pytest.raises(StorageError):
      checkpoints.save(1, state, {})
      checkpoints.wait()
    (small_disk / 'ballast').unlink()
    checkpoints.save(2, state, {})
    checkpoints.wait()
    assert present(small_disk / 'run') == ['2']
    (small_disk / 'ballast').write_bytes(bytes(room.f_bavail * room.f_frsize - 1024 * left - 65536))
    with contextlib.suppress(StorageError):
      checkpoints.save(3, {'w': jnp.arange(50_000.0)}, {})
    raise ZeroDivisionError
