"""The forms of a block: norms before or after its parts, and a part that is left out."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.block import Block
from valkyrie.models.layers import GatedMLP, Module, SquaredReLUMLP


class Doubling(Module):
  """A mixer that doubles what it reads."""

  causal = True
  dropout = 0.0

  def initial_carry(self, batch_size, dtype):
    return ()

  def forward_flops(self, width):
    return width

  def __call__(self, x, carry, *, positions, segment_ids):
    return 2 * x, carry


def rms_norm(x, scale):
  return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize(
  ('norm', 'mixers', 'mlp'),
  [
    ('before', (), SquaredReLUMLP),
    ('before', (Doubling,), None),
    ('after', (Doubling, Doubling), SquaredReLUMLP),
    ('both', (Doubling,), SquaredReLUMLP),
  ],
)
def test_a_block_is_its_equation(norm, mixers, mlp):
  random = np.random.default_rng(0)
  x = random.normal(size=(2, 3, 4))
  tokens = np.ones((2, 3), np.int32)
  kinds = ('mixers', 'mlp', 'stream')

  def read(x):
    found = {kind: [] for kind in kinds}
    block = Block(mixers, 6, mlp=mlp, norm=norm)
    y, _ = block(x, ((),) * len(mixers), positions=tokens, segment_ids=tokens, found=found)
    return y, [found[kind][0] for kind in kinds]

  with jax.enable_x64(True):
    pure = hk.without_apply_rng(hk.transform(read))
    shapes = jax.eval_shape(pure.init, jax.random.key(0), x)
    params = jax.tree.map(lambda p: random.normal(size=p.shape), shapes)
    y, found = jax.jit(pure.apply)(params, x)

  used = set()

  def normed(x, name, is_here):
    if not is_here:
      return x
    used.add(f'block/{name}')
    return rms_norm(x, params[f'block/{name}']['scale'])

  mixed = x
  for number in ('', '_1')[: len(mixers)]:
    read_by_mixer = normed(mixed, f'mixer_norm{number}', norm != 'after')
    mixed = mixed + normed(2 * read_by_mixer, f'post_mixer_norm{number}', norm != 'before')
  added = np.zeros_like(x)
  if mlp is not None:
    used.add('block/~/mlp')
    weights = params['block/~/mlp']
    hidden = normed(mixed, 'mlp_norm', norm != 'after') @ weights['hidden']
    added = normed(np.maximum(hidden, 0) ** 2 @ weights['out'], 'post_mlp_norm', norm != 'before')
  assert used == params.keys()
  np.testing.assert_allclose(y, mixed + added, atol=1e-12)
  for one, other in zip(found, (mixed - x, added, mixed + added), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_model_of_blocks_of_one_part_reads_chunks_as_the_whole():
  """And counts the operations of these parts, as a model whose block has both."""
  mixing = functools.partial(Block, (tiny.s5,), mlp=None)
  thinking = functools.partial(Block, (), 24, norm='both')

  def of(pattern, layers):
    make = functools.partial(
      language_model.LanguageModel, vocabulary_size=50, d_model=16, layers=layers, pattern=pattern
    )
    return language_model.transform(make)

  model = of((mixing, thinking), 4)
  params, carry = tiny.init(model, 2)
  batch = tiny.batch((5, 7))
  apply = jax.jit(model.apply)

  def read(carry, begin, end):
    part = tiny.cut(batch, begin, end)
    features, carry = apply(params, carry, part.inputs, part.positions, part.segment_ids)
    return features.hidden, carry

  whole, _ = read(carry, 0, 12)
  first, carry = read(carry, 0, 6)
  second, _ = read(carry, 6, 12)
  np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-5)
  both = functools.partial(Block, (tiny.s5,), 24)
  assert model.about.forward_flops == of((both,), 2).about.forward_flops


def test_blocks_that_cannot_be_are_refused():
  for options, message in (
    ({'mlp': None}, 'A Block has neither mixers nor an MLP. Set Block.mixers or Block.mlp.'),
    ({'mlp': GatedMLP}, 'Block.mlp_width is not set. Set it, or set Block.mlp = None.'),
    ({'mlp_width': 8, 'norm': 'none'}, "Block.norm='none' is unknown. Use one of"),
  ):
    with pytest.raises(ConfigurationError, match=message):
      hk.transform(lambda options=options: Block((), **options)).init(None)
