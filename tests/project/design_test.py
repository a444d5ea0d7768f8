"""The house is as docs/design.md says: one direction, and tests for every invariant."""

import ast
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / 'valkyrie'
QUESTIONS = {'what', 'which', 'whether', 'where', 'when', 'how', 'who', 'why'}


def room(module):
  """'models' for valkyrie.models.block, 'lab/suites' for valkyrie.lab.suites.ruler."""
  _, name, *inner = module.split('.')
  return f'{name}/{inner[0]}' if name == 'lab' and inner else name


def module_of(file):
  return '.'.join(file.relative_to(ROOT).with_suffix('').parts)


def imported(file):
  """The modules of the package that a file imports, at its head or inside a function."""
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('valkyrie'):
      yield from (
        f'{node.module}.{alias.name}' if node.module == 'valkyrie' else node.module
        for alias in node.names
        if alias.name != '__version__'
      )


def arrows():
  files = [file for file in PACKAGE.rglob('*.py') if file.parent != PACKAGE or file.stem[0] != '_']
  pairs = {(room(module_of(file)), room(name)) for file in files for name in imported(file)}
  return {(above, below) for above, below in pairs if above != below}


def test_rooms_import_in_one_direction():
  floors, found = {}, arrows()

  def floor(name, above=()):
    assert name not in above, f'a circle: {" -> ".join((*above, name))}'
    if name not in floors:
      below = [other for upper, other in found if upper == name]
      floors[name] = 1 + max((floor(other, (*above, name)) for other in below), default=0)
    return floors[name]

  for name, _ in sorted(found):
    floor(name)
  table = (ROOT / 'docs' / 'design.md').read_text().partition('## Contracts')[0]
  stated = {
    name: int(number)
    for number, names in re.findall(r'^\| (\d) \| (`.*?`) \|', table, re.M)
    for name in re.findall(r'`([\w/]+)[/.]', names)
  }
  assert stated == floors


def test_the_drawing_has_the_nearest_rooms_that_each_room_imports():
  below = {}
  for upper, lower in arrows():
    below.setdefault(upper, set()).add(lower)

  def all_below(name):
    lower = below.get(name, set())
    return lower.union(*(all_below(other) for other in lower))

  nearest = {}
  for name, lower in below.items():
    farther = set().union(*(all_below(other) for other in lower))
    nearest[name] = lower - farther
  page = (ROOT / 'docs' / 'design.md').read_text()
  drawing = page.partition('    floor  spine')[2].partition('\n\n')[0]
  drawn = {
    name: {*rooms.split(', ')}
    for name, rooms in re.findall(r'([\w/]+) -> ([\w/]+(?:, [\w/]+)*)', drawing)
  }
  assert drawn == nearest


def named_modules(file):
  """What a file imports, anywhere in it, also by a call with the name of a module."""
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.ImportFrom):
      yield from (node.module, *(f'{node.module}.{alias.name}' for alias in node.names))
    elif isinstance(node, ast.Call):
      yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def test_modules_import_in_one_direction():
  files = {module_of(file): file for file in PACKAGE.rglob('*.py')}
  imports = {name: (files.keys() & {*named_modules(file)}) - {name} for name, file in files.items()}
  graphlib.TopologicalSorter(imports).prepare()  # raises a CycleError that names the modules


def test_tests_of_two_rooms_share_only_what_is_in_support():
  tests = {file.stem: file for file in (ROOT / 'tests').rglob('*_test.py')}
  for file in (ROOT / 'tests').rglob('*.py'):
    for node in ast.walk(ast.parse(file.read_text())):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      if isinstance(node, ast.ImportFrom):
        names = [node.module]
      for name in names:
        assert name not in tests or tests[name].parent == file.parent, f'{file} imports {name}'


def test_the_spine_imports_no_wing():
  page = (ROOT / 'docs' / 'design.md').read_text().partition('## Contracts')[0]
  wings = {*re.findall(r'^\| \d \| `([\w/]+)[/.]', page.partition('The wings,')[2], re.M)}
  assert {'inference', 'lab/certificates', 'main'} <= wings
  assert not {(above, below) for above, below in arrows() if below in wings and above not in wings}


def test_the_one_ambient_value_is_in_sharding():
  made = [file for file in PACKAGE.rglob('*.py') if 'ContextVar(' in file.read_text()]
  assert made == [PACKAGE / 'sharding' / 'ambient.py']
  assert made[0].read_text().count('ContextVar(') == 1


def test_module_titles_are_no_questions():
  for file in PACKAGE.rglob('*.py'):
    title = ast.get_docstring(ast.parse(file.read_text()))
    assert title, file
    assert title.split()[0].lower() not in QUESTIONS, file


def test_every_program_explains_its_errors():
  # main ends its processes, too; the others run another program, or answer only the one above them.
  others = {'main', 'supervisor', 'template_program', 'learn'}
  files = [*PACKAGE.rglob('*.py'), *(ROOT / 'scripts' / 'experiments').glob('*.py')]
  for file in files:
    text = file.read_text()
    if file.stem not in others and "__name__ == '__main__'" in text:
      assert '@console.program\ndef main(' in text and text.endswith('  sys.exit(main())\n'), file


def test_every_invariant_is_held_by_tests_and_every_mark_is_an_invariant():
  text = (ROOT / 'docs' / 'design.md').read_text().partition('## Invariants')[2]
  stated = {int(number) for number in re.findall(r'^(\d+)\. \*\*', text, re.M)}
  marked = {
    int(number)
    for file in (ROOT / 'tests').rglob('*_test.py')
    for number in re.findall(r'^@pytest\.mark\.invariant\((\d+)\)$', file.read_text(), re.M)
  }
  assert stated == marked == set(range(1, len(stated) + 1))
