"""The values that a layer saves for the backward pass, which recomputes the others."""

import jax

_SAVED = jax.checkpoint_policies.save_only_these_names  # names of `checkpoint_name`
# A 'product' is the result of a `split_product`: its sum over devices is saved, instead of parts.
POLICIES = {
  'products': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    _SAVED('attention', 'product', 'states', 'stream'),
  ),
  'mlp': _SAVED('attention', 'mlp'),
  'attention': _SAVED('attention'),
  'weights': _SAVED('weights'),
  'nothing': jax.checkpoint_policies.nothing_saveable,
}
