"""Messages for every mistake in a configuration, and the files of a correct one."""

import json
import os
import pathlib
import re
import textwrap

import gin
import pytest

from valkyrie.config import check, parse, paths
from valkyrie.config.load import check_call, load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.run.configuration_files import (
  write_configuration,
  write_operative_configuration,
)


@gin.configurable
class Gadget:
  def __init__(self, size: int, rate: float = 0.1, name: str | None = None, parts=()):
    self.size, self.rate, self.name, self.parts = size, rate, name, parts


@gin.configurable(denylist=['model_dir'])
def operate(model_dir, gadget, steps: 'int' = 3, **extra):
  return gadget, steps, extra


GOOD = """
  seed = 0
  size = 8
  label = 'plain'
  operate.gadget = @big/Gadget()
  Gadget.size = %size
  big/Gadget.name = %label
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """An empty current folder, and gin as new before and after."""
  monkeypatch.chdir(tmp_path)
  gin.clear_config(clear_constants=True)
  yield tmp_path
  gin.clear_config(clear_constants=True)


def write(name, text):
  path = pathlib.Path(name)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(text).lstrip('\n'), encoding='utf-8')
  return name


def load(text, *flags, **options):
  load_gin([write('a.gin', text)], flags, **options)


def refusal(text, *flags, **options):
  """The error message, after a check that gin is still empty."""
  with pytest.raises(ConfigurationError) as caught:
    load(text, *flags, **options)
  assert caught.value.exit_code == 78
  assert gin.config_str() == ''
  return str(caught.value)


def test_binds_and_locks():
  load(GOOD, '--gin.size=16', '--gin.operate.steps=5', '--gin.big/Gadget.rate=1')
  gadget, steps, _ = operate(model_dir='x')
  assert (gadget.size, gadget.rate, gadget.name, steps) == (16, 1, 'plain', 5)
  with pytest.raises(RuntimeError, match='locked'):
    gin.bind_parameter('Gadget.size', 1)


def test_later_files_and_flags_override():
  load_gin([write('a.gin', GOOD), write('b.gin', 'size = 9')])
  assert operate(model_dir='x')[0].size == 9
  gin.clear_config()
  load_gin(['a.gin', 'b.gin'], ['--gin.size=10', '--gin.size=11'])
  assert operate(model_dir='x')[0].size == 11


def test_blocks_includes_nested_values_and_constants():
  gin.constant('toys.PI', 3.5)
  write('inner.gin', 'Gadget:\n  size = %size  # a comment\n  parts = [(%size, @Gadget)]\n')
  load("""
    size = 4
    include 'inner.gin'
    Gadget.rate = %PI
    operate.gadget = @Gadget()
  """)
  gadget = operate(model_dir='x')[0]
  assert gadget.parts[0][0] == 4
  assert gadget.parts[0][1] is Gadget
  assert gadget.rate == 3.5


@pytest.mark.invariant(15)
@pytest.mark.parametrize(
  ('flag', 'expected'),
  [
    ('--gin.sizes=1', ['--gin.sizes=1', 'Did you mean size?']),
    ('--gin.gadget=1', ["macro 'gadget'", 'Did you mean operate.gadget?']),
    ('--gin.seed=1', ['has no effect', '%seed']),
    ('--gin.gadget.size=1', ["no configurable 'gadget'", 'Did you mean Gadget?']),
    ('--gin.Gadget.sise=1', ["no parameter 'sise'", 'Did you mean size?', 'size, rate']),
    ('--gin.operate.model_dir="x"', ["no parameter 'model_dir'"]),
    ('--gin.operate.gadget=@Gadgt()', ["no configurable 'Gadgt'", 'Did you mean Gadget?']),
    ('--gin.operate.gadget=@Mine()', ["no configurable 'Mine'", '--gin_allow_import=PACKAGE']),
    ('--gin.Gadget.name=nan', ['gin has no number nan. Write a finite one']),
    ('--gin.Gadget.name=-inf', ['gin has no number -inf. Write a finite one']),
    ('--gin.Gadget.name=abc', ['strings need quotes. Write --gin.Gadget.name=\'"abc"\'']),
    ('--gin.Gadget.name=/data/x-1', ['--gin.Gadget.name=\'"/data/x-1"\'']),
    ('--gin.Gadget.parts=[a, 1]', ['a is not a value', 'strings need quotes']),
    ('--gin.size=8*1024', ['8*1024 is not gin syntax. Write --gin.size=8192']),
    ('--gin.size=2**3 + 1', ['Write --gin.size=9']),
    ('--gin.size=9**9**9', ['no expressions']),
    ('--gin.Gadget.name=none', ['Write --gin.Gadget.name=None']),
    ('--gin.size="8"', ["a string ('8')", 'a.gin:2 has an integer (8)']),
    ('--gin.size=1e3', ['a.gin:2 has an integer (8). Write 1000']),
    ('--gin.size=True', ['True or False (True)', 'a.gin:2 has an integer (8)']),
    ('--gin.Gadget.rate="fast"', ['Gadget.rate takes a number', "a string ('fast')"]),
    ('--gin.Gadget.size=None', ['Gadget.size takes an integer, not None']),
    ('--gin.operate.steps=2.5', ['operate.steps takes an integer', '(2.5)']),
    ('--gin.Gadget.name=%sizes', ['no statement defines %sizes', 'Did you mean size?']),
    ('--gin.size=1\nimport os', ['is neither a macro']),
    ('--gin.size=', ['the value is missing']),
    ('--gin.1x=3', ['what stands before = is not gin syntax']),
    ('--gin.@Gadget=True', ['what stands before = is not gin syntax']),
    ('--gin.nowhere/Gadget.size=3', ['has no effect', 'no binding refers to a @nowhere/Gadget']),
    (
      '--gin.operate.gadget=@optax.adamx',
      ["no configurable 'optax.adamx'", 'Did you mean optax.ada'],
    ),
  ],
)
def test_wrong_flags(flag, expected):
  message = refusal(GOOD, flag)
  assert message.startswith(flag)
  for part in expected:
    assert part in message


@pytest.mark.parametrize(
  ('line', 'expected'),
  [
    ('sizee = 3', ["reads the macro 'sizee'"]),
    ('Gadget.sise = 3', ['Did you mean size?']),
    ('Gadgets.size = 3', ['Did you mean Gadget?']),
    ('Gadgets:\n  size = 3', ['Did you mean Gadget?']),
    ('Gadget.rate = %speed', ['no statement defines %speed', '--gin.speed=VALUE']),
    ('Gadget.size = %size', ['already bound at a.gin:5']),
    ('size = 9', ['size is already bound at a.gin:2']),
    (
      'Gadget.name = abc',
      ['strings need quotes. Write Gadget.name = "abc"', '\n  Gadget.name = abc'],
    ),
    ('Gadget.rate = 3 * 2', ['Write Gadget.rate = 6']),
    ('Gadget.rate = "fast"', ["Gadget.rate takes a number, not a string ('fast')"]),
    ('Gadget.name = %size', ['(from a.gin:2)', 'takes a string or None, not an integer (8)']),
    ('Gadget.rate 3', ['not gin syntax']),
    ('Gadget.parts = (1,', ['the bracket ( is not closed']),
    ('Gadget.name = "abc', ['not gin syntax']),
    ('Gadget.rate =', ['the value is missing']),
    ('include "inner.gim"', ["no file 'inner.gim'", 'Did you mean inner.gin?']),
    ('import os', ['may import valkyrie, not os', '--gin_allow_import=os']),
    ('from os import path', ['not os.path', '--gin_allow_import=os']),
    ('import valkyrie_evil', ['not valkyrie_evil']),
    ('import valkyrie.no_such_room', ['no module valkyrie.no_such_room']),
    ('from __gin__ import dynamic_registration', ['dynamic registration']),
  ],
)
def test_wrong_lines(line, expected):
  write('inner.gin', '')
  message = refusal(textwrap.dedent(GOOD).lstrip('\n') + line + '\n')
  assert message.startswith(('a.gin:7', 'a.gin:8'))  # 8: where an open bracket is missed
  for part in expected:
    assert part in message


def test_required_macro_forgotten():
  text = GOOD.replace('size = 8', 'size = %gin.REQUIRED')
  assert refusal(text) == 'a.gin:2: size is required and has no value. Pass --gin.size=VALUE.'
  load(text, '--gin.size=3')
  assert operate(model_dir='x')[0].size == 3


def test_a_configurable_that_gin_builds_needs_all_arguments():
  message = refusal(GOOD.replace('Gadget.size = %size', 'Gadget.rate = %size'))
  assert 'a.gin:4: @big/Gadget() cannot be built, since Gadget.size has no value' in message


@gin.configurable
class Inheriting(Gadget):
  """A gadget with the same constructor."""


@gin.configurable
class Rebuilding(Gadget):
  def __init__(self, size):
    super().__init__(size)


def test_a_binding_of_a_base_class_counts_where_its_constructor_does():
  load('operate.gadget = @Inheriting()\nGadget.size = 3\n')
  assert operate(model_dir='x')[0].size == 3
  gin.clear_config()
  message = refusal('operate.gadget = @Rebuilding()\nGadget.size = 3\n')
  assert '@Rebuilding() cannot be built, since Rebuilding.size has no value' in message


@pytest.mark.parametrize(
  'line',
  [
    "operate.task = 'toys.tasks:cubes'",
    "named = 'toys.tasks:cubes'\noperate.task = %named",
    "operate.sources = {'a': {'task': 'toys.tasks:cubes'}, 'b': '/data:x'}",
    "operate.sources = 'toys.tasks:cubes'",
  ],
)
def test_a_task_of_a_gin_file_needs_leave_to_import_its_module(line):
  text = f'operate.gadget = @Gadget()\nGadget.size = 3\n{line}\n'
  assert 'If you trust that package, pass --gin_allow_import=toys.' in refusal(text)
  load(text, allowed_imports=['toys'])


def test_a_task_of_a_flag_and_one_of_valkyrie_have_leave():
  text = "operate.gadget = @Gadget()\nGadget.size = 3\noperate.task = 'valkyrie.tasks.text:text'\n"
  load(text, "--gin.operate.task='toys.tasks:cubes'")
  gin.clear_config()
  load(text)


def test_a_run_mode_needs_all_arguments():
  load('Gadget.size = 3')
  with pytest.raises(ConfigurationError, match=r'operate\.gadget has no value'):
    check_call(operate, 'model_dir')
  check_call(operate, 'model_dir', 'gadget')


@pytest.mark.parametrize('cycle', ['size = %label\nlabel = %size', 'size = [%size]\nlabel = %size'])
def test_a_macro_defined_by_itself_is_refused(cycle):
  text = f'{cycle}\nGadget.size = %label\n'
  assert 'is defined by itself' in refusal(text)


def test_run_macros_may_be_unread():
  names = sorted(check.RUN_MACROS)
  load('\n'.join(f'{name} = 1' for name in names))


def test_circular_include():
  write('b.gin', "include 'sub/../a.gin'")
  write('sub/c.gin', '')
  message = refusal("include 'b.gin'")
  assert 'includes itself: a.gin -> b.gin -> sub/../a.gin.' in message


def test_a_line_above_an_include_that_binds_the_same_is_not_lost():
  write('b.gin', "include 'c.gin'")
  write('c.gin', 'size = 3\nGadget.size = %size')
  message = refusal("size = 4\ninclude 'b.gin'")
  assert 'a.gin:1: size would be lost: c.gin:1, which is included below it' in message
  load("include 'b.gin'\nsize = 4")


def test_wrong_encoding(folder):
  (folder / 'b.gin').write_bytes('seed = 1\nGadget.name = "é"\n'.encode('latin-1'))
  assert 'b.gin:2: byte 0xe9 is not UTF-8' in refusal("include 'b.gin'")
  (folder / 'b.gin').write_bytes('\ufeffGadget.name = "é"\n'.encode())
  load("include 'b.gin'")  # with the byte order mark of Windows editors
  assert gin.query_parameter('Gadget.name') == 'é'


def test_a_missing_file_is_reported_with_the_searched_folders(folder):
  write('shelf/tiny.gin', '')
  with pytest.raises(ConfigurationError) as caught:
    load_gin(['tinny.gin'], search_paths=['shelf'])
  message = str(caught.value)
  assert message.startswith("--gin_file=tinny.gin: there is no file 'tinny.gin'")
  assert str(folder / 'shelf') in message
  assert 'Did you mean tiny.gin?' in message


@pytest.mark.parametrize(
  ('kind', 'said'),
  [
    ('pipe', 'a pipe'),
    ('folder', 'a folder'),
    ('immense', 'expected at most'),
    ('link', 'No such file'),
  ],
)
def test_what_is_not_a_gin_file_is_refused(folder, kind, said):
  path = folder / 'a.gin'
  if kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'folder':
    path.mkdir()
  elif kind == 'link':
    path.symlink_to('missing')
  else:
    with path.open('wb') as file:
      file.truncate(20 * 2**30)  # sparse
  with pytest.raises(ConfigurationError, match='a.gin cannot be read: .*' + said):
    load_gin(['a.gin'])


def test_includes_are_found_in_search_paths():
  write('shelf/part.gin', 'Gadget.rate = 2')
  load("include 'part.gin'", search_paths=['elsewhere', 'shelf'])
  assert gin.query_parameter('Gadget.rate') == 2


def test_shipped_gin_files_are_found_from_any_folder(folder, monkeypatch):
  monkeypatch.setattr(paths, 'GIN', folder / 'installed' / 'gin')
  write('installed/gin/x.gin', "include 'gin/parts/y.gin'")
  write('installed/gin/parts/y.gin', 'Gadget.size = 5')
  monkeypatch.chdir('/')
  load_gin(['gin/x.gin'])
  assert gin.query_parameter('Gadget.size') == 5


def test_the_gin_folder_exists():
  assert (paths.GIN / 'models').is_dir()
  assert not (paths.GIN / '__init__.py').exists()


def test_imports_of_included_files_are_checked():
  write('b.gin', 'import os.path')
  assert refusal("include 'b.gin'").startswith('b.gin:1: a gin file may import valkyrie, not')


def test_an_allowed_package_registers_its_configurables(folder, monkeypatch):
  monkeypatch.syspath_prepend(folder)
  write('my_toys/__init__.py', '')
  write('my_toys/parts.py', 'import gin\n@gin.configurable\ndef my_part(depth=1): return depth\n')
  text = 'import my_toys.parts\nmy_part.depth = 3\noperate.gadget = @my_part()'
  assert '--gin_allow_import=my_toys' in refusal(text)
  load(text, allowed_imports=['my_toys'])
  assert operate(model_dir='x')[0] == 3
  assert 'import my_toys.parts' in gin.config_str()


def test_nothing_is_imported_if_one_import_is_not_allowed(folder, monkeypatch):
  monkeypatch.syspath_prepend(folder)
  write('my_witness.py', 'open("imported", "w").close()')
  refusal('import my_witness\nimport os', allowed_imports=['my_witness'])
  assert not (folder / 'imported').exists()


def test_a_missing_package_is_reported():
  message = refusal('import my_absent.parts', allowed_imports=['my_absent'])
  assert message.startswith('a.gin:1: there is no module my_absent')
  assert 'not the name of a package' in refusal('', allowed_imports=['./my_toys'])


def test_the_saved_configuration_is_complete_and_loads_again(folder):
  load(GOOD, '--gin.size=16', '--gin.Gadget.parts=(1, "a", None, %label, {2: @Gadget})')
  write_configuration('run')
  text = (folder / 'run/config.gin').read_text()
  data = json.loads((folder / 'run/config.json').read_text())
  assert data['macros'] == {'seed': 0, 'size': 16, 'label': 'plain'}
  assert data['bindings'] == {
    'Gadget.parts': [1, 'a', None, 'plain', {'2': '@Gadget'}],
    'Gadget.size': 16,
    'big/Gadget.name': 'plain',
    'operate.gadget': '@big/Gadget()',
  }
  gin.clear_config()
  load(text)  # from a copy, since no gin file is loaded from a run
  assert text.endswith(f'\n\n{gin.config_str()}')


def test_secrets_are_not_written(folder):
  load(f"""
    hf_token = 'swordfish'
    {GOOD}
    Gadget.name = %hf_token
    operate.api_key = ('swordfish', {{
        'swordfish':
            'it is a swordfish of a considerable length, which gin writes on a line of its own'}})
    operate.source = 'https://me:swordfish@host/data?x=1&X-Goog-Signature=swordfish&y=2'
    operate.note = 'the key is hf_swordfishswordfishswordfish'
    operate.headers = {{'Authorization': 'Bearer swordfish', 'pwd': %inner,
        'auth': ('a', 'swordfish')}}
    operate.wandb_key = %login
    login = %deeper
    deeper = 'swordfish'
    inner = 'swordfish'
    operate.token = 'swordfish'
    operate.others = ('glpat-swordfishswordfish', 'github_pat_swordfishswordfish', \\
        'AIzaswordfishswordfish', 'xoxb-swordfishswordfish')
    operate.max_tokens = 4
    operate.tokenizer = 'data/tokenizer.json'
    operate.author = 'me'
    operate.eos_token = '</s>'
  """)
  gin.get_configurable('operate')('run')
  write_configuration('run')
  write_operative_configuration('run')
  for name in ('config.gin', 'operative_config.gin', 'config.json'):
    text = (folder / 'run' / name).read_text()
    assert 'swordfish' not in text
    assert 'https://(redacted)@host/data?x=1&(redacted)&y=2' in text
    assert 'data/tokenizer.json' in text and '</s>' in text and "'me'" in text.replace('"', "'")
  found = bindings()
  assert found['Gadget.name'] == '(redacted)'
  assert found['operate.api_key'] == ['(redacted)', {'(redacted)': '(redacted)'}]
  assert found['operate.max_tokens'] == 4


@pytest.mark.parametrize(
  'value',
  [
    "{'api-key': 'swordfish'}",
    "{'X-Api-Key': 'swordfish'}",
    "{'a': {'password': {'b': ['swordfish', {'c': ('x', 'swordfish')}]}}, 'kept': 'shown'}",
    "{'passphrase': ('swordfish',), 'kept': 'shown'}",
    "{'Cookie': 'session=swordfish'}",
    "{'note': 'Bearer swordfish'}",
    "'https://host/data?password=swordfish&kept=shown'",
    "'https://host/data?x=1&pwd=swordfish'",
    "'https://host/data?client_secret=swordfish'",
    "'https://me:sword/swordfish@host/data'",
    "'s3://me:at@swordfish@host/data'",
    "('--user=me', '--password=swordfish', 'shown')",
    "('--user', 'me', '--api-key', 'swordfish', 'shown')",
    "'https://hooks.slack.com/services/T0/B0/swordfish'",
    "'https://discord.com/api/webhooks/1/swordfish'",
    "{'slack_webhook': 'https://host/swordfish'}",
  ],
)
def test_no_form_of_a_secret_is_written(folder, value):
  load(GOOD + f'    operate.note = {value}\n    operate.label = "shown"\n')
  write_configuration('run')
  for name in ('config.gin', 'config.json'):
    text = (folder / 'run' / name).read_text()
    assert 'swordfish' not in text and '(redacted)' in text
    assert text.count('shown') >= 1 + value.count('shown')


@pytest.mark.parametrize(
  'value',
  [
    'https://host:8443/path@v2/data',
    'gs://bucket/folder@2/a=1',
    'the basic tokens of an author',
    'data/keys/tokenizer.json',
    'https://host/data?x=1&page=2',
  ],
)
def test_what_is_no_secret_is_written(folder, value):
  load(GOOD + f'    operate.note = {value!r}\n')
  write_configuration('run')
  assert value in (folder / 'run' / 'config.gin').read_text()


def test_a_named_secret_is_told_to_its_user_and_nobody_else(folder, monkeypatch):
  load(
    GOOD
    + """
    operate.api_key = 'env:MY_KEY'
    operate.headers = {'Authorization': 'env:MY_KEY', 'other': ('env:MY_KEY', [4], 'env: no name')}
    operate.note = %login
    login = 'env:MY_KEY'
  """
  )
  with pytest.raises(ConfigurationError, match='the environment has no variable'):
    operate(model_dir='x')
  monkeypatch.setenv('MY_KEY', 'swordfish')
  _, _, got = operate(model_dir='x')
  headers = {'Authorization': 'swordfish', 'other': ('swordfish', [4], 'env: no name')}
  assert got == {'api_key': 'swordfish', 'note': 'swordfish', 'headers': headers}
  write_configuration('run')
  write_operative_configuration('run')
  for name in ('config.gin', 'operative_config.gin', 'config.json'):
    text = (folder / 'run' / name).read_text()
    assert 'swordfish' not in text and 'env:MY_KEY' in text
  assert 'swordfish' not in json.dumps(bindings())


def test_the_run_of_a_stranger_is_told_no_secret(monkeypatch):
  monkeypatch.setenv('MY_KEY', 'swordfish')
  load(GOOD + "    operate.note = ('env:MY_KEY',)\n")
  write_configuration('run')
  gin.clear_config()
  with pytest.raises(ConfigurationError, match=r'operate\.note was not recorded, .*secret'):
    load_gin([], [], run='run')
  load_gin([], ["--gin.operate.note=('env:MY_KEY',)"], run='run')
  assert operate(model_dir='x')[2] == {'note': ('swordfish',)}


def test_a_secret_behind_two_macros_alone_is_not_written(folder):
  load(GOOD + '    operate.api_key = %login\n    login = %deeper\n    deeper = "swordfish"\n')
  write_configuration('run')
  assert 'swordfish' not in (folder / 'run' / 'config.gin').read_text()


def test_the_operative_configuration_has_defaults(folder):
  load(GOOD)
  operate(model_dir='x')
  write_operative_configuration('run')
  assert 'Gadget.rate = 0.1' in (folder / 'run/operative_config.gin').read_text()


def test_earlier_configurations_are_kept(folder):
  for size in (1, 1, 2, 3):
    gin.clear_config()
    load(GOOD, f'--gin.size={size}')
    write_configuration('run')
  sizes = {
    path.name: json.loads(path.read_text())['macros']['size']
    for path in (folder / 'run').glob('config.json*')
  }
  assert sizes == {'config.json': 3, 'config.json.1': 1, 'config.json.2': 2}
  kept = sorted(path.name for path in (folder / 'run').iterdir() if 'gin' in path.name)
  assert kept == ['config.gin', 'config.gin.1', 'config.gin.2']


def test_a_folder_that_cannot_be_written_is_a_storage_error(folder):
  load(GOOD)
  (folder / 'run').write_text('a file')
  with pytest.raises(StorageError, match=r'config\.gin cannot be written.*--model_dir'):
    write_configuration('run')


@pytest.mark.parametrize('name', ['run/config.gin', 'run/train/deep.gin', 'link.gin'])
def test_gin_files_in_the_folder_of_a_run_are_refused(folder, name):
  load(GOOD)
  write_configuration('run')
  write('run/train/deep.gin', '')
  (folder / 'link.gin').symlink_to(folder / 'run/config.gin')
  gin.clear_config()
  message = refusal(f"include '{name}'")
  assert 'is the folder of a run' in message
  assert 'Leave --gin_file out: the run opens with its own configuration' in message


@pytest.mark.parametrize('file', ['/etc/passwd', '/proc/self/environ'])
def test_no_line_of_a_file_that_is_no_gin_file_is_quoted(file):
  message = refusal(f"include '{file}'")
  assert file in message
  lines = pathlib.Path(file).read_text(errors='replace').replace('\0', '\n').splitlines()
  quoted = [line for line in lines if len(line) > 12 and line in message]
  assert lines and quoted == []


def test_a_folder_with_checkpoints_is_a_run(folder):
  write('run/x.gin', '')
  (folder / 'run/checkpoints').mkdir()
  assert 'is the folder of a run' in refusal("include 'run/x.gin'")


@pytest.mark.parametrize(
  ('text', 'line', 'bracket'),
  [
    ('seed = 1\nB.x = [1, 2\nC.y = 3\n', 2, '['),
    ("a = {'x': 1\nb = 2", 1, '{'),
    ('a = (1,\n\n\n', 1, '('),
    ('a = (@f(), @g/h(\nb = 2\n', 1, '('),
    ("a = ('x(',\n'b=')\nc = @f(\n", 3, '('),
  ],
)
def test_a_bracket_that_is_not_closed_is_named_where_it_opens(tmp_path, text, line, bracket):
  path = tmp_path / 'x.gin'
  path.write_text(text)
  message = re.escape(f'{path}:{line}: the bracket {bracket} is not closed')
  with pytest.raises(ConfigurationError, match=message):
    parse.read_statements([str(path)])


def test_a_bracket_of_a_flag_that_is_not_closed():
  with pytest.raises(ConfigurationError, match=r'x=\(1, 2: the bracket \( is not closed'):
    parse.read_statements([], ['--gin.x=(1, 2'])


HYBRID_WITH_TEACHER = (
  ['gin/tiny_cpu.gin', 'gin/objectives/distillation.gin'],
  '--gin.teacher="runs/teacher"',
)


def load_with_teacher(*flags):
  gin.clear_config(clear_constants=True)
  files, teacher = HYBRID_WITH_TEACHER
  load_gin(files, [teacher, *flags], modules=CONFIGURABLE_MODULES)


@pytest.mark.parametrize(
  ('flags', 'part'),
  [
    (['--gin.teacher/Block.mlp_width=64'], '@local/Block, @recurrent/Block'),
    (['--gin.teacher/S5.horizon=2.0'], '@S5'),
    (['--gin.LanguageModel.pattern=(@Block,)', '--gin.local/Block.mlp_width=64'], '@Block'),
  ],
)
def test_a_binding_in_a_scope_where_no_such_part_is_built(flags, part):
  """A reference with a scope of its own, as @local/Block in a pattern, leaves the teacher's."""
  message = f'has no effect, since no .* the references to it are {part}, and'
  with pytest.raises(ConfigurationError, match=message):
    load_with_teacher(*flags)


def test_bindings_in_scopes_that_reach_a_part():
  """Also where Python builds the part, and in files for a pattern that a later one overrides."""
  load_with_teacher(
    '--gin.teacher/LanguageModel.pattern=(@teacher/Block,)',
    '--gin.teacher/Block.mlp_width=64',
    '--gin.teacher/RMSNorm.epsilon=1e-5',
    '--gin.recurrent/S5.horizon=2.0',
  )
  load_with_teacher('--gin.LanguageModel.pattern=(@Block,)', '--gin.Block.mixers=(@S5,)')


@pytest.mark.parametrize(
  ('flag', 'advice'),
  [
    ('--gin.Block.mixers=(@S5,)', 'local/Block.mixers or recurrent/Block.mixers'),
    ('--gin.LongformerAttention.window=8', 'local/LongformerAttention.window'),
  ],
)
def test_a_flag_without_a_scope_where_the_scopes_have_bindings_of_their_own(flag, advice):
  own = '--gin.local/LongformerAttention.window=4'
  gin.clear_config(clear_constants=True)
  with pytest.raises(ConfigurationError, match=rf'has no effect, since .* Bind {advice}\.'):
    load_gin(['gin/tiny_cpu.gin'], [own, flag], modules=CONFIGURABLE_MODULES)


@pytest.mark.parametrize(
  'flags',
  [
    ['--gin.Block.dropout=0.5', '--gin.local/Block.dropout=0.1'],
    ['--gin.RMSNorm.epsilon=1e-5', '--gin.local/RMSNorm.epsilon=1e-6'],
    ['--gin.local/Block.mixers=(@S5,)', '--gin.local/S5.horizon=2.0', '--gin.S5.horizon=4.0'],
  ],
)
def test_a_flag_without_a_scope_that_one_part_still_reads(flags):
  gin.clear_config(clear_constants=True)
  load_gin(['gin/tiny_cpu.gin'], flags, modules=CONFIGURABLE_MODULES)
