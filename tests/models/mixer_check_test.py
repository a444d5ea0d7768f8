"""The check of a mixer of one's own: each rule that is broken is named, and all of ours pass."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from recurrent_mixers_test import MIXERS
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.mixer_check import check_mixer, check_result
from valkyrie.training.setup import check_mixers

full = functools.partial(FullAttention, heads=2, head_width=8, max_context=16)


@pytest.mark.parametrize('make', [MIXERS['s5'], MIXERS['gated_delta'], tiny.attention, full])
def test_our_mixers_follow_the_rules(make):
  """platforms_test.py holds the others, and these, to more than the check does."""
  check_mixer(make, width=8)


class Running(hk.Module):
  """A sum over the tokens of a document before each, and one broken rule."""

  causal = True
  dropout = 0.0

  def __init__(self, broken=None):
    super().__init__()
    self.broken = broken

  def initial_carry(self, batch_size, dtype):
    return jnp.zeros((batch_size, 8), dtype)

  def forward_flops(self, width):
    return width

  def __call__(self, x, carry, *, positions, segment_ids):
    if self.broken == 'row':
      x = x + x.mean(axis=0, keepdims=True)
    if self.broken == 'later':
      x = x + x[:, -1:]

    def step(state, now):
      token, starts, real = now
      kept = state if self.broken == 'document' else jnp.where(starts[:, None], 0, state)
      after = kept + token
      return after if self.broken == 'padding' else jnp.where(real[:, None], after, state), after

    along = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), (x, positions == 0, segment_ids > 0))
    state, y = jax.lax.scan(step, carry, along)
    if self.broken == 'cut':
      state = jnp.zeros_like(state)
    y = y.swapaxes(0, 1)
    return (y / (jnp.sum(y) * 0) if self.broken == 'finite' else y), state


def test_a_mixer_that_follows_the_rules_passes():
  check_mixer(Running, width=8)


@pytest.mark.parametrize(
  ('broken', 'said'),
  [
    ('later', 'an output depends on a later token'),
    ('row', 'a row depends on another one'),
    ('cut', 'a row cut into chunks of 7 and 9 tokens'),
    ('document', 'a document depends on the one before it'),
    ('padding', 'padding changes the carry'),
    ('finite', 'The outputs of Running for normal random inputs are not finite'),
  ],
)
def test_a_broken_rule_is_named(broken, said):
  make = functools.partial(Running, broken)
  make.__name__ = 'Running'
  with pytest.raises(ConfigurationError, match=said):
    check_mixer(make, width=8)


@pytest.mark.parametrize(
  ('y', 'after', 'said'),
  [
    (jnp.ones((2, 3)), jnp.ones((2, 8)), r'Own returned outputs of shape \(2, 3\) .*\(2, 3, 4\)'),
    (jnp.ones((2, 3, 4)), (), r"Own returned the carry \(\), but took float32\[2, 8\]"),
    (jnp.ones((2, 3, 4)), jnp.ones((2, 8), jnp.bfloat16), r'carry bfloat16\[2, 8\]'),
  ],
)  # fmt: skip
def test_results_of_another_form_are_refused(y, after, said):
  with pytest.raises(ConfigurationError, match=said):
    check_result('Own', jnp.ones((2, 3, 4)), jnp.ones((2, 8)), y, after)


@pytest.mark.parametrize('member', ['causal', 'dropout', 'initial_carry', 'forward_flops'])
def test_a_missing_member_is_named(member):
  members = {name: value for name, value in vars(Running).items() if not name.startswith('__')}
  members |= {'__init__': lambda self: None, '__call__': Running.__call__}
  made = type('Lacking', (), {name: value for name, value in members.items() if name != member})
  with pytest.raises(ConfigurationError, match=f'The mixer Lacking has no attribute {member}'):
    check_mixer(made, width=8)


def test_a_run_checks_imported_mixers_and_not_ours():
  def model(make):
    block = functools.partial(Block, mixers=(tiny.attention, make), mlp_width=8)
    sizes = {'vocabulary_size': 50, 'd_model': 8, 'layers': 1}
    return functools.partial(LanguageModel, **sizes, pattern=(block,))

  check_mixers(model(Running))
  with pytest.raises(ConfigurationError, match='Running: an output depends on a later token'):
    check_mixers(model(functools.partial(Running, 'later')))
