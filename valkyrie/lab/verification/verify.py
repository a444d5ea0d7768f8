"""The run mode `verify`: whether a model computes the same in all forms that should be the same.

    python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --run_mode=verify

Random documents are read in the run's form, with its chunks, layout and devices, in a few rows.
Loss, gradient and carry are compared with other cuts, layouts, neighbors and lengths, and with
reading one token after the other. Rounding explains a difference if it is not much larger than the
difference of two runs of one form whose parameters differ in the last digit, so that every rounding
differs (stochastic arithmetic, Vignes 1993). It explains little in float32, and in float64 where
the devices have it: these show what the run's own precision hides.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
import contextlib
import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config import paths
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import override_gin
from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, Disagreement, message_of, write_errors
from valkyrie.lab.verification import verify_forms
from valkyrie.lab.verification.verify_numbers import Computation, Numbers, compiler_options
from valkyrie.monitoring.waiting import doing
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import owned, whole_file
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.training.train_state import TrainState
from valkyrie.types import leaves_by_path

_EXPLAINED = 8.0  # times the effect of other roundings


class Finding(NamedTuple):
  """The largest difference of two forms, as a multiple of what rounding explains.

  deviation, rounding: the difference, and the effect of rounding, both relative to the size of the
    array at the path `where`.
  """

  check: str
  precision: str
  where: str
  deviation: float
  rounding: float

  @property
  def agrees(self) -> bool:
    """Whether rounding explains the difference; it never explains a NaN."""
    return self.deviation <= _EXPLAINED * self.rounding

  def __str__(self) -> str:
    explained = _EXPLAINED * self.rounding
    line = (
      f'{self.check:24} {self.precision:9} {self.deviation:8.1e}   rounding explains '
      f'{explained:8.1e}   {self.where}'
    )
    if not self.agrees:
      line += '   DIFFERS'
    return line


@gin.configurable
@may_change_on_resume()
def verify(model_dir: str, *, settings: Callable[[], StepSettings]) -> None:
  """Prints a line for each comparison, and writes all comparisons to model_dir/verify.json.

  Raises a Disagreement if rounding does not explain a difference.
  """
  setup = Setup(settings())
  findings = []
  layouts, refused = _layouts(settings, setup.partitioner)
  failure: Exception | None = None
  try:
    for finding in _findings(setup, layouts, pathlib.Path(model_dir), refused):
      findings.append(finding)
      print(finding, flush=True)
  except Exception as error:  # the findings before it count
    failure = error
  path = pathlib.Path(model_dir) / 'verify.json'
  rows = []
  for finding in findings:
    rows.append({**finding._asdict(), 'agrees': finding.agrees})
  text = json.dumps({'findings': rows, 'not_possible': refused}, indent=2)
  if rows:
    whole_file.write_version(path, f'{text}\n'.encode())
  wrong = [finding for finding in findings if not finding.agrees]
  if wrong:
    first = wrong[0]
    raise Disagreement(
      f'{len(wrong)} of {len(findings)} comparisons differ by more than rounding explains. The '
      f'first: {first.check}, in {first.precision}, {first.where} by {first.deviation:.1e} of its '
      f'size. {path} has all comparisons, and docs/reliability.md says what each one compares.'
    ) from failure
  if failure is not None:
    raise failure
  print(f'all {len(findings)} comparisons agree')


def _layouts(
  settings: Callable[[], StepSettings], layout_of_run: Partitioner
) -> tuple[dict[str, Partitioner], dict[str, str]]:
  """(The other layouts of gin/partition for these devices, why the rest is not possible)."""
  layouts = {}
  refused = {}
  if jax.device_count() == 1:
    return layouts, refused
  computations = [layout_of_run.computation]
  files = (paths.GIN / 'partition').glob('*.gin')
  for path in sorted(files):
    try:
      with override_gin([f'gin/partition/{path.name}'], []):
        other_setup = Setup(settings())
      layout = other_setup.partitioner
    except ConfigurationError as error:
      verify_forms.refuse(refused, f'layout {path.stem}', message_of(error))
      continue
    if layout.computation not in computations:
      computations.append(layout.computation)
      layouts[path.stem] = layout
  return layouts, refused


def _findings(
  setup: Setup,
  layouts: Mapping[str, Partitioner],
  model_dir: pathlib.Path,
  refused: dict[str, str],
) -> Iterator[Finding]:
  precision_of_run = str(setup.model.about.compute_dtype)
  precisions = [precision_of_run, 'float32']
  platform = jax.devices()[0].platform
  if platform != 'tpu':
    precisions.append('float64')
  runs = []
  for precision in dict.fromkeys(precisions):
    run = yield from comparisons(setup, layouts, precision, refused)
    if run:
      runs.append(run)
  if len(runs) > 1:
    numbers, spread = runs[0]
    expected, _ = runs[-1]
    yield _largest('beside the widest', precision_of_run, numbers, expected, (spread,))
  with doing('comparing what is saved and restored'):
    finding = _restored(setup, model_dir / 'verify')
  yield finding


def comparisons(
  setup: Setup,
  layouts: Mapping[str, Partitioner],
  precision: str,
  refused: dict[str, str],
) -> Generator[Finding, None, tuple[Numbers, Numbers] | None]:
  """All comparisons in one precision; returns the numbers of the run, and their spread.

  `refused` receives the forms for which the memory is too small, or which a mixer cannot compute in
  a precision other than the run's, with the reasons. Raises a ConfigurationError if the run itself
  does not fit in its own precision.
  """
  # A platform's own rounding of the factors of float32 products breaks no rule.
  with jax.enable_x64(precision == 'float64'), jax.default_matmul_precision('highest'):
    compute = Computation(setup, precision, refused)
    result_of_run = None
    for first, *others in verify_forms.forms(setup, layouts):
      expected = compute(first)
      if first.name == verify_forms.RUN:
        result_of_run = expected
      if expected is None:
        continue
      expected_numbers, expected_spread = expected
      for form in others:
        result = compute(form)
        if result:
          numbers, spread = result
          spreads = (expected_spread, spread)
          yield _largest(form.name, precision, numbers, expected_numbers, spreads)
  return result_of_run


def _largest(
  check: str,
  precision: str,
  numbers: Numbers,
  expected: Numbers,
  spreads: tuple[Numbers, ...],
) -> Finding:
  """The largest difference of all arrays, as a multiple of what rounding explains."""
  deviations = {}
  roundings = {}
  for name, value in expected.items():
    if name in numbers:
      size = np.linalg.norm(value) + 1e-300
      difference = np.linalg.norm(numbers[name] - value)
      deviations[name] = float(difference / size)
      effects = []
      for spread in spreads:
        if name in spread:
          effects.append(np.linalg.norm(spread[name]))
      roundings[name] = float(max(effects) / size)
  # The spread of a single number may be small by chance, but not much below all other spreads.
  all_roundings = list(roundings.values())
  least = 0.1 * float(np.median(all_roundings))
  findings = []
  for name, deviation in deviations.items():
    rounding = max(roundings[name], least)
    finding = Finding(check, precision, name, deviation, rounding)
    findings.append(finding)

  def multiple(finding):
    ratio = finding.deviation / finding.rounding
    return np.nan_to_num(ratio, nan=np.inf)

  return max(findings, key=multiple)


def _restored(setup: Setup, place: pathlib.Path) -> Finding:
  """Compares a step with one after the state was saved beside `place` and restored, bit by bit."""
  phase = dataclasses.replace(
    setup.curriculum.phases[0].long,
    chunks=verify_forms.CHUNKS,
    backprop_chunks=verify_forms.CHUNKS,
    steps=None,
  )
  rows = setup.settings.batch_size
  documents = verify_forms.documents(rows, phase.tokens_per_row, setup.language_model.about)
  batch = setup.partitioner.place_batch(documents)
  lowered = setup.trace(phase).lower()
  step = lowered.compile(compiler_options())
  state, _ = step(setup.initial_state(), batch)
  restored = _saved_and_restored(setup, state, place)
  # A step gives up the memory of its state, so `state` is saved before.
  expected, _ = step(state, batch)
  after_restore, _ = step(restored, batch)
  differs = leaves_by_path(_differing_leaves(after_restore, expected))
  wrong = [path for path, leaf_differs in differs.items() if bool(leaf_differs)]
  where = 'all arrays'
  if wrong:
    where = wrong[0]
  return Finding('saved and restored', 'bit for bit', where, float(len(wrong)), 0.0)


@jax.jit
def _differing_leaves(first: Any, second: Any) -> Any:
  """A tree of whether each array differs anywhere."""
  return jax.tree.map(lambda x, y: jnp.any(x != y), first, second)


def _saved_and_restored(setup: Setup, state: TrainState, place: pathlib.Path) -> TrainState:
  """The state as a checkpoint in a temporary folder beside `place` gives it back."""
  with contextlib.ExitStack() as stack:
    folder_name = None
    if jax.process_index() == 0:
      with write_errors(f'{place.parent} cannot be written', 'pass another --model_dir'):
        folder = stack.enter_context(owned.temporary_folder(place))
        folder_name = folder.name
    first, *_ = processes.exchange('verify', folder_name)
    with Checkpoints().open(place.with_name(first)) as directory:
      directory.save_now(1, state, {}, patiently=False)
      restored = directory.restore(setup.state)
  return restored
