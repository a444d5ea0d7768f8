"""What a file system refuses for a while is tried again, and a mistake is said at once."""

import errno
import json
import os
import resource
import types

import pytest

from valkyrie.errors import StorageError, storage_errors
from valkyrie.monitoring import patience as room
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.patience import may_pass_when_opened, patiently
from valkyrie.monitoring.writers import create_writers
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.observers import Refusals


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
  monkeypatch.setattr(room, '_PAUSE', 0.01)


def refusing(*codes):
  """A function that fails with these errors of the system, and then returns its calls."""
  calls = []

  def attempt():
    calls.append(None)
    if len(calls) <= len(codes):
      with storage_errors('mine cannot be written'):
        raise OSError(codes[len(calls) - 1], os.strerror(codes[len(calls) - 1]))
    return len(calls)

  return attempt


def test_what_is_refused_for_a_while_is_tried_again_and_said_once():
  said = []
  assert patiently(refusing(errno.ENOSPC, errno.EIO), 3600.0, said.append) == 3
  (line,) = said
  assert line.startswith('tried again for up to 3600 s: mine cannot be written: No space left')


def test_what_does_not_pass_or_lasts_too_long_is_raised():
  said = []
  with pytest.raises(StorageError, match='No space left'):
    patiently(refusing(*[errno.ENOSPC] * 9), 0.0, said.append)
  for code in (errno.EACCES, errno.EROFS, errno.ENOTDIR):
    with pytest.raises(StorageError, match=os.strerror(code)):
      patiently(refusing(code), say=said.append, passes=may_pass_when_opened)

  def lost():
    raise StorageError('the run was lost to another trainer')

  with pytest.raises(StorageError, match='was lost'):
    patiently(lost, say=said.append)
  assert said == []


@pytest.fixture
def refused_files(monkeypatch):
  """The system refuses to open these files, each as often as its number says."""
  left = {}
  opened = os.open

  def refuse(path, flags, mode=0o777):
    name = os.path.basename(path)
    if left.get(name, 0) > 0:
      left[name] -= 1
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return opened(path, flags, mode)

  monkeypatch.setattr(os, 'open', refuse)
  return left


def test_a_stream_waits_for_a_disk_that_is_full_when_it_is_made(tmp_path, refused_files):
  said = []
  refused_files |= {'metrics.jsonl': 2}
  with create_writers(tmp_path, name='eval', tensorboard=False, say=said.append) as writer:
    writer.write_scalars(1, {'loss': 1.0})
  assert json.loads((tmp_path / 'eval' / 'metrics.jsonl').read_text()) == {'step': 1, 'loss': 1.0}
  assert len(said) == 1 and 'metrics.jsonl cannot be written: No space left' in said[0]


def test_a_folder_that_may_not_be_written_ends_at_once(tmp_path):
  (tmp_path / 'eval').write_text('a file where a folder should be')
  with pytest.raises(StorageError, match='cannot be written: File exists'):
    JsonLines(tmp_path / 'eval' / 'metrics.jsonl')


@pytest.fixture
def until_said():
  """Bounds the size of files, until the returned function is called with what is said."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  said = []

  def tell(text):
    said.append(text)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

  resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
  yield tell
  resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert len(said) == 1 and 'cannot be written: File too large' in said[0]


def test_refused_steps_wait_for_room_when_they_are_closed(tmp_path, until_said):
  def say(text):
    if 'rewind' not in text and 'spike' not in text:
      until_said(text)

  with Refusals(tmp_path, types.SimpleNamespace(skipped=0), say) as refusals:
    refusals.rewound(8, 4)
  line = json.loads((tmp_path / 'refused_steps.jsonl').read_text())
  assert line == {'step': 8, 'rewound_to': 4}


def test_the_fingerprints_of_data_wait_for_room(tmp_path, until_said):
  evaluator = types.SimpleNamespace(sources={'a': types.SimpleNamespace(fingerprint='1234')})
  Evaluator.record_data(evaluator, tmp_path, 'eval', may_differ=False, say=until_said)
  assert json.loads((tmp_path / 'eval' / 'data.json').read_text()) == {'a': '1234'}
