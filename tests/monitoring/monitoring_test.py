"""Metrics, writers, progress and reports, also after a crash, a NaN or a full disk."""

import contextlib
import errno
import fcntl
import inspect
import io
import json
import math
import os
import pty
import re
import resource
import subprocess
import sys
import termios
import threading
import time
import types

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jaxlib
import numpy as np
import PIL.Image
import pytest

from valkyrie import packages
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.monitoring import chips, memory, metric_writer, model_info, system
from valkyrie.monitoring.json_lines import JsonLines, by_step
from valkyrie.monitoring.metrics import speed_metrics, text_metrics
from valkyrie.monitoring.progress import Progress
from valkyrie.monitoring.writers import create_writers
from valkyrie.run import observers

IMAGE = np.arange(60, dtype=np.uint8).reshape(1, 4, 5, 3)


def refuse_constant(name):
  raise AssertionError(f'{name} is not JSON')


def read_lines(path):
  text = path.read_text()
  assert text.endswith('\n')
  return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


def test_text_metrics_count_bits():
  metrics = text_metrics(jnp.float32(6 * math.log(2)), np.float32(3), tokens_per_byte=0.5)
  assert metrics == pytest.approx(
    {
      'loss': 2 * math.log(2),
      'perplexity': 4,
      'bits_per_token': 2,
      'bits_per_byte': 1,
      'targets': 3,
    },
    rel=1e-6,
  )
  assert text_metrics(1.0, 1.0, None)['bits_per_byte'] is None
  assert math.isnan(text_metrics(0.0, 0.0, None)['loss'])
  assert math.isnan(text_metrics(0.0, 0.0, None)['perplexity'])
  assert text_metrics(1e6, 1.0, None)['perplexity'] == math.inf


def test_speed_metrics_are_per_step_and_device():
  known = {'tokens': 8000, 'steps': 4, 'seconds': 2.0, 'devices': 8}
  assert speed_metrics(**known, flops_per_token=1e10, peak_flops=2e13) == {
    'step_seconds': 0.5,
    'tokens_per_second': 4000.0,
    'tokens_per_second_per_device': 500.0,
    'tflops_per_second_per_device': 5.0,
    'mfu': 0.25,
  }
  unknown = speed_metrics(**known, flops_per_token=None, peak_flops=1.0)
  assert unknown['mfu'] is unknown['tflops_per_second_per_device'] is None


def test_chips_of_device_kinds():
  assert chips.of_kind('TPU v5') is chips.TPUS['v5p']
  assert chips.of_kind('TPU v5 lite') is chips.TPUS['v5e']
  assert chips.of_kind('TPU v4 lite') is None
  assert chips.peak_flops('NVIDIA H100 80GB HBM3') == 989e12
  assert chips.peak_flops('cpu') is None


def test_json_lines_are_valid_json_and_only_appended_to(tmp_path):
  path = tmp_path / 'deep' / 'metrics.jsonl'
  lines = JsonLines(path)
  lines.write({'step': 1, 'loss': math.nan, 'up': math.inf, 'down': -math.inf, 'mfu': None})
  assert read_lines(path) == [
    {'step': 1, 'loss': 'NaN', 'up': 'Infinity', 'down': '-Infinity', 'mfu': None}
  ], 'each line is written immediately'
  lines.close()
  with path.open('a') as torn:
    torn.write('{"step": 2, "loss": ' + '1' * 5000)  # as after a crash of the machine
  assert [*by_step(path)] == [1], 'a reader leaves out what is no line'
  resumed = JsonLines(path)
  resumed.write({'step': 2})
  resumed.close()
  assert [line['step'] for line in read_lines(path)] == [1, 2]


def test_a_file_with_only_an_incomplete_line_is_emptied(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"st')
  lines = JsonLines(path)
  lines.write({'step': 1})
  lines.close()
  assert read_lines(path) == [{'step': 1}]


def steps_of(path):
  return [line['step'] for line in read_lines(path)]


def write(path, *lines):
  writer = JsonLines(path)
  for step, loss in lines:
    writer.write({'step': step, 'loss': loss})
  writer.close()


def test_both_lines_of_a_repeated_step_stay_and_the_later_one_is_read(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  write(path, (2, 0.2), (4, 0.4))
  write(path, (2, 0.25))
  assert steps_of(path) == [2, 4, 2]
  assert [*by_step(path).items()] == [(2, {'step': 2, 'loss': 0.25}), (4, {'step': 4, 'loss': 0.4})]


def test_writers_at_once_lose_no_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'

  def evaluate(steps):
    for step in steps:
      write(path, (step, 0.5))

  threads = [threading.Thread(target=evaluate, args=(range(first, 200, 4),)) for first in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(steps_of(path)) == [*range(200)]


def test_a_renamed_folder_keeps_its_lines_and_another_in_its_place_gets_none(tmp_path):
  path = tmp_path / 'run' / 'metrics.jsonl'
  writer = JsonLines(path)
  path.parent.rename(tmp_path / 'moved')
  write(path, (7, 0.7))
  writer.write({'step': 1})
  writer.close()
  assert steps_of(path) == [7] and steps_of(tmp_path / 'moved' / 'metrics.jsonl') == [1]


def test_lines_that_a_full_disk_does_not_take_are_written_later(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  lines = JsonLines(path)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))  # in the midst of the second line
  try:
    for step in (1, 2, 3):
      lines.write({'step': step})
    assert read_lines(path) == [{'step': 1}], 'half a line was cut off at once'
    assert path.read_bytes().endswith(b'\n')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  write(path, (7, 0.7))  # another process
  lines.write({'step': 4})
  assert steps_of(path) == [1, 7, 2, 3, 4]
  lines.close()


def test_a_writer_cuts_off_the_half_line_of_another_one_that_was_killed(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  lines = JsonLines(path)
  lines.write({'step': 1})
  with path.open('a') as killed:
    killed.write('{"step": 2, "lo')
  lines.write({'step': 3})
  lines.close()
  assert steps_of(path) == [1, 3]


def test_a_lock_of_another_program_does_not_hold_up_the_lines(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  lines = JsonLines(path)
  with path.open() as other:
    fcntl.flock(other, fcntl.LOCK_SH)  # as of a program for backups
    for step in range(200):
      lines.write({'step': step})
    assert len(read_lines(path)) == 200
  lines.close()


def test_an_unreadable_line_is_named_with_what_to_do(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  write(path, (1, 0.1), (2, 0.2))
  path.write_text('{"step": 9, "lo' + path.read_text())
  with pytest.raises(StorageError, match=r'metrics.jsonl:1 cannot be read.* Delete this line'):
    by_step(path)
  path.write_text(''.join(path.read_text().splitlines(keepends=True)[1:]))
  assert [*by_step(path)] == [2]


def read_events(folder):
  """{tag: [(step, value)]} and {tag: plugin} of the event files of a folder."""
  from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415
  from tensorboard.util import tensor_util  # noqa: PLC0415

  events = event_accumulator.EventAccumulator(str(folder))
  events.Reload()
  tags = events.Tags()['tensors']
  values = {
    tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
    for tag in tags
  }
  return values, {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in tags}


def shown_by_tensorboard(folder, tag='learning/loss'):
  """[(step, value)] that TensorBoard itself shows of a tag, to one decimal."""
  from tensorboard.backend.event_processing import plugin_event_accumulator  # noqa: PLC0415
  from tensorboard.util import tensor_util  # noqa: PLC0415

  events = plugin_event_accumulator.EventAccumulator(str(folder))
  events.Reload()
  found = [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors(tag)]
  return [
    (step, round(float(value), 1) if value.dtype == np.float32 else value) for step, value in found
  ]


def test_tensorboard_and_a_bound_writer_of_clu_have_every_value(tmp_path):
  from clu.metric_writers import SummaryWriter  # noqa: PLC0415 - TensorFlow

  shown = []
  with create_writers(
    tmp_path,
    also=[lambda step, numbers: shown.append((step, numbers))],
    clu_writers=[lambda folder: SummaryWriter(f'{folder}.clu')],
  ) as writer:
    writer.write_scalars(3, {'loss': jnp.float32(0.5), 'skipped': np.int32(2), 'mfu': None})
    # Neither waits for the thread.
    assert read_lines(tmp_path / 'metrics.jsonl') == [
      {'step': 3, 'loss': 0.5, 'skipped': 2, 'mfu': None}
    ]
    assert shown == [(3, {'loss': 0.5, 'skipped': 2, 'mfu': None})]
    writer.write_scalars(4, {'loss': math.nan, 'tokens': 3 * 10**10 + 1})
    writer.write_texts(4, {'sample': 'def main():'})
    writer.draw(4, lambda: {'image': IMAGE})
    writer.write_hparams({'learning_rate': 0.1})

  values, plugins = read_events(tmp_path / 'train')
  their_values, their_plugins = read_events(tmp_path / 'train.clu')
  assert plugins == their_plugins and 'throughput/mfu' not in plugins
  assert plugins['learning/loss'] == 'scalars' and plugins['sample'] == 'text'
  assert values.pop('_hparams_/session_start_info') is not None
  for tag, found in values.items():
    for (step, ours), (their_step, theirs) in zip(found, their_values[tag], strict=True):
      assert step == their_step
      np.testing.assert_array_equal(ours, theirs, tag)
  ((_, image),) = values['image']
  np.testing.assert_array_equal(np.asarray(PIL.Image.open(io.BytesIO(image[2]))), IMAGE[0])
  (step, loss), (_, unknown) = values['learning/loss']
  assert (step, loss.item()) == (3, 0.5) and math.isnan(unknown)
  ((_, tokens),) = values['learning/tokens']
  assert tokens == np.float32(3 * 10**10)
  assert values['sample'][0][1].item() == b'def main():'


def test_a_writer_that_fails_is_named(tmp_path):
  class Full:
    def __init__(self, folder):
      self.folder = folder

    def write_scalars(self, step, scalars):
      raise RuntimeError(f'no room in {self.folder}')

    def flush(self):
      pass

    close = flush

  said = []
  options = {'tensorboard': False, 'clu_writers': [Full], 'say': said.append}
  with create_writers(tmp_path, **options) as writer:
    for step in (1, 2):
      writer.write_scalars(step, {'loss': 1.0})
  (line,) = said
  assert re.search(
    'Full of .*: write_scalars failed, and is left out: .* no room in .*/train', line
  )
  assert os.listdir(tmp_path) == ['metrics.jsonl']


def test_other_streams_have_their_own_directory(tmp_path):
  with create_writers(tmp_path, name='eval') as writer:
    writer.write_scalars(1, {'loss': 1.0})
  assert read_lines(tmp_path / 'eval' / 'metrics.jsonl') == [{'step': 1, 'loss': 1.0}]
  assert list((tmp_path / 'eval').glob('events.out.tfevents.*'))
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_without_tensorboard_only_json_lines_are_written(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboard', None)
  with create_writers(tmp_path, tensorboard=False) as writer:
    writer.write_scalars(1, {'loss': 1.0})
    writer.flush()
  assert read_lines(tmp_path / 'metrics.jsonl') == [{'step': 1, 'loss': 1.0}]
  assert os.listdir(tmp_path) == ['metrics.jsonl']


def test_a_failure_of_tensorboard_is_said_and_ends_nothing(tmp_path):
  (tmp_path / 'train').write_text('a file where a directory should be')
  said = []
  with create_writers(tmp_path, say=said.append, patience=0.0) as writer:
    writer.write_scalars(1, {'loss': 1.0})
  assert read_lines(tmp_path / 'metrics.jsonl') == [{'step': 1, 'loss': 1.0}]
  assert re.search(r'TensorBoard of .*: open failed, and is left out: FileExistsError', said[0])


def test_what_a_full_disk_refuses_for_a_while_is_in_the_event_file_in_order(tmp_path):
  said = []
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with create_writers(tmp_path, begin=1, say=said.append) as writer:
    writer.write_scalars(1, {'loss': 1.0})
    writer.flush()
    # The disk is full in the midst of a record.
    (file,) = (tmp_path / 'train').iterdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 30, limits[1]))
    try:
      for step in (2, 3):
        writer.write_scalars(step, {'loss': float(step)})
      writer.draw(3, lambda: {'picture': IMAGE})
      while not said:
        time.sleep(0.01)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert 'flush failed, and is tried again for up to 3600 s' in said[0]
  assert said[-1].endswith('flush has succeeded')
  assert shown_by_tensorboard(tmp_path / 'train') == [(1, 1.0), (2, 2.0), (3, 3.0)]
  values, _ = read_events(tmp_path / 'train')
  assert values['picture'][0][0] == 3


def test_a_resumed_run_replaces_the_steps_that_it_repeats_in_tensorboard(tmp_path):
  for begin, steps in ((1, (1, 2, 3, 4)), (3, (3, 4))):
    with create_writers(tmp_path, begin=begin) as writer:
      for step in steps:
        writer.write_scalars(step, {'loss': begin + step / 10})
        writer.write_texts(step, {'sample': f'of {begin}'})
    # TensorBoard reads files by name, that is by second and then by a number: 10 comes before 9.
    time.sleep(1.1)
  folder = tmp_path / 'train'
  assert shown_by_tensorboard(folder) == [(1, 1.1), (2, 1.2), (3, 3.3), (4, 3.4)]
  assert [step for step, _ in shown_by_tensorboard(folder, 'sample')] == [1, 2, 3, 4]


def test_a_value_that_tensorflow_cannot_write_loses_no_other(tmp_path):
  said = []
  with create_writers(tmp_path, begin=1, say=said.append) as writer:
    writer.write_images(1, {'image': np.zeros((1, 4, 4, 9), np.uint8)})  # nine colors
    writer.write_scalars(2, {'loss': 2.0})
  assert any('flush failed, and is left out' in line for line in said)
  assert shown_by_tensorboard(tmp_path / 'train') == [(2, 2.0)]


def test_a_line_of_metrics_that_is_refused_at_the_end_is_tried_again(tmp_path):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  said = []

  def tell(text):  # while the run waits
    said.append(text)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

  try:
    with create_writers(tmp_path, tensorboard=False, say=tell) as writer:
      resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
      writer.write_scalars(1, {'loss': 1.0})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert 'tried again for up to 3600 s' in said[0] and 'File too large' in said[0]
  assert read_lines(tmp_path / 'metrics.jsonl') == [{'step': 1, 'loss': 1.0}]


def test_a_picture_that_cannot_be_drawn_is_said_and_ends_nothing(tmp_path):
  said = []
  with create_writers(tmp_path, say=said.append, tensorboard=False) as writer:
    writer.draw(1, lambda: 1 / 0)
  assert re.search('pictures of .*: draw failed, and is left out: ZeroDivisionError', said[0])


@pytest.mark.parametrize('world', [{'MPLBACKEND': 'nonsense'}, {'MATPLOTLIBRC': '/FOLDER'}])
def test_settings_of_matplotlib_that_do_not_work_change_no_picture(tmp_path, world):
  """LaTeX is not there: PATH is empty."""
  (tmp_path / 'matplotlibrc').write_text('text.usetex: True\nfont.family: no such font\n')
  script = f"""
import pathlib
from valkyrie.monitoring import pictures
found = {{'loss_by_position/1': 2.0, 'loss_by_position/2': 1.0}}
pictures.write_loss_by_position(pathlib.Path({str(tmp_path)!r}), {{'validation': found}})
assert '<img' in pictures.figure('loss', 'step', '', [pictures.Curve('mine', [(1, 2.0)])])
"""
  world = {name: value.replace('/FOLDER', str(tmp_path)) for name, value in world.items()}
  environment = {**os.environ, 'PATH': '', 'MPLCONFIGDIR': str(tmp_path), **world}
  subprocess.run([sys.executable, '-c', script], env=environment, check=True)
  assert (tmp_path / 'loss_by_position.png').stat().st_size > 5000


def test_a_full_disk_is_a_storage_error(tmp_path):
  lines = JsonLines(tmp_path / 'metrics.jsonl', patience=0.0)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
  try:
    for step in range(10):
      lines.write({'step': step})
    for end in (lines.sync, lines.close):
      with pytest.raises(StorageError, match=os.strerror(errno.EFBIG)):
        end()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_only_tensorboard_and_writers_of_clu_load_tensorflow(tmp_path):
  script = f"""
import sys
import numpy as np
from valkyrie.monitoring import metrics, model_info, pictures, progress, system, writers
heavy = {{'tensorflow', 'tensorboard', 'clu.metric_writers'}}
with writers.create_writers({str(tmp_path)!r}, tensorboard=False) as writer:
  writer.write_scalars(1, {{'loss': 1.0}})
  writer.write_texts(1, {{'sample': 'x'}})
  writer.write_images(1, {{'image': np.zeros((1, 4, 4, 3), np.uint8)}})
  writer.write_hparams({{'learning_rate': 0.1}})
assert not (heavy | {{'matplotlib'}}) & set(sys.modules)
with writers.create_writers({str(tmp_path)!r}) as writer:
  writer.write_scalars(2, {{'loss': 1.0}})
assert heavy <= set(sys.modules)
"""
  subprocess.run([sys.executable, '-c', script], check=True)
  assert list((tmp_path / 'train').iterdir())


def test_our_writers_have_the_interface_of_clu(tmp_path):
  from clu import metric_writers  # noqa: PLC0415 - TensorFlow

  from valkyrie.monitoring import clu_writers  # noqa: PLC0415 - the same

  theirs = metric_writers.MetricWriter
  for name in theirs.__abstractmethods__:
    method = inspect.signature(getattr(metric_writer.MetricWriter, name))
    expected = inspect.signature(getattr(theirs, name))
    described = [
      [(p.name, p.kind, p.default) for p in signature.parameters.values()]
      for signature in (method, expected)
    ]
    assert described[0] == described[1], name
  with create_writers(tmp_path, tensorboard=False) as writer:
    assert isinstance(writer, theirs)
  assert issubclass(clu_writers.TensorBoard, theirs)


def test_every_call_reaches_a_bound_writer_of_clu(tmp_path):
  calls = []

  class Recorder(metric_writer.MetricWriter):
    def __init__(self, folder):
      pass

    def call(self, method, *arguments, **options):
      calls.append((method, *arguments, *options.items()))

  sound = {'sound': np.zeros((1, 8, 1), np.float32)}
  with create_writers(tmp_path, tensorboard=False, clu_writers=[Recorder]) as writer:
    writer.write_histograms(2, {'weights': np.arange(3.0)}, {'weights': 2})
    writer.write_audios(3, sound, sample_rate=8000)
  methods = [method for method, *_ in calls]
  assert methods == ['write_histograms', 'flush', 'write_audios', 'flush', 'close']
  assert calls[0][3] == {'weights': 2} and calls[2][1:] == (3, sound, ('sample_rate', 8000))


def test_the_first_numbers_wait_for_the_import_and_hold_up_nothing(tmp_path):
  (tmp_path / 'tensorboard.py').write_text(
    f"""
import pathlib, time
while not pathlib.Path({str(tmp_path / 'go')!r}).exists():
  time.sleep(0.01)
del __import__('sys').modules['tensorboard'], __import__('sys').path[0]
import tensorboard
"""
  )
  script = f"""
import pathlib
from valkyrie.monitoring.writers import create_writers
folder = pathlib.Path({str(tmp_path)!r})
with create_writers(folder) as writer:
  for step in (1, 2):
    writer.write_scalars(step, {{'loss': float(step)}})
  assert len((folder / 'metrics.jsonl').read_text().splitlines()) == 2
  assert not (folder / 'train').exists()
  (folder / 'go').touch()
"""
  path = os.pathsep.join([str(tmp_path), *sys.path])
  subprocess.run([sys.executable, '-c', script], env={**os.environ, 'PYTHONPATH': path}, check=True)
  values, _ = read_events(tmp_path / 'train')
  assert [(step, loss.item()) for step, loss in values['learning/loss']] == [(1, 1), (2, 2)]


def test_a_run_that_ends_before_it_writes_waits_for_no_import(tmp_path):
  (tmp_path / 'tensorboard.py').write_text('import time\ntime.sleep(1000)')
  script = f"""
import os
from valkyrie.monitoring.writers import create_writers
try:
  with create_writers({str(tmp_path / 'run')!r}):
    1 / 0
except ZeroDivisionError:
  os._exit(3)
"""
  path = os.pathsep.join([str(tmp_path), *sys.path])
  environment = {**os.environ, 'PYTHONPATH': path}
  done = subprocess.run([sys.executable, '-c', script], env=environment, check=False)
  assert done.returncode == 3


def test_a_missing_package_is_named_immediately(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboard', None)
  with pytest.raises(ConfigurationError, match='need tensorboard, which'):
    create_writers(tmp_path)
  assert not os.listdir(tmp_path)


def test_a_package_that_cannot_be_imported_is_reported(tmp_path):
  (tmp_path / 'tensorboard.py').write_text('raise ImportError("no libstdc++")')
  script = f"""
from valkyrie.monitoring.writers import create_writers
writer = create_writers({str(tmp_path)!r})
writer.write_scalars(1, {{'loss': 1.0}})
writer.close()
"""
  path = os.pathsep.join([str(tmp_path), *sys.path])
  done = subprocess.run(
    [sys.executable, '-c', script],
    env={**os.environ, 'PYTHONPATH': path},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stderr.count('importing it failed: no libstdc++') == 1
  assert read_lines(tmp_path / 'metrics.jsonl')[0]['loss'] == 1.0


METRICS = {
  'loss': 1.25,
  'bits_per_token': 1.8,
  'bits_per_byte': 0.9,
  'tokens_per_second': 8123.4,
  'step_seconds': 2.0,
  'grad_norm': 0.5123,
  'learning_rate': 3e-4,
  'tflops_per_second_per_device': 0.06172,
  'mfu': None,
}


def test_progress_is_plain_lines_without_a_terminal():
  stream = io.StringIO()
  progress = Progress(100, stream)
  progress.show(50, METRICS)
  progress.say('evaluated')
  progress.show(60, {'loss': math.nan, 'bits_per_token': math.nan, 'bits_per_byte': None})
  progress.show(75, {'accuracy': 0.5, 'step_seconds': 605.0})
  progress.close()
  ends, *lines = stream.getvalue().splitlines()
  assert re.fullmatch(r'at this speed the steps are done on [\d-]{10} [\d:]{5}; .*', ends)
  assert lines == [
    'step 50/100 (50%): loss 1.2500, 0.900 bits per byte, 8,123 tokens/s, '
    '2 s a step, 0.0617 TFLOP/s per device, gradient 0.512, learning rate 0.0003, 01:40 left',
    'evaluated',
    'step 60/100 (60%): loss nan, nan bits per token',
    'step 75/100 (75%): accuracy 50.00%, 605 s a step, 4:12:05 left',
  ]


def test_all_lines_go_to_the_log_with_their_time(tmp_path):
  stream = io.StringIO()
  for quiet in (False, True):
    progress = Progress(100, stream, quiet=quiet)
    progress.say('first')  # before the directory of the run is there
    progress.log_to(tmp_path / 'log.txt')
    progress.show(50, {'loss': 1.25})
    progress.say('evaluated', 'saved')
  lines = (tmp_path / 'log.txt').read_text().splitlines()
  said = ['first', 'step 50/100 (50%): loss 1.2500', 'evaluated', 'saved']
  assert [line[20:] for line in lines] == 2 * said
  for line in lines:
    time.strptime(line[:19], '%Y-%m-%d %H:%M:%S')
  assert stream.getvalue().splitlines() == said  # nothing of the quiet one


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path):
  stream = io.StringIO()
  progress = Progress(100, stream)
  progress.log_to(tmp_path / 'nowhere' / 'log.txt')
  progress.say('goes on')
  first, second = stream.getvalue().splitlines()
  assert first.endswith('log.txt cannot be written (No such file or directory)')
  assert second == 'goes on'
  full = Progress(100, stream)
  full.log_to(tmp_path / 'log.txt')
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
  try:
    full.say('one', 'two')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  said = stream.getvalue().splitlines()[2:]
  log = tmp_path / 'log.txt'
  assert f'the log {log} cannot be written (File too large); its lines are kept' in '\n'.join(said)
  assert {'one', 'two'} <= {*said} and len(said) == 3
  full.say('three')  # there is room again
  lines = log.read_text().splitlines()
  assert [line.split(' ', 2)[2] for line in lines if 'kept' not in line] == ['one', 'two', 'three']


def test_memory_is_told_in_bytes_and_in_lines():
  before = memory.host_peak()
  block = np.ones(2**26, np.uint8)
  assert memory.host_peak() >= block.nbytes and memory.host_peak() >= before > 2**20
  assert re.fullmatch(
    r'memory of this process: [\d.]+ [MG]iB in use, [\d.]+ [MG]iB peak', memory.lines()[0]
  )
  assert memory.lines(' at the end')[0].startswith('memory of this process at the end: ')
  assert memory.device_peak() is None  # a CPU does not say


def read_all(terminal):
  pieces = []
  with contextlib.suppress(OSError):  # Linux raises it when the other end is closed
    while piece := os.read(terminal, 1000):
      pieces.append(piece)
  os.close(terminal)
  return b''.join(pieces).decode()


def test_progress_is_one_bar_on_a_terminal():
  reading_end, writing_end = pty.openpty()
  termios.tcsetwinsize(writing_end, (24, 60))
  with os.fdopen(writing_end, 'w', encoding='utf-8') as terminal:
    progress = Progress(100, terminal)
    progress.show(25, METRICS)
    progress.say('evaluated')
    progress.close()
  seen = read_all(reading_end)
  blocks = '█' * 5 + ' ' * 15
  bar = f'step 25/100 |{blocks}|  25%, loss 1.2500, 0.900 bits per byte'[:59]
  before, after = seen.split('evaluated\r\n')
  assert bar in before and before.endswith('\r'), 'the bar is cleared for the line'
  assert before.replace(bar, '').strip().splitlines()[-1] == f'step 25/100 |{blocks}|  25%'
  assert after == f'\r{bar}\r{bar}\r\n'


def test_model_info_has_every_parameter_and_totals():
  mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(2), ('data',))
  split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (('data',), ()))
  shapes = {
    'model': {'embed': jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)},
    'model/mlp': {'b': jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=whole)},
  }
  axes = {'model': {'embed': ('vocabulary', None)}, 'model/mlp': {'b': (None,)}}
  counts = {'model': {'embed': 28}, 'model/mlp': {'b': 4}}  # a row of `embed` is padding
  moments = {'mu': {'model/mlp': {'b': shapes['model/mlp']['b']}}}
  text = model_info.text(shapes, axes, counts, moments)
  totals, parameters, modules, states = text.rstrip().split('\n\n')
  assert totals == (
    '32 parameters in 2 arrays and 4 of padding, 136 bytes (136 B), 72 bytes (72 B) on each of 2 '
    'devices (mesh data=2)'
  )
  assert [row.split() for row in parameters.splitlines()[1:]] == [
    ['model/embed', '(8,4)', 'float32', '(vocabulary,-)', '(data)', '128', '64'],
    ['model/mlp/b', '(4)', 'bfloat16', '(-)', '()', '8', '8'],
  ]
  assert [row.split() for row in modules.splitlines()] == [
    ['module', 'parameters', 'bytes'],
    ['model', '32', '136'],
    ['model/mlp', '4', '8'],
  ]
  assert [row.split() for row in states.splitlines()[1:]] == [
    ['mu/model/mlp/b', '(4)', 'bfloat16', '-', '()', '8', '8']
  ]
  assert model_info.replication(shapes) == [
    'warning: 5.88% of the bytes of parameters are whole on every device, more than 2.00% '
    '(train.replication_tolerance); the largest is model/mlp/b. A rule of Partitioner.axis_rules '
    'for one of its logical axes splits it; model_info.txt has them'
  ]
  assert model_info.replication(shapes, tolerance=0.06) == [
    '5.88% of the bytes of parameters are whole on every device'
  ]
  assert model_info.replication({'model/mlp': shapes['model/mlp']}) == []  # nothing is split


def test_system_lines_name_versions_devices_and_memory():
  text = '\n'.join(system.lines())
  assert f'jax {jax.__version__}' in text
  assert 'devices: 8 x cpu (cpu), 8 local, process 0 of 1' in text
  assert 'processors' in text
  assert 'available' in text


def test_compilers_of_a_platform_are_those_that_are_found_first(tmp_path, monkeypatch):
  assert packages.compilers('cpu') == {'jaxlib': jaxlib.__version__}
  assert packages.compilers('abacus') == {}
  for folder, version in (('b', '13.2'), ('a', '13.1')):
    described = tmp_path / folder / f'jax_cuda13_pjrt-{version}.dist-info'
    described.mkdir(parents=True)
    (described / 'METADATA').write_text(f'Name: jax-cuda13-pjrt\nVersion: {version}\n')
    monkeypatch.syspath_prepend(tmp_path / folder)
  assert packages.compilers('gpu')['jax-cuda13-pjrt'] == '13.1'


@pytest.mark.parametrize(
  ('steps', 'save', 'said'),
  [(90, 12.0, True), (5, 1.5, True), (5, 0.9, False), (900, 12.0, False)],  # seconds
)
def test_a_run_that_waits_long_for_its_saves_is_told_to_save_less_often(
  monkeypatch, steps, save, said
):
  clock, lines = [0.0], []
  monkeypatch.setattr(observers.time, 'perf_counter', lambda: clock[0])

  def write(*_):
    clock[0] += save

  directory = types.SimpleNamespace(save=write)
  run = types.SimpleNamespace(step=8, record=dict, state=None)
  log = types.SimpleNamespace(flush=lambda: None, untimed=contextlib.nullcontext)
  saver = observers.Saver(run, directory, log, lines.append)
  saver._saved_at, clock[0] = 0.0, float(steps)
  saver()
  advice = 'for the save of step 8: a larger checkpoint_every saves less often'
  assert lines == [f'the run waited {save:.1f} s of {steps + save:.1f} {advice}'] * said
