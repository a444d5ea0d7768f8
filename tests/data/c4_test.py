"""C4 in its published layouts: the files of allenai/c4, the same streamed, and TFDS's records."""

import functools
import gzip
import json

import pytest

from valkyrie.data import records, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.tasks.text import TextSource

BYTES = vocabularies.ByteVocabulary()
CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
- config_name: de
  data_files:
  - split: train
    path: multilingual/c4-de.tfrecord-*.json.gz
---
"""
PAGES = {
  'train': [f'Page {number} of many.' for number in range(12)],
  'validation': [f'Held-out page {number}.' for number in range(3)],
}


@pytest.fixture
def published(tmp_path):
  """The folder allenai/c4 as Hugging Face's hub has it."""
  folder = tmp_path / 'allenai' / 'c4'
  (folder / 'en').mkdir(parents=True)
  (folder / 'README.md').write_text(CARD)
  for split, pages in PAGES.items():
    shards = (pages[::2], pages[1::2])
    for number, shard in enumerate(shards):
      rows = [{'text': page, 'timestamp': '2019', 'url': 'https://a.org'} for page in shard]
      lines = ''.join(f'{json.dumps(row)}\n' for row in rows)
      name = f'c4-{split}.{number:05d}-of-00002.json.gz'
      (folder / 'en' / name).write_bytes(gzip.compress(lines.encode()))
  return folder


def texts(source, split):
  return sorted(document.text for document in source.documents(split, 0, 1))


def test_the_folder_of_a_configuration_has_both_splits(published):
  source = TextSource(str(published / 'en'))
  for split, pages in PAGES.items():
    assert texts(source, split) == sorted(pages)


def test_the_split_train_is_streamed(published, monkeypatch):
  pytest.importorskip('datasets', reason="only pip install '.[hf]' installs datasets")
  monkeypatch.chdir(published.parents[1])
  records._revision.cache_clear()
  source = TextSource('hf://allenai/c4/en', held_out='0.3')
  streamed = texts(source, 'train') + texts(source, 'validation')
  assert sorted(streamed) == sorted(PAGES['train'])
  assert texts(source, 'validation')


def test_a_task_of_seqio_reads_the_records_of_tfds(tmp_path):
  import seqio  # noqa: PLC0415
  import tensorflow as tf  # noqa: PLC0415
  import tensorflow_datasets as tfds  # noqa: PLC0415

  from valkyrie.data import seqio_tasks  # noqa: PLC0415

  folder = tmp_path / 'c4' / 'en' / '3.1.0'
  folder.mkdir(parents=True)
  names = ('content-length', 'content-type', 'text', 'timestamp', 'url')
  features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in names})
  splits = []
  for split, pages in PAGES.items():
    with tf.io.TFRecordWriter(str(folder / f'c4-{split}.tfrecord-00000-of-00001')) as writer:
      for page in pages:
        example = dict.fromkeys(names, 'unknown') | {'text': page}
        writer.write(features.serialize_example(example))
    template = tfds.core.ShardedFileTemplate(
      data_dir=folder, dataset_name='c4', split=split, filetype_suffix='tfrecord'
    )
    splits.append(tfds.core.SplitInfo(split, [len(pages)], 0, template))
  tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=splits)

  seqio.TaskRegistry.add(
    'c4_of_tfds',
    source=seqio.TfdsDataSource('c4/en:3.1.0', tfds_data_dir=str(tmp_path)),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={'targets': 'text'}),
      seqio.preprocessors.tokenize,
    ],
    output_features={'targets': seqio.Feature(seqio.ByteVocabulary(), add_eos=False)},
  )
  for split, pages in PAGES.items():
    reader = seqio_tasks.task_reader_of('c4_of_tfds', Selection('c4_of_tfds', split, BYTES))
    found = [BYTES.decode(document.tokens) for document in reader.documents(0, 1)]
    assert sorted(found) == sorted(pages)
    assert '0x' not in reader.description['kind']  # shards of several processes join
