"""The command line: exit codes, messages, and no early import of large packages."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from valkyrie import __version__, main
from valkyrie.errors import UsageError

ROOT = pathlib.Path(__file__).parents[2]

# A module with two run modes, to test main alone.
RUN_MODES = """
import gin
from valkyrie.errors import Diverged

@gin.configurable
def train(model_dir, ending='well'):
  print('train', model_dir, ending)
  if ending == 'diverged':
    raise Diverged('loss is nan at step 3')
  if ending == 'bug':
    raise ValueError('a bug')
  if ending == 'interrupt':
    raise KeyboardInterrupt
  if ending == 'devices':
    import jax
    jax.devices()
  if ending == 'traced':
    import jax
    def step(x):
      raise Diverged('a mistake of a traced step')
    jax.jit(step)(1)

@gin.configurable
def infer(model_dir, prompt, prompts, messages, output):
  print('infer', repr(prompt))
"""

START = """
import sys
from valkyrie import main
modes = {'train': ('toys', 'train'), 'infer': ('toys', 'infer')}
sys.exit(main.main(sys.argv[1:], modules=('toys',), run_modes=modes))
"""

# Command lines that one process runs, each with files for its output and its errors.
COMMANDS = {
  'arguments': ['--gin_file', 'a.gin', '--gin.train.ending="fine"', '--model_dir=here'],
  'default': ['--gin_file=a.gin', '--gin_file=a.gin'],
  'diverged': ['--gin_file=a.gin', '--gin.train.ending="diverged"', '--model_dir=x'],
  'interrupt': ['--gin_file=a.gin', '--gin.train.ending="interrupt"', '--model_dir=x'],
  'bug': ['--gin_file=a.gin', '--gin.train.ending="bug"', '--model_dir=x'],
  'configuration': ['--gin_file=a.gin', '--gin.train.endings="well"'],
  'usage': ['--gin_fil=a.gin'],
}
ONE_BY_ONE = """
import json, os, pathlib, sys
import gin
from valkyrie import main
modes = {'train': ('toys', 'train'), 'infer': ('toys', 'infer')}
results = {}
for name, arguments in json.loads(sys.argv[1]).items():
  files = [pathlib.Path(f'{name}.{stream}') for stream in ('output', 'errors')]
  for number, file in enumerate(files, 1):
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
  gin.clear_config(clear_constants=True)
  code = main.main(arguments, modules=('toys',), run_modes=modes)
  sys.stdout.flush()
  results[name] = code, *(file.read_text() for file in files)
pathlib.Path('results.json').write_text(json.dumps(results))
"""


def run_in(folder, code, *arguments, **options):
  """Executes `code` in a new process whose current folder has the module and a gin file."""
  (folder / 'toys.py').write_text(RUN_MODES)
  (folder / 'a.gin').write_text("train.ending = 'well'\n")
  return subprocess.run(
    [sys.executable, '-c', code, *arguments],
    cwd=folder,
    env={**os.environ, 'PYTHONPATH': f'{ROOT}{os.pathsep}{folder}', 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    check=False,
    timeout=120,
    **{'input': b'', **options},
  )


@pytest.fixture
def start(tmp_path):
  def run(*arguments, code=START, **options):
    return run_in(tmp_path, code, *arguments, **options)

  return run


@pytest.fixture(scope='module')
def results(tmp_path_factory):
  """{name: [exit code, output, errors]} of the commands."""
  folder = tmp_path_factory.mktemp('commands')
  run_in(folder, ONE_BY_ONE, json.dumps(COMMANDS))
  return json.loads((folder / 'results.json').read_text())


def test_the_run_mode_gets_its_arguments(results):
  assert results['arguments'] == [0, 'train here fine\n', '']


def test_the_default_model_dir_is_printed(results):
  said = 'model_dir: runs/a-a (--model_dir=DIR for another)\n'
  assert results['default'] == [0, 'train runs/a-a well\n', said]


@pytest.mark.parametrize(
  ('ending', 'code', 'message'),
  [
    ('diverged', 76, 'valkyrie: loss is nan at step 3\n'),
    ('interrupt', 130, 'valkyrie: interrupted\n'),
  ],
)
def test_errors_have_their_exit_code_and_no_traceback(results, ending, code, message):
  found, _, errors = results[ending]
  assert (found, errors) == (code, message)


def test_bugs_print_their_traceback(results):
  code, _, errors = results['bug']
  assert code == 70
  assert 'Traceback' in errors and 'ValueError: a bug' in errors


def test_a_bad_configuration_prints_one_message(results):
  code, output, errors = results['configuration']
  assert (code, output) == (78, '')
  assert errors.startswith('valkyrie: --gin.train.endings="well": train has no parameter')
  assert 'Traceback' not in errors


def test_infer_reads_the_prompt_or_standard_input(start):
  arguments = ('--gin_file=a.gin', '--run_mode=infer', '--model_dir=x')
  assert start(*arguments, '--prompt=').stdout == b"infer ''\n"
  assert start(*arguments, input='dé\nf'.encode()).stdout == "infer 'dé\\nf'\n".encode()
  broken = start(*arguments, input=b'\xff')
  assert (broken.returncode, b'not UTF-8' in broken.stderr) == (2, True)
  broken = start(*arguments, b'--prompt=a\xff')
  assert (broken.returncode, b'--prompt is not UTF-8' in broken.stderr) == (2, True)


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (['--gin_fil=x.gin'], 'Did you mean --gin_file?'),
    (['--modeldir', 'x', '--gin_file=a'], 'Did you mean --model_dir?'),
    (['stray', '--gin_file=a'], 'stray'),
    ([], '--gin_file is missing'),
    (['--gin_file'], 'expected one argument'),
    (['--gin.size', '3', '--gin_file=a'], 'expected --gin.NAME=VALUE, with ='),
    (['--gin.size=', '--gin_file=a'], 'expected --gin.NAME=VALUE'),
    (['--gin.place="\udcff"', '--gin_file=a'], 'is not UTF-8'),
    (['--run_mode=trian', '--gin_file=a'], "'trian'"),
    (['--prompt=x', '--gin_file=a'], '--prompt needs --run_mode=infer'),
  ],
)
def test_wrong_usage_has_a_hint(arguments, expected):
  with pytest.raises(UsageError) as caught:
    main.parse_command_line(arguments)
  assert expected in str(caught.value)


def test_the_version(capsys):
  with pytest.raises(SystemExit) as ending:
    main.main(['--version'])
  assert (ending.value.code, capsys.readouterr().out) == (0, f'valkyrie {__version__}\n')


def test_wrong_usage_exits_2(results):
  code, output, errors = results['usage']
  assert (code, output) == (2, '')
  assert errors.startswith('valkyrie: --gin_fil=a.gin: unknown flag.')


def test_help_is_complete_and_imports_no_large_package(start):
  code = """
import sys
from valkyrie import main
try:
  main.main(['--help'])
finally:
  print('HEAVY', {'jax', 'gin', 'haiku', 'numpy', 'tensorflow', 'absl'} & set(sys.modules))
"""
  done = start(code=code)
  text = done.stdout.decode()
  assert done.returncode == 0
  assert 'HEAVY set()' in text
  for flag in ('gin_file', 'gin.NAME=VALUE', 'gin_search_paths', 'gin_allow_import', 'model_dir',
               'run_mode', 'prompt'):  # fmt: skip
    assert f'--{flag}' in text
  assert '--gin_file=gin/tiny_cpu.gin --model_dir=runs/tiny\n' in text


def test_a_bad_configuration_ends_before_tensorflow_data_and_devices(start):
  code = """
import sys
import gin
from valkyrie import main
for flag in sys.argv[1:]:
  gin.clear_config(clear_constants=True)
  print(main.main(['--gin_file=a.gin', flag]))
heavy = {'tensorflow', 'seqio', 'clu.metric_writers'} & set(sys.modules)
devices = 'jax' in sys.modules and sys.modules['jax']._src.xla_bridge._backends
print(heavy or devices or 'nothing heavy')
"""
  done = start('--gin.S5.state_sise=3', '--gin.LanguageModle.x=3', '--gin.x=3', code=code)
  assert done.stdout == b'78\n78\n78\nnothing heavy\n', done.stderr.decode()


def test_main_runs_as_a_module(start):
  done = start(code='import runpy; runpy.run_module("valkyrie.main", run_name="__main__")')
  assert done.returncode == 2
  assert b'--gin_file is missing' in done.stderr


def test_an_error_of_a_traced_step_has_no_word_of_a_traceback(start):
  done = start('--gin_file=a.gin', '--gin.train.ending="traced"')
  assert done.returncode == 76
  assert done.stderr.decode().splitlines()[-1] == 'valkyrie: a mistake of a traced step'


@pytest.mark.parametrize('platform', ['nonsense', 'rocm'])
def test_a_platform_without_devices_is_a_mistake_of_the_configuration(start, platform):
  """jax raises a RuntimeError for the first, and fails an assertion for the second."""
  code = f"import os\nos.environ['JAX_PLATFORMS'] = {platform!r}\n{START}"
  done = start('--gin_file=a.gin', '--gin.train.ending="devices"', code=code)
  assert done.returncode == 78
  said = done.stderr.decode()
  assert f'(JAX_PLATFORMS={platform}): ' in said and 'such as cpu' in said
  assert 'Traceback' not in said and 'In call to configurable' not in said


def test_a_python_without_packages_is_refused():
  """One that is not the environment's, in a clone, whose folder gin/ has the name of a package."""
  command = [sys.executable, '-S', '-m', 'valkyrie.main', '--gin_file=gin/tiny_cpu.gin']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 78
  assert 'lacks the packages of Valkyrie, such as dm-haiku. Activate' in done.stderr
  assert f'source {ROOT}/.venv/bin/activate' in done.stderr and 'Traceback' not in done.stderr


def test_a_python_without_assertions_is_refused(tmp_path):
  """Haiku keeps its state in assert statements."""
  done = subprocess.run(
    [sys.executable, '-O', '-m', 'valkyrie.main', '--gin_file=gin/tiny_cpu.gin', '--model_dir=run'],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 78 and 'Unset PYTHONOPTIMIZE' in done.stderr
