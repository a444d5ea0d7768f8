"""Gin files with a random mistake."""

from collections.abc import Iterable, Iterator
import multiprocessing
import os
import pathlib
import random
import re
import sys

from faults.harness import Harness
from faults.table import Trial, fault
from valkyrie import main

REFUSED = (2, 78)
SIZES = (
  'batch_size', 'chunk_size', 'chunks', 'backprop_chunks', 'log_every', 'checkpoint_every',
  'train_steps', 'LanguageModel.d_model', 'LanguageModel.layers', 'Block.mlp_width',
  'LongformerAttention.heads', 'LongformerAttention.head_width', 'LongformerAttention.slice_size',
  'S5.state_size', 'S5.hippo_blocks',
)  # fmt: skip
# Values that are valid alone, but do not fit the rest of the file.
MISFITS = (
  ('backprop_chunks', '3'), ('LongformerAttention.kv_heads', '3'), ('S5.hippo_blocks', '3'),
  ('LanguageModel.vocabulary_size', '100'), ('LanguageModel.layers', '0'), ('seed', '-1'),
  ('Partitioner.mesh', '(("data", 3),)'), ('Partitioner.mesh', '(("data", 0),)'),
  ('Partitioner.mesh', '(("data", -1), ("model", -1))'),
  ('Partitioner.mesh', '(("data", 1), ("data", 1))'), ('Partitioner.mesh', '(("data", "one"),)'),
  ('Partitioner.mesh', '"data"'), ('Partitioner.axis_rules', '(("embed", "modle"),)'),
  ('Partitioner.gather_layers', 'True'), ('Partitioner.parameter_axes', '(("(", ("embed",)),)'),
  ('StepSettings.loss_spikes', '@S5'), ('LossSpikes.action', '"ignore"'), ('Checkpoints.keep', '0'),
  ('RefusedSteps.allowed', '-1'), ('Preemption.grace_seconds', '-1.0'),
  ('TaskFeed.reset_at', '"line"'), ('vocabulary', '"words"'), ('Block.mixers', '(@Block,)'),
  ('Block.mixers', '@S5'), ('LanguageModel.pattern', '()'), ('LanguageModel.compute_dtype', '"f8"'),
  ('Curriculum.phases', '()'), ('Optimizer.algorithm', '@S5'), ('train.hooks', '(@S5(),)'),
)  # fmt: skip


def _typo(word: str, at: random.Random) -> str:
  place = at.randrange(1, len(word))
  return word[:place] + at.choice(['', word[place] * 2, 'q' + word[place]]) + word[place + 1 :]


def mutate(text: str, number: int, at: random.Random) -> tuple[str, str]:
  """(the changed line, the text with one mistake)."""
  lines = text.splitlines()
  bound = [n for n, line in enumerate(lines) if re.match(r'[\w./]+ = ', line)]
  n = at.choice(bound)
  name, value = lines[n].split(' = ', 1)
  kind = number % 7
  if kind == 0:
    part = at.choice([part for part in re.split(r'[./]', name) if len(part) > 3] or [name])
    lines[n] = f'{name.replace(part, _typo(part, at), 1)} = {value}'
  elif kind == 1:
    lines.append(f'{name} = {value}')
  elif kind == 2:
    wrong = ['17'] if value[0] == "'" else ["'many'", '(1, "b")'] if value[0].isdigit() else ['3.5']
    lines[n] = f'{name} = {at.choice(wrong)}'
  elif kind == 3:
    name, value = at.choice(SIZES), at.choice(['0', '-3', '2.5'])
    lines = [line for line in lines if not line.startswith(f'{name} = ')] + [f'{name} = {value}']
  elif kind == 4:
    name, value = MISFITS[number // 7 % len(MISFITS)]
    lines = [line for line in lines if not line.startswith(f'{name} = ')] + [f'{name} = {value}']
  elif kind == 5:
    ends = (
      f'{name} = ({value}',
      f'{name} {value}',
      f'{name} = 8*1024',
      f'{name} = word',
      f'{name} =',
    )
    lines[n] = at.choice(ends)
  else:
    lines[n] = at.choice(
      (
        "include 'gin/modles/tiny.gin'",
        'import os',
        f'{name} = %chunk_sise',
        f'{name} = @Longformr',
      )
    )
  changed = [line for line in lines if line not in text.splitlines()] or [lines[-1]]
  return changed[0], '\n'.join(lines) + '\n'


def attempts(
  harness: Harness, runs: Iterable[tuple[str, pathlib.Path]], *flags: str
) -> Iterator[tuple[str, int | None]]:
  """(name, exit code) of runs with their gin files, in forked processes that have all imports."""
  processes = multiprocessing.get_context('forkserver')
  processes.set_forkserver_preload(['faults.mistakes', *main.CONFIGURABLE_MODULES])
  for name, file in runs:
    arguments = [f'--gin_file={file}', f'--model_dir={harness.folder / name}', *harness.flags(name)]
    arguments += flags
    process = processes.Process(target=_attempt, args=(arguments, harness.folder / f'{name}.log'))
    process.start()
    process.join()
    yield name, process.exitcode


def _attempt(arguments: list[str], log: pathlib.Path) -> None:
  """Runs the command, and writes its output to a file."""
  with open(log, 'w') as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  sys.exit(main.main(arguments))


@fault('a gin file with a mistake', 'ends with 78 or 2, explains the mistake', full=210, short=7)
def mistakes(harness: Harness, times: int) -> Iterator[Trial]:
  text = (harness.folder / 'single.gin').read_text()
  changes, runs = [], []
  for number in range(times):
    what, mutated = mutate(text, number, harness.random)
    runs.append((harness.new(), harness.folder / f'mistake{number}.gin'))
    runs[-1][1].write_text(mutated)
    changes.append(what)
  for what, (name, code) in zip(changes, attempts(harness, runs), strict=True):
    failure = None
    if code not in REFUSED or 'valkyrie: ' not in harness.said(name):
      failure = f'exit code {code}: {harness.said(name)[-300:]}'
    yield Trial(what, failure)
    harness.forget(name)
