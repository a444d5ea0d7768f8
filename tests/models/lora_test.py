"""Low-rank adapters: what they compute, what learns, and how they merge."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.lora import Lora
from valkyrie.models.matrices import Adapted, products
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Group, Optimizer
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step
from valkyrie.weights import named_tensors, tensor_files
from valkyrie.weights.initial import InitialWeights

PHASE = Phase(chunk_size=12, chunks=2, backprop_chunks=2)
BASE = r'(?<!_lora_a)(?<!_lora_b)$'
adapted = functools.partial(Lora, pattern='(attention/query|mlp/out)$', rank=2)
small = functools.partial(tiny.model, (tiny.attention,))


def split(params):
  """The adapters and the other parameters, by path."""
  flat = {f'{m}/{n}': leaf for m, group in params.items() for n, leaf in group.items()}
  adapters = {path: leaf for path, leaf in flat.items() if path.endswith(('_lora_a', '_lora_b'))}
  return adapters, {path: leaf for path, leaf in flat.items() if path not in adapters}


def with_values(params, seed=1):
  """The parameters with adapters that add something."""
  random = np.random.default_rng(seed)
  return {
    m: {
      n: jnp.asarray(random.normal(size=leaf.shape) / 4, leaf.dtype)
      if n.endswith('_lora_b')
      else leaf
      for n, leaf in group.items()
    }
    for m, group in params.items()
  }


def features(model, params):
  batch = tiny.batch((9, 15))
  return jax.jit(model.apply)(
    params, model.initial_carry(2), batch.inputs, batch.positions, batch.segment_ids
  )[0].hidden


def test_adapters_change_nothing_at_first_and_are_the_sum_of_both_matrices(tmp_path):
  model, plain = small(lora=adapted), small()
  params = tiny.init(model, 1)[0]
  adapters, base = split(params)
  assert sorted(leaf.shape for leaf in adapters.values()) == [
    (2, 2, 16),
    (2, 2, 32),
    (2, 16, 2),
    (2, 24, 2),
  ]
  without = {m: {n: leaf for n, leaf in g.items() if f'{m}/{n}' in base} for m, g in params.items()}
  np.testing.assert_allclose(features(model, params), features(plain, without), atol=1e-5)
  params = with_values(params)
  found = features(model, params)
  assert np.abs(found - features(plain, without)).max() > 0.01
  # A model without adapters, or whose adapters are other ones, loads the sums.
  save_file(
    {
      name: np.asarray(leaf[number] if of.stacked else leaf)
      for of in named_tensors.leaves(params)
      for leaf in [params[of.module][of.name]]
      for number, name in enumerate(of.tensors)
    },
    tmp_path / 'adapted.safetensors',
  )
  make = functools.partial(LanguageModel, vocabulary_size=50, d_model=16, layers=2)
  merged, complete = InitialWeights(str(tmp_path / 'adapted.safetensors')).load(
    plain, make, tiny.init(plain, 1)[0], 'bytes', lambda line: None
  )
  assert complete
  np.testing.assert_allclose(features(plain, merged), found, atol=1e-5)
  fresh = (('_lora_[ab]$', 'fresh'),)
  for rank, rules in ((4, ()), (4, fresh), (2, fresh)):
    other = small(lora=functools.partial(adapted, rank=rank))
    loaded, _ = InitialWeights(str(tmp_path / 'adapted.safetensors'), rules=rules).load(
      other, make, tiny.init(other, 1)[0], 'bytes', lambda line: None
    )
    np.testing.assert_allclose(features(other, loaded), found, atol=1e-5)


def test_only_adapters_learn_and_count():
  model = small(lora=adapted)
  group = Group(BASE, learning_rate_scale=0.0)
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=0, train_steps=9, groups=(group,))
  state = initial_state(model, optimizer, 0, 2)
  step = make_train_step(model, optimizer, Curriculum([PHASE]), PHASE, seed=0, remat_chunks=True)
  after, metrics = jax.jit(step)(state, tiny.batch((9, 15)))
  adapters, base = split(state.params)
  learned, kept = split(after.params)
  jax.tree.map(np.testing.assert_array_equal, kept, base)
  assert all(np.any(learned[path] != adapters[path]) for path in adapters if path.endswith('_b'))
  moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim)
  assert moments == 2 * sum(leaf.size for leaf in adapters.values())
  # The norm counts the adapters alone: at first only B, since B = 0 stops the gradient of A.
  whole = jax.jit(
    make_train_step(
      model, Optimizer(learning_rate=0.01, warmup_steps=0, train_steps=9), Curriculum([PHASE]),
      PHASE, seed=0, remat_chunks=True,
    )
  )  # fmt: skip
  plain = Optimizer(learning_rate=0.01, warmup_steps=0, train_steps=9)
  of_all = whole(initial_state(model, plain, 0, 2), tiny.batch((9, 15)))[1]
  assert 0 < metrics.grad_norm < 0.9 * of_all.grad_norm
  assert optax.tree.norm(kept) > 0


def test_a_cast_copy_computes_the_same():
  model = small(lora=adapted, compute_dtype='bfloat16')
  params = with_values(tiny.init(model, 1)[0])
  copy = model.cast(params)
  dtypes = {leaf.dtype for path, leaf in split(copy)[0].items()}
  assert dtypes == {jnp.dtype('bfloat16')}
  np.testing.assert_array_equal(features(model, params), features(model, copy))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'rank': 0}, r'Lora\.rank = 0'),
    ({'pattern': '('}, r'is not a regular expression'),
  ],
)
def test_bad_adapters_are_refused(options, message):
  with pytest.raises(ConfigurationError, match=message):
    Lora(**options)


def test_a_pattern_without_matrices_is_refused():
  model = tiny.model(lora=functools.partial(Lora, pattern='qerry$'))
  with pytest.raises(ConfigurationError, match=r"'qerry\$', which .* Did you mean query\?"):
    model.parameters()


@pytest.mark.parametrize('scale', [1e-4, 1e-3, 1e-2])
def test_in_bfloat16_a_small_adapter_has_its_whole_effect(scale):
  random = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

  x, whole, plain = normal(64, 256), normal(256, 48), normal(256, 8)
  down, up = normal(256, 4), normal(4, 48) * scale
  adapted = Adapted(whole, down, up)
  found = products(x, [[adapted, plain], plain], out_dtype=jnp.float32)
  base = products(x, [[whole, plain], plain], out_dtype=jnp.float32)
  expected = np.float64(x) @ np.float64(down) @ np.float64(up)
  effect = np.float64(found[0][:, :48]) - np.float64(base[0][:, :48])
  assert np.linalg.norm(effect - expected) < 0.005 * np.linalg.norm(expected)
  np.testing.assert_array_equal(found[0][:, 48:], base[0][:, 48:])
  np.testing.assert_array_equal(found[1], base[1])


def test_stored_in_bfloat16_a_small_adapter_merges_whole():
  random = np.random.default_rng(0)
  whole, down, up = (
    np.asarray(random.normal(size=shape) * scale, ml_dtypes.bfloat16)
    for shape, scale in (((32, 48), 1), ((32, 4), 1), ((4, 48), 1e-4))
  )
  tensors = {'w': whole, 'w_lora_a': down, 'w_lora_b': up}
  read = {name: tensor_files.Tensor(x.shape, x.__getitem__) for name, x in tensors.items()}
  found = named_tensors.merged(read)['w'].read((slice(None), slice(None)))
  effect = np.float64(found) - np.float64(whole)
  expected = np.float64(down) @ np.float64(up)
  assert np.linalg.norm(effect - expected) < 0.005 * np.linalg.norm(expected)
