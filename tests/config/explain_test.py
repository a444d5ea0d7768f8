"""`--run_mode=explain`: the file or flag that set each macro and binding."""

import pytest

from valkyrie import main
from valkyrie.config import paths

TINY = f'{paths.GIN}/tiny_cpu.gin'


@pytest.fixture
def explained(tmp_path, monkeypatch, capsys):
  """A function from arguments to {name: the rest of its line}, in a folder with mine.gin."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.gin').write_text('train_steps = 9\n\nS5.state_size = 64\n')

  def explain(*arguments):
    files = ('--gin_file=gin/tiny_cpu.gin', '--gin_file=mine.gin')
    assert main.main([*files, *arguments, '--run_mode=explain']) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(' = ', 1) for line in lines)

  return explain


def test_the_setter_and_what_it_replaces(explained, tmp_path):
  lines = explained('--gin.train_steps=4')
  value, setters = lines['train_steps'].split('# ')
  assert value.strip() == '4'
  assert setters == f'--gin.train_steps, replaces mine.gin:1, {TINY}:12'
  model = f'{paths.GIN}/models/tiny.gin:19'
  assert lines['S5.state_size'].split() == ['64', '#', 'mine.gin:3,', 'replaces', model]
  assert lines['train/TaskFeed.split'].split()[0] == "'train'"
  assert not (tmp_path / 'runs').exists()


def test_macros_come_first(explained):
  names = list(explained())
  bindings = [name for name in names if '.' in name]
  assert names[: len(names) - len(bindings)] == sorted(set(names) - set(bindings))
  assert names[-len(bindings) :] == sorted(bindings)


def test_a_secret_is_not_printed(explained):
  secret = 'https://reader:hidden@example.org/texts.jsonl'
  lines = explained('--gin_file=gin/data/text.gin', f"--gin.text='{secret}'")
  assert 'hidden' not in ''.join(lines.values())
  assert lines['text'].startswith("'https://(redacted)@example.org/texts.jsonl'")
