"""Links between pages lead to files and headings that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / f'{name}.md' for name in ('README', 'CONTRIBUTING', 'CHANGELOG')]
PAGES += sorted((ROOT / 'docs').rglob('*.md'))
LINK = re.compile(r'\]\(([^)\s]+)\)')


def anchors(page):
  """Those of its headings, as GitHub and mkdocs make them."""
  prose = re.sub(r'^```.*?^```$', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
  for heading in re.findall(r'^#+ (.*)', prose, re.MULTILINE):
    words = re.sub(r'[^\w\s-]', '', heading.lower())
    yield words.strip().replace(' ', '-')


def test_links_lead_somewhere():
  checked = 0
  for page in PAGES:
    for link in LINK.findall(page.read_text()):
      if re.match(r'\w+:', link):
        continue
      name, _, anchor = link.partition('#')
      target = page.parent / name if name else page
      assert target.exists(), f'{page}: {link}'
      assert not anchor or anchor in anchors(target), f'{page}: {link}'
      checked += 1
  assert checked > 150


def test_every_page_is_in_the_navigation():
  navigation = (ROOT / 'docs' / 'mkdocs.yml').read_text().partition('\nnav:')[2]
  for page in (ROOT / 'docs').rglob('*.md'):
    assert f'{page.relative_to(ROOT / "docs")}' in re.split(r'[\s,\[\]]+', navigation), page


def test_pages_are_within_their_length():
  """Measured tables stand in docs/results, so that the pages can be read in a day."""
  read = [*PAGES[:2], *(ROOT / 'docs').glob('*.md')]
  assert sum(len(page.read_text().split()) for page in read) <= 36_000
