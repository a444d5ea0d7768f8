"""A store is never written among the texts that it is made from, by whatever path."""

import contextlib
import json
import pathlib

import pytest

from valkyrie import main
from valkyrie.data import apart, build_store
from valkyrie.errors import ConfigurationError


def contents(folder):
  return {
    path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
    for path in folder.rglob('*')
  }


@pytest.fixture
def place(tmp_path):
  """texts/{a.txt,more/b.txt,empty}, elsewhere/{c.txt,new}, links into both, and held/d.txt."""
  for folder in ('texts/more', 'texts/empty', 'elsewhere/new', 'held', 'far'):
    (tmp_path / folder).mkdir(parents=True)
  for name in ('texts/a.txt', 'texts/more/b.txt', 'elsewhere/c.txt', 'held/d.txt'):
    (tmp_path / name).write_text(f'The text {name}.')
  (tmp_path / 'texts' / 'linked').symlink_to(tmp_path / 'elsewhere')
  (tmp_path / 'texts' / 'far').symlink_to(tmp_path / 'far')
  (tmp_path / 'link').symlink_to('texts')
  (tmp_path / 'up').symlink_to(tmp_path / 'texts' / 'more')
  return tmp_path


def build(place, source, output, *more):
  command = [
    '--task=text',
    '--shards=1',
    f'--source={place}/{source}',
    f'--output={place}/{output}',
  ]
  return build_store.main([*command, '--option=held_out=1e-9', *more])


@pytest.mark.parametrize(
  ('source', 'output'),
  [
    ('texts', 'texts'),
    ('texts', 'texts/'),
    ('texts', 'texts/new'),
    ('texts', 'texts/empty'),
    ('texts', 'texts/.hidden/store'),
    ('texts', '.'),
    ('texts', 'held/../texts/new'),
    ('texts', 'up/../new'),  # the system follows the link before the two points
    ('texts', 'link'),
    ('texts', 'link/new'),
    ('link', 'texts/new'),
    ('link', 'link'),
    ('texts', 'texts/linked'),
    ('texts', 'elsewhere'),
    ('texts', 'elsewhere/new'),
    ('texts', 'far'),
    ('texts/linked', '.'),
    ('texts/linked', 'texts'),
    ('texts/a.txt', 'texts'),
    ('texts/a.txt', '.'),
    ('texts/more/*.txt', 'texts/more'),
    ('texts/more/*.txt', 'texts'),
    ('texts/*/b.txt', 'texts/more'),
    ('texts/**', 'texts/new'),
    ('texts/**/*.json', 'texts/new'),
    ('texts/*/*.json', 'texts/new'),
    ('gone', 'gone/new'),
    ('gone/texts', 'gone'),
  ],
)
@pytest.mark.parametrize('more', [(), ('--rebuild',)])
def test_an_output_that_is_not_apart_from_the_source_is_refused(
  place, capsys, source, output, more
):
  before = contents(place)
  assert build(place, source, output, *more) == 78
  assert 'Nothing was written' in capsys.readouterr().err
  assert contents(place) == before


@pytest.mark.parametrize(
  ('source', 'output'),
  [
    ('texts', 'store'),
    ('texts', 'held/store'),
    ('texts/a.txt', 'texts/store'),
    ('texts/*.txt', 'texts/store'),
    ('*/a.txt', 'store'),
    ('texts/more', 'texts/store'),
  ],
)
def test_an_output_apart_from_the_source_is_built(place, source, output):
  assert build(place, source, output) == 0
  assert (place / output / 'store.json').exists()


@pytest.mark.parametrize('output', ['held', 'held/new', 'texts/more/../../held'])
@pytest.mark.parametrize('split', ['train', 'validation'])
def test_held_out_texts_are_a_source_too(place, capsys, output, split):
  before = contents(place)
  more = [f'--option=held_out={place}/held', f'--split={split}']
  assert build(place, 'texts', output, *more) == 78
  assert 'the option held_out' in capsys.readouterr().err
  assert contents(place) == before


def test_an_address_of_this_machine_is_a_path(place, capsys):
  before = contents(place)
  command = ['--task=text', f'--source=file://{place}/texts', f'--output={place}/texts/new']
  assert build_store.main(command) == 78
  assert 'is inside the source' in capsys.readouterr().err
  assert contents(place) == before


def test_a_folder_with_a_circle_of_links_is_read_once(place):
  (place / 'texts' / 'more' / 'circle').symlink_to(place / 'texts')
  assert build(place, 'texts/more/circle', 'texts/new') == 78


def test_the_default_place_of_a_store_is_apart_too(place, capsys, monkeypatch):
  monkeypatch.setenv('VALKYRIE_CACHE', str(place / 'texts' / 'cache'))
  before = contents(place)
  assert build_store.main(['--task=text', f'--source={place}/texts']) == 78
  assert 'VALKYRIE_CACHE' in capsys.readouterr().err
  assert contents(place) == before


OF_A_TASK = """
from valkyrie.data import document_source, source_files

class Fixed(document_source.DocumentSource):
  def documents(self, split, shard, shards):
    yield document_source.TextDocument('A text', '', '')

  def describe(self, split):
    return {{'kind': 'fixed'}}

  def files(self, split):
    return source_files.SourceFiles({place!r})

document_source.register('fixed', Fixed(('train',)))
"""


def test_files_that_only_the_task_names_are_a_source_too(place, capsys, monkeypatch):
  (place / 'fixed_tasks.py').write_text(OF_A_TASK.format(place=f'{place}/texts/more/*.txt'))
  monkeypatch.syspath_prepend(place)
  before = contents(place)
  for output in ('texts/more', 'texts', 'up'):
    command = ['--task=fixed_tasks:fixed', f'--output={place}/{output}', '--shards=1']
    assert build_store.main(command) == 78
    assert 'the files of its task' in capsys.readouterr().err
  after = {name: text for name, text in contents(place).items() if '__pycache__' not in name}
  assert after == before
  assert build_store.main([*command[:1], f'--output={place}/store', '--shards=1']) == 0


def test_a_relative_output_is_compared(place, monkeypatch):
  monkeypatch.chdir(place / 'texts')
  before = contents(place)
  for output in ('.', '..', 'new'):
    assert build_store.main(['--task=text', '--source=.', f'--output={output}']) == 78
  assert contents(place) == before
  assert pathlib.Path('a.txt').exists()


FOLDERS = [
  ('texts', 'texts'),
  ('texts', 'texts/runs/mine'),
  ('texts', 'link/run'),
  ('link', 'texts/a'),
]


@pytest.mark.parametrize(('text', 'model_dir'), FOLDERS)
@pytest.mark.parametrize('mode', ['train', 'vocabulary'])
def test_a_run_in_the_folder_of_its_texts_is_refused(place, capsys, text, model_dir, mode):
  before = contents(place)
  flags = ['--gin_file=gin/tiny_cpu.gin', '--gin_file=gin/data/text.gin', f'--run_mode={mode}']
  flags += [f'--gin.text="{place}/{text}"', f'--model_dir={place}/{model_dir}']
  assert main.main([*flags, '--gin.train_vocabulary.size=300'] if mode != 'train' else flags) == 78
  assert 'would be read as texts' in capsys.readouterr().err
  assert contents(place) == before


@pytest.mark.parametrize(
  ('name', 'value', 'model_dir', 'is_refused'),
  [
    ('Mixture.sources', {'a': '{place}/texts'}, 'texts/run', True),
    ('train/Mixture.sources', {'a': {'source': '{place}/texts'}}, 'texts', True),
    ('TaskFeed.source', '{place}/texts/**/*.jsonl', 'texts/run', True),
    ('TaskFeed.source', '{place}/texts/*.jsonl', 'texts/run', False),
    ('TaskFeed.source', '{place}/texts/a.txt', 'texts', False),
    ('TaskFeed.source', '{place}/texts', '.', False),
    ('TaskFeed.source', 'gs://bucket/texts', 'texts', False),
    ('TaskFeed.source', None, 'texts', False),
    ('Mixture.sources', 'toys.tasks:cubes', 'texts', False),
  ],
)
def test_the_directory_of_a_run_is_compared_with_all_texts(
  place, name, value, model_dir, is_refused
):
  bindings = json.loads(json.dumps({name: value}).replace('{place}', str(place)))
  may_refuse = pytest.raises(ConfigurationError) if is_refused else contextlib.nullcontext()
  with may_refuse:
    apart.check_run(f'{place}/{model_dir}', bindings)
