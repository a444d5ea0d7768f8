"""The residual stream of shipped models at initialization."""

import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel

# The depth of the large model counts here, so its widths are those of a small one.
NARROW = (
  'LanguageModel.vocabulary_size=259',
  'LanguageModel.d_model=192',
  'LanguageModel.compute_dtype="float32"',
  'Block.mlp_width=512',
  'LongformerAttention.heads=3',
  'LongformerAttention.kv_heads=3',
  'LongformerAttention.window=128',
  'LongformerAttention.slice_size=64',
  'GatedRecurrence.width=256',
  'S5.state_size=96',
  'S5.hippo_blocks=3',
)
MODELS = {'toy': (), 'micro': (), 'tiny': (), 'valkyrie_10m': (), 'valkyrie_24b': NARROW}
TOKENS = 256


def stream():
  """The residual stream of a text after the embedding and after each layer: [L + 1, T, D].

  And the mixers that have added to it by then, [L + 1].
  """
  model = language_model.transform(LanguageModel)
  params, carry = jax.jit(model.init, static_argnums=1)(jax.random.key(0), 1)
  found = []
  hk.transform(lambda: found.append(LanguageModel(name='model'))).apply({}, None)
  (module,) = found
  positions, segment_ids = jnp.arange(TOKENS)[None], jnp.ones((1, TOKENS), int)

  def layer(number, params, x, carry):
    def apply(x, carry):
      block = module.pattern[number](name=f'block_{number}')
      return block(x, carry, positions=positions, segment_ids=segment_ids)[0]

    return hk.transform(apply).apply(params, None, x, carry)

  layer = jax.jit(layer, static_argnums=0)
  text = pathlib.Path(__file__).read_bytes()[:TOKENS]
  tokens = np.frombuffer(text, np.uint8).astype(np.int32)[None] + 3
  x = module.scale * params['model']['embedding'][tokens]
  states, mixers = [x], [0]
  for repeat in range(module.repeats):
    for number in range(len(module.pattern)):
      own = {
        name.removeprefix('model/layers/'): {key: leaf[repeat] for key, leaf in leaves.items()}
        for name, leaves in params.items()
        if name.startswith(f'model/layers/block_{number}/')
      }
      before = jax.tree.map(lambda leaf, r=repeat: leaf[r], carry['model']['carry'][number])
      states.append(x := layer(number, own, x, before))
      mixers.append(mixers[-1] + len(before))
  return np.asarray(jnp.stack(states))[:, 0], np.array(mixers)


@pytest.mark.parametrize('name', MODELS)
def test_the_stream_stays_sane_at_any_depth(name):
  """Its size grows no faster than a sum of independent terms, and tokens stay distinct."""
  flags = [f'--gin.{flag}' for flag in MODELS[name]]
  load_gin([f'gin/models/{name}.gin'], flags, modules=main.CONFIGURABLE_MODULES)
  x, mixers = stream()
  rms = np.sqrt(np.mean(x**2, axis=(1, 2)))
  common = np.sum(np.mean(x, axis=1) ** 2, axis=1) / np.mean(np.sum(x**2, axis=2), axis=1)
  np.testing.assert_allclose(rms[0], 1, rtol=0.1)
  assert np.all(rms <= rms[0] * np.sqrt(1 + mixers))
  assert np.all(common < 0.25)
  cosine = np.sum(x[-1] * x[0], axis=1) / np.linalg.norm(x[-1], axis=1)
  assert np.mean(cosine / np.linalg.norm(x[0], axis=1)) > 0.25  # a token still knows its own
