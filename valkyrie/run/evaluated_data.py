"""The data behind the numbers of a stream of evaluations: model_dir/eval/data.json."""

from collections.abc import Mapping
import json
import pathlib

import jax

from valkyrie.errors import ConfigurationError, storage_errors


def record(model_dir: str, stream: str, fingerprints: Mapping[str, str]) -> None:
  """Writes the fingerprints of the stores of a stream, by the names of the sources.

  Raises:
    StorageError: the file cannot be written.
  """
  if jax.process_index() != 0:
    return
  path = _path(model_dir, stream)
  with storage_errors(f'{path} cannot be written', 'Make room, or pass another --model_dir.'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(fingerprints)) + '\n')


def check(model_dir: str, stream: str, fingerprints: Mapping[str, str]) -> None:
  """Raises a ConfigurationError if the numbers of a stream are of other data."""
  try:
    recorded = json.loads(_path(model_dir, stream).read_text())
  except (OSError, ValueError):
    return
  if recorded != dict(fingerprints):
    raise ConfigurationError(
      f'{model_dir}/{stream} has evaluations of other data, which numbers of these would be '
      'mixed with. Give this data a name of its own, such as --gin.evaluate.name=\'"mine"\': its '
      'numbers then go to eval_mine and loss_by_position_mine.png.'
    )


def _path(model_dir: str, stream: str) -> pathlib.Path:
  return pathlib.Path(model_dir, stream, 'data.json')
