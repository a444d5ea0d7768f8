"""What commands print is written below them, and the pages of docs/results name commands."""

import pathlib
import re

import page_blocks
import pytest
import write_results

EXPERIMENTS = pathlib.Path(write_results.__file__).parent
PAGE = """# Results

<!-- run: printf 'seen:\\n| a |\\n| --- |\\n| 1 |\\n' -->
old
<!-- end of run -->

<!-- run: echo 'two  words' -->
old
<!-- end of run -->

<!-- run: echo half; exit 3 -->
old
<!-- end of run -->
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
  monkeypatch.setattr(write_results, 'FOLDER', tmp_path)
  path = tmp_path / 'toy.md'
  path.write_text(PAGE)
  return path


def test_tables_and_texts_are_written_and_a_failure_leaves_its_own(page, capsys):
  assert write_results.main(['toy']) == 1
  table, text, failed = page.read_text().split('<!-- run: ')[1:]
  assert table.split('-->')[1].split('<!--')[0] == '\n\n| a |\n| --- |\n| 1 |\n\n'
  assert text.split('-->')[1].split('<!--')[0] == '\n\n    two  words\n\n'
  assert '\nold\n' in failed
  assert 'ended with 3' in capsys.readouterr().err


def test_only_some_commands_run(page):
  assert write_results.main(['toy', '--only=words']) == 0
  assert page.read_text() == PAGE.replace("words' -->\nold", "words' -->\n\n    two  words\n")


def test_pages_name_experiments_that_exist():
  folder = EXPERIMENTS.parents[1] / 'docs' / 'results'
  texts = [path.read_text() for path in folder.glob('*.md')]
  names = {name for text in texts for name in re.findall(r'bash scripts/experiment (\w+)', text)}
  assert len(names) > 10
  assert {f'{name}.py' for name in names} <= {path.name for path in EXPERIMENTS.glob('*.py')}


def test_every_table_stands_in_a_section_that_says_where_it_comes_from():
  origin = re.compile(
    r'bash scripts/|python -m valkyrie|scripts/compare|scripts/experiment'
    r'|This prints the table|\b[Bb]y\s+count\b'
  )
  not_measured = '## Recipes\n', '## Beside what others publish\n'
  folder = EXPERIMENTS.parents[1] / 'docs' / 'results'
  for page in folder.glob('*.md'):
    for section in re.split(r'^(?=##+ )', page.read_text(), flags=re.M):
      if '\n| ---' in section and not section.startswith(not_measured):
        assert origin.search(section), f'{page.name}: {section.splitlines()[0]}'


@pytest.mark.parametrize('page', ['', 'a\nc\n', 'b\na\n', 'a\nb\na\nb\n'])
def test_a_page_without_one_block_is_not_written(page):
  assert page_blocks.with_block('1\na\n2\nb\n3', 'a', 'b', 'new') == '1\na\nnew\nb\n3'
  with pytest.raises(ValueError, match='expected a page with a once, and b below it'):
    page_blocks.with_block(page, 'a', 'b', 'new')
