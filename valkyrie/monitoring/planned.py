"""Operations of a step and memory of a state, told before anything is allocated."""

from collections.abc import Iterable
import math
import pathlib
from typing import Any

import jax

from valkyrie.models.model import Model
from valkyrie.models.parts import is_of_model, part_of
from valkyrie.monitoring import model_info
from valkyrie.monitoring.memory import in_units
from valkyrie.storage import whole_file
from valkyrie.training.setup import Setup
from valkyrie.training.train_state import TrainState


def lines(setup: Setup) -> list[str]:
  """The lines of `operations` and `held` about a run."""
  rows = setup.settings.batch_size
  tokens = [rows * phase.tokens_per_row for phase in setup.curriculum.phases]
  return [*operations(setup.language_model, tokens), held(setup.state)]


def write(model_dir: pathlib.Path, setup: Setup) -> None:
  """Writes model_dir/model_info.txt; an earlier file with another content stays as NAME.1."""
  axes = setup.model.parameter_axes(setup.partitioner.parameter_axes)
  counts = setup.model.counts()
  state = setup.state
  text = model_info.text(state.params, axes, counts, state.optimizer_state, lines(setup))
  whole_file.write_version(model_dir / 'model_info.txt', text.encode())


def operations(model: Model, tokens_of_steps: Iterable[int]) -> list[str]:
  """A line for each size of a step: its operations, of weights and of all else.

  The operations are those of `mfu`: forward and backward, without recomputation, and without what
  terms of the objective add. A matrix that multiplies only some tokens counts as if it
  multiplied all.
  """
  total = model.about.train_flops_per_token
  of_weights = min(total, 3 * _forward_flops_of_weights(model))
  share = of_weights / total
  lines = []
  for tokens in dict.fromkeys(tokens_of_steps):
    lines.append(
      f'a step of {tokens:,} tokens takes {tokens * total:.4g} operations: '
      f'{tokens * of_weights:.4g} ({share:.1%}) of weights, '
      f'{tokens * (total - of_weights):.4g} of attention and recurrences between tokens'
    )
  return lines


def held(state: TrainState) -> str:
  """A line about the bytes of each part of a train state on a device; `state` has shapes.

  What terms of the objective add to the model, such as a teacher, is told apart from it.
  """
  sizes: dict[str, int] = {}

  def add(name: str, arrays: Any) -> None:
    leaves = jax.tree.leaves(arrays)
    sizes[name] = sizes.get(name, 0) + sum(model_info.weigh(leaf).per_device for leaf in leaves)

  for module, group in state.params.items():
    name = 'model'
    if not is_of_model(module):
      name = part_of(module, '')
    add(name, group)
  add('state of the optimizer', state.optimizer_state)
  add('carries', state.carry)
  add('average of the parameters', state.average)
  add('state of the objective', state.objective)
  known = [f'{name} {in_units(size)}' for name, size in sizes.items() if size]
  listed = ', '.join(known)
  return f'on each device: {listed}'


def _forward_flops_of_weights(model: Model) -> int:
  """The operations of one token in products with matrices of the layers and the unembedding."""
  insert = model.about.insert
  elements = model.about.width * model.about.vocabulary_size
  for module, group in model.parameters().items():
    if insert is not None and module.startswith(insert):  # it does not read every token
      continue
    for declared in group.values():
      if declared.matrix is not None or declared.in_blocks:
        elements += math.prod(declared.shape.shape)
  return 2 * elements
