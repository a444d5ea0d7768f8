"""Gin files and names of strangers, and secrets in one's own."""

from collections.abc import Iterator
import json
import os
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

from faults.buckets import service
from faults.data import BAD_DATA, copied
from faults.disks import STORAGE
from faults.harness import Harness
from faults.table import Trial, fault
from valkyrie.data.token_store import content_hash

REFUSED = 78
LEADS_OUT = 'is not a path below'
SECRET = 'swordfish'
TOKENS = tuple(f'{kind}{SECRET}{SECRET}' for kind in ('glpat-', 'github_pat_', 'AIza', 'xoxb-'))
# Statements of a gin file that name a module, in place of its task.
NAMES = (
  "task = 'stranger:letters'",
  "named = 'stranger:letters'\ntask = %named",
  "task = 'letters'\nimport stranger",
  "task = 'letters'\nTaskFeed.task = 'stranger:letters'",
)


@fault(
  'a gin file that names a module of a stranger',
  'is refused with 78, nothing is imported',
  full=4,
)
def strangers(harness: Harness, times: int) -> Iterator[Trial]:
  (harness.folder / 'stranger.py').write_text(
    'import pathlib\npathlib.Path(__file__).with_suffix(".imported").touch()\n'
  )
  path = f'{harness.folder}:{harness.environment()["PYTHONPATH"]}'
  for names in NAMES[:times]:
    name = harness.new()
    text = (harness.folder / 'single.gin').read_text()
    (harness.folder / 'stranger.gin').write_text(text.replace("task = 'letters'", names))
    process = harness.start(name, partition='stranger', environment={'PYTHONPATH': path})
    failure, said = harness.ending(name, process, REFUSED), harness.said(name)
    if '--gin_allow_import=stranger' not in said:
      failure = failure or f'the message is {said[-300:]}'
    if (harness.folder / 'stranger.imported').exists():
      failure = 'the module was imported'
    yield Trial(names, failure)
    harness.forget(name)


@fault(
  'a run that is resumed in its folder, which holds a numpy.py of a stranger',
  'goes on, nothing of the folder is imported',
  full=3,
)
def current_folders(harness: Harness, times: int) -> Iterator[Trial]:
  for module in ('numpy', 'gin', 'socket')[:times]:
    name = harness.new()
    folder = harness.folder / name
    harness.run(name, steps=1)
    (folder / f'{module}.py').write_text(
      'import pathlib\npathlib.Path(__file__).with_suffix(".imported").touch()\n'
    )
    failure = harness.ending(name, harness.start(name, cwd=folder))
    if (folder / f'{module}.imported').exists():
      failure = f'{module}.py of the folder was imported'
    yield Trial(module, failure)
    harness.forget(name)


@fault(
  'an include of a file that is no gin file',
  'is refused with 78, none of its lines is quoted',
  full=2,
)
def includes(harness: Harness, times: int) -> Iterator[Trial]:
  for file in ('/etc/passwd', '/proc/self/environ')[:times]:
    name = harness.new()
    text = (harness.folder / 'single.gin').read_text()
    (harness.folder / 'include.gin').write_text(f'{text}\ninclude {file!r}\n')
    secret = {'A_TOKEN': SECRET}
    process = harness.start(name, partition='include', environment=secret)
    failure, said = harness.ending(name, process, REFUSED), harness.said(name)
    lines = [SECRET, *pathlib.Path('/etc/passwd').read_text().splitlines()]
    if quoted := [line for line in lines if line in said]:
      failure = f'the message has {quoted}'
    if file not in said:
      failure = failure or f'the message is {said[-300:]}'
    yield Trial(file, failure)
    harness.forget(name)


def _ending(harness: Harness, name: str, process, code: int) -> str | None:
  """What is wrong with a run that should have refused a name."""
  failure = harness.ending(name, process, code)
  if failure is None and LEADS_OUT not in (said := harness.said(name)):
    failure = f'the message is {said[-300:]}'
  return failure


@fault(
  'an object of a run in a bucket whose name leads out of the run',
  'ends with 74, nothing of the run is copied',
  full=4,
)
def objects(harness: Harness, times: int) -> Iterator[Trial]:
  with service() as (server, options):
    for number in range(times):
      name = harness.new()
      own, temporary = harness.folder / f'{name}.own', harness.folder / f'{name}.tmp'
      own.write_text('own')
      temporary.mkdir()
      # The local copy is TEMPORARY/valkyrie-X/NAME.
      out = (f'../../../{own.name}', f'eval/../../../../{own.name}', str(own), '../planted')[number]
      server.put(f'{name}/config.gin', b'')
      server.put(f'{name}/{out}', b'planted')
      environment = {**options['environment'], 'TMPDIR': str(temporary)}
      process = harness.start(name, f'--model_dir=gs://bucket/{name}', environment=environment)
      failure = _ending(harness, name, process, STORAGE)
      if own.read_text() != 'own' or [*temporary.rglob('planted')]:
        failure = 'it was written outside'
      yield Trial(out, failure)
      harness.forget(name)


@fault(
  'a store.json, here or at an address, that names a shard outside the store',
  'ends with 65, nothing is read or copied there',
  full=4,
)
def shards(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    data, store = copied(harness, name)
    information = json.loads((store / 'store.json').read_text())
    del information['sha256']
    shard, cache = information['shards'][0], data / 'cache'
    elsewhere = shutil.copytree(store / shard['name'], data / 'elsewhere')
    shard['name'] = ('../elsewhere', str(elsewhere))[number // 2]
    information['sha256'] = content_hash(information)
    (store / 'store.json').write_text(json.dumps(information))
    place = f'file://{data}' if number % 2 else data
    process = harness.start(
      name, f'--gin.TaskFeed.data_dir="{place}"', environment={'VALKYRIE_CACHE': str(cache)}
    )
    failure = _ending(harness, name, process, BAD_DATA)
    if [*cache.glob('letters-train-*'), *cache.glob('elsewhere')]:
      failure = 'it was copied'
    yield Trial(f'{shard["name"]} in {place}', failure)
    harness.forget(name)


@fault(
  'an index of safetensors that names a file outside its folder',
  'ends with 74, the file is not read',
  full=2,
)
def weights(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    folder = harness.folder / f'{name}.data'
    folder.mkdir()
    named = ('../secret.safetensors', '/etc/hostname')[number]
    index = json.dumps({'weight_map': {'embedding': named}})
    (folder / 'model.safetensors.index.json').write_text(index)
    process = harness.start(name, f'--gin.train.initial_weights="{folder}"')
    yield Trial(named, _ending(harness, name, process, STORAGE))
    harness.forget(name)


def _contradiction(kind: str, folder: pathlib.Path) -> None:
  """Files of weights that do not fit one another, or that a start would not load."""
  tensors = {'embedding': np.ones((2, 3), np.float32)}
  parts = [f'model-{number:05}-of-00002.safetensors' for number in (1, 2)]
  index = folder / 'model.safetensors.index.json'
  if kind == 'a tensor in two files':
    for name in ('a.safetensors', 'b.safetensors'):
      save_file(tensors, folder / name)
  elif kind == 'an old index beside new weights':
    save_file(tensors, folder / parts[0])
    save_file(tensors, folder / 'model.safetensors')
    index.write_text(json.dumps({'weight_map': {'embedding': parts[0]}}))
  elif kind == 'one file of two':
    save_file(tensors, folder / parts[0])
  elif kind == 'a file without a tensor of the index':
    save_file(tensors, folder / parts[0])
    index.write_text(json.dumps({'weight_map': {'embedding': parts[0], 'unembedding': parts[0]}}))
  elif kind == 'an adapter beside the weights':
    save_file(tensors, folder / 'model.safetensors')
    (folder / 'config.json').write_text(json.dumps({'format': 'valkyrie', 'vocabulary': 'bytes'}))
    (folder / 'adapter_config.json').write_text('{}')
  elif kind == 'no tensor of the model':
    save_file({'other': tensors['embedding']}, folder / 'model.safetensors')
  elif kind == 'a pipe':
    os.mkfifo(folder / 'model.safetensors')


CONTRADICTIONS = {
  'a tensor in two files': REFUSED,
  'an old index beside new weights': REFUSED,
  'one file of two': STORAGE,
  'a file without a tensor of the index': STORAGE,
  'an adapter beside the weights': REFUSED,
  'no tensor of the model': REFUSED,
  'a pipe': STORAGE,
}


@fault(
  'weights whose files do not fit one another, or of which nothing would be loaded',
  'are refused with 74 or 78 and the name of a file, also with InitialWeights.partial',
  full=len(CONTRADICTIONS),
)
def contradictions(harness: Harness, times: int) -> Iterator[Trial]:
  for kind in [*CONTRADICTIONS][:times]:
    name = harness.new()
    folder = harness.folder / f'{name}.data'
    folder.mkdir()
    _contradiction(kind, folder)
    process = harness.start(
      name, f'--gin.train.initial_weights="{folder}"', '--gin.InitialWeights.partial=True'
    )
    failure = harness.ending(name, process, CONTRADICTIONS[kind])
    if failure is None and str(folder) not in harness.said(name):
      failure = f'the message is {harness.said(name)[-300:]}'
    yield Trial(kind, failure)
    harness.forget(name)


@fault(
  'passwords, keys and tokens in gin bindings and in the path of a text',
  'are in no file of the run or of its token store',
  full=1,
)
def secrets(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    place = harness.folder / f'{name}.data'
    text = place / TOKENS[0] / 'a.txt'
    text.parent.mkdir(parents=True)
    for number in range(40):
      text.with_name(f'{number}.txt').write_text('abcdefgh' * 4 + str(number))
    harness.run(
      name,
      '--gin_file=gin/data/text.gin',
      f'--gin.text="{text.parent}"',
      '--gin.held_out="0.3"',
      f'--gin.TaskFeed.data_dir="{place / "stores"}"',
      '--gin.train.hooks=(@LogIn(), @HashState())',
      f'--gin.login="{SECRET}"',
      '--gin.LogIn.api_key=%login',
      f'--gin.LogIn.token="{SECRET}"',
      f'--gin.LogIn.headers={{"Authorization": "Bearer {SECRET}", "password": %login}}',
      f'--gin.LogIn.others={TOKENS}',
      steps=2,
    )
    files = [file for root in (harness.folder / name, place / 'stores') for file in root.rglob('*')]
    found = [file for file in files if file.is_file() and SECRET.encode() in file.read_bytes()]
    redacted = '(redacted)' in (harness.folder / name / 'config.gin').read_text()
    failure = None if redacted and any(file.name == 'store.json' for file in files) else 'no files'
    if found:
      failure = f'found in {", ".join(str(file.relative_to(harness.folder)) for file in found)}'
    yield Trial('of each kind', failure)
    harness.forget(name)
