"""The page about runs: whole, self-contained, and with the numbers of the runs."""

import html.parser
import json
import math
import re

import numpy as np
import pytest

from valkyrie.monitoring import html_report, pictures, recorded_run
from valkyrie.monitoring.pictures import Curve, figure, short
from valkyrie.run.observers import Refusals
from valkyrie.training.objective import Sums
from valkyrie.training.spikes import RefusedSteps
from valkyrie.training.train_step import StepMetrics


class Page(html.parser.HTMLParser):
  """The tags that are open, the texts, and what would be fetched or run."""

  def __init__(self, text):
    super().__init__()
    self.open, self.texts, self.outside, self.seen, self.names = [], [], [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag != 'meta':
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.seen.append(tag)
    self.outside += [
      value
      for name, value in attrs
      if name in ('src', 'href', 'xlink:href') and not value.startswith('#')
    ]
    self.names += [value for name, value in attrs if name == 'id']

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)


@pytest.fixture
def run(tmp_path):
  """Writes the files of a run."""

  def write(name, rate, offset=0.0):
    folder = tmp_path / name
    (folder / 'eval').mkdir(parents=True)
    lines = [
      {
        'step': step,
        'tokens': 100 * step,
        'loss': 3 / step + offset,
        'grad_norm': None,
        'learning_rate': rate,
        'step_seconds': 0.5,
        'tokens_per_second': 200.0,
        'tokens_per_second_per_device': 200.0,
        'tflops_per_second_per_device': 1e-6,
        'mfu': None,
        'host_memory_peak': 2**30 + step,
        'phase': step // 21,
      }
      for step in range(2, 41, 2)
    ]
    lines[-1] |= {'hooks/sample_1': 'def <b>', 'hooks/loss': 0.5}
    evaluations = [
      {
        'step': step,
        'loss': 2.0 + offset,
        'loss_by_position/1': 4.0,
        'loss_by_position/2': math.nan,
      }
      for step in (11, 40)
    ]
    evaluations[-1] |= {'loss': 9.0 + offset, 'quick_loss': 1.5 + offset, 'bits_per_byte': 1.25}
    for path, found in (('metrics', lines), ('eval/metrics', evaluations)):
      (folder / f'{path}.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in found))
    sums = Sums(*[np.float32(math.nan)] * 3, {})
    refused = StepMetrics(sums, np.float32(1), {}, np.float32(1), np.int32(1), np.bool_(False))
    with Refusals(folder, RefusedSteps(0, lambda _: 'a <file> & more'), print) as refusals:
      refusals(7, refused)
    bindings = {'Optimizer.learning_rate': rate, 'S5.state_size': 8}
    (folder / 'config.json').write_text(json.dumps({'version': '7.8.9', 'bindings': bindings}))
    (folder / 'model_info.txt').write_text('1,234 parameters\n\ntable')
    return folder

  return write


def test_a_page_of_two_runs(run, tmp_path, capsys):
  output = tmp_path / 'report.html'
  arguments = [str(run('first', 0.1)), str(run('second', 0.2, 0.5)), f'--output={output}']
  assert html_report.main(arguments) == 0
  text = output.read_text()
  page = Page(text)
  assert not page.open and not page.outside and 'script' not in page.seen and 'http' not in text
  assert len(page.names) == len({*page.names}) > 0
  assert page.seen.count('svg') == page.seen.count('figcaption') == 10
  said = ' '.join(page.texts)
  for expected in (
    'first',
    'second',
    '1,234 parameters',
    '7.8.9',
    '1.25',
    'not finite',
    'a <file> & more',
    'Speed',
  ):
    assert expected in said
  assert '9.5 (+0.5, worse)' in said and '200 (+0)' in said and 'median mfu' not in said
  assert text.count('class="number worse"') == 1 and 'class="number better"' not in text
  assert page.texts.count('def <b>') == 2 and page.texts.count('first, step 40') == 1
  phases = said.partition('tokens until then')[2].split()
  assert phases[:5] == ['first', '0', '2', '20', '2,000']
  assert phases[5:10] == ['first', '1', '22', '40', '4,000']
  assert '1 bindings differ, 1 are the same.' in said
  assert text.count('<tr class="differs">') == 1
  assert 'Gradient norm' not in said  # no run has one
  assert html_report.main(arguments) == 74 and 'is there already' in capsys.readouterr().err
  assert html_report.main([str(tmp_path)]) == 78


@pytest.mark.parametrize(
  ('tokenizers', 'data', 'sources', 'comparable', 'same_text'),
  [
    ((None, None), ('a', 'a'), 'tt', True, True),
    ((b'x', b'x'), ('a', 'a'), 'tt', True, True),
    ((b'x', b'x'), (None, None), 'tt', True, True),
    ((b'x', b'y'), ('a', 'b'), 'tt', False, True),
    ((None, b'y'), (None, None), 'tt', False, True),
    ((b'x', b'x'), ('a', 'b'), 'tt', False, False),  # another text at the same place
    ((b'x', b'y'), ('a', 'b'), 'tu', False, False),
  ],
)
def test_numbers_of_other_tokens_or_texts_are_not_compared(
  run, tokenizers, data, sources, comparable, same_text
):
  runs = []
  for name, offset, tokenizer, fingerprint, source in zip(
    ('a', 'b'), (0, 1), tokenizers, data, sources, strict=True
  ):
    folder = run(name, 0.1, offset)
    bindings = {'TaskFeed.source': source, 'train/TaskFeed.source': name}
    (folder / 'config.json').write_text(json.dumps({'version': '7', 'bindings': bindings}))
    if tokenizer is not None:
      (folder / 'tokenizer.model').write_bytes(tokenizer)
    if fingerprint is not None:
      (folder / 'eval' / 'data.json').write_text(json.dumps({'': fingerprint}))
    evaluations = folder / 'eval' / 'metrics.jsonl'
    text = evaluations.read_text().replace(
      '"bits_per_byte": 1.25', f'"bits_per_byte": {2 - offset}'
    )
    evaluations.write_text(text)
    runs.append(recorded_run.read_run(folder))
  page = html_report.page(runs)
  rows = {row.partition('</td>')[0]: row for row in html_report._results(runs).split('<tr><td>')}
  assert ('worse' in rows['loss']) == comparable
  assert ('not compared' in rows['loss']) == (not comparable)
  assert ('+0' in rows['median tokens_per_second']) == (tokenizers[0] == tokenizers[1])
  assert ('better' in rows['bits_per_byte']) == same_text
  assert ('(other validation data, not compared)' in rows['bits_per_byte']) == (not same_text)
  figures = page.split('<figure>')[1:]
  for both in (one.partition('</figcaption>')[0] for one in figures):
    drawn = {name for name in 'ab' if f'">{name} ' in both}
    assert len(drawn) == 2 or (not comparable and ('bits per byte' not in both or not same_text))
    assert same_text or len(drawn) == 1
    colors = {name: re.search(rf'--c(\d)\)">{name} ', both)[1] for name in drawn}
    assert all(color == str('ab'.index(name)) for name, color in colors.items())
  assert ('bits per byte' in page.partition('<figure>')[2]) == (not comparable)


@pytest.mark.parametrize('value', [1e308, -1e308, 1e39, 9e38, 5e-324])
def test_numbers_that_would_overflow_an_axis_are_left_out(run, tmp_path, value):
  folder = run('a', 0.1)
  for place in ('metrics.jsonl', 'eval/metrics.jsonl'):
    lines = [json.loads(line) for line in (folder / place).read_text().splitlines()]
    for sign, line in zip((1, -1), lines, strict=False):
      line |= {name: sign * value for name in line if name not in ('step', 'phase')}
    (folder / place).write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  page = html_report.page([recorded_run.read_run(folder)])
  assert page.count('<figure>') > 5 and 'nan' not in page
  points = {'loss_by_position/1': value, 'loss_by_position/2': -value, 'loss_by_position/4': 2.0}
  assert (len(pictures.by_position(points)) == 3) == (abs(value) < 1e39)
  pictures.write_loss_by_position(tmp_path, {'a': points})


def test_losses_of_training_are_compared_only_on_the_same_texts(run):
  runs = []
  for name, source in (('a', 't'), ('b', 't'), ('c', 'u')):
    folder = run(name, 0.1, len(runs))
    (folder / 'eval/metrics.jsonl').unlink()
    bindings = {'TaskFeed.source': source, 'validation/TaskFeed.source': name}
    (folder / 'config.json').write_text(json.dumps({'version': '7', 'bindings': bindings}))
    runs.append(recorded_run.read_run(folder))
  runs.append(recorded_run.read_run(run('d', 0.1, 3)))
  (row,) = (row for row in html_report._results(runs).split('<tr>') if row.startswith('<td>loss'))
  cells = row.split('</td>')
  assert 'worse' in cells[2] and '(other training data, not compared)' in cells[3]
  assert '(of validation, not compared)' in cells[4]


def test_the_speed_of_a_run_is_the_median_of_its_lines(run):
  folder = run('a', 0.1)
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  for line, speed in zip(lines[-3:], (None, 'NaN', 1e9), strict=True):
    line['tokens_per_second'] = speed
  del lines[0]['tokens_per_second'], lines[0]['step_seconds']
  (folder / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  found = html_report._results([recorded_run.read_run(folder)])
  assert '<td>median tokens_per_second</td><td class="number">200</td>' in found


def test_costs_and_evaluations_between_lines(run):
  found = recorded_run.read_run(run('first', 0.1))
  last = found.lines[-1]
  assert (last['seconds'], last['flops']) == (20.0, pytest.approx(4000 * 1e6 / 200))
  drawn = html_report._curves([found], 'evaluations', *html_report._VALIDATION, ('tokens', 't'))
  assert 'first 1.5</span>' in drawn  # of the quick part, as those before it
  (curve,) = re.findall(r'd="(M[^"]*)"[^>]*stroke: var\(--c0\)', drawn)
  assert curve.count('L') == 1  # two points


def test_long_curves_are_thinned_and_short_ones_drawn():
  assert figure('t', 'x', 'y', [Curve('empty', [])]) == ''
  points = [(float(x), 1.0) for x in range(5000)]
  assert len(pictures._thinned(points)) <= 400 and pictures._thinned(points)[-1] == points[-1]
  assert '<use' in figure('t', 'x', 'y', [Curve('one', [(1.0, 2.0)])])


def test_curves_have_the_colors_and_fonts_of_the_page():
  curves = [Curve(f'<{number}>', [(1.0, 2.0), (2.0, 1.0)]) for number in range(7)]
  found = figure('t', 'x', 'y', curves, logarithmic='x')
  for color in range(6):
    assert f'stroke: var(--c{color})' in found
  assert not re.search('#0000|font-family|<style', found)
  assert [*map(short, (0.12345, 1234, 12_345, 4.56e6))] == ['0.1235', '1234', '12.3k', '4.56M']
