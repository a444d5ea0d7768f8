"""Whole files: what a user has under the same name stays."""

import errno
import os

import pytest

from valkyrie.data.tokenizer_copy import copy_tokenizer
from valkyrie.errors import StorageError, write_errors
from valkyrie.storage import whole_file


def test_an_earlier_file_with_another_content_stays_under_a_number(tmp_path):
  place = tmp_path / 'model_info.txt'
  place.write_text('of a user')
  for content in (b'first', b'second', b'second'):
    whole_file.write_version(place, content)
  contents = {file.name: file.read_text() for file in tmp_path.iterdir()}
  assert contents == {
    'model_info.txt': 'second', 'model_info.txt.1': 'of a user', 'model_info.txt.2': 'first',
  }  # fmt: skip


def test_the_target_of_a_link_stays(tmp_path):
  (tmp_path / 'theirs').write_text('of a user')
  (tmp_path / 'precompile.json').symlink_to('theirs')
  whole_file.write_version(tmp_path / 'precompile.json', b'new')
  assert (tmp_path / 'theirs').read_text() == 'of a user'
  assert (tmp_path / 'precompile.json').read_text() == 'new'


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / 'taken').write_text('')
  with pytest.raises(StorageError, match=r'model_info\.txt cannot be written.*another --model_dir'):
    whole_file.write_version(tmp_path / 'taken/model_info.txt', b'')


@pytest.mark.parametrize(
  ('name', 'remedy'),
  [
    ('file/below', 'Move away the file in its path, where a folder is expected'),
    ('folder', 'Move away the folder there, where a file is expected'),
    ('loop/file', 'Remove the link there'),
    ('loop', 'Move away what is there'),
    ('n' * 300 + '/file', 'Shorten the name'),
    (errno.ENOSPC, 'Make room there'),
    (errno.EDQUOT, 'Make room there'),
    (errno.EFBIG, 'Raise the limit on the size of a file'),
    (errno.EACCES, 'Give this user the right to write there'),
    (errno.EPERM, 'Give this user the right to write there'),
    (errno.EROFS, 'Mount that file system for writing'),
    (errno.EIO, 'Name another'),
  ],
)
def test_the_advice_fits_what_the_system_says(name, remedy, tmp_path):
  (tmp_path / 'file').write_text('of a user')
  (tmp_path / 'folder').mkdir()
  (tmp_path / 'loop').symlink_to('loop')
  with (
    pytest.raises(StorageError) as caught,
    write_errors('a file cannot be written', 'name another', 'Nothing was changed.'),
  ):
    if isinstance(name, int):
      raise OSError(name, os.strerror(name))
    if name == 'loop':
      (tmp_path / name).mkdir()
    with open(tmp_path / name, 'wb'):
      pass
  _, _, advice = str(caught.value).partition('. ')
  assert advice.startswith(remedy)
  assert advice.lower().endswith('name another. nothing was changed.')
  assert ('room' in advice) == (name in (errno.ENOSPC, errno.EDQUOT))


def test_a_run_keeps_another_tokenizer_in_its_folder(tmp_path):
  """The folder may hold downloaded weights, with their tokenizer."""
  own = tmp_path / 'own'
  own.mkdir()
  (own / 'my.json').write_text('{"own": 1}')
  (own / 'tokenizer_config.json').write_text('{"own": 2}')
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (tmp_path / name).write_text('of a user')
  copy_tokenizer(_Vocabulary(own / 'my.json'), tmp_path)
  for name, number in (('tokenizer.json', 1), ('tokenizer_config.json', 2)):
    assert (tmp_path / name).read_text() == f'{{"own": {number}}}'
    assert (tmp_path / f'{name}.1').read_text() == 'of a user'


def test_files_for_other_programs_are_kept_beside_a_tokenizer(tmp_path, caplog):
  own = tmp_path / 'own'
  own.mkdir()
  (own / 'my.json').write_text('{}')
  (own / 'generation_config.json').write_text('{"eos_token_id": [5, 7]}')
  os.mkfifo(own / 'special_tokens_map.json')
  run = tmp_path / 'run'
  run.mkdir()
  copy_tokenizer(_Vocabulary(own / 'my.json'), run)
  assert (run / 'generation_config.json').read_text() == '{"eos_token_id": [5, 7]}'
  assert not (run / 'special_tokens_map.json').exists()
  assert f'special_tokens_map.json is not copied to {run}' in caplog.text
  with (own / 'generation_config.json').open('wb') as large:
    large.truncate(2**24 + 1)
  copy_tokenizer(_Vocabulary(own / 'my.json'), run)
  assert (run / 'generation_config.json').read_text() == '{"eos_token_id": [5, 7]}'
  assert 'it has 16,777,217 bytes, expected at most 16,777,216' in caplog.text


class _Vocabulary:
  def __init__(self, file):
    self.file = file
