"""`mamba2` as flash-linear-attention writes it: transformers' model under other names of fields."""

from collections.abc import Mapping
import pathlib
from typing import Any

from valkyrie.weights import config_fields
from valkyrie.weights.classes import parts
from valkyrie.weights.config_fields import Fields

_EPSILON = 'norm_eps'
_STEPS = 'dt_limit'
# Both programs call these the same; they are checked under transformers' names.
_SHARED = (
  'vocab_size', 'hidden_size', 'num_hidden_layers', 'num_heads', 'head_dim', 'state_size',
  'n_groups', 'conv_kernel', 'use_conv_bias', 'tie_word_embeddings', 'use_bias', 'hidden_act',
)  # fmt: skip
_FIELDS = Fields(
  used={**dict.fromkeys((*_SHARED, _STEPS), object), _EPSILON: float},
  required={'rmsnorm': (True,), 'norm_before_gate': (False,), 'D_has_hdim': (False,)},
  no_effect=(
    'A_init_range', 'chunk_size', 'conv_init', 'dt_init_floor', 'dt_max', 'dt_min', 'expand',
    'fuse_cross_entropy', 'fuse_linear_cross_entropy', 'fuse_norm', 'rescale_prenorm_residual',
    'residual_in_fp32', 'use_l2warp',
  ),
)  # fmt: skip


def is_from_fla(found: Mapping[str, Any]) -> bool:
  """Whether flash-linear-attention wrote the fields of a `mamba2`."""
  return _EPSILON in found


def translated(file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
  """The fields that count, under transformers' names.

  Raises a ConfigurationError that names a field which is unknown, or of something that Valkyrie
  does not compute.
  """
  config_fields.check(file, found, _FIELDS)
  parts.check_mamba_steps(file, found, _STEPS)
  config = dict(found)
  config['layer_norm_epsilon'] = config.pop(_EPSILON)
  for name in (_STEPS, *_FIELDS.required, *_FIELDS.no_effect):
    config.pop(name, None)
  config.setdefault('n_groups', 1)  # where transformers has 8
  return config
