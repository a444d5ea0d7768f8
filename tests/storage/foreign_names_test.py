"""Names that others chose: hundreds are proposed to each reader, and none leads out of a folder."""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
from safetensors.numpy import save_file

from valkyrie.checkpoint import chosen_steps, manifest, steps
from valkyrie.checkpoint.steps import steps_of
from valkyrie.data import provenance, token_store, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import open_store
from valkyrie.data.store_writer import Document, StoreWriter
from valkyrie.errors import ConfigurationError, DataError, StorageError
from valkyrie.monitoring import trackers, writers
from valkyrie.storage import foreign_names
from valkyrie.storage.bucket import Bucket
from valkyrie.storage.run_directory import opened
from valkyrie.weights import tensor_folders

REFUSED = 'is not a path below'
CLIMBS = ('..', '../..', '../../..', 'a/../..', './..', '..//..', 'a/../../a/..', './.', 'a/.')
ENDS = (
  'x', '.bashrc', 'eval/x', 'x/..', '.', '..', 'metrics.jsonl', 'store.json', 'x y', 'é', '~',
  '...', '%2e%2e', 'tokens.npy', 'x.safetensors', '.lock', '.part', 'record.json', '/x',
)  # fmt: skip
ODD = (
  '.', '..', '/', '//', '///x', './x', 'x/.', 'x/..', 'a//b', '/x', '//x', '..\\x', '..\\..\\x',
  'a\\..\\..\\x', 'C:\\x', '\\\\host\\x', '\\x', 'x\\', 'a\0b', '\0', '../x\0', 'x\0/../..', 'a\nb',
  'x\n', '\r', '\t', 'x\x1b[2J', '\x7f', '\x9b2J', 'a\udcff', '\ud800', '\udfff/x', 'x' * 256,
  'é' * 128, 'a/' + 'x' * 256, '/'.join('x' * 600), '../' * 5 + 'x' * 256,
)  # fmt: skip
HOSTILE = sorted({*ODD, *(f'{climb}/{end}' for climb, end in itertools.product(CLIMBS, ENDS))})
NO_TEXTS = (None, 3, 1.5, True, [], ['..'], {}, {'..': '..'}, '', 'x/', '../', '../x/')
ORDINARY = (
  'x', 'eval/metrics.jsonl', '.x', '..x', 'x..', '...', 'a/...', '..../x', 'a..b/c', 'x y', ' ',
  '~', '~root/x', '$HOME', '-rf', '*', '[x]', '%2e%2e', '%2e%2e%2fx', '%00', 'C:x', 'C:', 'x:y',
  'é', '\uff0e\uff0e', '\uff0e\uff0e.x/x', '\u2025/x', '一/二', '👍🏽', 'e\u0301', 'CON',
  'x' * 255, 'é' * 127, '/'.join('y' * 512), 'Eval/metrics.jsonl', 'metrics.jsonl.1',
  '.config.gin.new', 'wandb/run-1_2/files/a=b,c.json', '#?;&x',
)  # fmt: skip
BYTES = vocabularies.ByteVocabulary()
SELECTION = Selection('letters', 'train', BYTES)
STORE = SELECTION.name


def letters(name):
  """A name for a folder in a bucket, of a test with brackets in its name."""
  return re.sub(r'\W', '-', name)


@pytest.fixture
def place(tmp_path, monkeypatch):
  """A folder so deep that the names lead to places in `tmp_path`, as do those of local copies."""
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'a/tmp'))
  monkeypatch.setenv('VALKYRIE_CACHE', str(tmp_path / 'a/b/cache'))
  for folder in ('a/tmp', 'a/b/c/folder'):
    (tmp_path / folder).mkdir(parents=True)
  return tmp_path / 'a/b/c/folder'


def names(place):
  """The hostile names, and absolute ones."""
  return [*HOSTILE, *(f'{place.parents[3]}/{end}' for end in ENDS), f'{place}/x']


def of_objects(place):
  """Those that an object can have, and that mark no folder."""
  surrogates = re.compile('[\ud800-\udfff]')
  return [name for name in names(place) if name[-1] != '/' and not surrogates.search(name)]


def plant(place, target, make):
  """Makes what a name leads to, where it is in `tmp_path`, so that a reader could follow it."""
  with contextlib.suppress(OSError, ValueError, shutil.Error):
    target = pathlib.Path(os.path.realpath(target))
    if place.parents[3] in target.parents:
      target.parent.mkdir(parents=True, exist_ok=True)
      make(target)


def files(root):
  """{path: content} of all files, but the local copies of runs and stores."""
  return {
    file: file.read_bytes()
    for file in root.rglob('*')
    if file.is_file() and not re.search('/(tmp/valkyrie-[^/]*/run|cache)/', str(file))
  }


def test_a_name_that_leads_out_is_refused():
  assert len(HOSTILE) > 200
  wrong = [name for name in (*HOSTILE, *NO_TEXTS) if foreign_names.is_below(name)]
  assert not wrong
  for name in (*HOSTILE, *NO_TEXTS):
    with pytest.raises(DataError, match=f'^the list names .*{REFUSED} its folder. Mend it'):
      foreign_names.checked(name, 'the list', 'Mend it.', DataError)


def test_a_message_has_no_control_characters_and_an_end():
  for name in HOSTILE:
    with pytest.raises(StorageError) as caught:
      foreign_names.checked(name, 'the list', '')
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_ordinary_names_stay():
  assert [foreign_names.checked(name, '', '') for name in ORDINARY] == [*ORDINARY]


@hypothesis.given(
  strategies.text()
  | strategies.lists(strategies.sampled_from(('..', '.', 'a', '', '/'))).map('/'.join)
)
def test_a_name_that_is_not_refused_is_the_only_one_of_its_path(name):
  if foreign_names.is_below(name):
    path = pathlib.Path('/folder', name)
    assert os.path.normpath(path) == str(path) == f'/folder/{name}'
    assert path.parent.is_relative_to('/folder') and path != pathlib.Path('/folder')


def write_store(folder):
  """A store of one shard, and the content of its store.json."""
  writer = StoreWriter(folder, SELECTION, {}, 1)
  writer.write(lambda shard: [Document(np.arange(3, 9), 6)] * 3)
  return json.loads((folder / 'store.json').read_text())


def sealed(information):
  content = {key: value for key, value in information.items() if key != 'sha256'}
  return json.dumps(content | {'sha256': token_store.content_hash(content)})


def renamed(information, name, of_file):
  """store.json with the name of a shard, or of a file of it, in another one's place."""
  shard = dict(information['shards'][0])
  if of_file:
    shard['files'] = {**shard['files'], name: shard['files']['tokens.npy']}
  else:
    shard['name'] = name
  return sealed(information | {'shards': [shard]})


@pytest.mark.parametrize('kind', ['local', 'file', 'gs'])
@pytest.mark.parametrize('of_file', [False, True])
def test_a_store_names_no_shard_or_file_elsewhere(place, request, kind, of_file):
  store = place / STORE
  information = write_store(store)
  shard = store / information['shards'][0]['name']
  if kind == 'gs':
    server = request.getfixturevalue('gcs')
    prefix = f'{letters(request.node.name)}/{STORE}'
    for file in ('hashes.npy', 'keys.npy', 'offsets.npy', 'tokens.npy'):
      server.put(f'{prefix}/{shard.name}/{file}', (shard / file).read_bytes())
  address = {
    'file': f'file://{place}',
    'gs': f'gs://bucket/{letters(request.node.name)}',
  }.get(kind)
  proposed = [*names(place), *(() if of_file else NO_TEXTS)]
  proposed = proposed if kind == 'local' else proposed[::3]
  for name in (name for name in proposed if isinstance(name, str)):
    if of_file:
      plant(place, shard / name, functools.partial(shutil.copyfile, shard / 'tokens.npy'))
    else:
      plant(place, store / name, functools.partial(shutil.copytree, shard))
    if kind == 'gs':
      planted = f'{prefix}/{shard.name}/{name}' if of_file else f'{prefix}/{name}/tokens.npy'
      server.put(planted, (shard / 'tokens.npy').read_bytes())
  before = files(place.parents[3])
  for name in proposed:
    text = renamed(information, name, of_file)
    refused = REFUSED if isinstance(name, str) else 'does not list its shards'
    if kind == 'gs':
      server.put(f'{prefix}/store.json', text.encode())
    (store / 'store.json').write_text(text)
    with pytest.raises(DataError, match=refused):
      if address is None:
        token_store.TokenStore.open(store, BYTES)
      else:
        open_store(SELECTION, address)
    if kind == 'local':
      with pytest.raises(DataError, match=refused):
        token_store.verify(store)
  (store / 'store.json').write_text(json.dumps(information))
  assert {**files(place.parents[3]), store / 'store.json': b''} == {
    **before,
    store / 'store.json': b'',
  }
  assert not (place.parents[1] / 'cache').exists()


def test_a_store_without_a_list_of_shards_is_refused(place):
  information = write_store(place)
  shard = information['shards'][0]
  for shards in (None, 3, [3], ['x'], [{}], [{**shard, 'files': 3}], {'x': 3}):
    (place / 'store.json').write_text(sealed(information | {'shards': shards}))
    with pytest.raises(DataError, match='does not list its shards'):
      token_store.read_information(place)


@pytest.mark.parametrize('name', ['.part', '.lock', 'store.json', '.PART', '...', '~', '%2e%2e'])
def test_a_store_whose_names_are_those_of_the_copy_stays_inside(place, name):
  information = write_store(place / STORE)
  shutil.copytree(place / STORE / information['shards'][0]['name'], place / STORE / 'copy')
  if name != 'store.json':
    shutil.copytree(place / STORE / 'copy', place / STORE / name)
    (place / STORE / 'store.json').write_text(renamed(information, name, of_file=False))
  before = files(place.parents[3])
  for _ in range(2):
    try:
      store = open_store(SELECTION, f'file://{place}')
      assert store.tokens == information['tokens']
    except StorageError as error:
      assert name in ('.part', '.lock') and 'cannot be copied' in str(error)
  assert files(place.parents[3]) == before


def test_a_shard_names_no_file_elsewhere(place):
  write_store(place)
  writer = StoreWriter(place, SELECTION, {}, 1)
  shard = writer.folders[0]
  record = json.loads((shard / 'shard.json').read_text())
  del record['sha256']  # as versions before 0.3 wrote it
  for name in names(place):
    plant(place, shard / name, functools.partial(shutil.copyfile, shard / 'tokens.npy'))
    named = {**record['files'], name: record['files']['tokens.npy']}
    (shard / 'shard.json').write_text(json.dumps(record | {'files': named}))
    with pytest.raises(DataError, match=REFUSED):
      writer.finish()
    (shard / 'shard.json').write_text(json.dumps(record | {'name': name}))
    with pytest.raises(ConfigurationError, match='built with another name'):
      writer.finish()


def test_an_index_names_no_weights_elsewhere(place):
  save_file({'w': np.ones(3, np.float32)}, place / 'model.safetensors')
  for name in (*names(place), *NO_TEXTS):
    if isinstance(name, str):
      plant(place, place / name, functools.partial(shutil.copyfile, place / 'model.safetensors'))
    index = json.dumps({'weight_map': {'w': name}})
    (place / 'model.safetensors.index.json').write_text(index)
    with pytest.raises(StorageError, match=REFUSED):
      tensor_folders.in_files(place)
  for listed in (None, 3, ['model.safetensors'], '../x'):
    (place / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': listed}))
    with pytest.raises(StorageError, match='has no weight_map'):
      tensor_folders.in_files(place)
  (place / 'a').mkdir(exist_ok=True)
  for name in ('model.safetensors', 'a/x y.safetensors', '..x'):
    if name != 'model.safetensors':  # which would be other weights beside an index
      (place / 'model.safetensors').rename(place / name)
    index = json.dumps({'weight_map': {'w': name}})
    (place / 'model.safetensors.index.json').write_text(index)
    assert [*tensor_folders.in_files(place).tensors] == ['w']
    (place / name).rename(place / 'model.safetensors')


@pytest.mark.invariant(11)
@pytest.mark.parametrize('bucket', [False, True])
def test_a_manifest_names_no_file_elsewhere(place, request, bucket):
  step, record, planted = place / 'checkpoints/3', b'{}', b'planted'
  step.mkdir(parents=True)
  (step / 'record.json').write_bytes(record)
  (place / 'planted').write_bytes(planted)
  algorithm = manifest.MD5 if bucket else manifest.SHA256
  address = f'gs://bucket/{letters(request.node.name)}' if bucket else str(place)
  server = request.getfixturevalue('gcs') if bucket else None
  found = manifest.DiskFiles(step)
  (digest,) = found.digests(['record.json'], algorithm)
  (of_planted,) = manifest.DiskFiles(place).digests(['planted'], algorithm)
  proposed = [name for name in of_objects(place) if '\n' not in name]
  for name in proposed[::4] if bucket else proposed:
    text = manifest.content(3, {'record.json': digest, name: of_planted})
    plant(
      place, step / name, lambda target: None if target.exists() else target.write_bytes(planted)
    )
    (step / manifest.name(algorithm)).write_bytes(text)
    if server:
      below = f'{letters(request.node.name)}/checkpoints/3'
      objects = {'record.json': record, name: planted, manifest.name(algorithm): text}
      for one, content in objects.items():
        server.put(f'{below}/{one}', content)
    with pytest.raises(StorageError, match=f'manifest.* names .*{REFUSED} the step'):
      chosen_steps.first_valid(steps_of(address), [3])
    if server:
      server.delete(f'{below}/{name}')


def test_a_record_that_no_manifest_names_is_not_read(place):
  step = place / 'checkpoints/3'
  step.mkdir(parents=True)
  steps.write_manifest(step, 3)
  assert manifest.damage(manifest.DiskFiles(step), 3) is None
  (step / 'record.json').symlink_to('/etc/hostname')
  assert 'record.json is not in' in str(manifest.damage(manifest.DiskFiles(step), 3))


def test_no_object_of_a_run_is_copied_elsewhere(place, gcs):
  root = place.parents[3]
  for name in of_objects(place):
    plant(
      place,
      place.parents[2] / 'tmp/valkyrie-x/run' / name,
      lambda target: target.write_bytes(b'own'),
    )
  before = files(root)
  for number, name in enumerate(of_objects(place)):
    gcs.put(f'{number}/run/config.gin', b'a = 1')
    gcs.put(f'{number}/run/{name}', b'planted')
    with pytest.raises(StorageError, match=rf'^gs://bucket/{number}/run names .*{REFUSED}'):
      opened(f'gs://bucket/{number}/run')
  assert files(root) == before


def test_ordinary_objects_of_a_run_are_copied(place, gcs):
  for name in ORDINARY:
    gcs.put(f'ordinary/run/{name}', name.encode())
  for name in ('', 'eval/', 'empty/', 'empty/below/'):  # as consoles mark folders
    gcs.put(f'ordinary/run/{name}', b'')
  before = files(place.parents[3])
  run = opened('gs://bucket/ordinary/run')
  found = {file for file in pathlib.Path(run).rglob('*') if file.is_file()}
  assert {str(file.relative_to(run)): file.read_text() for file in found} == {
    n: n for n in ORDINARY
  }
  assert files(place.parents[3]) == before


def test_marks_of_folders_damage_no_step(gcs):
  record, md5 = b'{}', hashlib.md5(b'{}').hexdigest()
  text = manifest.content(3, {'record.json': md5, 'state/x': md5})
  objects = {'record.json': record, 'state/x': record, 'manifest.md5': text}
  for name, content in {**objects, '': b'', 'state/': b'', 'state/d/': b''}.items():
    gcs.put(f'marks/run/checkpoints/3/{name}', content)
  assert chosen_steps.first_valid(steps_of('gs://bucket/marks/run'), [3]) == (3, {})


def test_an_object_with_the_name_of_a_folder_is_said(place, gcs):
  gcs.put('both/run/a', b'')
  gcs.put('both/run/a/b', b'b')
  assert pathlib.Path(opened('gs://bucket/both/run'), 'a/b').read_bytes() == b'b', 'a mark'
  gcs.put('both/run/a', b'a')
  with pytest.raises(StorageError, match=r'gs://bucket/both/run cannot be read: .*run/a\)'):
    opened('gs://bucket/both/run')


@pytest.mark.parametrize('folder', ['', '..', '.', 'a/..', 'a/../b', 'a//b', './a', 'a\nb'])
def test_an_address_names_a_folder(gcs, folder):
  with pytest.raises(ConfigurationError, match='not the address of a folder'):
    Bucket(f'gs://bucket/{folder}')


def test_a_lock_counts_no_steps_but_numbers(place, gcs):
  numbers = [-1, 1.5, True, None, '3', [3], '٣', 1e300]
  odd = [{key: [3, step]} for step in (*HOSTILE, *numbers) for key in ('steps', 'unfinished')]
  odd += [{'steps': steps} for steps in ('x', 3, {'3': 3}, True)]
  odd += [{'token': token} for token in (*HOSTILE, *NO_TEXTS)]
  run = steps_of('gs://bucket/lock/run')
  for fields in odd:
    gcs.put('lock/run/trainer.lock', json.dumps({'token': 'x', **fields}).encode())
    with pytest.raises(StorageError, match='is not the lock of a trainer'):
      run.find()
  gcs.put('lock/run/trainer.lock', b'{"token": "x", "steps": [4, 3], "unfinished": [2]}')
  assert run.find() == [3, 4]


def test_only_an_address_that_the_run_names_is_asked(place, gcs, caplog):
  gcs.put('texts/a.txt', b'text')
  address = 'gs://bucket/texts'
  origin = {'location': address, 'formats': ['.txt'], 'files': []}
  gcs.calls.clear()
  provenance.check(place, {'origin': origin}, '', [None, 'gs://bucket/other', '0.1'])
  assert not gcs.calls and f"does not name the address '{address}'" in caplog.text
  with pytest.raises(DataError, match=r'1 new: a\.txt'):
    provenance.check(place, {'origin': origin}, '', [None, address])


def test_no_stream_and_no_id_of_a_run_leads_elsewhere(place):
  before = files(place.parents[3])
  for name in names(place):
    with pytest.raises(ConfigurationError, match=f'create_writers.name names .*{REFUSED}'):
      writers.create_writers(place, name=name, tensorboard=False)
  for name in (name for name in of_objects(place) if not foreign_names.is_below(name.strip())):
    (place / 'tracking_id').write_text(name)
    with pytest.raises(StorageError, match=f'tracking_id names .*{REFUSED}'):
      trackers._id(place)
  (place / 'tracking_id').unlink()
  assert trackers._id(place) == trackers._id(place)
  (place / 'tracking_id').unlink()
  assert files(place.parents[3]) == before
