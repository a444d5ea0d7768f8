"""The examples of docs/ run as printed, in a folder of a user's own.

Of a page, in order: a block with the name of a file is written to it, ```python runs and its last
line checks the outcome, and ```bash is run by the shell. The page for those who come from other
trainers has a first command, which trains, and others in its tables, which use this run: each run
mode runs once, and of the other commands, such as those for a pod, the configuration is loaded and
checked.
"""

import ast
import importlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import gin
from hybrid_classes_reference import Qwen35
import llama_reference
import pytest
from safetensors.numpy import save_file
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.command_line import FLAGS_OF_MODES, RUN_MODES, parse_command_line
from valkyrie.config import check
from valkyrie.config.load import check_call, load_gin

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / 'docs').glob('*.md'))
BLOCK = re.compile(r'^```(python|bash|gin)(?: (\S+))?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
# gin/models/tiny.gin as the pages find it here: thinner, and most of them need no attention.
HYBRID = """
include 'gin/models/hybrid.gin'
LanguageModel.vocabulary_size = 259
LanguageModel.d_model = 192
LanguageModel.layers = 6
LanguageModel.pattern = (@recurrent/Block, @local/Block)
Block.mlp_width = 64
LongformerAttention.heads = 3
LongformerAttention.kv_heads = 1
LongformerAttention.head_width = 16
LongformerAttention.window = 32
LongformerAttention.registers = 4
LongformerAttention.document_start = 4
LongformerAttention.query_key_norm = False
GatedRecurrence.width = 32
S5.state_size = 16
S5.hippo_blocks = 2
"""
RECURRENT = HYBRID.replace('layers = 6', 'layers = 2').replace(', @local/Block', ',')
HYBRID_PAGES = 'export', 'finetune', 'optimizers'
QWEN = ['linear_attention', 'full_attention']  # the layers of my_qwen, whose tokens are bytes
COMING_FROM = (ROOT / 'docs' / 'coming_from.md').read_text()
BLOCKS = {page.stem: BLOCK.findall(page.read_text()) for page in PAGES}


def test_pages_have_examples():
  assert {
    'encoder',
    'data',
    'optimizers',
    'objectives',
    'finetune',
    'hooks',
    'mixers',
    'own_loop',
    'layouts',
    'use',
    'export',
    'hybrids',
    'tutorial',
  } <= {page for page, blocks in BLOCKS.items() if blocks}
  assert all(block.count('\n') < 50 for blocks in BLOCKS.values() for *_, block in blocks)


@pytest.fixture(scope='module')
def macros():
  """Those of runs, with the configurables imported."""
  for module in main.CONFIGURABLE_MODULES:
    importlib.import_module(module)
  return check.RUN_MACROS | {'text', 'text_column', 'vocabulary'}


def test_readme_names_what_exists(macros):
  """Files and links, command lines, bindings and macros."""
  text = (ROOT / 'README.md').read_text()
  assert text.count('\n') <= 130 and len(text.split()) <= 1200
  for path in re.findall(r'\b(?:gin|scripts|docs)/[\w/.]*\w', text):
    assert (ROOT / path).exists(), path
  joined = text.replace('\\\n', '')
  commands = re.findall(r'^    python -m valkyrie.main (.*)', joined, re.M)
  given = [flag for line in commands for flag in main.parse_command_line(shlex.split(line))[1]]
  bindings = re.findall(r'^    (\S+\.\S+) = .*  #', text, re.M) + given
  assert len(commands) > 7 and len(bindings) > 13
  for binding in bindings:
    name = binding.partition('=')[0].removeprefix('--gin.').rpartition('/')[2]
    selector, _, parameter = name.rpartition('.')
    known = check.parameters_of(check.find(selector).wrapped) if selector else macros
    assert parameter in known, binding


def test_tables_from_other_trainers_name_what_exists(macros):
  """Bindings, macros of a run, flags and files in the left column."""
  found = 0
  for span in typed():
    found += 1
    name = span.partition(' =')[0]
    if span.startswith('bash scripts/experiment '):
      assert (ROOT / 'scripts' / 'experiments' / f'{span.split()[2]}.py').exists(), span
    elif span.startswith(('gin/', 'bash scripts/')):
      assert (ROOT / span.removeprefix('bash ')).exists(), span
    elif re.fullmatch(r'(optax\.)?\w+\.\w+', name) and not name.endswith('.jsonl'):
      selector, _, parameter = name.rpartition('.')
      assert parameter in check.parameters_of(check.find(selector).wrapped), span
    elif re.fullmatch(r'[a-z_]+', span):
      assert span in macros, span
  assert found > 80


def typed():
  """What people type here: the commands of the page, then the code in the left column of tables."""
  text = COMING_FROM.replace('\\\n', '')
  yield from re.findall(r'^    (python -m .*)', text, re.M)
  for cell in re.findall(r'^\| (`.*?) \| ', text, re.M):
    yield from re.findall(r'`([^`]+)`', cell)


@pytest.fixture(scope='module')
def shared(inputs, cache, tmp_path_factory):
  """A folder like `inputs`, with the run of the first command of coming_from.md."""
  folder = tmp_path_factory.mktemp('other') / 'user'
  shutil.copytree(inputs, folder)
  (folder / 'gin' / 'models' / 'tiny.gin').write_text(RECURRENT)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('VALKYRIE_CACHE', str(cache))
    patch.chdir(folder)
    assert main.main(shlex.split(next(typed()))[3:]) == 0
    yield {'train', 'precompile'}  # the run modes that need not run, or not again


def test_commands_for_those_from_other_trainers(shared):
  variables, count = {'valkyrie': valkyrie}, 0
  for span in typed():
    gin.clear_config(clear_constants=True)
    count += 1
    if span.startswith('--'):
      _load(['--gin_file=gin/tiny_cpu.gin', *shlex.split(span)])
    elif span.startswith('python -m valkyrie.main '):
      words = shlex.split(span)[3:]
      _load(words)
      if (mode := parse_command_line(words)[0].run_mode) not in shared:
        gin.clear_config(clear_constants=True)
        assert main.main(words) == 0, span
        shared.add(mode)
    elif span.startswith('python -m '):
      _, _, module, *arguments = shlex.split(span.partition(' >')[0])
      assert importlib.import_module(module).main(arguments) == 0, span
    elif re.match(r'run\.|for |[a-z]+ = ', span):
      exec(span, variables)
    else:
      count -= 1
  assert count > 40


def _load(words):
  """Loads a configuration, and checks that its run mode lacks nothing."""
  flags, gin_flags = parse_command_line(words)
  run = None if flags.gin_file else flags.model_dir
  load_gin(flags.gin_file or (), gin_flags, run=run, modules=main.CONFIGURABLE_MODULES)
  module, name = RUN_MODES[flags.run_mode]
  given = [name for name in FLAGS_OF_MODES if getattr(flags, name) is not None]
  check_call(getattr(importlib.import_module(module), name), 'model_dir', *given)


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  """Of stores, which pages share."""
  return tmp_path_factory.mktemp('cache')


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
  """The folder of all pages, with files that a user has; a page leaves nothing else there."""
  folder = tmp_path_factory.mktemp('user')
  texts = folder / 'my_text'
  texts.mkdir()
  for number in range(80):
    (texts / f'{number}.txt').write_text(f'This is text number {number}. ' * (1 + number % 9))
  notes = (json.dumps({'text': f'Note {number} of many.'}) for number in range(80))
  (folder / 'my_notes.jsonl').write_text('\n'.join(notes))
  answers = (
    json.dumps({'question': f'Text {n}? ', 'reply': f'This is text number {n}.'}) for n in range(80)
  )
  (folder / 'my_answers.jsonl').write_text('\n'.join(answers))
  llama = llama_reference.config(vocab_size=259)
  _write_weights(folder / 'my_llama', llama, llama_reference.tensors(llama))
  qwen = Qwen35.config(vocab_size=264, num_hidden_layers=2, layer_types=QWEN)
  _write_weights(folder / 'my_qwen', qwen, Qwen35.tensors(qwen))
  _write_conversations(folder)
  (folder / 'gin' / 'models').mkdir(parents=True)
  return folder


@pytest.fixture
def folder(inputs):
  """That folder, for one page."""
  before = set(inputs.iterdir())
  yield inputs
  for path in set(inputs.iterdir()) - before:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize('page', [page for page, blocks in BLOCKS.items() if blocks])
def test_examples(page, folder, cache):
  model = HYBRID if page in HYBRID_PAGES else RECURRENT
  blocks = [('gin', 'gin/models/tiny.gin', model), *BLOCKS[page], *_cells(page)]
  for language, file, block in BLOCKS[page]:
    if language == 'python' and not file:
      last = ast.parse(block).body[-1]
      assert isinstance(last, ast.Assert) or ast.unparse(last).startswith('check_')
  environment = {
    **os.environ,
    'PATH': os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ['PATH']]),
    'PYTHONPATH': os.pathsep.join([str(ROOT), str(folder)]),
    'VALKYRIE_CACHE': str(cache),
  }
  done = subprocess.run(
    [sys.executable, ROOT / 'tests' / 'support' / 'page_process.py'],
    input=json.dumps(blocks),
    cwd=folder,
    env=environment,
    check=False,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  if _cells(page):
    assert 'bits' in done.stdout and 'layer 1' in done.stdout


def _cells(page):
  """The cells of the notebook of a page, which runs in the folder in which the page has trained."""
  notebook = ROOT / 'docs' / f'{page}.ipynb'
  if not notebook.exists():
    return []
  cells = json.loads(notebook.read_text())['cells']
  code = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
  return [('python', '', '\n'.join(code))]


def _write_conversations(folder):
  """Conversations and questions, and a tokenizer with a chat template."""
  (folder / 'my_chat').mkdir()
  tiny_run.write_tokenizer(folder / 'my_chat' / 'tokenizer.json')
  (folder / 'my_chat' / 'chat_template.jinja').write_text(
    '{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n'
    '{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}'
  )
  for name, count in (('my_talks', 2), ('my_questions', 1)):
    roles = ('user', 'assistant')[:count]
    rows = (
      json.dumps({'messages': [{'role': role, 'content': f'Text {n}'} for role in roles]})
      for n in range(60)
    )
    (folder / f'{name}.jsonl').write_text('\n'.join(rows))


def _write_weights(folder, config, weights):
  """A model as Hugging Face keeps it."""
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(weights, folder / 'model.safetensors')
