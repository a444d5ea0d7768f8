"""Fingerprints of what carries depend on: a file of a carry fits a model with the same ones."""

from collections.abc import Mapping
import hashlib
import os

import numpy as np

from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.steps import steps_of
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.types import Params
from valkyrie.weights import named_tensors
from valkyrie.weights.changed import changed_bindings

# A file has those that its model had: earlier versions wrote the first two.
FIELDS = ('weights', 'tokenizer', 'first_carry', 'bindings')


def origin_of(
  model_dir: str | os.PathLike,
  steps: tuple[int, ...],
  tokenizer: Vocabulary,
  first_carry: Params | None,
) -> dict[str, str]:
  """The fingerprints of a run's model, under the bindings of the process.

  Args:
    model_dir, steps: the checkpoints whose mean the weights are.
    tokenizer: makes tokens of the texts.
    first_carry: parameters with a first carry that another source gave; None without.
  """
  manifests = []
  steps_of_run = steps_of(model_dir)
  for step in steps:
    recorded = manifest.read_manifest(steps_of_run.files(step))
    manifests.append(recorded[1])
  weights = hashlib.sha256(b''.join(manifests))
  origin = {'weights': weights.hexdigest(), 'tokenizer': tokenizer.fingerprint}
  if first_carry is not None:
    tensors = named_tensors.of_params(first_carry)
    arrays = {}
    for name, tensor in tensors.items():
      if named_tensors.is_first_carry(name):
        arrays[name] = tensor.whole()
    origin['first_carry'] = digest_of(arrays)
  changed = changed_bindings(model_dir, str(steps[0]), ('open_run.model',))
  if changed:
    origin['bindings'] = '; '.join(changed)
  return origin


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of the names and bytes of arrays."""
  digest = hashlib.sha256()
  for name in sorted(arrays):
    content = np.ascontiguousarray(arrays[name])
    digest.update(f'{name}\0'.encode())
    digest.update(content.tobytes())
  return digest.hexdigest()
