"""An unknown text is read whole, or a line says how it is cut."""

import re

import pytest
import tiny_run

from valkyrie import main
from valkyrie.data import own_text

FILES = ['gin/words_cpu.gin']  # batches of 64 rows


@pytest.fixture
def text(tmp_path):
  """Writes a folder with documents of so many bytes."""

  def write(**sizes):
    for name, size in sizes.items():
      lines = 'a line of text.\n' * (size // 16)
      (tmp_path / f'{name}.txt').write_text(f'{name}\n{lines}')
    return str(tmp_path)

  return write


def found(location, *flags):
  """The values of the flags, by name, and the sentences."""
  flags, sentences = own_text.own_text(location, FILES, flags)
  assert flags[0] == '--gin_file=gin/data/text.gin'
  values = dict(flag.removeprefix('--gin.').split('=', 1) for flag in flags[1:])
  assert eval(values.pop('text')) == location
  return values, ' '.join(sentences)


def test_enough_documents_stay_whole(text):
  values, said = found(text(**{f'n{number}': 4000 for number in range(128)}))
  assert values == {'text_column': "'text'", 'held_out': '0.1'}
  assert said == '10.0% of the documents validate. Documents are read whole.'


def test_few_documents_are_cut_no_shorter_than_the_rows_need_and_it_is_said(text):
  location = text(one=100_000, two=300_000)
  values, said = found(location)
  size = 400_000 // 128
  assert abs(int(values['text_cut']) - size) < 10
  assert 'has 2 documents, and the rows of the batches need 128.' in said
  assert re.search(r'cut into pieces of at most 3,12\d bytes, so no longer memory is learned', said)
  flags = ('--gin.batch_size=1', '--gin.held_out="/elsewhere"')
  assert 'text_cut' not in found(location, *flags)[0]
  _, said = found(location, '--gin.batch_size=1', '--gin.held_out=0.01')
  assert 'need 800.' in said, 'a hundredth of them is two for each of 4 rows of the validation'


def test_a_large_text_holds_out_less(text, monkeypatch):
  monkeypatch.setattr(own_text, '_SHARES', ((5000, 0.01), (0, 0.1)))
  assert found(text(one=4000))[0]['held_out'] == '0.1'
  assert found(text(one=4000, two=1000))[0]['held_out'] == '0.01'


def test_what_a_user_has_set_stays(text):
  location = text(one=100_000)
  values, said = found(location, '--gin.text_cut=50', '--gin.held_out="/elsewhere"')
  assert values['text_cut'] == '50' and values['held_out'] == "'/elsewhere'"
  assert said == ''


def test_files_of_a_validation_split_validate(tmp_path):
  for name in ('train', 'validation'):
    (tmp_path / f'{name}.jsonl').write_text('{"text": "abc"}\n' * 200)
  values, said = found(str(tmp_path))
  assert values == {'text_column': "'text'"}
  assert said == 'The files of the split validation validate. Documents are read whole.'


def test_the_flags_are_printed_and_a_missing_text_is_an_error(text, capsys):
  assert own_text.main([text(one=100_000), '--gin_file=gin/words_cpu.gin', '--gin.text_cut=9']) == 0
  flags = capsys.readouterr().out.splitlines()
  assert flags[0] == '--gin_file=gin/data/text.gin' and '--gin.text_cut=9' in flags
  assert own_text.main(['/not/there', '--gin_file=gin/words_cpu.gin']) == 65
  assert 'valkyrie: The source /not/there' in capsys.readouterr().err


@pytest.mark.parametrize('sizes', [[6000], [300, 90_000], [2000] * 30])
def test_a_run_reads_any_such_text(tmp_path, sizes, monkeypatch):
  monkeypatch.setenv('VALKYRIE_CACHE', str(tmp_path / 'cache'))
  folder = tmp_path / 'text'
  folder.mkdir()
  for number, size in enumerate(sizes):
    (folder / f'{number}.txt').write_text(f'{number} ' * (size // 2) + '\n')
  file = tmp_path / 'toy.gin'
  file.write_text(tiny_run.gin_text(tmp_path))
  flags, _ = own_text.own_text(str(folder), [str(file)])
  main.run([f'--gin_file={file}', *flags, f'--model_dir={tmp_path / "run"}'])
  assert 2 in tiny_run.metrics(tmp_path / 'run', 'eval')
