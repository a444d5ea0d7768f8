"""A hook of mkdocs: the pages of the site that are not in docs/.

README, CHANGELOG and CONTRIBUTING with their links turned to the site, and for each room of the
package a page with the docstrings of its modules.
"""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
REPOSITORY_PAGES = {'README': 'index', 'CHANGELOG': 'changelog', 'CONTRIBUTING': 'contributing'}


def on_config(config):
  """Adds the rooms to the navigation."""
  config.nav.append({'API': [{name: f'api/{name}.md'} for name in _rooms()]})
  return config


def on_page_markdown(markdown, **_):
  """Turns the name of a file after ``` into a title, and links out of docs/ to the site."""
  for name, page in REPOSITORY_PAGES.items():
    markdown = markdown.replace(f'](../{name}.md', f']({page}.md')
  return re.sub(r'^```(\w+) (\S+)$', r'```\1 title="\2"', markdown, flags=re.MULTILINE)


def on_files(files, config):
  """Adds the pages."""
  for source, page in REPOSITORY_PAGES.items():
    text = (ROOT / f'{source}.md').read_text()
    text = re.sub(r'\]\(docs/', '](', text)
    # The site has no gin files: of a link to one, its text stays.
    text = re.sub(r'\[([^]]*)\]\(gin/[^)]*\)', r'\1', text)
    for name, other in REPOSITORY_PAGES.items():
      text = text.replace(f']({name}.md', f']({other}.md')
    files.append(File.generated(config, f'{page}.md', content=text))
  for name, modules in _rooms().items():
    text = '\n'.join([f'# {name}\n', *(f'::: {module}\n' for module in modules)])
    files.append(File.generated(config, f'api/{name}.md', content=text))
  return files


def _rooms():
  """{room: its modules by their dotted names}, in the order of the alphabet."""
  rooms = {}
  for path in sorted((ROOT / 'valkyrie').glob('**/*.py')):
    module = path.relative_to(ROOT).with_suffix('').parts
    parts = module[:-1] if module[-1] == '__init__' else module
    depth = 3 if parts[:2] == ('valkyrie', 'lab') else 2
    rooms.setdefault('.'.join(parts[:depth]), []).append('.'.join(parts))
  return rooms
