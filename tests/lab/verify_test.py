"""The run mode `verify`: nothing is found in what is right, and each planted defect is."""

import functools
import json

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
import tiny

from valkyrie.errors import ConfigurationError, Disagreement
from valkyrie.lab.verification import verify
from valkyrie.models.attention import kv_cache
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import project
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.setup import Setup, StepSettings

ROWS, SIZE = 2, 8
ONE = functools.partial(Partitioner, (('data', 1),))
BOTH = functools.partial(
  Partitioner, (('data', 2), ('time', 4)), (('batch', 'data'), ('time', 'time'))
)
TIME = functools.partial(Partitioner, (('time', 8),), (('time', 'time'),))


def settings(*mixers, dtype='float32', layout=ONE, size=SIZE):
  block = functools.partial(Block, mixers=mixers, mlp_width=24)
  return StepSettings(
    seed=0,
    batch_size=ROWS,
    model=functools.partial(
      LanguageModel,
      vocabulary_size=tiny.VOCABULARY,
      d_model=16,
      layers=1,
      pattern=(block,),
      compute_dtype=dtype,
    ),
    partitioner=layout,
    curriculum=lambda: Curriculum([Phase(size, 1, 1)]),
    optimizer=functools.partial(Optimizer, learning_rate=0.01, warmup_steps=1, train_steps=10),
    check_mixers=False,
  )


class Sum(hk.Module):
  """A mixer of a user: a decaying sum of what it has read in the document."""

  causal, dropout = True, 0.0

  def initial_carry(self, batch_size, dtype):
    return jnp.zeros((batch_size, 16), jnp.promote_types(dtype, jnp.float32))

  def forward_flops(self, width):
    return 2 * width * width

  def __call__(self, x, carry, *, positions, segment_ids):
    (inner,) = project(x, ('embed', None), inner=16)

    def step(state, now):
      value, position, segment = now
      following = 0.9 * jnp.where(position[:, None] == 0, 0, state) + value
      state = jnp.where(segment[:, None] == 0, state, following.astype(state.dtype))
      return state, state.astype(value.dtype)

    by_time = jax.tree.map(lambda v: jnp.swapaxes(v, 0, 1), (inner, positions, segment_ids))
    carry, states = jax.lax.scan(step, self.begun(carry, x), by_time)
    (out,) = project(jnp.swapaxes(states, 0, 1), (None, 'embed'), out=x.shape[-1])
    return out, carry

  def begun(self, carry, x):
    del x
    return carry


class DropsItsCarry(Sum):
  def begun(self, carry, x):
    return jnp.zeros_like(carry) if x.dtype == jnp.bfloat16 else carry


class Leaks(Sum):
  """Its document begins with the last value of the document before it."""

  def __call__(self, x, carry, *, positions, segment_ids):
    return super().__call__(
      x, carry, positions=jnp.where(positions == 0, 1, positions), segment_ids=segment_ids
    )


class SeesTheNext(Sum):
  """It reads each token with the next one of the chunk."""

  def __call__(self, x, carry, *, positions, segment_ids):
    following = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return super().__call__(
      x + 0.01 * following, carry, positions=positions, segment_ids=segment_ids
    )


class NeedsMemory(Sum):
  """It cannot read 4 tokens, or `most`, at once."""

  most = 4 * SIZE

  def __call__(self, x, carry, **where):
    if x.shape[1] in (4, self.most):
      raise MemoryError
    return super().__call__(x, carry, **where)


class NeedsMore(NeedsMemory):
  most = SIZE


def comparisons(*mixers, precision='float32', layouts=None, refused=None, **options):
  refused = {} if refused is None else refused
  return verify.comparisons(Setup(settings(*mixers, **options)), layouts or {}, precision, refused)


def agrees(check, *mixers, **options):
  """Whether a check agrees; what is compared after it is not computed."""
  return next(f.agrees for f in comparisons(*mixers, **options) if f.check == check)


@pytest.mark.parametrize('precision', ['bfloat16', 'float64'])
def test_a_right_model_agrees(precision):
  layouts = {'both': BOTH()} if precision == 'float64' else {}
  found = [*comparisons(tiny.attention, tiny.s5, precision=precision, layouts=layouts)]
  assert len(found) == 6 + len(layouts)
  assert not [finding for finding in found if not finding.agrees]


def test_a_carry_that_is_dropped_in_bfloat16_is_found_there():
  assert agrees('chunks of 4', DropsItsCarry)
  assert agrees('activations saved', DropsItsCarry, precision='bfloat16')
  assert not agrees('chunks of 4', DropsItsCarry, precision='bfloat16')


def test_a_mask_that_leaks_is_found():
  assert not agrees('a document alone', Leaks)
  assert not agrees('chunks of 4', SeesTheNext)


def test_a_halo_that_is_a_token_short_is_found(monkeypatch):
  whole = kv_cache.exchange_halo

  def short(*arguments):
    carry, after = whole(*arguments)
    segments = carry.window.segment_ids.at[:, 0].set(0)
    return carry._replace(window=carry.window._replace(segment_ids=segments)), after

  monkeypatch.setattr(kv_cache, 'exchange_halo', short)
  assert not agrees('layout time', tiny.attention, layouts={'time': TIME()})


def test_a_form_that_does_not_fit_is_named_and_the_run_has_to_fit():
  refused = {}
  found = {finding.check for finding in comparisons(NeedsMemory, refused=refused)}
  assert found == {'activations saved', 'twice the length', 'a document alone', 'token by token'}
  assert set(refused) == {'chunks of 4 in float32', 'chunks of 32 in float32'}
  assert set(refused.values()) == {'The memory is too small for this run: MemoryError'}
  with pytest.raises(ConfigurationError, match='smaller batch_size or chunk_size'):
    next(comparisons(NeedsMore))
  # In a wider precision it may not fit.
  refused = {}
  assert not [*comparisons(NeedsMore, dtype='bfloat16', refused=refused)]
  assert 'the run in float32' in refused


class OnlyInFloat32(Sum):
  """Sum with a state that stays float32, as a user may write it: no loop has such a state."""

  def initial_carry(self, batch_size, dtype):
    return jnp.zeros((batch_size, 16), jnp.float32)

  def __call__(self, x, carry, **where):
    if x.dtype == jnp.float64:
      raise TypeError('scan body function carry input and carry output must have equal types')
    return super().__call__(x, carry, **where)


class Both(SeesTheNext, OnlyInFloat32):
  """It sees the next token, and computes in no other precision."""


def test_a_model_that_computes_in_one_precision_is_compared_in_this_one(
  tmp_path, capsys, monkeypatch
):
  """What is found counts, though the other precision and what follows fail."""

  def fails(*_):
    raise RuntimeError('planted')

  monkeypatch.setattr(verify, '_restored', fails)
  with pytest.raises(Disagreement, match=r'comparisons differ by more .* chunks of 4, in float32'):
    verify.verify(str(tmp_path), settings=functools.partial(settings, Both))
  report = json.loads((tmp_path / 'verify.json').read_text())
  assert [row['check'] for row in report['findings'] if not row['agrees']]
  assert 'only in the precision of the run' in report['not_possible']['the run in float64']
  assert 'the run in float64 is not possible' in capsys.readouterr().out


def test_the_run_mode(tmp_path, capsys):
  verify.verify(str(tmp_path), settings=functools.partial(settings, Sum))
  rows = json.loads((tmp_path / 'verify.json').read_text())['findings']
  assert len(rows) == 2 * 6 + 2
  assert all(row['agrees'] for row in rows)
  assert capsys.readouterr().out.endswith(f'all {len(rows)} comparisons agree\n')
