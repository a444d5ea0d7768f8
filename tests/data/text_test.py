"""Text of a user's own: formats, columns, held-out documents, and sources that change."""

import ast
import bz2
import collections
import csv
import gzip
import hashlib
import io
import itertools
import json
import logging
import lzma
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from valkyrie.data import (
  build_store,
  document_source,
  provenance,
  records,
  store_builder,
  store_location,
  vocabularies,
)
from valkyrie.data.document_source import TASKS
from valkyrie.data.feed import TaskFeed
from valkyrie.data.records import Records
from valkyrie.data.selection import Selection
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks import passkey  # noqa: F401
from valkyrie.tasks.fineweb import FineWebSource
from valkyrie.tasks.text import TextSource

BYTES = vocabularies.ByteVocabulary()
TEXTS = [f'Text {number}: naïve café. ' * (1 + number % 3) for number in range(24)]


def json_lines(texts, column='text'):
  return ''.join(json.dumps({'id': n, column: t}) + '\n' for n, t in enumerate(texts)).encode()


def parquet(texts, column='text'):
  sink = pa.BufferOutputStream()
  table = pa.table({'id': list(range(len(texts))), column: texts})
  pyarrow.parquet.write_table(table, sink, row_group_size=5)
  return sink.getvalue().to_pybytes()


def arrow(texts, column='text'):
  sink = pa.BufferOutputStream()
  table = pa.table({'id': list(range(len(texts))), column: texts})
  with pyarrow.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table, max_chunksize=5)
  return sink.getvalue().to_pybytes()


def arrow_file(texts, column='text', **options):
  table = pa.table({'id': [*range(len(texts))], column: texts})
  sink = pa.BufferOutputStream()
  settings = pyarrow.ipc.IpcWriteOptions(**options)
  with pyarrow.ipc.new_file(sink, table.schema, options=settings) as writer:
    writer.write_table(table, max_chunksize=3)
  return sink.getvalue().to_pybytes()


WRITERS = {'.jsonl': json_lines, '.parquet': parquet, '.arrow': arrow}
COMPRESSORS = {
  '': bytes,
  '.gz': gzip.compress,
  '.zst': lambda content: pa.compress(content, codec='zstd', asbytes=True),
}


@pytest.mark.parametrize('compression', COMPRESSORS)
@pytest.mark.parametrize('kind', WRITERS)
def test_every_format_has_each_row_in_exactly_one_part(tmp_path, kind, compression):
  content = COMPRESSORS[compression](WRITERS[kind](TEXTS, 'body'))
  (tmp_path / f'a{kind}{compression}').write_bytes(content)
  records = Records(str(tmp_path), ['body'])
  for parts in (1, 4):
    found = [row['body'] for part in range(parts) for row in records.rows(part, parts)]
    assert sorted(found) == sorted(TEXTS)
  assert [row['body'] for row in records.rows(0, 1)] == TEXTS


def test_a_plain_text_is_a_document(tmp_path):
  (tmp_path / 'deep').mkdir()
  for name, text in (('b.txt', 'zwei'), ('deep/a.md', 'eins'), ('c.txt', 'drei')):
    (tmp_path / name).write_text(text)
  (tmp_path / 'd.txt.gz').write_bytes(gzip.compress(b'vier'))
  (tmp_path / 'image.png').write_bytes(b'\xff')
  (tmp_path / '.hidden.txt').write_text('no')
  assert [row['text'] for row in Records(str(tmp_path), ['text']).rows(0, 1)] == [
    'zwei',
    'drei',
    'vier',
    'eins',
  ]


@pytest.mark.parametrize(
  ('pattern', 'found'),
  [
    ('*.txt', ['a.txt', 'b.txt']),
    ('**/*.txt', ['a.txt', 'b.txt', 'x/c.txt', 'x/y/d.txt']),
    ('x/*', ['x/c.txt']),
    ('?.txt', ['a.txt', 'b.txt']),
    ('?/**/d.txt', ['x/y/d.txt']),
    ('[]a].txt', ['a.txt']),
    ('[z-a].txt', []),
    ('[!a].txt', ['b.txt']),
    ('x/y/d.txt', ['x/y/d.txt']),
    ('', ['a.txt', 'b.txt', 'x/c.txt', 'x/y/d.txt']),
  ],
)
def test_a_location_is_a_file_a_folder_or_a_pattern(tmp_path, pattern, found):
  for name in ('a.txt', 'b.txt', 'x/c.txt', 'x/y/d.txt', 'x/y/e.png'):
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text('text')
  if not found:
    with pytest.raises(DataError, match=r'its pattern .* is wrong'):
      SourceFiles(str(tmp_path / pattern))
    return
  listed = SourceFiles(str(tmp_path / pattern))
  assert [str(pathlib.Path(f.path).relative_to(tmp_path)) for f in listed.files] == found


@pytest.mark.parametrize('compression', [None, 'lz4', 'zstd'])
@pytest.mark.parametrize('suffix', ['', '.gz'])
def test_both_forms_of_arrow_are_read(tmp_path, compression, suffix):
  written = arrow_file(TEXTS, compression=compression)
  with pyarrow.ipc.open_file(written) as theirs:  # as its own library has it
    assert theirs.read_all()['text'].to_pylist() == TEXTS and theirs.num_record_batches > 3
  for name, content in {'file': written, 'stream': arrow(TEXTS)}.items():
    file = tmp_path / f'{name}.ARROW{suffix}'
    file.write_bytes(gzip.compress(content) if suffix else content)
    for parts in (1, 2, 7, 30):
      read = [[row['text'] for row in Records(str(file), ['text']).rows(part, parts)]
              for part in range(parts)]  # fmt: skip
      assert sorted(itertools.chain(*read)) == sorted(TEXTS)
    assert read and len([one for one in read if one]) > 3


@pytest.mark.parametrize(
  ('name', 'content', 'said'),
  [
    ('a.jsonl', b'{"text": "a"}\n{"text": "b', 'Line 2 of .*a.jsonl is not JSON'),
    ('a.jsonl', b'["text"]\n', 'Line 1 of .*a.jsonl is not a JSON object'),
    ('a.jsonl', b'{"id": 1, "content": "a"}\n', 'no column text; it has id, content'),
    ('a.parquet', parquet(TEXTS, 'content'), 'no column text; it has id, content'),
    ('a.parquet', parquet(TEXTS)[:-50], 'a.parquet is corrupt'),
    ('a.parquet', parquet([b'x', b'y']), r"a.parquet has b'x' in the column text, expected a text"),
    ('a.parquet', parquet([7, 8]), 'a.parquet has 7 in the column text, expected a text'),
    ('a.arrow', arrow([['x'], ['y']]), r"a.arrow has \['x'\] in the column text, expected a text"),
    ('a.jsonl', b'{"text": 1}\n', 'a.jsonl has 1 in the column text, expected a text'),
    ('a.arrow', arrow(TEXTS, 'content'), 'no column text; it has id, content'),
    ('a.arrow', arrow(TEXTS)[:400], 'a.arrow is corrupt'),
    ('a.arrow', arrow_file(TEXTS, 'content'), 'no column text; it has id, content'),
    ('a.arrow', arrow_file(TEXTS)[:400], 'a.arrow is corrupt'),
    ('a.arrow', arrow_file(TEXTS)[:-1], 'a.arrow is corrupt'),
    ('a.arrow', b'ARROW1', 'a.arrow is corrupt'),
    ('a.arrow', b'ARR', 'a.arrow is corrupt'),
    ('a.txt', b'caf\xe9', 'not UTF-8: byte 3 is 0xe9'),
    ('a.jsonl', b'', 'a.jsonl is empty'),
    ('a.jsonl', b'{"text": "a"}\n{"text": "x\\ud83d"}\n', r"Line 2 of .*'.ud83d', after 'x'"),
    ('a.json', b'[{"text": "a"}, {"text": "\\udc00"}]', r"Member 2 of .*a.json.*'.udc00'"),
    ('a.json', b'[{"text": "a"}, 7]', 'Member 2 of .*a.json is not a JSON object: it has 7'),
    ('a.json', b'{"data": []}', 'no column text; it has data'),
    ('a.json', b'{"text": "a"', 'a.json is not JSON'),
    ('a.json', b'["text"]', 'Member 1 of .*a.json is not a JSON object'),
    ('a.jsonl', b'[' * 100_000, r'Line 1 of .*a.jsonl is not JSON \(it has more than 100'),
    ('a.json', b'[' * 100_000, r'a.json is not JSON \(it has more than 100'),
    ('a.ndjson', b'{"text": ' * 100_000, 'Line 1 of .*a.ndjson is not JSON'),
    ('a.csv', b'title,body\na,b\n', 'no column text; it has title, body.* --gin.text_column='),
    ('a.csv', b'text,id,text\na,1,b\n', 'first line of .*a.csv has columns of one name: text, id'),
    ('a.tsv', b'text\ttext\na\tb\n', 'first line of .*a.tsv has columns of one name: text, text'),
    ('a.jsonl', b'{"text": "a"}\n{"text": "b", "text": "c"}\n', "Line 2 of .*'text' twice in one"),
    (
      'a.json',
      b'[{"text": "a"},\n {"text": "b", "text": "c"}]',
      "a.json says .*'text' twice in one",
    ),
    ('a.json', b'{"text": "b", "text": "c"}\n{"text": "a"}\n', 'Line 1 of .*a.json says two'),
    ('a.csv', b'id,text\n1,a,b\n', 'ends on line 2 of .*a.csv has 3 fields, .* names 2'),
    ('a.csv', b'id,text\n1,"a\n', 'Line 2 of .*a.csv is wrong'),
    ('a.tsv', b'id\ttext\n1\n', 'ends on line 2 of .*a.tsv has 1 fields'),
    ('a.csv', b'text\ncaf\xe9\n', 'a.csv is not UTF-8'),
    ('a.txt', b'%PDF-1.4\n%abc', "is not text: it begins with b'%PDF-1.4"),
    ('a.TXT', b'a\0b', 'a.TXT is not text: .* has 1 null bytes'),
    ('a.txt', 'caf\xe9'.encode('utf-16'), 'a.txt is not UTF-8: byte 0 is 0xff.*iconv'),
    ('a.txt.gz', gzip.compress(b'text')[:-9], 'a.txt.gz is corrupt'),
    ('a.png', b'image', 'no files of a known format'),
    ('dataset_dict.json', b'{}', 'several splits; name one:'),
  ],
  ids=itertools.count(),
)
def test_bad_files_are_named(tmp_path, name, content, said):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(DataError, match=said):
    list(Records(str(tmp_path), ['text']).rows(0, 1))


def test_a_missing_folder_is_named(tmp_path):
  with pytest.raises(DataError, match='nowhere cannot be listed'):
    Records(str(tmp_path / 'nowhere'), ['text'])


def test_a_column_of_plain_text_is_refused(tmp_path):
  (tmp_path / 'a.txt').write_text('text')
  with pytest.raises(DataError, match='no column body; it has text'):
    Records(str(tmp_path), ['body'])


def test_a_named_file_of_another_format_is_plain_text(tmp_path):
  (tmp_path / 'book').write_text('text')
  assert list(Records(str(tmp_path / 'book'), ['text']).rows(0, 1)) == [{'text': 'text'}]
  with pytest.raises(DataError, match='a plain text has no column body'):
    Records(str(tmp_path / 'book'), ['body'])


JSON_LINES = json_lines(TEXTS)
LIST = json.dumps([{'text': text} for text in TEXTS]).encode()
PRETTY = json.dumps([{'text': text} for text in TEXTS], indent=1).encode()
KNOWN = {  # of many names, the same texts
  **dict.fromkeys(['a.JSONL', 'a.ndjson', 'a.json', 'a.Json', '[a].jsonl', 'a*.json'], JSON_LINES),
  **{name: LIST for name in ('b.json', 'list.JSON')},
  'pretty.json': PRETTY,
  'begins_later.json': b'\n \n' + JSON_LINES,
  'mark.json': b'\xef\xbb\xbf' + JSON_LINES,
}


def table(separator):
  stream = io.StringIO(newline='')
  writer = csv.writer(stream, delimiter=separator)
  writer.writerows([['id', 'text'], *enumerate(TEXTS)])
  return stream.getvalue().encode()


KNOWN |= {'a.csv': table(','), 'a.TSV': table('\t'), 'm.csv': b'\xef\xbb\xbf' + table(',')}


@pytest.mark.parametrize('direct', [True, False])
@pytest.mark.parametrize('compression', COMPRESSORS)
@pytest.mark.parametrize('name', KNOWN)
def test_every_known_form_is_parsed_by_any_name(tmp_path, name, compression, direct):
  file = tmp_path / f'{name}{compression.upper()}'
  file.write_bytes(COMPRESSORS[compression](KNOWN[name]))
  found = Records(str(file if direct else tmp_path), ['text'])
  for parts in 1, 5:
    rows = [row['text'] for part in range(parts) for row in found.rows(part, parts)]
    assert rows == TEXTS if parts == 1 else sorted(rows) == sorted(TEXTS)


def test_quotes_lines_and_long_fields_of_csv(tmp_path):
  texts = ['a "b", c\nd', 'x' * 200_000, '', 'e\r\nf']
  with (tmp_path / 'a.csv').open('w', newline='') as stream:
    csv.writer(stream).writerows([['text', 'n'], *([text, 1] for text in texts)])
  assert [row['text'] for row in Records(str(tmp_path), ['text']).rows(0, 1)] == texts


@pytest.mark.parametrize(
  ('content', 'text'),
  [
    (b'\xef\xbb\xbfone\r\ntwo\r\n', 'one\ntwo\n'),
    (b'', ''),
    (b'\xef\xbb\xbf', ''),
    (b'a\rb\tc\x0cd\x1b[0m', 'a\rb\tc\x0cd\x1b[0m'),
    (b'{"text": "in a text"}\n', '{"text": "in a text"}\n'),
  ],
)
def test_marks_and_line_ends_of_plain_text(tmp_path, content, text):
  (tmp_path / 'a.txt').write_bytes(content)
  assert list(Records(str(tmp_path), ['text']).rows(0, 1)) == [{'text': text}]


@pytest.mark.parametrize(
  ('name', 'content', 'said'),
  [
    ('a.pdf', b'%PDF-1.7\n\xe2', 'not text'),
    ('a.docx', b'PK\3\4\0\0', 'not text'),
    ('a.jsonl.bz2', bz2.compress(JSON_LINES), 'not (text|UTF-8)'),
    ('a.jsonl.xz', lzma.compress(JSON_LINES), 'not (text|UTF-8)'),
    ('a.rtf', b'{\\rtf1 text}', 'not text'),
    ('a.npy', b'\x93NUMPY\1\0v\0', 'not text'),
    ('c4-train.00000', JSON_LINES, 'is JSON, but its name does not say so'),
    ('a.jsonlines', JSON_LINES, 'is JSON'),
    ('a.ipynb', json.dumps({'cells': []}, indent=1).encode(), 'is JSON'),
    ('a.geojson', PRETTY, 'is JSON'),
    ('a.py', b'{1: 2}\n[1]\n', None),
    ('a.rst', b'[1] A note.\n', None),
    ('a.tex', b'{\\it a}', None),
    ('a.html', b'<p>text</p>', None),
  ],
)
@pytest.mark.parametrize('pattern', [True, False])
def test_what_is_not_known_is_text_or_refused_by_name(tmp_path, name, content, said, pattern):
  (tmp_path / name).write_bytes(content)
  rows = Records(str(tmp_path / ('*' if pattern else name)), ['text']).rows(0, 1)
  if said is None:
    assert list(rows) == [{'text': content.decode()}]
  else:
    with pytest.raises(DataError, match=f'{name} (is )?{said}'):
      list(rows)


@pytest.mark.parametrize(
  ('names', 'read'),
  [
    (['a.txt', 'b.csv', 'c.json', 'd.png'], ['a.txt']),
    (['README.md', 'data/b.json', 'data/c.json.gz'], ['data/b.json', 'data/c.json.gz']),
    (['notes.md', 'index.json'], ['notes.md']),
    (['README.md', 'LICENSE'], ['README.md']),
    (['a.arrow', 'state.json', 'dataset_info.json'], ['a.arrow']),
    (['a.TXT', 'b.NDJSON'], ['a.TXT', 'b.NDJSON']),
    (['a.csv', 'b.tsv', '.c.csv'], ['a.csv', 'b.tsv']),
  ],
)
def test_what_a_folder_has_besides_is_named(tmp_path, names, read):
  for name in names:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('x')
  files = SourceFiles(str(tmp_path))
  assert [files.name(file) for file in files.files] == read
  left = {name for name in names if name not in read and name[0] != '.'}
  assert {files.name(file) for file in files.left_out} == left


def test_a_build_says_which_files_of_a_folder_it_leaves_out(tmp_path, caplog):
  (tmp_path / 'a.txt').write_text('text')
  (tmp_path / 'b.csv').write_text('text')
  for _ in range(2):
    Records(str(tmp_path), ['text'])
  assert caplog.text.count('is read without these files of the folder: b.csv.') == 1


def test_the_advice_on_files_left_out_names_the_formats_of_the_source(tmp_path, caplog):
  (tmp_path / 'a.txt').write_text('text')
  (tmp_path / 'b.md').write_text('text')
  Records(str(tmp_path), ['text'], formats=('.txt',))
  assert 'b.md. To read them, name them by a pattern, or convert them to .txt.' in caplog.text


LITERAL = [
  '[2024] notes',
  'what?',
  'a*b',
  '[a-',
  'x]y',
  '[!a]',
  '**',
  '[z-a]',
  '{a,b}',
  '%20',
  '$HOME',
]


@pytest.mark.parametrize('name', LITERAL)
def test_a_name_that_exists_is_no_pattern(tmp_path, name):
  folder = tmp_path / name
  folder.mkdir()
  (folder / f'{name}.txt').write_text('mine')
  for other in '2', 'whats', 'ab', 'a', 'whatx', 'axb':  # that a pattern would match
    (tmp_path / other).mkdir(exist_ok=True)
    (tmp_path / other / f'{other}.txt').write_text('other')
  for place in (folder, folder / f'{name}.txt', folder / '*.txt', folder / '**' / '*.txt'):
    listed = SourceFiles(str(place))
    assert [file.path for file in listed.files] == [str(folder / f'{name}.txt')], place


def test_a_downloaded_fineweb_has_a_readme_too(tmp_path):
  (tmp_path / 'README.md').write_text('a data card')
  table = pa.table({'text': ['page'], 'id': ['1'], 'url': ['https://a.org/1']})
  pyarrow.parquet.write_table(table, tmp_path / '0.parquet')
  source = FineWebSource(str(tmp_path))
  found = [text for split in source.splits for text in documents(source, split)]
  assert found == ['page']
  origin = provenance.Origin(source.files('train'), tmp_path / 'store')
  recorded = json.loads(json.dumps(origin.record()))
  provenance.check(tmp_path, {'task': 'fineweb', 'source': {}, 'origin': recorded}, '', [])


def documents(source, split):
  return [document.text for document in source.documents(split, 0, 1)]


def test_a_document_stays_in_its_split_when_files_are_added(tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(json_lines(TEXTS))
  source = TextSource(str(tmp_path), held_out='0.3')
  before = documents(source, 'validation')
  assert 2 < len(before) < 14
  assert sorted(before + documents(source, 'train')) == sorted(TEXTS)
  more = [f'Other {number}' for number in range(30)]
  (tmp_path / '0.jsonl').write_bytes(json_lines(more))
  after = documents(source, 'validation')
  assert set(before) == set(after) & set(TEXTS) and len(after) > len(before)


def test_held_out_text_in_another_folder(tmp_path):
  for name, texts in (('train', TEXTS[:20]), ('test', TEXTS[20:])):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'a.jsonl').write_bytes(json_lines(texts))
  source = TextSource(str(tmp_path / 'train'), held_out=str(tmp_path / 'test'))
  assert documents(source, 'train') == TEXTS[:20]
  assert documents(source, 'validation') == TEXTS[20:]
  assert [f.path for f in source.files('validation').files] == [str(tmp_path / 'test/a.jsonl')]


def test_long_documents_are_cut_at_line_ends(tmp_path):
  lines = [f'Zeile {number} mit ä\n' for number in range(9)]
  (tmp_path / 'a.txt').write_text(''.join(lines) + 'x' * 50)
  (tmp_path / 'b.txt').write_text('short')
  source = TextSource(str(tmp_path), held_out='1e-9', cut='40')
  found = list(source.documents('train', 0, 1))
  pieces, short = found[:-1], found[-1]
  assert ''.join(piece.text for piece in pieces) == ''.join(lines) + 'x' * 50
  assert [piece.text for piece in pieces[:4]] == [''.join(lines[n : n + 2]) for n in (0, 2, 4, 6)]
  assert all(len(piece.text.encode()) <= 40 for piece in pieces)  # a long line is cut inside
  assert len({piece.sequence_key for piece in pieces}) == 1  # and stays together
  assert (short.text, short.sequence_key) == ('short', '')


def lines(number, count):
  letter = 'abcdefghijkl'[number]
  return ''.join(letter * 5 + letter.upper() * (n % 3) + '\n' for n in range(count))


@given(
  counts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
  share=st.sampled_from([0.01, 0.1, 0.2, 0.5]),
  cut=st.sampled_from([None, 40, 400]),
  kind=st.sampled_from(['.txt', '.jsonl', '.parquet']),
)
@settings(max_examples=60, deadline=None)
def test_no_held_out_text_is_in_the_training_text(counts, share, cut, kind):
  """A document is in one split; if they are few, its end is in the other."""
  texts = [lines(number, count) for number, count in enumerate(counts)]
  with tempfile.TemporaryDirectory() as folder:
    if kind == '.txt':
      for number, text in enumerate(texts):
        pathlib.Path(folder, f'{number:02}.txt').write_text(text)
    else:
      pathlib.Path(folder, f'a{kind}').write_bytes(WRITERS[kind](texts))
    source = TextSource(folder, held_out=str(share), cut=cut and str(cut))
    found = {split: [*source.documents(split, 0, 1)] for split in source.splits}
  read = {split: collections.defaultdict(str) for split in source.splits}
  for split, documents in found.items():
    for document in documents:
      read[split][document.text.lower().strip()[0]] += document.text
  few = len(texts) < (3 / share if cut else 2)
  for text in texts:
    begin, end = (read[split][text[0]] for split in ('train', 'validation'))
    assert begin + end == text  # the end is held out, with no hole
    assert few or not (begin and end)
    assert not few or len(end) <= 2 * share * len(text)


def test_a_single_long_text_has_its_end_held_out(tmp_path):
  text = lines(0, 1000)
  (tmp_path / 'a.txt').write_text(text)
  place, stores = str(tmp_path / 'a.txt'), str(tmp_path / 'stores')
  options = {'held_out': 0.1, 'cut': 400}
  feeds = [
    TaskFeed('text', split, 4, 0, source=place, options=options, data_dir=stores)
    for split in ('train', 'validation')
  ]
  source = TextSource(place, held_out='0.1', cut='400')
  pieces = [documents(source, split) for split in source.splits]
  assert [len(feed.store.lengths) for feed in feeds] == [*map(len, pieces)]
  assert ''.join(pieces[0]) + ''.join(pieces[1]) == text
  assert 0.09 < len(''.join(pieces[1])) / len(text) < 0.12


@pytest.mark.parametrize(
  ('text', 'held_out', 'both'),
  [
    ('d', 'd/second.jsonl', True),
    ('d', 'd', True),
    ('d', 'd/', True),
    ('d', 'd/../d/s*.jsonl', True),
    ('d', 'link', True),
    ('d', 'linked.jsonl', True),
    ('d/first.jsonl', 'd', True),
    ('*/first.jsonl', 'd/*.jsonl', True),
    ('d/f*.jsonl', 'd/second.jsonl', False),
    ('d/first.jsonl', 'd/second.jsonl', False),
  ],
)
def test_held_out_files_in_the_training_text_are_refused(tmp_path, capsys, text, held_out, both):
  (tmp_path / 'd').mkdir()
  (tmp_path / 'd' / 'first.jsonl').write_bytes(json_lines(TEXTS[:20]))
  (tmp_path / 'd' / 'second.jsonl').write_bytes(json_lines(TEXTS[20:]))
  (tmp_path / 'link').symlink_to('d')
  (tmp_path / 'linked.jsonl').symlink_to('d/second.jsonl')
  for split in 'train', 'validation':
    command = [f'--split={split}', f'--option=held_out={tmp_path}/{held_out}']
    assert build(tmp_path / split, tmp_path / text, *command) == (65 if both else 0)
    assert ('in the training text' in capsys.readouterr().err) == both


@pytest.mark.parametrize('text', [lines(0, 9000), lines(0, 90), 'no line ends here ' * 15])
def test_the_advice_about_too_few_documents_helps(tmp_path, text):
  """A single text has one document in each split; `cut` makes more of them."""
  (tmp_path / 'a.txt').write_text(text)

  def feed(split, **options):
    how = {'source': str(tmp_path / 'a.txt'), 'data_dir': str(tmp_path / 'stores')}
    return TaskFeed('text', split, 4, 0, options=options, **how)

  for split in 'train', 'validation':
    with pytest.raises(ConfigurationError, match=r'has 1 documents.*--gin.text_cut=') as said:
      feed(split, held_out=0.2).read(0, 1)
    advised = ast.literal_eval(re.search(r"'options': ({.*?}) of a source", str(said.value))[1])
    assert advised.get('held_out') == (0.4 if split == 'validation' else None)
    assert f'--gin.text_cut={advised["cut"]}' in str(said.value)
    assert feed(split, **{'held_out': 0.2, **advised}).read(0, 8).inputs.shape == (4, 8)


def test_the_advice_about_an_empty_split_helps(tmp_path):
  texts = [lines(number, 100) for number in range(12)]
  kept = [text for text in texts if document_source.stable_hash(text) > 0.2 * 2**64]
  for number, text in enumerate(kept[:3]):  # none is held out
    (tmp_path / f'{number}.txt').write_text(text)
  how = {'source': str(tmp_path / '*.txt'), 'data_dir': str(tmp_path / 'stores')}

  def feed(**options):
    return TaskFeed('text', 'validation', 1, 0, options=options, **how)

  for share in 0.2, 0.01:
    with pytest.raises(DataError, match=r'has no documents.*--gin.held_out=') as said:
      feed(held_out=share).read(0, 1)
    advised = ast.literal_eval(re.search(r"'options': ({.*?}) of a source", str(said.value))[1])
    assert advised['held_out'] > share
    assert feed(**advised).read(0, 8).inputs.shape == (1, 8)


def test_documents_with_the_same_text_in_a_column_are_together(tmp_path):
  places = ['https://a.org/1', 'http://a.org:80/2', 'a book', 'https://[b', '', None]
  rows = [{'text': f'{n}', 'place': place} for n, place in enumerate(places * 9)]
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  source = TextSource(str(tmp_path), held_out='0.3', together='place')
  keys = {
    split: collections.Counter(d.sequence_key for d in source.documents(split, 0, 1))
    for split in source.splits
  }
  train, validation = keys['train'], keys['validation']
  assert train + validation == {'a.org': 18, 'a book': 9, 'https://[b': 9, '': 18}
  assert train.keys() & validation.keys() == {''}  # alone, each in a split by its own hash


def test_a_streamed_data_set(tmp_path, monkeypatch, caplog):
  pytest.importorskip('datasets', reason="only pip install '.[hf]' installs datasets")
  folder = tmp_path / 'owner' / 'pages'
  folder.mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  rows = {'text': TEXTS, 'url': [f'https://a.org/{n}' for n in range(len(TEXTS))]}
  pyarrow.parquet.write_table(pa.table(rows), folder / 'train.parquet')
  source = FineWebSource('hf://owner/pages')
  parts = [source.documents(split, part, 2) for split in source.splits for part in range(2)]
  assert [d.text for part in parts for d in part] == TEXTS[::2] + TEXTS[1::2]
  assert source.files('train') is None
  records._revision.cache_clear()
  (folder / 'test.parquet').write_bytes((folder / 'train.parquet').read_bytes())
  assert [d.text for d in source.documents('train', 0, 1)] == TEXTS
  assert 'Not read: test' in caplog.text
  records._revision.cache_clear()
  (folder / 'train.parquet').unlink()
  with pytest.raises(DataError, match='has no split train, only test'):
    next(source.documents('train', 0, 1))
  (folder / 'test.parquet').rename(folder / 'train.parquet')
  records._revision.cache_clear()
  described = source.describe('train')
  rows['text'] = TEXTS[::-1]
  pyarrow.parquet.write_table(pa.table(rows), folder / 'train.parquet')
  assert source.describe('train') == described  # one revision in a process
  records._revision.cache_clear()
  assert source.describe('train')['streamed'] != described['streamed']
  with pytest.raises(DataError, match=r'hf://owner/pages has no column body; it has text, url'):
    next(source.at('hf://owner/pages', column='body').documents('train', 0, 1))


@pytest.mark.parametrize('held_out', ['0', '1.5', '-0.1', 'nan', 'inf', '1e-400'])
def test_an_impossible_share_is_refused(held_out):
  with pytest.raises(
    ConfigurationError, match=f'held_out={held_out} must be a share above 0'
  ) as caught:
    TextSource('/data', held_out=held_out)
  assert 'to train on all documents, name other files that validate' in str(caught.value)


@pytest.mark.parametrize('cut', ['0', '-1', '2.5', '1e3', 'True', 'nan', '\N{SUPERSCRIPT TWO}'])
def test_an_impossible_size_is_refused(cut):
  with pytest.raises(ConfigurationError, match=f'cut={cut} must be a number of bytes, 1 or more'):
    TextSource('/data', cut=cut)


def test_unknown_options_are_refused():
  with pytest.raises(ConfigurationError, match=r'no option colum\. It has column, cut, held_out'):
    TASKS['text'].source.at('/data', colum='a')
  with pytest.raises(ConfigurationError, match=r'no option url\. It has column, cut, held_out'):
    TASKS['fineweb'].source.at('/data', url='a')
  with pytest.raises(ConfigurationError, match='its own documents, but got the option column'):
    TASKS['passkey.64'].source.at(None, column='a')


def test_a_changed_source_is_refused_and_a_touched_one_is_not(tmp_path, caplog, monkeypatch):
  folder = tmp_path / 'text'
  folder.mkdir()
  for number, text in enumerate(TEXTS):
    (folder / f'{number:02}.txt').write_text(text)
  options = {'held_out': 0.3, 'column': 'text'}
  data_dir = str(tmp_path / 'stores')

  def feed():
    return TaskFeed('text', 'train', 1, 0, source=str(folder), options=options, data_dir=data_dir)

  first = feed()
  kept = [text for text in TEXTS if text.encode() in _content(first)]
  assert len(kept) == len(first.store.lengths) and 10 < len(kept) < 24

  os.utime(folder / '03.txt', (1, 1))
  assert feed().fingerprint == first.fingerprint  # the same content

  (folder / '03.txt').write_text(TEXTS[3].replace('T', 't'))  # the same size
  (folder / '24.txt').write_text('one more')
  (folder / '05.txt').unlink()
  with pytest.raises(DataError) as refused:
    feed().read(0, 1)
  said = str(refused.value)
  assert '1 new: 24.txt; 1 gone: 05.txt; 1 changed: 03.txt' in said
  (command,) = [line for line in said.splitlines() if line.strip().endswith('--rebuild')]
  monkeypatch.setattr(sys, 'argv', shlex.split(command)[2:])
  assert build_store.main() == 0
  assert feed().fingerprint != first.fingerprint

  folder.rename(tmp_path / 'elsewhere')
  with caplog.at_level(logging.WARNING):
    feed().read(0, 1)
  assert 'was not compared with its source' in caplog.text


def test_a_source_that_is_hashed_is_no_silence(tmp_path, monkeypatch):
  for name in 'ab':
    (tmp_path / f'{name}.txt').write_bytes(10 * name.encode())
  beats = []
  monkeypatch.setattr(provenance.heartbeat, 'beat', lambda: beats.append(1))
  monkeypatch.setattr(provenance, '_PIECE', 4)
  found = provenance.Origin(SourceFiles(str(tmp_path), ['.txt']), tmp_path / 'store').record()
  assert len(beats) == 6
  assert (
    provenance.Origin(SourceFiles(str(tmp_path), ['.txt']), tmp_path / 'store').record() == found
  )
  assert len(beats) == 6  # the second builder reads the record of the first
  hashes = [hashlib.blake2b(10 * name, digest_size=16).hexdigest() for name in (b'a', b'b')]
  assert [file[3] for file in found['files']] == hashes


def _content(feed):
  tokens = feed.read(0, feed.row_tokens).inputs[0]
  return bytes(int(token) - 3 if token > 2 else 0 for token in tokens)


def test_a_store_records_no_password(tmp_path):
  (tmp_path / 'a.txt').write_text('a text')
  files = SourceFiles(str(tmp_path), ('.txt',))
  origin = provenance.Origin(files, tmp_path / 'store')
  files.location = 's3://key:swordfish@bucket/texts?x=1'
  assert origin.record()['location'] == 's3://(redacted)@bucket/texts?x=1'


def test_a_command_that_is_shown_has_no_password():
  source = '--source=s3://key:swordfish@bucket/texts'
  shown = store_location._command(['--task=text', source, '--option=column=body'])
  assert 'swordfish' not in shown and shown.endswith('--option=column=body')


def test_stores_of_different_options_have_different_names():
  selected = [
    Selection('text', 'train', BYTES, source, options).name
    for source in (None, '/texts')
    for options in ({}, {'flavor': 'vanilla'}, {'flavor': 'chocolate'})
  ]
  assert len({*selected}) == len(selected)


def test_a_store_of_a_place_with_a_token_records_none_and_is_found_again(tmp_path, monkeypatch):
  folder = tmp_path / 'glpat-swordfishswordfish'
  other = tmp_path / 'glpat-otherswordfishes'
  for place, texts in (folder, TEXTS[:20]), (other, TEXTS[20:]):
    place.mkdir()
    (place / 'a.jsonl').write_bytes(json_lines(texts))
  output = tmp_path / 'store'
  command = ['build_store', '--task=text', '--split=train', f'--source={folder}', '--shards=2']
  command += [f'--output={output}', f'--option=held_out={other}']
  monkeypatch.setattr(sys, 'argv', command)
  for _ in range(2):
    assert build_store.main() == 0
  files = [file for file in output.rglob('*') if file.is_file()]
  assert not [file for file in files if b'swordfish' in file.read_bytes()]
  recorded = json.loads((output / 'store.json').read_text())['source']
  assert recorded['location'] == recorded['options']['held_out'] == f'{tmp_path}/(redacted)'


def build(store, source, *arguments, shards=2):
  """The exit code of the command line."""
  command = ['--task=text', f'--shards={shards}', '--option=held_out=1e-9', f'--source={source}']
  return build_store.main([*command, f'--output={store}', *arguments])


def edit(file, content):
  """Writes a file at equal size, and gives it its old time of change."""
  before = file.stat()
  file.write_bytes(content)
  os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
  assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def stored(store):
  """The first words of the documents of a store."""
  documents = TokenStore.open(store, BYTES)
  zeros = np.zeros(len(documents.lengths), int)
  tokens = documents.read(np.arange(len(zeros)), zeros, zeros + 4)
  return collections.Counter(map(BYTES.decode, tokens.reshape(-1, 4)))


@pytest.mark.parametrize(
  ('kind', 'place'),
  [('.jsonl', 'text/a.jsonl'), ('.parquet', 'text'), ('.arrow', 'text/*'), ('.jsonl', 'link')],
)
def test_shards_of_two_texts_never_join(tmp_path, capsys, kind, place):
  (tmp_path / 'text').mkdir()
  (tmp_path / 'link').symlink_to('text')
  file, store, source = tmp_path / 'text' / f'a{kind}', tmp_path / 'store', tmp_path / place
  old = WRITERS[kind](TEXTS)
  new = WRITERS[kind]([text.replace('Text', 'Next') for text in TEXTS])
  file.write_bytes(old)
  assert build(store, source, '--shard=0') == 0
  edit(file, new)
  for shard in 0, 1:
    assert build(store, source, f'--shard={shard}') == 65
    assert f'1 changed: a{kind}' in capsys.readouterr().err
  assert not (store / 'shard-00001-of-00002').exists()

  file.write_bytes(old)  # the first advice; the time alone changes nothing
  assert build(store, source, '--shard=1') == 0
  assert stored(store) == {'Text': 24}
  assert not [left for left in store.iterdir() if left.name.startswith('.')]

  shutil.rmtree(store)
  assert build(store, source, '--shard=1') == 0
  edit(file, new)
  assert build(store, source, '--processes=2') == 65
  shutil.rmtree(store)  # the second advice
  assert build(store, source) == 0
  assert stored(store) == {'Next': 24}


def test_files_that_come_and_go_between_shards_are_named(tmp_path, capsys):
  (tmp_path / 'text').mkdir()
  for name in 'abc':
    (tmp_path / 'text' / f'{name}.txt').write_text('Text')
  assert build(tmp_path / 'store', tmp_path / 'text', '--shard=1') == 0
  (tmp_path / 'text' / 'a.txt').rename(tmp_path / 'text' / 'd.txt')
  assert build(tmp_path / 'store', tmp_path / 'text') == 65
  assert '1 new: d.txt; 1 gone: a.txt' in capsys.readouterr().err


def test_a_shard_of_a_text_that_changes_meanwhile_does_not_count(tmp_path):
  file, output = tmp_path / 'a.jsonl', tmp_path / 'store'
  texts = [f'Text {number}' for number in range(150)]
  file.write_bytes(json_lines(texts))
  selection = Selection('text', 'train', BYTES, str(file))
  bench = store_builder.Bench(selection, output, 1)
  other = json_lines([text.replace('Text', 'Next') for text in texts])
  with pytest.raises(DataError, match=r'being built from other files.*1 changed: a\.jsonl'):
    bench.build(0, lambda documents, tokens: edit(file, other))  # after 100 documents
  assert not list(output.glob('shard-*'))
  # No shard has the old text, so none is in the way.
  assert store_builder.build(selection, output, shards=1)['origin']
  assert set(stored(output)) == {'Next'}


def test_shards_without_a_record_of_their_files_never_join_either(tmp_path, capsys):
  (tmp_path / 'a.jsonl').write_bytes(json_lines(TEXTS))
  assert build(tmp_path / 'store', tmp_path / 'a.jsonl', '--shard=0') == 0
  edit(tmp_path / 'a.jsonl', json_lines([text.replace('Text', 'Next') for text in TEXTS]))
  (tmp_path / 'store' / '.source.jsonl').unlink()
  assert build(tmp_path / 'store', tmp_path / 'a.jsonl', '--shard=1') == 78
  said = capsys.readouterr().err
  assert 'shard-00000-of-00002 was built with another source' in said
  assert "found {'files_sha256'" in said
  assert not (tmp_path / 'store' / 'shard-00001-of-00002').exists()


def test_the_splits_of_a_run_are_of_one_text(tmp_path):
  file = tmp_path / 'a.jsonl'
  file.write_bytes(json_lines(TEXTS))
  how = {'source': str(file), 'options': {'held_out': 0.3}, 'data_dir': str(tmp_path / 'stores')}
  validation = TaskFeed('text', 'validation', 1, 0, **how)
  validation.read(0, 1)
  file.write_bytes(json_lines([text.replace('Text', 'Next') for text in TEXTS]))
  with pytest.raises(DataError, match=r'text-validation-.*1 changed: a\.jsonl') as said:
    TaskFeed('text', 'train', 1, 0, **how).read(0, 1)
  assert str(validation.store.path) in str(said.value)
  (command,) = [line for line in str(said.value).splitlines() if line.endswith('--rebuild')]
  assert build_store.main(shlex.split(command)[3:]) == 0
  feeds = [TaskFeed('text', split, 1, 0, **how) for split in ('train', 'validation')]
  contents = [_content(feed) for feed in feeds]
  assert all(b'Next' in content and b'Text' not in content for content in contents)


@pytest.mark.parametrize('mended', ['one', 'another file'])
def test_a_store_of_a_failed_start_is_replaced_after_its_text_was_mended(tmp_path, mended):
  (tmp_path / 'text').mkdir()
  file, wrong = tmp_path / 'text' / 'a.jsonl', tmp_path / 'text' / 'b.jsonl'
  file.write_bytes(json_lines(TEXTS))
  wrong.write_bytes(b'{"text": "b"}\n' * 7 + b'{"text": 7}\n')  # in the last shard
  how = {'source': str(tmp_path / 'text'), 'options': {'held_out': 1e-9}}

  def feed():
    return TaskFeed('text', 'train', 1, 0, data_dir=str(tmp_path / 'stores'), **how)

  for _ in range(2):
    with pytest.raises(DataError, match=r'Line 8 of .*b\.jsonl has 7 in the column text'):
      feed().read(0, 1)
  assert len(list(tmp_path.glob('stores/*/shard-*'))) == 7
  if mended == 'one':
    wrong.write_bytes(b'{"text": "Next b"}\n' * 7 + b'{"text": "Next b"}\n')
  else:
    wrong.rename(tmp_path / 'b.jsonl')
    (tmp_path / 'text' / 'c.jsonl').write_bytes(json_lines(['Next c']))
  store = feed().store
  assert stored(store.path) == {'Text': 24, 'Next': 8 if mended == 'one' else 1}


def test_an_empty_location_is_not_the_current_folder(tmp_path, monkeypatch):
  """As of a variable of a shell without a value."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'private.txt').write_text('private')
  for read in (
    lambda: Selection('text', 'train', BYTES, ''),
    lambda: Records('', ['text']),
  ):
    with pytest.raises(ConfigurationError, match='location of a text is empty'):
      read()


TASK_WITH_FILES = """
from valkyrie.data.document_source import DocumentSource, TextDocument, register
from valkyrie.data.source_files import SourceFiles


class Whole(DocumentSource):
  def __init__(self, location=None):
    super().__init__(('train', 'validation'))
    self._location = location

  def at(self, location, **options):
    return type(self)(location)

  def files(self, split):
    return SourceFiles(self._location, ('.txt',))

  def documents(self, split, shard, shards):
    files = self.files(split)
    for file in files.files[shard::shards]:
      with files.open(file) as stream:
        yield TextDocument(stream.read().decode(), '', '')

  def describe(self, split):
    return {'kind': 'whole'}


register('whole', Whole())
"""


def test_an_edited_task_that_names_its_files_is_no_silence(tmp_path, caplog, monkeypatch):
  module = tmp_path / 'edited_with_files.py'
  module.write_text(TASK_WITH_FILES)
  monkeypatch.syspath_prepend(tmp_path)
  folder = tmp_path / 'text'
  folder.mkdir()
  for number, text in enumerate(TEXTS):
    (folder / f'{number:02}.txt').write_text(text)
  task, data_dir = 'edited_with_files:whole', str(tmp_path / 'stores')
  built = [f'--task={task}', f'--source={folder}', f'--data_dir={data_dir}']
  assert build_store.main(built) == 0

  def read():
    caplog.clear()
    TaskFeed(task, 'train', 1, 0, source=str(folder), data_dir=data_dir).read(0, 1)
    return caplog.text

  assert 'edited' not in read().replace('edited_with_files', '')
  module.write_text(TASK_WITH_FILES.replace('.decode()', ".decode('utf-8')"))
  said = read()
  assert 'was edited after the store was built' in said and '--rebuild' in said
  assert build_store.main([*built, '--rebuild']) == 0
  assert 'was edited' not in read()
