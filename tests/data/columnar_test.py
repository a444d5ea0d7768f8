"""Damaged and odd files of parquet and arrow: none reads the memory of the process, or ends it."""

import datetime
import errno
import gzip
import os

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from valkyrie.data import columnar
from valkyrie.data.records import Records
from valkyrie.data.source_files import SourceFiles
from valkyrie.errors import DataError, StorageError

TEXTS = ['one', 'two', 'three']
BEHIND = np.array([0, 3, 6, 2**30], np.int32).tobytes()  # offsets that end behind the buffer
OFFSETS = np.array([0, 3, 6, 11], np.int32).tobytes()


def arrow(column, new=pyarrow.ipc.new_file, **options):
  table = pa.table({'text': column, 'id': range(len(column))})
  sink = pa.BufferOutputStream()
  settings = pyarrow.ipc.IpcWriteOptions(**options)
  with new(sink, table.schema, options=settings) as writer:
    writer.write_table(table)
  return sink.getvalue().to_pybytes()


def parquet(file, column):
  pyarrow.parquet.write_table(pa.table({'text': column}), file)


def texts(file, column='text'):
  return [row[column] for row in Records(str(file), [column]).rows(0, 1)]


@pytest.mark.parametrize('new', [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize('kind', ['text', 'dictionary', 'list'])
def test_an_offset_behind_its_buffer_is_refused(tmp_path, new, kind):
  column = pa.array(TEXTS)
  if kind == 'dictionary':
    column = column.dictionary_encode()
  elif kind == 'list':
    column = pa.array([['one'], ['two'], ['three']])
  file = tmp_path / 'a.arrow'
  whole = arrow(column, new)
  assert whole.count(OFFSETS) == 1
  file.write_bytes(whole.replace(OFFSETS, BEHIND))
  with pytest.raises(DataError, match=r'a\.arrow is corrupt: it cannot be read \('):
    texts(file)


@pytest.mark.parametrize(
  ('number', 'expected', 'said'),
  [
    (errno.ESTALE, StorageError, r'a\.arrow cannot be read \('),
    (errno.EACCES, DataError, r'This user may not read .*a\.arrow'),
  ],
)
def test_a_file_that_a_disk_refuses_is_not_corrupt(tmp_path, monkeypatch, number, expected, said):
  file = tmp_path / 'a.arrow'
  file.write_bytes(arrow(pa.array(TEXTS)))

  def refuse(*_):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(SourceFiles, 'open_at_random', refuse)
  with pytest.raises(expected, match=said):
    texts(file)


def test_an_index_behind_its_dictionary_is_refused(tmp_path):
  codes = pa.array([0, 1, 2], pa.int8())
  whole = arrow(pa.DictionaryArray.from_arrays(codes, pa.array(TEXTS)))
  file = tmp_path / 'a.arrow'
  file.write_bytes(whole.replace(b'\0\1\2\0', b'\0\1\x70\0', 1))
  with pytest.raises(DataError, match=r'a\.arrow is corrupt'):
    texts(file)


@pytest.mark.parametrize('compression', ['zstd', 'lz4'])
def test_compressed_batches_are_read(tmp_path, compression):
  (tmp_path / 'a.arrow').write_bytes(arrow(TEXTS * 50, compression=compression))
  assert texts(tmp_path / 'a.arrow') == TEXTS * 50


def test_empty_files_of_parquet_among_full_ones_have_no_rows(tmp_path):
  parquet(tmp_path / 'part-0.parquet', TEXTS)
  parquet(tmp_path / 'part-1.parquet', pa.array([], pa.string()))
  pyarrow.parquet.write_table(pa.table({}), tmp_path / 'part-2.parquet')  # of a job without rows
  assert texts(tmp_path) == TEXTS
  assert Records(str(tmp_path), ['text']).has_fewer_rows(4)
  os.unlink(tmp_path / 'part-0.parquet')
  with pytest.raises(
    DataError, match=r'part-1\.parquet is empty: it has no rows, nor has any other'
  ):
    texts(tmp_path)


@pytest.mark.parametrize('column', [[2**62], [-(2**62)], [253_402_300_800 * 10**6]])
def test_a_time_that_python_cannot_hold_is_refused(tmp_path, column):
  parquet(tmp_path / 'a.parquet', pa.array(column, pa.timestamp('us')))
  with pytest.raises(DataError, match=r'a\.parquet is corrupt: .* text of timestamp\[us\]'):
    texts(tmp_path / 'a.parquet')
  parquet(tmp_path / 'a.parquet', pa.array([datetime.datetime(2026, 1, 1)]))
  with pytest.raises(DataError, match='in the column text, expected a text'):
    texts(tmp_path / 'a.parquet')


@pytest.mark.parametrize('suffix', ['.parquet', '.arrow', '.jsonl.gz'])
def test_text_that_is_not_utf8_is_damage_where_it_cannot_be_another_encoding(tmp_path, suffix):
  file = tmp_path / f'a{suffix}'
  wrong = pa.array([b'caf\xe9'], pa.binary()).view(pa.string())
  if suffix == '.parquet':
    parquet(file, wrong)
  elif suffix == '.arrow':
    file.write_bytes(arrow(wrong))
  else:
    content = bytearray(gzip.compress(b'{"text": "caf\xe9"}\n'))
    content[-8] ^= 1  # the checksum
    file.write_bytes(content)
  with pytest.raises(DataError, match='is corrupt') as refused:
    texts(file)
  assert 'iconv' not in str(refused.value)


def test_values_without_content_do_not_fill_the_memory(monkeypatch, tmp_path):
  monkeypatch.setattr(columnar, '_MOST_VALUES', 1000)
  nothing = pa.nulls(5000)
  for column in (
    pa.ListArray.from_arrays(pa.array([0, 5000], pa.int32()), nothing),
    pa.StructArray.from_arrays([pa.ListArray.from_arrays(pa.array([0, 5000]), nothing)], ['a']),
  ):
    (tmp_path / 'a.arrow').write_bytes(arrow(column))
    with pytest.raises(DataError, match='a row of its column text holds too many values'):
      texts(tmp_path / 'a.arrow')


@pytest.mark.parametrize('suffix', ['.parquet', '.arrow'])
def test_two_columns_of_one_name_are_refused(tmp_path, suffix):
  table = pa.Table.from_arrays([pa.array(TEXTS), pa.array(TEXTS)], names=['text', 'text'])
  file = tmp_path / f'a{suffix}'
  if suffix == '.parquet':
    pyarrow.parquet.write_table(table, file)
  else:
    with pyarrow.ipc.new_file(str(file), table.schema) as writer:
      writer.write_table(table)
  with pytest.raises(DataError, match='columns of one name: text, text'):
    texts(file)


@pytest.mark.parametrize('change', ['missing', 'has changed'])
def test_a_parquet_file_that_goes_after_it_was_listed_is_named(tmp_path, change):
  file = tmp_path / 'a.parquet'
  parquet(file, TEXTS)
  records = Records(str(file), ['text'])
  file.unlink()
  if change == 'has changed':
    file.write_bytes(b'PAR1')
  with pytest.raises(DataError, match=rf'a\.parquet.* {change}'):
    list(records.rows(0, 1))
