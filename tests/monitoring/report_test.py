"""The page about runs: whole, self-contained, and with the numbers of the runs."""

import base64
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
    self.open, self.texts, self.outside, self.seen, self.pictures = [], [], [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag not in ('meta', 'img'):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.seen.append(tag)
    links = [value for name, value in attrs if name in ('src', 'href', 'xlink:href')]
    for link in links:
      kind, _, picture = link.partition('data:image/svg+xml;base64,')
      if picture and not kind:
        self.pictures.append(base64.b64decode(picture).decode())
      elif not link.startswith('#'):
        self.outside.append(link)

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
  assert not page.open and not page.outside and 'script' not in page.seen
  assert page.seen.count('img') == page.seen.count('figcaption') == len(page.pictures) == 8
  assert all('<path' in picture and '<script' not in picture for picture in page.pictures)
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
  row = '<td>validation loss</td><td class="number">9</td><td class="number">9.5</td>'
  assert row in text and 'median tokens/s' in said and 'median share' not in said
  assert page.texts.count('def <b>') == 2 and page.texts.count('first, step 40') == 1
  assert '1 bindings differ, 1 are the same.' in said
  assert text.count('<tr class="differs">') == 1
  assert 'Gradient norm' not in said  # no run has one
  assert html_report.main(arguments) == 74 and 'is there already' in capsys.readouterr().err
  assert html_report.main([str(tmp_path)]) == 78


def test_a_folder_of_pages_has_an_index(run, tmp_path, capsys):
  folders = [run('a <b>', 0.1), run('other', 0.2, 0.5)]
  arguments = [*map(str, folders), f'--folder={tmp_path}/reports']
  assert html_report.main(arguments) == 0
  assert capsys.readouterr().out.endswith(f'{tmp_path}/reports/index.html\n')
  text = (tmp_path / 'reports' / 'index.html').read_text()
  assert '<a href="run-1.html">a &lt;b&gt;</a>' in text
  assert '<th scope="col">validation loss</th>' in text
  rows = re.findall('<td class="number">(9|9.5)</td>', text)
  assert rows == ['9', '9.5']  # a row of each run
  assert re.findall('href="([^"]+)"', text) == ['run-1.html', 'run-2.html', 'all.html']
  titles = {}
  for path in (tmp_path / 'reports').iterdir():
    titles[path.name] = re.findall('<title>(.*)</title>', path.read_text())
  assert titles == {
    'index.html': ['Runs'],
    'run-1.html': ['a &lt;b&gt;'],
    'run-2.html': ['other'],
    'all.html': ['a &lt;b&gt;, other'],
  }
  assert html_report.main(arguments) == 74 and 'is there already' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('tokenizers', 'data', 'comparable'),
  [
    ((None, None), ('a', 'a'), True),
    ((b'x', b'x'), ('a', 'a'), True),
    ((b'x', b'x'), (None, None), True),
    ((b'x', b'y'), ('a', 'a'), False),
    ((None, b'y'), (None, None), False),
    ((b'x', b'x'), ('a', 'b'), False),  # another text at the same place
  ],
)
def test_runs_of_other_tokens_or_data_are_drawn_in_bits_per_byte(run, tokenizers, data, comparable):
  runs = []
  for name, tokenizer, fingerprint in zip(('a', 'b'), tokenizers, data, strict=True):
    folder = run(name, 0.1)
    if tokenizer is not None:
      (folder / 'tokenizer.model').write_bytes(tokenizer)
    if fingerprint is not None:
      (folder / 'eval' / 'data.json').write_text(json.dumps({'': fingerprint}))
    runs.append(recorded_run.read_run(folder))
  page = html_report.page(runs)
  _, *figures = page.partition('Validation</h2>')[2].split('<figure>')
  assert ('different tokenizers or validation data' in page) == (not comparable)
  assert ('nats per token' in figures[0]) == comparable
  assert ('bits per byte' in figures[0]) == (not comparable)


@pytest.mark.parametrize('value', [1e308, -1e308, 1e39, 9e38, 5e-324])
def test_numbers_that_would_overflow_an_axis_are_left_out(run, tmp_path, value):
  folder = run('a', 0.1)
  for place in ('metrics.jsonl', 'eval/metrics.jsonl'):
    lines = [json.loads(line) for line in (folder / place).read_text().splitlines()]
    for sign, line in zip((1, -1), lines, strict=False):
      line |= {name: sign * value for name in line if name not in ('step', 'phase')}
    (folder / place).write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  page = Page(html_report.page([recorded_run.read_run(folder)]))
  assert len(page.pictures) > 3
  assert not any('nan' in text for text in (*page.pictures, *page.texts))
  points = {'loss_by_position/1': value, 'loss_by_position/2': -value, 'loss_by_position/4': 2.0}
  assert (len(pictures.by_position(points)) == 3) == (abs(value) < 1e39)
  pictures.write_loss_by_position(tmp_path, {'a': points})


def test_the_speed_of_a_run_is_the_median_of_its_lines(run):
  folder = run('a', 0.1)
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  for line, speed in zip(lines[-3:], (None, 'NaN', 1e9), strict=True):
    line['tokens_per_second'] = speed
  del lines[0]['tokens_per_second'], lines[0]['step_seconds']
  (folder / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  found = html_report._results([recorded_run.read_run(folder)])
  assert '<td>median tokens/s</td><td class="number">200</td>' in found


def test_costs_and_evaluations_between_lines(run):
  found = recorded_run.read_run(run('first', 0.1))
  last = found.lines[-1]
  assert (last['seconds'], last['flops']) == (20.0, pytest.approx(4000 * 1e6 / 200))
  drawn = html_report._curves([found], 'evaluations', *html_report._VALIDATION, ('tokens', 't'))
  assert 'first 1.5</span>' in drawn  # of the quick part, as those before it
  (picture,) = Page(drawn).pictures
  (curve,) = re.findall(rf'd="(M[^"]*)"[^>]*stroke: {pictures.COLORS[0]}', picture)
  assert curve.count('L') == 1  # two points


def test_long_curves_are_thinned_and_short_ones_drawn():
  assert figure('t', 'x', 'y', [Curve('empty', [])]) == ''
  points = [(float(x), 1.0) for x in range(5000)]
  assert len(pictures._thinned(points)) <= 400 and pictures._thinned(points)[-1] == points[-1]
  (picture,) = Page(figure('t', 'x', 'y', [Curve('one', [(1.0, 2.0)])])).pictures
  assert f'stroke: {pictures.COLORS[0]}' in picture


def test_curves_differ_in_color_and_then_in_dashes():
  curves = [Curve(f'<{number}>', [(1.0, 2.0), (2.0, 1.0)]) for number in range(7)]
  drawn = figure('t', 'x', 'y', curves, logarithmic='x')
  (picture,) = Page(drawn).pictures
  for number, color in enumerate(pictures.COLORS):
    assert f'<span style="color: {color}">&lt;{number}&gt; 1</span>' in drawn
    assert f'stroke: {color}' in picture
  assert picture.count('stroke-dasharray') > 0
  assert [*map(short, (0.12345, 1234, 12_345, 4.56e6))] == ['0.1235', '1234', '12.3k', '4.56M']
