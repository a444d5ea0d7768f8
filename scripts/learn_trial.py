"""One trial of scripts/learn: its settings, its process, and the file with its result."""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A trial of this budget trains nothing: it measures the seconds of a step.
SPEED = 'speed'
_MEASURED_SECONDS, _MEASURED_STEPS = 8, 3  # at least


class Variant(NamedTuple):
  """One of our models.

  gin: arguments of valkyrie.main.
  output_scale: a factor on the initial matrices named `out`, which write to the residual stream.
  """

  gin: tuple[str, ...] = ()
  output_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Trial:
  """A model, trained once.

  Attributes:
    model: its name in the tables.
    budget: 'seconds' or 'tokens', the table it belongs to; or SPEED.
    rate: peak learning rate.
    seed: of the parameters and of the order of the documents.
    steps: optimizer steps.
    batch: tokens of a step.
    scored: bytes of the validation sample.
    gin, output_scale: of one of our models, see Variant.
  """

  model: str
  budget: str
  rate: float
  seed: int
  steps: int
  batch: int
  scored: int
  gin: tuple[str, ...] = ()
  output_scale: float = 1.0

  def file(self, results: pathlib.Path) -> pathlib.Path:
    """The file of its result."""
    settings = '' if self.budget == SPEED else f'_rate{self.rate:g}_seed{self.seed}'
    return results / self.budget / f'{self.model.replace("/", "_")}{settings}.json'

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self))


class Processes:
  """Runs each trial in a process of its own, with a log beside its result."""

  def __init__(self, threads: int, peers: Sequence[str]):
    """Takes the threads of a process, and the names of the models that learn_peers.py trains."""
    self._peers = peers
    self._environment = os.environ | {
      'NPROC': str(threads),  # of XLA
      'OMP_NUM_THREADS': str(threads),  # of torch
      'JAX_PLATFORMS': 'cpu',
      'HF_HUB_OFFLINE': '1',
      'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    }

  def __call__(self, trial: Trial, file: pathlib.Path) -> None:
    script = 'learn_peers.py' if trial.model in self._peers else 'learn_ours.py'
    command = [sys.executable, str(ROOT / 'scripts' / script), trial.to_json(), str(file)]
    file.parent.mkdir(parents=True, exist_ok=True)
    log = file.with_suffix('.log')
    with log.open('w') as output:
      done = subprocess.run(
        command, cwd=ROOT, env=self._environment, stdout=output, stderr=output, check=False
      )
    if done.returncode:
      end = '\n  '.join(log.read_text().splitlines()[-5:])
      raise RuntimeError(f'exit code {done.returncode}. The end of {log}:\n  {end}')


def run(trial: Trial, measure: Callable, train: Callable, file: pathlib.Path) -> None:
  """Runs a trial, and writes its settings and its result to `file`, complete or not at all."""
  result = measure(trial) if trial.budget == SPEED else train(trial)
  write(file, json.dumps({**dataclasses.asdict(trial), **result}, indent=1))


def step_seconds(step: Callable[[], object]) -> float:
  """Seconds of `step`, which waits for its result; the first call is not counted."""
  step()
  began, steps = time.perf_counter(), 0
  while steps < _MEASURED_STEPS or time.perf_counter() - began < _MEASURED_SECONDS:
    step()
    steps += 1
  return (time.perf_counter() - began) / steps


def write(file: pathlib.Path, text: str) -> None:
  """Writes a file, complete or not at all."""
  file.parent.mkdir(parents=True, exist_ok=True)
  partial = file.with_name(f'{file.name}.partial')
  partial.write_text(f'{text}\n')
  os.replace(partial, file)


def main(measure: Callable, train: Callable) -> None:
  """The command line of the processes that run one trial."""
  parser = argparse.ArgumentParser(description='Runs one trial of scripts/learn.')
  parser.add_argument('trial', help='a Trial as JSON')
  parser.add_argument('file', type=pathlib.Path, help='for the result')
  flags = parser.parse_args()
  settings = json.loads(flags.trial)
  run(Trial(**{**settings, 'gin': tuple(settings['gin'])}), measure, train, flags.file)
