"""Rows of token ids in npy, parquet, arrow and JSON, as documents of a store."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from valkyrie.data import columnar
from valkyrie.data.feed import TaskFeed
from valkyrie.data.records import Records
from valkyrie.data.vocabularies import ByteVocabulary
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks.token_ids import TokenSource

ROWS = np.random.default_rng(0).integers(3, 259, (60, 9))


def write(file, rows):
  """Rows, or a column of any values, in the format that the name of the file says."""
  if file.suffix == '.npy':
    np.save(file, rows)
    return
  if file.suffix == '.npz':
    np.savez(file, rows)
    return
  if file.suffix == '.jsonl':
    lines = (
      json.dumps({'input_ids': row if isinstance(row, list) else row.tolist()}) for row in rows
    )
    file.write_text('\n'.join(lines))
    return
  table = pa.table({'input_ids': list(rows)})
  if file.suffix == '.parquet':
    pyarrow.parquet.write_table(table, file, row_group_size=7)
  else:
    with pyarrow.ipc.new_file(str(file), table.schema) as writer:
      writer.write_table(table, max_chunksize=7)


def feed(location, tmp_path, split='train', **options):
  return TaskFeed(
    'token_ids', split, 1, 0, source=str(location), options={'held_out': 0.3, **options},
    data_dir=str(tmp_path / 'stores'), epochs=1, shuffle=False,
  )  # fmt: skip


def documents(feed):
  """The ids of each document, and which targets are learned."""
  batch = feed.read(0, feed.row_tokens)
  ends = np.flatnonzero(np.diff(batch.segment_ids[0])) + 1
  return np.split(batch.inputs[0], ends), np.split(batch.weights[0], ends)


@pytest.mark.parametrize('suffix', ['.npy', '.parquet', '.arrow', '.jsonl'])
def test_rows_are_documents_with_their_own_ids_as_targets(tmp_path, suffix):
  (tmp_path / 'ids').mkdir()
  write(tmp_path / 'ids' / f'a{suffix}', ROWS)
  found = []
  for split in ('train', 'validation'):
    opened = feed(tmp_path / 'ids', tmp_path, split)
    ids, weights = documents(opened)
    assert len(ids) > 5
    assert opened.tokens_per_byte is None
    for row, learned in zip(ids, weights, strict=True):
      assert row[-1] == opened.vocabulary.eos_id
      np.testing.assert_array_equal(learned, [1] * 8 + [0, 0])  # not the EOS, nor what follows it
      found.append(tuple(row[:-1]))
  assert sorted(found) == sorted(map(tuple, ROWS.tolist()))


@pytest.mark.parametrize('suffix', ['.npy', '.parquet', '.arrow', '.jsonl'])
def test_each_row_is_in_one_shard_and_files_named_by_split_validate(tmp_path, suffix):
  write(tmp_path / f'train{suffix}', ROWS[:50])
  write(tmp_path / f'val{suffix}', ROWS[50:])
  source = TokenSource(str(tmp_path)).encoded_by(ByteVocabulary())
  shards = [list(source.documents('train', shard, 3)) for shard in range(3)]
  rows = [tuple(document.tokens.tolist()) for shard in shards for document in shard]
  assert sorted(rows) == sorted(map(tuple, ROWS[:50].tolist()))
  assert all(shards)
  held = [tuple(document.tokens.tolist()) for document in source.documents('validation', 0, 1)]
  assert held == list(map(tuple, ROWS[50:].tolist()))


def with_id(value, rows=ROWS):
  """The rows with a value in the second one."""
  changed = np.array(rows)
  changed[1, 4] = value
  return changed


@pytest.mark.parametrize(
  ('name', 'rows', 'message'),
  [
    ('a.npy', ROWS / 2, r'Row 1 of .*a\.npy has values of float64, expected integers'),
    ('a.npy', ROWS > 9, r'Row 1 of .*a\.npy has values of bool'),
    ('a.npy', ROWS[0], r'a\.npy has an array of the shape \(9,\), expected \[rows, tokens\]'),
    ('a.npy', np.asfortranarray(ROWS), r'shape \(60, 9\) by columns.* numpy\.save\('),
    ('a.npy', ROWS.astype(object), r'a\.npy is corrupt: .* objects of Python'),
    ('a.npy', ROWS[:, :1], r'Row 1 of .*a\.npy has 1 token ids, expected 2 or more'),
    ('a.npy', ROWS[:0], r'has no rows'),
    ('a.npy', with_id(-1), r'Row 2 of .*a\.npy has the token id -1 at its place 4.* 0 to 258'),
    ('a.parquet', with_id(259), r'Row 2 of .*a\.parquet has the token id 259 at its place 4'),
    ('a.arrow', with_id(2**40), r'Row 2 of .*a\.arrow has the token id 1099511627776'),
    (
      'a.parquet',
      [*ROWS[:8], ROWS[8, :5], *ROWS[9:]],
      r'Row 9 of .*a\.parquet has 5 token ids, and the first row of the source has 9\. Write all',
    ),
    ('a.jsonl', [*ROWS[:1], ROWS[1, :5]], r'Line 2 of .*a\.jsonl has 5 token ids'),
    ('a.jsonl', [[3, True, 4]], r'Line 1 of .* has \[3, True, 4\] in the column input_ids'),
    ('a.npz', ROWS, r'a\.npz has no name of a known format, .* no column input_ids\. .* \.npy'),
    ('a.parquet', ['3 4 5'], r"Row 1 of .*a\.parquet has '3 4 5' in the column input_ids"),
    ('a.parquet', [[0.5, 1.0]], r'Row 1 of .*a\.parquet has \[0\.5, 1\.0\]'),
    ('a.parquet', [[[1, 2], [3]]], r'Row 1 of .*a\.parquet has \[\[1, 2\], \[3\]\]'),
    ('a.parquet', [[1, None]], r'Row 1 of .*a\.parquet has \[1, None\]'),
    ('a.jsonl', [np.array([2**64, 1], object)], r'Line 1 of .*a\.jsonl has \[18446744073709551616'),
  ],
)
def test_what_is_no_row_of_ids_is_named(tmp_path, name, rows, message):
  write(tmp_path / name, rows)
  source = TokenSource(str(tmp_path / name)).encoded_by(ByteVocabulary())
  with pytest.raises(DataError, match=message):
    list(source.documents('train', 0, 1))


def test_an_array_that_was_cut_short_is_damaged_and_never_unpickled(tmp_path):
  file = tmp_path / 'a.npy'
  write(file, ROWS)
  file.write_bytes(file.read_bytes()[:-8])
  with pytest.raises(DataError, match=r'a\.npy is corrupt: .* and its shape \(60, 9\) needs'):
    documents(feed(file, tmp_path))
  np.save(file, ROWS)
  whole = file.read_bytes()
  for damaged in (b'of another kind', whole.replace(b'(60, 9)', b'((60, 9'), whole[:20]):
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r'a\.npy is corrupt: .*its header is wrong'):
      list(TokenSource(str(file)).encoded_by(ByteVocabulary()).documents('train', 0, 1))


@pytest.mark.parametrize('version', [(1, 0), (2, 0), (3, 0)])
def test_an_array_in_any_version_of_the_format_is_read(tmp_path, version):
  file = tmp_path / 'a.npy'
  with open(file, 'wb') as stream:
    np.lib.format.write_array(stream, ROWS, version)
  source = TokenSource(str(file)).encoded_by(ByteVocabulary())
  found = [document.tokens for document in source.documents('train', 0, 1)]
  np.testing.assert_array_equal(found, ROWS)
  file.write_bytes(file.read_bytes().replace(bytes(version), b'\4\0', 1))
  with pytest.raises(DataError, match=r'a\.npy is corrupt: .* the version 4\.0 of the format, exp'):
    list(source.documents('train', 0, 1))


def test_another_column_is_named_by_its_macro(tmp_path):
  write(tmp_path / 'a.parquet', ROWS)
  with pytest.raises(DataError, match=r'has no column tokens; it has input_ids.*gin\.ids_column'):
    documents(feed(tmp_path / 'a.parquet', tmp_path, column='tokens'))
  with pytest.raises(ConfigurationError, match=r'no option cut\. It has column, held_out, splits'):
    documents(feed(tmp_path / 'a.parquet', tmp_path, cut=3))


def test_long_rows_are_read_a_few_at_once(monkeypatch, tmp_path):
  write(tmp_path / 'a.parquet', ROWS)
  monkeypatch.setattr(columnar, '_VALUES_AT_ONCE', 20)
  read = Records(str(tmp_path / 'a.parquet'), ['input_ids'], check=lambda row, *_: row).rows(0, 1)
  assert [row['input_ids'] for row in read] == ROWS.tolist()
