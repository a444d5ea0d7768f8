"""Gin files of strangers, and secrets in one's own."""

from collections.abc import Iterator
import pathlib

from injections.harness import Harness
from injections.table import Trial, fault

REFUSED = 78
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
  short=1,
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
  'an include of a file that is no gin file',
  'is refused with 78, none of its lines is quoted',
  full=2,
  short=1,
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
