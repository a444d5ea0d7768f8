"""Every deletion and replacement of the package goes through storage/owned.py."""

import ast
import collections
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
THE_ONE_PLACE = ROOT / 'valkyrie' / 'storage' / 'owned.py'
DELETES = {
  'rmtree', 'unlink', 'rmdir', 'removedirs', 'rename', 'renames', 'truncate', 'ftruncate',
  'TemporaryDirectory', 'write_text', 'write_bytes', 'move',
}  # fmt: skip
# {file: calls that nothing of a user can meet}
APART = {
  # In the folder of an export, a step or pages that has its temporary name or its mark still.
  'inference/export.py': {'write_text': 2},
  'lab/decomposition/page.py': {'write_text': 3},
  'monitoring/html_report.py': {'write_bytes': 1},
  'weights/tensor_writer.py': {'write_text': 1},
  'checkpoint/steps.py': {'write_bytes': 2},
  'data/shard_arrays.py': {"open 'wb'": 1},
  # The copy of a run in a bucket, in a folder that this process has made in the memory of names.
  'storage/run_directory.py': {'TemporaryDirectory': 1, 'write_bytes': 1},
  # The null device, and a descriptor that is open.
  'data/build_store.py': {"open 'w'": 1},
  'data/document_source.py': {"open 'w'": 1},
  'distributed/console.py': {"open 'w'": 1},
}


def deletion(call):
  """How a call may delete or replace something, or None."""
  function = call.func
  name = function.attr if isinstance(function, ast.Attribute) else getattr(function, 'id', '')
  owner = (
    function.value.id
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    else ''
  )
  if owner == 'owned':
    return None
  if name in DELETES or (owner == 'os' and name in ('remove', 'replace')):
    return name
  if name == 'replace' and len(call.args) == 1 and not call.keywords:  # of a path; texts need two
    return name
  if name == 'open':
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    texts += [each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)]
    modes = [text for text in texts if isinstance(text, str) and len(text) < 4 and 'w' in text]
    flags = any(getattr(each, 'attr', '') == 'O_TRUNC' for each in ast.walk(call))
    return f'open {modes[0]!r}' if modes else 'open O_TRUNC' if flags else None
  return None


def deletions(text):
  calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
  return dict(collections.Counter(filter(None, map(deletion, calls))))


def test_nothing_else_deletes_or_replaces():
  files = [*(ROOT / 'valkyrie').rglob('*.py'), *(ROOT / 'tasks').rglob('*.py')]
  found = {
    file.relative_to(
      ROOT / 'valkyrie' if ROOT / 'valkyrie' in file.parents else ROOT
    ).as_posix(): deletions(file.read_text())
    for file in files
    if file != THE_ONE_PLACE
  }
  assert {name: calls for name, calls in found.items() if calls} == APART


@pytest.mark.parametrize(
  ('code', 'found'),
  [
    ('shutil.rmtree(place)', 'rmtree'),
    ('place.unlink(missing_ok=True)', 'unlink'),
    ('os.remove(place)', 'remove'),
    ('os.replace(a, b)', 'replace'),
    ('unfinished.replace(path)', 'replace'),
    ("open(path, 'w')", "open 'w'"),
    ("path.open(mode='wb')", "open 'wb'"),
    ('os.open(path, os.O_WRONLY | os.O_TRUNC)', 'open O_TRUNC'),
    ("path.write_text('')", 'write_text'),
    ("'a'.replace('a', 'b')", None),
    ('dataclasses.replace(phase, steps=None)', None),
    ('names.remove(name)', None),
    ("open(path, 'rb')", None),
    ('owned.move(a, b)', None),
  ],
)
def test_calls_that_delete_are_recognized(code, found):
  assert deletions(code) == ({found: 1} if found else {})
