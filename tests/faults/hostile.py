"""Checkpoints that a stranger has altered, and whose manifest fits the alteration."""

from collections.abc import Callable, Iterator
import json
import os
import pathlib
import pickle
import shutil

import tensorstore

from faults.harness import STEPS, Harness
from faults.mistakes import attempts
from faults.table import Trial, fault
from valkyrie.checkpoint import manifest

REFUSED = (74, 78)
PRINTED = 'The Zen of Python'  # by the module `this`, if anything imports it
ARRAY = 'params.model.embedding'


class _Opened:
  """An object that executes code when it is unpickled."""

  def __reduce__(self):
    return print, (PRINTED,)


def _seal(step: pathlib.Path, *more: str) -> None:
  """Writes the manifest of the files of a step, and of more."""
  (step / 'manifest.sha256').unlink()
  files = manifest.DiskFiles(step)
  names = [name for name in files.names() if files.has(name)] + [*more]  # no links
  digests = zip(names, files.digests(names, manifest.SHA256), strict=True)
  (step / 'manifest.sha256').write_bytes(manifest.content(STEPS, dict(digests)))


def _in_json(file: str, **changes) -> Callable[[pathlib.Path], None]:
  """Replaces values of a JSON object."""

  def alter(step):
    content = json.loads((step / file).read_text())
    (step / file).write_text(json.dumps(content | changes))

  return alter


def _in_leaf(part: str, **changes) -> Callable[[pathlib.Path], None]:
  """Replaces values in the metadata of an array, in its part 'key_metadata' or 'value_metadata'."""

  def alter(step):
    content = json.loads((step / 'state/_METADATA').read_text())
    for leaf in content['tree_metadata'].values():
      found = leaf[part][0] if part == 'key_metadata' else leaf[part]
      found |= changes
    (step / 'state/_METADATA').write_text(json.dumps(content))

  return alter


def _in_store(key: str, change: Callable[[bytes], bytes | None]) -> Callable[[pathlib.Path], None]:
  """Replaces a value of the key-value store that holds the arrays; None deletes it."""

  def alter(step):
    spec = {'driver': 'ocdbt', 'base': f'file://{step}/state'}
    store = tensorstore.KvStore.open(spec).result()
    new = change(store.read(f'{ARRAY}/{key}').result().value)
    store.write(f'{ARRAY}/{key}', new).result()

  return alter


def _in_array(**changes) -> Callable[[pathlib.Path], None]:
  """Replaces values in the zarr metadata of an array."""
  return _in_store('.zarray', lambda text: json.dumps(json.loads(text) | changes).encode())


def _content(file: str, content: bytes) -> Callable[[pathlib.Path], None]:
  def alter(step):
    (step / file).write_bytes(content)

  return alter


def _cut(file: str) -> Callable[[pathlib.Path], None]:
  def alter(step):
    os.truncate(step / file, (step / file).stat().st_size // 2)

  return alter


def _cut_data(step: pathlib.Path) -> None:
  for file in (step / 'state').rglob('d/*'):
    os.truncate(file, file.stat().st_size // 2)


def _link(file: str) -> Callable[[pathlib.Path], None]:
  def alter(step):
    elsewhere = step.parent.parent / 'elsewhere'
    (step / file).rename(elsewhere)
    (step / file).symlink_to(elsewhere)

  return alter


KINDS: dict[str, Callable[[pathlib.Path], None]] = {
  'a record that is a list': _content('record.json', b'[1]'),
  'a record with a text for its position': _in_json('record.json', position='x'),
  'a record with a position of 401 digits': _in_json('record.json', position=10**400),
  'a record with a negative position': _in_json('record.json', position=-3),
  'a record with no rows': _in_json('record.json', rows=0),
  'a record with stretches of no rows': _in_json('record.json', stretches=[[0, 0, 0]]),
  'a record with infinite stretches': _in_json('record.json', stretches=[[0, 1e999, 4]]),
  'a record with a number for its configuration': _in_json('record.json', configuration=3),
  'a record with a list for its versions': _in_json('record.json', versions=[1]),
  'a record with a text for its mesh': _in_json('record.json', mesh='x'),
  'a record that is nested too deeply': _content('record.json', b'[' * 10**6),
  'a record that is not UTF-8': _content('record.json', bytes([255, 254])),
  'a pickle for a record': _content('record.json', pickle.dumps(_Opened())),
  'metadata that are cut': _cut('state/_METADATA'),
  'metadata that are a list': _content('state/_METADATA', b'[1]'),
  'a pickle for metadata': _content('state/_METADATA', pickle.dumps(_Opened())),
  'metadata with a list for the tree': _in_json('state/_METADATA', tree_metadata=[1]),
  'metadata with no tree': _in_json('state/_METADATA', tree_metadata={}),
  'metadata with a text for the kind of store': _in_json('state/_METADATA', use_zarr3='x'),
  'metadata without OCDBT': _in_json('state/_METADATA', use_ocdbt=False),
  'metadata with keys of an unknown kind': _in_leaf('key_metadata', key_type=99),
  'metadata with keys that lead elsewhere': _in_leaf('key_metadata', key='../../..'),
  'metadata with a module for values': _in_leaf('value_metadata', value_type='this.Array'),
  'metadata with texts for values': _in_leaf('value_metadata', value_type='string'),
  'shardings that are a list': _content('state/_sharding', b'[1]'),
  'array metadata that are a list': _content('state/array_metadatas/process_0', b'[1]'),
  'an array of 2^62 values': _in_array(shape=[2**31, 2**31], chunks=[2**31, 2**31]),
  'an array of many more chunks': _in_array(shape=[2**50, 16]),
  'an array of another dtype': _in_array(dtype='<f8'),
  'an array of Python objects': _in_array(dtype='|O'),
  'an array of another order': _in_array(order='x'),
  'an array with an unknown compressor': _in_array(compressor={'id': 'this'}),
  'an array with texts for sizes': _in_array(shape='x'),
  'zarr metadata that are cut': _in_store('.zarray', lambda text: text[:9]),
  'zarr metadata that are missing': _in_store('.zarray', lambda text: None),
  'a chunk that is cut': _in_store('0.0', lambda data: data[:9]),
  'a chunk that is missing': _in_store('0.0', lambda data: None),
  'a pickle for a chunk': _in_store('0.0', lambda data: pickle.dumps(_Opened())),
  'a manifest of OCDBT that is cut': _cut('state/manifest.ocdbt'),
  'a manifest of OCDBT with other bytes': _content('state/manifest.ocdbt', bytes(999)),
  'data of OCDBT that are cut': _cut_data,
  'a link for a file': _link('state/_METADATA'),
  'a link for a folder': _link('state/d'),
  'a link for the folder of the state': _link('state'),
}  # fmt: skip


def _unnamed(step: pathlib.Path) -> None:
  (step / 'state/planted').write_text('{}')


def _outside(step: pathlib.Path) -> None:
  (step.parent.parent / 'outside').write_text('')
  _seal(step, '../../outside')


def _odd_lines(step: pathlib.Path) -> None:
  (step / 'manifest.sha256').write_bytes(manifest.content(STEPS, {'\0': 'x', 'y\n': ''}))


# Alterations that the manifest does not fit.
UNSEALED = {
  'a file without a name in the manifest': _unnamed,
  'a name in the manifest that leads elsewhere': _outside,
  'odd lines in the manifest': _odd_lines,
}


@fault(
  'a checkpoint of a stranger: odd metadata, sizes, names and links, and a manifest that fits',
  'ends with 74 or 78 and a message, executes nothing of it',
  full=len(KINDS) + len(UNSEALED),
  short=3,
)
def hostile(harness: Harness, times: int) -> Iterator[Trial]:
  kinds = [*KINDS.items(), *UNSEALED.items()]
  chosen = kinds[:: max(1, len(kinds) // times)][:times]
  file = harness.folder / 'single.gin'
  runs = [(_altered(harness, what, alter), file) for what, alter in chosen]
  ended = attempts(harness, runs, '--allow_changed=executable')
  for (what, _), (name, code) in zip(chosen, ended, strict=True):
    said, failure = harness.said(name), None
    if code not in REFUSED or 'valkyrie: ' not in said:
      failure = f'exit code {code}: {said[-300:]}'
    if any(text in said for text in ('Traceback', PRINTED, 'has changed since it was saved')):
      failure = f'the output is {said[-600:]}'
    yield Trial(what, failure)
    harness.forget(name)


def _altered(harness: Harness, what: str, alter: Callable[[pathlib.Path], None]) -> str:
  """A run whose only checkpoint is altered."""
  name = harness.new()
  step = harness.folder / name / 'checkpoints' / str(STEPS)
  shutil.copytree(harness.folder / 'reference/checkpoints' / str(STEPS), step)
  alter(step)
  if what in KINDS:
    _seal(step)
  return name
