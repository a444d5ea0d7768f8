"""The invariants of every mixer in the forms and with the products of each platform.

A GPU rounds the operands of float32 products to TF32 by default, and a TPU to bfloat16; both scan
in the associative form. Tokens differ in size by a factor of 10^6: what reaches a place where it
does not belong shows, however small its share.
"""

import functools

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest
import recurrent_mixers_test
import tiny

from valkyrie.models.attention import softmax
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.recurrence import scan_kernel
from valkyrie.models.s5.layer import S5
from valkyrie.sharding import ambient

WIDTH = recurrent_mixers_test.WIDTH
CHUNKS, CHUNK = 3, 16
# Documents of each row that start at the first token of a chunk, at its last, at every token, and
# elsewhere; some reach through whole chunks.
ROWS = [[16, 16, 16], [15, 17, 16], [1] * 48, [3, 8, 1, 12, 2, 2, 20], [10, 38]]
DOCUMENTS = sum(map(len, ROWS))  # the rows of every batch: each document has one when alone


class KernelS5(S5):
  """With the kernels of a GPU, interpreted, in blocks of two tokens."""

  def _form(self, time):
    return functools.partial(scan_kernel.scan, interpret=True, block=2)


kernel_s5 = functools.partial(
  KernelS5, state_size=6, hippo_blocks=2, discretization='normalized', activation='linear'
)
MIXERS = {
  **recurrent_mixers_test.MIXERS,
  's5_kernel': kernel_s5,
  's5_selective_kernel': functools.partial(kernel_s5, selective=True),
  'longformer': tiny.attention,
  'dilated': functools.partial(tiny.attention, dilations=(1, 3), window=4),
  'full': functools.partial(FullAttention, heads=2, head_width=8, max_context=48, slice_size=4),
}
# platform: the bits of a mantissa that its products keep of their operands by default, and the
# tolerance for a document that stands elsewhere: an operand that differs in its last bit of float32
# may be rounded to its other neighbor, so it is about eight roundings of an operand.
PLATFORMS = {'cpu': (23, 1e-5), 'gpu': (10, 4e-3), 'tpu': (7, 3e-2)}
# What a product has as its precision where none is given. A CPU computes all of them exactly, and
# jax keeps the traces of each, with the products that they have, apart.
DEFAULTS = {
  'gpu': ('tensorfloat32', lax.Precision.HIGH),
  'tpu': ('bfloat16', lax.Precision.DEFAULT),
}


def takes(platform, name):
  """Whether a platform computes a mixer in this form by default, and the form is tried there.

  Where all platforms have one form, the finest and the coarsest products include those of a GPU.
  """
  if name.endswith('_kernel'):
    return platform == 'gpu'
  if name.startswith(('s5', 'rg_lru')):
    return name.endswith('_associative') == (platform != 'cpu')
  return platform in ('cpu', 'tpu')


def form_over_devices(name):
  """The platform whose form of a mixer is tried over devices: the forms of a GPU are a TPU's."""
  if name.endswith('_kernel'):
    return 'gpu'
  return 'tpu' if name.endswith('_associative') else 'cpu'


@pytest.fixture
def products(platform, monkeypatch):
  """Rounds the operands of products as the platform does, those of gradients included."""
  bits, _ = PLATFORMS[platform]
  if bits == 23:
    yield
    return
  exact = lax.dot_general_p.bind
  default, given = DEFAULTS[platform]

  def rounded(*operands, precision, **options):
    if precision == (given, given) and all(x.dtype == jnp.float32 for x in operands):
      operands = [lax.reduce_precision(x, 8, bits) for x in operands]
    return exact(*operands, precision=precision, **options)

  monkeypatch.setattr(lax.dot_general_p, 'bind', rounded)
  with jax.default_matmul_precision(default):
    yield


def transformed(name):
  return hk.transform(
    lambda carry, x, positions, segment_ids: MIXERS[name]()(
      x, carry, positions=positions, segment_ids=segment_ids
    )
  )


def initial_carry(name):
  made = []
  hk.transform(lambda: made.append(MIXERS[name]().initial_carry(DOCUMENTS, 'float32'))).init(None)
  return made[0]


@functools.cache
def parameters(name):
  """Away from any initialization, float32."""
  random, tokens = np.random.default_rng(0), np.ones((DOCUMENTS, 1), np.int32)
  x = np.ones((DOCUMENTS, 1, WIDTH), np.float32)
  params = jax.jit(transformed(name).init)(
    jax.random.key(0), initial_carry(name), x, tokens, tokens
  )

  def moved(leaf):
    return np.float32(leaf + 0.3 * random.normal(size=leaf.shape))

  return jax.tree.map(moved, jax.device_get(params))


@functools.cache
def reader(name, platform, devices):
  """(params, x, positions, segment_ids, weights) -> (y, gradients by params and x), compiled.

  All but params are chunks [N, B, C, ...]; the loss is the sum of the weighted outputs y.
  """
  del platform  # one trace for each

  def loss(params, x, positions, segment_ids, weights):
    chunks = x, positions, segment_ids
    return recurrent_mixers_test.read(
      transformed(name), params, initial_carry(name), chunks, weights
    )

  def on_one(*arguments):
    (_, (y, _)), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(*arguments)
    return y, *gradients

  def on_eight(*arguments):
    with ambient.within(time=('t',)):
      y, of_params, of_x = on_one(*arguments)
    return y, lax.psum(of_params, 't'), of_x

  if devices == 1:
    return jax.jit(on_one)
  whole, cut = PartitionSpec(), PartitionSpec(None, None, 't')
  return jax.jit(
    jax.shard_map(
      on_eight,
      mesh=Mesh(np.array(jax.devices()), ('t',)),
      in_specs=(whole, cut, cut, cut, cut),
      out_specs=(cut, whole, cut),
      check_vma=False,
    )
  )


def in_chunks(x):
  """[B, T, ...] -> [N, B, C, ...]."""
  return np.moveaxis(x.reshape(DOCUMENTS, CHUNKS, CHUNK, *x.shape[2:]), 1, 0)


def whole(x):
  """The inverse of `in_chunks`."""
  return np.moveaxis(np.asarray(x), 0, 1).reshape(DOCUMENTS, CHUNKS * CHUNK, *x.shape[3:])


@functools.cache
def packed():
  """(positions, segment_ids, the number of each token's document), int32 [B, T]."""
  rows = [ROWS[row % len(ROWS)] for row in range(DOCUMENTS)]
  positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in rows])
  number = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
  return *(part.astype(np.int32) for part in (positions, 1 + number)), number


def normal(seed):
  return (
    np.random.default_rng(seed).normal(size=(DOCUMENTS, CHUNKS * CHUNK, WIDTH)).astype('float32')
  )


@pytest.mark.invariant(1)
@pytest.mark.invariant(2)
@pytest.mark.invariant(4)
@pytest.mark.parametrize(
  ('platform', 'name'),
  [(platform, name) for platform in PLATFORMS for name in MIXERS if takes(platform, name)],
)
@pytest.mark.usefixtures('products')
def test_cuts_the_future_and_padding_change_nothing(platform, name):
  apply = jax.jit(functools.partial(transformed(name).apply, parameters(name), None))
  positions, segment_ids, _ = (part[:, :24] for part in packed())
  x = normal(0)[:, :24]

  def read(x, positions, segment_ids, cuts=()):
    """(y, the carry after each chunk)."""
    ys, after = [], [initial_carry(name)]
    chunks = zip(
      *(np.split(part, cuts, axis=1) for part in (x, positions, segment_ids)), strict=True
    )
    for chunk in chunks:
      y, carry = apply(after[-1], *chunk)
      ys.append(y)
      after.append(carry)
    return np.concatenate(ys, axis=1), after

  def close(found, expected):
    leaves = map(jax.tree.leaves, jax.device_get((found, expected)))
    for one, other in zip(*leaves, strict=True):
      off = np.linalg.norm(np.float32(one) - other)
      assert off <= PLATFORMS[platform][1] * np.linalg.norm(other)

  y, after = read(x, positions, segment_ids)
  in_chunks, after_chunks = read(x, positions, segment_ids, (8, 16))
  close(in_chunks, y)
  close(after_chunks[-1], after[-1])

  later = np.concatenate([x[:, :11], np.float32(1e6) * normal(1)[:, 11:24]], axis=1)
  np.testing.assert_array_equal(read(later, positions, segment_ids)[0][:, :11], y[:, :11])

  padded = np.arange(24)[None] >= 8
  of_padding = [np.where(padded, 0, part) for part in (positions, segment_ids)]
  large = np.where(padded[..., None], np.float32(1e6) * x, x)
  in_whole, in_parts = read(large, *of_padding)[1], read(large, *of_padding, (8, 16))[1]
  close(in_whole[-1], after_chunks[1])
  jax.tree.map(np.testing.assert_array_equal, in_parts[-1], after_chunks[1])


@pytest.mark.invariant(3)
@pytest.mark.parametrize(
  ('platform', 'name', 'devices'),
  [
    (platform, name, devices)
    for platform in PLATFORMS
    for name in MIXERS
    for devices in (1, 8)
    if takes(platform, name) and (devices == 1 or platform == form_over_devices(name))
  ],
)
@pytest.mark.usefixtures('products')
def test_documents_never_see_one_another(platform, name, devices):
  """Every second document is exchanged for one that is 10^6 times larger, and is then alone."""

  def results(*batch):
    read = reader(name, platform, devices)
    y, of_params, of_x = read(parameters(name), *map(in_chunks, batch))
    return whole(y), whole(of_x), of_params

  positions, segment_ids, number = packed()
  for parity in (0, 1):
    mine = number % 2 == parity
    small, weights = normal(0), np.where(mine[..., None], normal(1), 0)
    large = np.where(mine[..., None], small, np.float32(1e6) * normal(2))
    y, of_x, of_params = results(large, positions, segment_ids, weights)
    other_y, *other_gradients = results(small, positions, segment_ids, weights)
    np.testing.assert_array_equal(y[mine], other_y[mine])
    jax.tree.map(np.testing.assert_array_equal, [of_x, of_params], other_gradients)
    assert not np.any(of_x[~mine])

    places = [
      (row, np.flatnonzero(number[row] == n))
      for row, lengths in enumerate(ROWS)
      for n in range(parity, len(lengths), 2)
    ]

    def alone(part, places=places):
      rows = np.zeros_like(part)
      for own, (row, where) in zip(rows, places, strict=False):
        own[: len(where)] = part[row, where]
      return rows

    own_y, own_of_x, _ = results(
      *map(alone, (small, positions, np.minimum(segment_ids, 1), weights))
    )
    for n, (row, where) in enumerate(places):
      for found, rows in ((y, own_y), (of_x, own_of_x)):
        expected = rows[n, : len(where)]
        off = np.linalg.norm(found[row, where] - expected)
        assert off < PLATFORMS[platform][1] * np.linalg.norm(expected), (row, where)


def test_weights_of_logits_that_are_computed_again_are_at_most_one():
  """A product of 10^9 in TF32 may be rounded by more than 88, whose exponential is infinite."""
  ones = jnp.ones((1, 1, 1, 1))
  part = softmax.Part(ones, ones, ones, jnp.ones((1, 1, 1), bool))
  _, (parts, dropout, out, log_total) = softmax._attend_forward((part,), None)
  rounded = log_total - 100  # as if the logit had been smaller in the forward pass
  residuals = parts, dropout, out, rounded
  ((cotangent,), _) = softmax.attend_backward(residuals, (ones, jnp.zeros_like(ones)))
  for gradient, expected in ((cotangent.v, 1), (cotangent.q, 0), (cotangent.k, 0)):
    np.testing.assert_array_equal(gradient, expected * ones)
