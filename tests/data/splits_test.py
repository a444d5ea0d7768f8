"""Splits that names of files tell, and files that stand in a source twice."""

import gzip
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest

from valkyrie.data import build_store, provenance, records, splits
from valkyrie.data.selection import Selection
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.vocabularies import ByteVocabulary
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks.conversations import ConversationSource
from valkyrie.tasks.fineweb import FineWebSource
from valkyrie.tasks.prompts import PromptSource
from valkyrie.tasks.text import TextSource

SHARD = '-00000-of-00002'


def write(folder, *names):
  """Files whose documents begin with the name of their file."""
  for name in names:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = ''.join(json.dumps({'text': f'{name} {n}'}) + '\n' for n in range(30))
    if name.endswith('.gz'):
      file.write_bytes(gzip.compress(text.encode()))
    elif name.endswith('.jsonl'):
      file.write_text(text)
    else:
      file.write_text(f'{name} 0')


def read(location, **options):
  """The files whose documents each split has."""
  source = TextSource(str(location), **options)
  return {
    split: sorted({document.text.split(' ')[0] for document in source.documents(split, 0, 1)})
    for split in source.splits
  }


@pytest.mark.parametrize(
  ('train', 'validation', 'test'),
  [
    (['train.jsonl'], ['validation.jsonl'], ['test.jsonl']),
    ([f'train{SHARD}.jsonl'], [f'validation{SHARD}.jsonl'], [f'test{SHARD}.jsonl']),
    ([f'data/train{SHARD}.jsonl'], [f'data/dev{SHARD}.jsonl'], [f'data/eval{SHARD}.jsonl']),
    (['train/a.jsonl'], ['valid/a.jsonl'], ['test/a.jsonl', 'test/deep/b.jsonl']),
    (['training/a.txt'], ['validation/a.txt'], ['evaluation/a.txt', 'testing/b.md']),
    (['Train.jsonl'], ['VAL.jsonl'], ['TEST.jsonl']),
    (['ptb.train.txt'], ['ptb.valid.txt'], ['ptb.test.txt']),
    (['c4-train.00000-of-00008.jsonl.gz'], ['c4-validation.00000-of-00008.jsonl.gz'], []),
    (
      ['data/train_sft-00000-of-00001-b42a775f407cee45.jsonl'],
      ['data/val_sft-00000-of-00001-b42a775f407cee45.jsonl'],
      ['data/test_sft-00000-of-00001-b42a775f407cee45.jsonl'],
    ),
    (['books.jsonl'], ['books_dev.jsonl'], ['books-test.jsonl', 'test2.jsonl']),
    (['books.jsonl'], ['dev/a.jsonl'], ['held/test/a.jsonl']),
    (['en/train.jsonl', 'fr/train.jsonl'], ['en/dev.jsonl'], ['en/test.jsonl', 'fr/test.jsonl']),
    (['train/a.jsonl'], ['train/validation.jsonl'], ['test/train.jsonl']),
    (['train-file.jsonl'], ['dev-file.jsonl'], ['test-file.jsonl']),
  ],
)
@pytest.mark.parametrize('pattern', ['', '**/*'])
def test_splits_are_read_by_their_names(tmp_path, caplog, train, validation, test, pattern):
  write(tmp_path, *train, *validation, *test)
  records._warn_once.cache_clear()
  location = tmp_path / pattern
  assert read(location) == {'train': sorted(train), 'validation': sorted(validation)}
  if test:
    assert f'of the split test ({", ".join(sorted(test))})' in caplog.text
  assert f'of the split validation ({", ".join(validation)})' in caplog.text
  everything = read(location, splits='all', held_out='1e-9')
  assert everything['train'] == sorted([*train, *validation, *test])


@pytest.mark.parametrize(
  'name',
  [
    'contest.jsonl',
    'latest.jsonl',
    'train_schedule.jsonl',
    'dev_to.jsonl',
    'validations.jsonl',
    'testimony.jsonl',
    'test_results.jsonl',
    'libfoo-dev/a.txt',
    'evaluate/a.jsonl',
    'a/attest.jsonl',
  ],
)
def test_other_names_are_no_splits(tmp_path, name):
  write(tmp_path, 'books.jsonl', name)
  assert read(tmp_path, held_out='1e-9')['train'] == sorted(['books.jsonl', name])


def test_plain_texts_are_a_split_only_beside_their_counterpart(tmp_path, caplog):
  write(tmp_path, 'docs/testing.md', 'docs/intro.md', 'docs/test/a.md', 'latest.md')
  records._warn_once.cache_clear()
  files = ['docs/intro.md', 'docs/test/a.md', 'docs/testing.md', 'latest.md']
  assert read(tmp_path, held_out='1e-9')['train'] == files
  assert 'trained on: docs/test/a.md, docs/testing.md. To leave them out' in caplog.text
  write(tmp_path, 'docs/training.md')
  found = read(tmp_path, held_out='1e-9')
  assert found['train'] == ['docs/intro.md', 'docs/training.md', 'latest.md']


@pytest.mark.parametrize(
  ('names', 'doubtful'),
  [
    (('corpus.txt', 'corpus_test.txt'), 'corpus_test.txt'),
    (('train_a.txt', 'test_a.txt', 'test_b.txt'), 'test_b.txt'),
    (('a/train_it.md', 'a/eval_it.md', 'a/eval_of_it.md'), 'a/eval_of_it.md'),
  ],
)
def test_a_name_that_may_mean_a_split_is_said(tmp_path, caplog, names, doubtful):
  write(tmp_path, *names)
  records._warn_once.cache_clear()
  assert doubtful in read(tmp_path, held_out='1e-9')['train']
  assert f'trained on: {doubtful}. To leave them out' in caplog.text


def test_a_share_goes_before_validation_files(tmp_path, caplog):
  write(tmp_path, 'train.jsonl', 'validation.jsonl', 'test.jsonl')
  found = read(tmp_path, held_out='0.3')
  assert found == {'train': ['train.jsonl'], 'validation': ['train.jsonl']}
  assert 'held_out has a value, which says what validates' in caplog.text


def test_held_out_files_may_be_a_split_of_the_folder(tmp_path):
  write(tmp_path, 'train.jsonl', 'validation.jsonl', 'test.jsonl')
  for held_out in 'validation.jsonl', 'test.jsonl':
    found = read(tmp_path, held_out=str(tmp_path / held_out))
    assert found == {'train': ['train.jsonl'], 'validation': [held_out]}
  write(tmp_path / 'other', 'train.jsonl', 'validation.jsonl', 'test.jsonl')
  found = read(tmp_path / 'train.jsonl', held_out=str(tmp_path / 'other'))
  assert found == {'train': ['train.jsonl'], 'validation': ['validation.jsonl']}


@pytest.mark.parametrize('location', ['test.jsonl', 'test*', '*test*.jsonl', 'test/*', 'test'])
def test_a_location_that_names_the_split_is_read(tmp_path, location):
  write(tmp_path, 'train.jsonl', 'test/a.jsonl' if 'test' in location.split('/') else 'test.jsonl')
  (name,) = read(tmp_path / location, held_out='1e-9')['train']
  assert name.startswith('test')


def test_a_folder_without_text_for_training_is_refused(tmp_path):
  write(tmp_path, 'test.jsonl', 'dev/a.jsonl')
  with pytest.raises(DataError, match=r'no files for training.*validation \(dev/a.jsonl\); test'):
    read(tmp_path)
  with pytest.raises(ConfigurationError, match='splits=some is unknown'):
    read(tmp_path, splits='some')


@pytest.mark.parametrize('kind', [TextSource, FineWebSource, PromptSource, ConversationSource])
def test_every_task_of_files_reads_splits_by_name(tmp_path, kind):
  for split in 'train', 'validation', 'test':
    (tmp_path / f'{split}.parquet').write_bytes(b'PAR1')
  source = kind(str(tmp_path))
  for split in source.splits:
    (file,) = source.files(split).files
    assert file.path == str(tmp_path / f'{split}.parquet')
  assert len(source.at(str(tmp_path), splits='all').files('train').files) == 3


def test_a_source_of_a_mixture_may_not_read_what_another_one_validates_on(tmp_path):
  write(tmp_path, 'train.jsonl', 'validation.jsonl', 'test.jsonl')

  def selection(location, **options):
    return Selection('text', 'train', ByteVocabulary(), str(tmp_path / location), options)

  apart = {'all': selection('.'), 'other': selection('test.jsonl')}
  provenance.check_apart(apart)
  with pytest.raises(DataError, match=r'validation.jsonl, which one source holds out'):
    provenance.check_apart({'all': selection('.'), 'other': selection('validation.jsonl')})
  with pytest.raises(DataError, match=r'validation.jsonl, which one source holds out'):
    provenance.check_apart({'all': selection('.'), 'other': selection('.', splits='all')})


CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: ["a/*", "b.jsonl"]
  - split: validation
    path: c.jsonl
  - split: test_hard
    path: "train.jsonl"
---
# A data set
"""


def test_a_dataset_card_goes_before_names(tmp_path, caplog):
  write(tmp_path, 'a/test.jsonl', 'b.jsonl', 'c.jsonl', 'd.jsonl', 'train.jsonl')
  (tmp_path / 'README.md').write_text(CARD)
  records._warn_once.cache_clear()
  assert read(tmp_path) == {'train': ['a/test.jsonl', 'b.jsonl'], 'validation': ['c.jsonl']}
  assert 'the split test (train.jsonl)' in caplog.text and '(d.jsonl)' in caplog.text


@pytest.mark.parametrize(
  ('entries', 'train'),
  [
    ('{config_name: en, data_files: "en/*"}', ['en/test.jsonl', 'en/train.jsonl']),
    ('{config_name: en, data_dir: en}', ['en/train.jsonl']),
    ('{config_name: a, data_files: "en/*"}, {config_name: default, data_dir: fr}', ['fr/a.jsonl']),
    ('{config_name: a, data_dir: en}, {data_dir: fr, default: true}', ['fr/a.jsonl']),
    ('{config_name: a, data_files: absent.jsonl}', ['en/train.jsonl', 'fr/a.jsonl']),
    ('3', ['en/train.jsonl', 'fr/a.jsonl']),
  ],
)  # fmt: skip
def test_configurations_of_a_card(tmp_path, entries, train):
  write(tmp_path, 'en/train.jsonl', 'en/test.jsonl', 'fr/a.jsonl')
  (tmp_path / 'README.md').write_text(f'---\nconfigs: [{entries}]\n---\n')
  assert read(tmp_path, held_out='1e-9')['train'] == train


def test_several_configurations_are_refused_by_name(tmp_path):
  write(tmp_path, 'en/train.jsonl', 'fr/train.jsonl')
  entries = '{config_name: en, data_dir: en}, {config_name: fr, data_dir: fr}'
  (tmp_path / 'README.md').write_text(f'---\nconfigs: [{entries}]\n---\n')
  with pytest.raises(DataError, match=r'has 2 configurations by its README.md.*en, fr'):
    read(tmp_path)
  assert read(tmp_path / 'en', held_out='1e-9')['train'] == ['en/train.jsonl']
  assert len(read(tmp_path / '**/*.jsonl', held_out='1e-9')['train']) == 2


@pytest.mark.parametrize(
  'card',
  [
    '',
    '---\n',
    '---\nconfigs: [\n---\n',
    '---\nconfigs: {a: 1}\n---\n',
    '---\nconfigs\n---\n',
    f'---\nconfigs: {"[" * 5000}\n---\n',
    '---\n!!python/object:os.system configs\n---\n',
  ],
)
def test_a_readme_that_is_no_card_has_no_configurations(card):
  assert splits.configurations(card) == []


def test_a_file_is_read_once(tmp_path, caplog):
  write(tmp_path, 'a.jsonl', 'b.jsonl.gz', 'd.txt')
  (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress((tmp_path / 'a.jsonl').read_bytes()))
  (tmp_path / 'link.jsonl').symlink_to('a.jsonl')
  (tmp_path / 'blob').symlink_to('a.jsonl')
  os.link(tmp_path / 'd.txt', tmp_path / 'e.txt')
  for pattern in '', '*':
    records._warn_once.cache_clear()
    files = SourceFiles(str(tmp_path / pattern))
    assert [files.name(file) for file in files.files] == ['a.jsonl', 'b.jsonl.gz', 'd.txt']
    rows = records.Records(str(tmp_path / pattern), ['text']).rows(0, 1)
    assert len([*rows]) == 61
    assert 'a.jsonl.gz is a.jsonl' in caplog.text and 'e.txt is d.txt' in caplog.text
  write(tmp_path, 'a.ndjson')
  assert 'a.ndjson and a.jsonl differ only in their format' in SourceFiles(str(tmp_path)).notes[0]


def test_revisions_of_the_hub_are_refused_by_name(tmp_path):
  cache = tmp_path / 'hub/datasets--owner--name'
  write(cache, 'snapshots/aaaa/train.jsonl', 'snapshots/bbbb/train.jsonl')
  for location in tmp_path, cache, cache / '**/*.jsonl', cache / 'snapshots/*/train.jsonl':
    with pytest.raises(DataError, match=r'2 revisions of one data set: aaaa, bbbb.*snapshots/'):
      SourceFiles(str(location))
  assert len(SourceFiles(str(cache / 'snapshots/aaaa')).files) == 1
  shutil.rmtree(cache / 'snapshots/bbbb')
  assert len(SourceFiles(str(tmp_path)).files) == 1


def test_a_store_of_an_earlier_version_with_test_data_is_refused(tmp_path):
  text, store = tmp_path / 'text', tmp_path / 'store'
  write(text, 'train.jsonl', 'test.jsonl')
  command = ['--task=text', f'--source={text}', f'--output={store}', '--shards=1']
  assert build_store.main([*command, '--option=splits=all']) == 0
  information = json.loads((store / 'store.json').read_text())
  for recorded in 'split', 'splits':  # which such a version did not record
    del information['origin'][recorded]
  with pytest.raises(DataError, match=r'earlier version, which read.*: test.jsonl.* build again'):
    provenance.check(store, information, 'build again', [])
  information['task'] = 'mine:lines'  # which reads what it wants
  provenance.check(store, information, 'build again', [])


def test_a_store_is_compared_with_the_files_of_its_split(tmp_path):
  text, store = tmp_path / 'text', tmp_path / 'store'
  write(text, 'train.jsonl', 'test.jsonl')
  command = ['--task=text', f'--source={text}', f'--output={store}', '--shards=1']
  assert build_store.main(command) == 0
  information = json.loads((store / 'store.json').read_text())
  assert [entry[0] for entry in information['origin']['files']] == ['train.jsonl']
  write(text, 'test-2.jsonl')
  provenance.check(store, information, 'build again', [])
  write(text, 'validation.jsonl')
  with pytest.raises(
    DataError, match=r'files of the split validation, which is held out.* build again'
  ):
    provenance.check(store, information, 'build again', [])


def test_the_advice_about_a_missing_column_of_fineweb_helps(tmp_path):
  write(tmp_path, 'a.jsonl')
  rows = [{'text': f'page {number}', 'host': 'a'} for number in range(9)]
  pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / 'a.parquet')

  def keys(**options):
    source = FineWebSource(str(tmp_path), held_out='1e-9', **options)
    return {document.sequence_key for document in source.documents('train', 0, 1)}

  with pytest.raises(DataError, match=r"no column url.*TaskFeed.options = {'together': 'NAME'}"):
    keys()
  assert keys(together='host') == {'a'}
  assert keys(together='') == {''}
