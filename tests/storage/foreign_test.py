"""The gate for files and texts of others."""

import os
import socket

import pytest

from valkyrie import foreign


def special(folder):
  """A file of each kind that is not regular, {what a message calls it: file}."""
  made = {name: folder / name for name in ('pipe', 'device', 'folder', 'socket')}
  os.mkfifo(made['pipe'])
  made['device'].symlink_to('/dev/zero')
  made['folder'].mkdir()
  listening = socket.socket(socket.AF_UNIX)
  listening.bind(os.fspath(made['socket']))
  return made


def test_only_regular_files_are_opened(tmp_path):
  for name, file in special(tmp_path).items():
    with pytest.raises(OSError, match=f'it is not a regular file, but a {name}'):
      foreign.content(file)


def test_links_that_lead_nowhere_are_errors_of_the_system(tmp_path):
  (tmp_path / 'loop').symlink_to('loop')
  (tmp_path / 'broken').symlink_to('missing')
  for name in ('loop', 'broken'):
    with pytest.raises(OSError, match=r'symbolic links|No such file'):
      foreign.content(tmp_path / name)


def test_a_file_is_read_up_to_a_size(tmp_path):
  file = tmp_path / 'a'
  with file.open('wb') as stream:
    stream.truncate(20 * 2**30)  # sparse
  with pytest.raises(ValueError, match='it has 21,474,836,480 bytes, expected at most 1,073,741'):
    foreign.content(file)
  file.write_bytes(b'abc')
  assert foreign.content(file, 3) == b'abc'
  with pytest.raises(ValueError, match='it has 3 bytes, expected at most 2'):
    foreign.content(file, 2)


def test_a_file_of_the_system_has_content_without_a_size():
  assert b'Name:' in foreign.content('/proc/self/status')


def test_hidden_characters_are_shown():
  letters = 'é 漢字 שלום \N{WOMAN}\u200d\N{PERSONAL COMPUTER} \\'
  assert foreign.shown(letters) == foreign.shown_lines(letters) == letters
  hidden = '\0\a\x1b[31m\x7f\x9b\u202e\u2066\u2028\ud83d'
  shown = r'\x00\x07\x1b[31m\x7f\x9b\u202e\u2066\u2028\ud83d'
  assert foreign.shown(hidden) == foreign.shown_lines(hidden) == shown
  assert foreign.shown('a\tb\r\nc') == r'a\tb\r\nc'


def test_whole_texts_keep_their_lines():
  assert foreign.shown_lines('a\n\tb\r\nc') == 'a\n\tb\r\nc'
  assert foreign.shown_lines('\r 50%') == '\r 50%'  # a line of progress
  assert foreign.shown_lines('name\rvalkyrie: saved') == r'name\rvalkyrie: saved'


def test_a_reason_is_one_short_line():
  assert foreign.reason(ValueError('a\n  b\x1b')) == r'a b\x1b'
  assert foreign.reason(MemoryError()) == 'MemoryError'
  assert len(foreign.reason(ValueError('x' * 10**6))) < 400


@pytest.mark.parametrize('wrong', ['[1]', '{}', '{"a": true}', '{"a": "1"}', '{"a": null}'])
def test_fields_have_their_types(wrong):
  with pytest.raises(ValueError, match=r'it has|its field'):
    foreign.json_object(wrong.encode(), a=int)
  assert foreign.json_object(b'{"a": 1}', a=int, b=str | None) == {'a': 1}


def test_a_json_object_has_each_field_once():
  """The standard library keeps the last one, and what was meant is unknown."""
  for text in (b'{"a": 1, "a": 1}', b'[{"b": {"a": 1, "c": 2, "a": 3}}]'):
    with pytest.raises(foreign.RepeatedField, match="has the field 'a' twice in one object"):
      foreign.json_value(text)
  assert foreign.json_value(b'\xef\xbb\xbf[{"a": 1}, {"a": "\\ud800"}]') == [
    {'a': 1},
    {'a': '\ud800'},
  ]
