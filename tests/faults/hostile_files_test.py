"""Files of strangers: each is read, or refused with its name and a reason on one line."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc

import pytest

from valkyrie import foreign, packages
from valkyrie.checkpoint import chosen_steps, manifest, steps
from valkyrie.config import parse, record
from valkyrie.data import (
  line_rows,
  provenance,
  store_builder,
  store_writer,
  token_store,
  vocabularies,
)
from valkyrie.data.records import Records
from valkyrie.data.selection import Selection
from valkyrie.distributed import heartbeat
from valkyrie.distributed.supervisor import RunStatus
from valkyrie.errors import ConfigurationError, DataError, ValkyrieError, message_of
from valkyrie.inference import infer
from valkyrie.monitoring import html_report, json_lines, recorded_run, trackers
from valkyrie.storage import lease
from valkyrie.weights import tensor_files

LINE = {'step': 3, 'loss': 2.5, 'tokens': 30, 'phase': 0, 'step_seconds': 0.5}
LINE |= {'tokens_per_second_per_device': 5.0, 'tflops_per_second_per_device': 1e-3}
VALUES = [
  None,
  True,
  -1,
  0,
  1.5,
  2**62,
  10**400,
  '',
  'NaN',
  '\ud83d',
  '<b>',
  [],
  [[1]],
  {},
  {'a': 1},
]
CONTENTS = [
  b'', b' ', b'\0' * 9, b'\xff\xfe\xff', b'\xef\xbb\xbf{}', b'null', b'7', b'"x"', b'[]', b'[7]',
  b'{}', b'{"a": 1', b'{"a": 1} x', b'{"a": NaN}', b'{"a": 1e999}', b'1' * 5000, b'nul',
  b'[' * 100_000, b'{"a":' * 100_000, b'[' * 900 + b']' * 900, b'{"a":' * 900 + b'1' + b'}' * 900,
  b'[' * 5000 + b']' * 5000, b'x = ' + b'[' * 100_000, b'x = ' + b'(' * 150 + b')' * 150,
]  # fmt: skip
EOS = {'model': {'type': 'WordLevel', 'vocab': {'<eos>': 0, 'a': 1}, 'unk_token': 'a'}}


def report(file):
  recorded_run.read_run(file.parents[file.parent.name == 'eval'])


def rows(file):
  for _ in Records(str(file), ['text']).rows(0, 1):
    pass


def shard(file):
  selection = Selection('letters', 'train', vocabularies.ByteVocabulary())
  store_writer.StoreWriter(file.parent.parent, selection, {}, 1).check_shards()


def id_of_tracker(file):
  trackers._id(file.parent)


READERS = {
  'metrics.jsonl': report,
  'eval/metrics.jsonl': report,
  'refused_steps.jsonl': report,
  'config.json': report,
  'model_info.txt': report,
  'other/metrics.jsonl': json_lines.by_step,
  'run/config.json': lambda file: record.read_configuration(file.parent),
  'beside/config.json': lambda file: parse.read_statements([str(file.with_name('x.gin'))]),
  'x.gin': lambda file: parse.read_statements([str(file)]),
  'prompts.jsonl': infer._read_prompts,
  'prompts.txt': infer._read_prompts,
  'index.json': tensor_files.read_json,
  'trainer.lock': lambda file: lease.lock_holder(file.parent),
  'trainer.lease': lambda file: lease._FileLease.__dict__['_read'](LeaseAt(file)),
  'checkpoints/3/record.json': lambda file: chosen_steps.record(
    steps.DiskSteps(file.parents[2]), 3
  ),
  'checkpoints/3/manifest.sha256': lambda file: manifest.damage(manifest.DiskFiles(file.parent), 3),
  'store/store.json': lambda file: token_store.read_information(file.parent),
  'store/.source.jsonl': provenance._read,
  'store/shard-00000-of-00001/shard.json': shard,
  'tokenizer.json': lambda file: vocabularies.load(str(file)),
  'a.model': lambda file: vocabularies.load(str(file)),
  'codec/tokenizer_config.json': lambda file: vocabularies.load(str(file.with_name('t.json'))),
  'tracking_id': id_of_tracker,
  'a.jsonl': rows,
  'a.json': rows,
  'a.csv': rows,
  'a.txt': rows,
}


class LeaseAt:
  def __init__(self, path):
    self._place = path


def refusal(reader, file):
  """The message of a refusal; '' if the file is read."""
  try:
    reader(file)
  except ValkyrieError as error:
    assert error.exit_code in (65, 74, 78)
    return message_of(error)
  return ''


@pytest.fixture
def folder(tmp_path):
  """A folder with what the readers expect beside their files."""
  for name in READERS:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / 'beside/x.gin').write_text('x = 1')
  (tmp_path / 'codec/t.json').write_text(json.dumps(EOS))
  (tmp_path / 'metrics.jsonl').write_text(json.dumps(LINE) + '\n')
  return tmp_path


@pytest.mark.parametrize('name', READERS)
def test_any_content_is_read_or_refused(folder, name):
  for content in [c for each in CONTENTS for c in (each, each + b'\n')]:
    (folder / name).write_bytes(content)
    if said := refusal(READERS[name], folder / name):
      assert (
        (folder / name).name in said or 'beside' in name or 'codec' in name or 'record of' in said
      ), said
      assert '\n' not in said and len(said) < 600, said


# Their size is no reason that is told: of a gin file in the folder of a run, and of a holder.
NOT_REASONED = ('x.gin', 'trainer.lock', 'checkpoints/3/manifest.sha256', 'beside/config.json')


@pytest.mark.parametrize('name', [name for name, reader in READERS.items() if reader != rows])
def test_an_immense_file_is_refused_unread(folder, name):
  with (folder / name).open('wb') as stream:
    stream.truncate(20 * 2**30)  # sparse
  try:
    said = refusal(READERS[name], folder / name)
  except OSError as error:  # which the lock of a trainer explains
    said = f'{name}: {error}'
  assert ('expected at most' in said) == (name not in NOT_REASONED), said


def test_a_report_of_any_values_is_drawn_or_refused(folder):
  names = [*LINE, *(f'loss_by_position/{p}' for p in ('2', 'x', '0', 10**18)), 'hooks/a', 'mfu']
  lines = [json.dumps(LINE | {name: value}) for name in names for value in VALUES]
  file, read = folder / 'metrics.jsonl', []
  for number, line in enumerate(lines):
    file.write_text(line + '\n')
    if said := refusal(json_lines.by_step, file):
      assert said.startswith(f'{file}:1 cannot be read: ')
    else:
      read += [{**json.loads(line), 'step': number}]
  assert len(lines) / 2 < len(read) < len(lines)
  for name in ('metrics', 'eval/metrics', 'refused_steps'):
    (folder / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in read))
  (folder / 'config.json').write_text(json.dumps({'version': [], 'bindings': {'a': VALUES}}))
  assert html_report.main([str(folder), str(folder), f'--output={folder}/page.html']) == 0


@pytest.fixture(scope='module')
def information(tmp_path_factory):
  """A store, and its store.json."""
  path = tmp_path_factory.mktemp('stores') / 'store'
  text = path.with_name('text')
  text.mkdir()
  (text / 'a.txt').write_text('A text of some words. ' * 20)
  selection = Selection('text', 'train', vocabularies.ByteVocabulary(), str(text))
  store_builder.build(selection, path, shards=1)
  return path, selection, json.loads((path / 'store.json').read_text())


def test_a_store_of_any_values_is_opened_or_refused(information):
  path, selection, right = information
  places = [(), ('vocabulary',), ('shards',), ('shards', 0)]
  places += [('shards', 0, 'files'), ('shards', 0, 'files', 'offsets.npy')]
  opened = 0
  for place in places:
    at = right
    for part in place:
      at = at[part]
    for key in range(len(at)) if isinstance(at, list) else at:
      for value in VALUES:
        altered = json.loads(json.dumps(right))
        inside = altered
        for part in place:
          inside = inside[part]
        inside[key] = value
        altered.pop('sha256', None)
        altered['sha256'] = token_store.content_hash(altered)
        (path / 'store.json').write_text(json.dumps(altered))
        try:
          store = token_store.TokenStore.open(path, selection.vocabulary)
          opened += store.tokens > 0
        except ValkyrieError as error:
          assert error.exit_code in (65, 78)
  assert opened


@pytest.mark.parametrize('suffix', ['.jsonl', '.json', '.csv', '.tsv'])
@pytest.mark.parametrize('compressed', ['', '.gz'])
def test_a_line_that_is_too_long_is_refused_before_it_is_read(
  tmp_path, monkeypatch, suffix, compressed
):
  monkeypatch.setattr(foreign, 'LONGEST_LINE', 10**4)
  monkeypatch.setattr(line_rows, '_LONGEST_VALUE', 10**4)
  file = tmp_path / f'a{suffix}{compressed}'
  for letters, refused in ((9000, False), (10**7, True)):
    text = 'a' * letters
    lines = f'text\n{text}\n' if suffix in ('.csv', '.tsv') else f'{{"text": "{text}"}}\n'
    file.write_bytes(gzip.compress(lines.encode()) if compressed else lines.encode())
    tracemalloc.start()
    said = refusal(rows, file)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ('more than 10,000 bytes' in said) == refused
    assert most < 3 * 10**6 or not compressed


LIMITED = """
import pathlib, resource, sys
from valkyrie.data.records import Records
pages = int(pathlib.Path('/proc/self/statm').read_text().split()[0])
size = pages * resource.getpagesize() + 2**27
resource.setrlimit(resource.RLIMIT_AS, (size, size))
for _ in Records(sys.argv[1], ['text']).rows(0, 1):
  pass
"""


def test_a_document_that_does_not_fit_into_memory_is_refused(tmp_path):
  """In a process of its own: this one gives memory back at any time, which would make room."""
  file = tmp_path / 'a.txt.gz'
  file.write_bytes(gzip.compress(b'a' * 2**20 * 300))
  command = [sys.executable, '-c', LIMITED, str(file)]
  child = subprocess.run(command, check=False, capture_output=True, text=True)
  assert child.returncode
  assert 'a.txt.gz is larger than the memory that is left' in child.stderr.splitlines()[-1]


@pytest.mark.parametrize('value', ['[' * 100_000, '(' * 100_000, '{1:' * 10_000, '[' * 150])
def test_a_flag_of_brackets_is_refused(value):
  with pytest.raises(ConfigurationError, match=r'--gin\.x='):
    parse.read_statements([], [f'--gin.x={value}'])


def test_a_line_in_the_pipe_of_a_supervisor_that_is_no_heartbeat_changes_nothing():
  status = RunStatus()
  for content in CONTENTS:
    assert not status.update(content)
  assert status == RunStatus()


@pytest.mark.parametrize('value', ['x', '9' * 30 + ':1:2', '9' * 5000 + ':1:2', '٣:1:2', '-1:0:0'])
def test_a_variable_that_names_no_pipe_is_left_alone(monkeypatch, value):
  monkeypatch.setenv(heartbeat.VARIABLE, value)
  assert heartbeat.inherited() == ()


@pytest.mark.parametrize(
  'name', ['metrics.jsonl', 'config.json', 'model_info.txt', 'tokenizer.json']
)
def test_files_that_never_end_are_not_read(folder, name):
  (folder / name).unlink(missing_ok=True)
  for make in (os.mkfifo, lambda file: os.symlink('/dev/zero', file)):
    make(folder / name)
    assert 'it is not a regular file' in refusal(report, folder / name).replace('Invalid arg', '')
    (folder / name).unlink()


@pytest.mark.parametrize('name', ['a.txt', 'a.json', 'a.jsonl', 'a.csv', 'a.arrow', 'a.parquet'])
def test_a_text_that_is_no_file_or_immense_is_refused(tmp_path, name):
  file = tmp_path / name
  os.mkfifo(file)
  assert 'it is not a regular file, but a pipe' in refusal(rows, file)
  for target in ('/dev/zero', name, 'missing'):
    file.unlink()
    file.symlink_to(target)
    assert f'{name} cannot be listed (' in refusal(rows, file)
  file.unlink()
  with file.open('wb') as stream:
    stream.truncate(20 * 2**30)  # sparse
  tracemalloc.start()
  assert re.search('is not text|is corrupt', refusal(rows, file))
  assert tracemalloc.get_traced_memory()[1] < 2**26
  tracemalloc.stop()


def test_a_folder_with_a_link_to_a_folder_above_is_refused(tmp_path):
  (tmp_path / 'a/b').mkdir(parents=True)
  (tmp_path / 'a/b/a.txt').write_text('text')
  (tmp_path / 'a/c').symlink_to('b')
  assert not refusal(rows, tmp_path / 'a/b')
  (tmp_path / 'a/b/up').symlink_to('..')
  assert 'b/up leads to a folder above it: remove the link' in refusal(rows, tmp_path / 'a')


def test_folders_that_link_to_each_other_are_refused(tmp_path):
  for one, other in ('ab', 'ba'):
    (tmp_path / one).mkdir()
    (tmp_path / one / other).symlink_to(f'../{other}')
    (tmp_path / one / f'{other}2').symlink_to(f'../{other}')
  assert 'leads to a folder above it' in refusal(rows, tmp_path / 'a')


def test_names_of_strangers_are_shown(tmp_path):
  file = tmp_path / 'a\x1b[31m\nvalkyrie: saved.jsonl'
  file.write_text(json.dumps({f'{n}\x1b': '' for n in range(10**4)}))
  said = refusal(rows, file)
  assert said == foreign.shown(said) and len(said) < 1000
  assert r'a\x1b[31m\nvalkyrie: saved.jsonl has no column text; it has 0\x1b, 1\x1b' in said


@pytest.mark.parametrize('name', ['prompts.jsonl', 'prompts.txt', 'store/store.json', 'a.model'])
def test_files_of_data_that_never_end_are_not_read(folder, name):
  file = folder / name
  os.mkfifo(file)
  assert 'it is not a regular file, but a pipe' in refusal(READERS[name], file)
  file.unlink()
  with file.open('wb') as stream:
    stream.truncate(20 * 2**30)  # sparse
  assert 'it has 21,474,836,480 bytes, expected at most' in refusal(READERS[name], file)


def test_names_in_a_record_of_a_source_are_shown(information):
  path, _, right = information
  origin = right['origin'] | {'files': [['a\x1b[31m\n', 1, 1, None]]}
  with pytest.raises(DataError, match=r'1 gone: a\\x1b\[31m\\n'):
    provenance.check(path, right | {'origin': origin}, 'build it again.', [])


def test_a_shard_of_any_values_is_read_or_refused(information, tmp_path):
  path, _, _ = information
  folder = shutil.copytree(path / 'shard-00000-of-00001', tmp_path / 'store/shard-00000-of-00001')
  file = folder / 'shard.json'
  right = json.loads(file.read_text())
  del right['sha256']  # as versions before 0.3 wrote it
  for name in right:
    for value in [*VALUES, '\x1b\n', 2**62, 10**400]:
      file.write_text(json.dumps(right | {name: value}))
      said = refusal(shard, file)
      assert said and foreign.shown(said) == said


def test_a_package_without_metadata_has_a_version():
  assert packages.version('no-such-package') == 'unknown'
