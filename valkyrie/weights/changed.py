"""Bindings under which a checkpoint computes something else than in the run that saved it.

Numbers under such bindings stay out of the records of the run.
"""

from collections.abc import Collection, Sequence
import contextlib
import json
import os
import pathlib
from typing import Any

import jax

from valkyrie import foreign
from valkyrie.checkpoint.manager import open_to_read
from valkyrie.config.computation import computation, default_of, reached
from valkyrie.config.differences import differences
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError, first_of, storage_errors
from valkyrie.storage import whole_file

_SHOWN = 10
_RUN_MODES = ('evaluate', 'components', 'open_run')  # which name the parts
# They change no number but by rounding, or the data, whose fingerprints are compared.
_WITHOUT_EFFECT = ('remat_policy', 'kernels', 'vocabulary')
_OF_A_FEED = ('reset_at', 'pass_carry', 'learn_eos', 'bad_documents')


def changed_bindings(
  model_dir: str | os.PathLike,
  step: str,
  roots: Collection[str],
  *,
  is_cut: bool = False,
) -> list[str]:
  """A line for each binding that differs from the run's and reaches the parts of `roots`.

  What computes a step of training is compared with the record of the checkpoint, and the validation
  with the config.json of the run. `is_cut` means that a part of the carry is reset before every
  chunk, so that numbers depend on the chunks' size.
  """
  first, _, _ = step.partition(',')
  with open_to_read(model_dir, first) as directory:
    record: dict[str, Any] = directory.latest_record() or {}
  trained = record.get('configuration')
  if not isinstance(trained, dict):
    return []
  bindings_of_run = _recorded_bindings(model_dir)
  text = json.dumps(bindings())
  current = json.loads(text)  # as in the records: tuples become lists
  computed = computation(bindings_of_run)
  recorded = {name: value for name, value in bindings_of_run.items() if name not in computed}
  recorded |= trained
  names = reached({**recorded, **current}, roots)
  names_with_effect = {name for name in names if _has_effect(name, is_cut)}
  return differences(
    _chosen(recorded, names_with_effect),
    _chosen(current, names_with_effect),
    default_of,
  )


def _recorded_bindings(model_dir: str | os.PathLike) -> dict[str, Any]:
  """The bindings in the config.json of a run; none if it is missing or damaged."""
  with contextlib.suppress(ValueError):
    content = _content(pathlib.Path(model_dir, 'config.json'))
    configuration = foreign.json_object(content, bindings=dict)
    return configuration['bindings']
  return {}


def _content(path: pathlib.Path) -> bytes:
  """The content of a file, b'' without one; raises a StorageError if the system does not tell."""
  with storage_errors(f'{path} cannot be read'):
    try:
      return foreign.content(path)
    except (FileNotFoundError, NotADirectoryError):
      return b''


def _chosen(values: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
  return {name: value for name, value in values.items() if name in names}


def _has_effect(name: str, is_cut: bool) -> bool:
  scoped_part, _, parameter = name.rpartition('.')
  _, _, part = scoped_part.rpartition('/')
  is_of_mode = part in ('Evaluator', *_RUN_MODES)
  if is_of_mode:
    return is_cut and parameter == 'chunk_size'
  if parameter in _WITHOUT_EFFECT:
    return False
  return part != 'TaskFeed' or parameter in _OF_A_FEED


def record_changes(
  model_dir: str | os.PathLike,
  stream: str,
  changed: Sequence[str],
  *,
  is_named: bool,
) -> None:
  """Writes the changed bindings to model_dir/STREAM/changed.json.

  Raises a ConfigurationError if the stream is the run's own, or has numbers under other bindings.
  """
  folder = pathlib.Path(model_dir, stream)
  path = folder / 'changed.json'
  recorded: Any = [*changed]
  if not is_named or (folder / 'metrics.jsonl').exists():
    recorded = []
  with contextlib.suppress(ValueError):
    recorded = foreign.json_value(_content(path))
  if recorded != [*changed]:
    names = first_of([*changed], _SHOWN)
    shown = '\n  '.join(names) or 'none'
    raise ConfigurationError(
      f'{folder} has evaluations with other bindings, which numbers of these would be mixed with. '
      f'Changed since the checkpoint:\n  {shown}\nUse the values of the run, or give these numbers '
      'a name of their own, such as --gin.evaluate.name=\'"mine"\': they then go to eval_mine and '
      'loss_by_position_mine.png.'
    )
  if changed and jax.process_index() == 0:
    text = json.dumps([*changed])
    whole_file.write(path, f'{text}\n')
