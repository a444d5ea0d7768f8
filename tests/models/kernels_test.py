"""Attention by a library's kernel, in Pallas's interpreter, against the definition in float64."""

import functools
import importlib
import types

import dense_attention
import gin
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.errors import ConfigurationError, Disagreement
from valkyrie.models import kernel_choice
from valkyrie.models.attention import cudnn, kv_cache, sliding_window
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.attention.windows import windows_of
from valkyrie.models.layers import MixerOptions
from valkyrie.sharding import ambient
from valkyrie.training.kernel_check import agreeing_lengths, asked_lengths
from valkyrie.training.setup import Setup, StepSettings

HEADS, KV_HEADS, WIDTH, WINDOW, STARTS = 2, 1, 8, 130, 3
PIECE = 128


def problem(time, lengths, padding):
  """One row of documents, the first begun long before."""
  random = np.random.default_rng(0)
  rows = [('q', HEADS), ('k', KV_HEADS), ('v', KV_HEADS)]
  whole = {name: random.normal(size=(1, time, heads, WIDTH)) for name, heads in rows}
  positions = np.concatenate([np.arange(n) for n in (*lengths, padding)])
  segments = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding])
  registers = tuple(random.normal(size=(2, 2, KV_HEADS, WIDTH)))
  return whole, registers, positions[None], segments[None]


def attend(arrays, registers, positions, segments, cut, choice='interpret'):
  """Chunks of `cut` tokens, one after the other -> out [1, T, H, K]."""
  windows = [
    seen._replace(kernels=choice)
    for seen in windows_of((1,) * KV_HEADS, HEADS, WINDOW, 64, Rotary())
  ]
  dtype = arrays['q'].dtype
  carry = kv_cache.empty_carry(1, WINDOW, STARTS, KV_HEADS, WIDTH, dtype)
  outs = []
  for n in range(0, positions.shape[1], cut):
    out, carry = sliding_window.sliding_window_attention(
      *(arrays[name][:, n : n + cut] for name in 'qkv'),
      carry,
      positions=positions[:, n : n + cut],
      segment_ids=segments[:, n : n + cut],
      registers=registers,
      windows=windows,
    )
    outs.append(out)
  return jnp.concatenate(outs, axis=1)


def cast(tree, dtype):
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def of_definition(q, k, v, bias, *more, scale, **options):
  """What cuDNN documents: softmax(q k + bias) v and the logarithm of its denominator."""
  k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
  logits = scale * jnp.einsum('bhqk,bhnk->bhqn', q, k) + bias
  log_total = jax.nn.logsumexp(logits, axis=-1)
  return jnp.einsum('bhqn,bhnk->bhqk', jnp.exp(logits - log_total[..., None]), v), log_total


def gradient_of_definition(q, k, v, bias, *more, scale, **options):
  """Its gradient, from the outputs and the logarithm that it is given."""
  *_, log_total, out, gradient = more

  def weights(q, k):
    k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
    return jnp.exp(scale * jnp.einsum('bhqk,bhnk->bhqn', q, k) + bias - log_total[..., None])

  def shared(q, k, v):  # the derivative of a softmax: p (do v - do o)
    v = jnp.repeat(v, q.shape[1] // v.shape[1], axis=1)
    own = jnp.sum(gradient * out, axis=-1, keepdims=True)
    seen = jnp.einsum('bhqk,bhnk->bhqn', gradient, v) - lax.stop_gradient(own)
    return jnp.sum(weights(q, k) * seen)

  return jax.grad(shared, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.invariant(1)
@pytest.mark.invariant(3)
@pytest.mark.parametrize('choice', ['interpret', 'require'])
def test_value_and_gradient_are_those_of_the_definition(choice, monkeypatch):
  """Two chunks; documents begin in both, one exceeds the window; padding; heads share keys.

  Splash attention is interpreted. No GPU is here, so cuDNN's part is computed by its definition.
  """
  cudnn = importlib.import_module('jax._src.cudnn.fused_attention_stablehlo')
  for name, function in (('fwd', of_definition), ('bwd', gradient_of_definition)):
    primitive = types.SimpleNamespace(bind=function)
    monkeypatch.setattr(cudnn, f'_dot_product_attention_{name}_p_wrapper', primitive)
  on_gpu = {'devices': [types.SimpleNamespace(platform='gpu')]} if choice == 'require' else {}
  whole, registers, *where = problem(256, (20, 170, 40), padding=26)
  expected = dense_attention.causal(
    *whole.values(), registers, *where, WINDOW, (1,) * KV_HEADS, STARTS
  )
  real = where[1][..., None, None] > 0
  weights = np.where(real, np.random.default_rng(1).normal(size=expected.shape), 0)

  def loss(inputs, dtype, choice):
    out = attend(*inputs, *(jnp.asarray(x, jnp.int32) for x in where), cut=PIECE, choice=choice)
    return jnp.sum(jnp.asarray(weights, dtype) * out), out

  with ambient.within(**on_gpu):
    by_kernel = jax.jit(
      jax.grad(functools.partial(loss, dtype=jnp.float32, choice=choice), has_aux=True)
    )
    gradient, out = by_kernel(cast((whole, registers), jnp.float32))
  with jax.enable_x64(True):  # the plain form's, which tests/models/sliding_window_test.py holds
    plain = jax.jit(jax.grad(functools.partial(loss, dtype=jnp.float64, choice=None), has_aux=True))
    expected_gradient, _ = plain(cast((whole, registers), jnp.float64))
  np.testing.assert_allclose(np.where(real, out, 0), np.where(real, expected, 0), atol=2e-5)
  for found, right in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
    assert np.linalg.norm(found - right) <= 2e-6 * np.linalg.norm(right) > 0


@pytest.mark.invariant(6)
def test_pieces_of_eight_devices_are_the_whole():
  whole, registers, *where = problem(8 * PIECE, (700, 200), padding=124)
  arrays = cast(whole, jnp.float32), cast(registers, jnp.float32)
  where = [jnp.asarray(x, jnp.int32) for x in where]
  mesh, cut, same = Mesh(np.array(jax.devices()), ('t',)), PartitionSpec(None, 't'), PartitionSpec()

  def body(arrays, registers, *where):
    with ambient.within(time=('t',)):
      out = attend(arrays, registers, *where, cut=PIECE)
    return out

  specs = {'in_specs': (cut, same, cut, cut), 'out_specs': cut, 'check_vma': False}
  pieces = jax.jit(jax.shard_map(body, mesh=mesh, **specs))(*arrays, *where)
  expected = jax.jit(functools.partial(attend, cut=8 * PIECE, choice=None))(*arrays, *where)
  real = where[1][..., None, None] > 0
  np.testing.assert_allclose(np.where(real, pieces, 0), np.where(real, expected, 0), atol=2e-5)


def test_full_attention_of_a_chunk_read_alone():
  make = functools.partial(
    FullAttention,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_width=WIDTH,
    max_context=PIECE,
    carried=False,
    kernels='interpret',
  )
  kernel, plain = (
    jax.jit(functools.partial(kernel_choice.results, make, (1, PIECE, 8), jnp.float32, options))()
    for options in (MixerOptions(kernel_lengths={('FullAttention', PIECE)}), MixerOptions())
  )
  for x, y in zip(kernel, plain, strict=True):
    assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y) > 0


def setup(tmp_path, choice, *flags):
  """A run of whole chunks of 128 tokens by one device, whose data do not exist."""
  gin.clear_config(clear_constants=True)
  file = tmp_path / 'run.gin'
  file.write_text(tiny_run.gin_text(tmp_path, mixers='(@LongformerAttention,)'))
  sizes = ('--gin.chunk_size=128', '--gin.batch_size=1', '--gin.LongformerAttention.window=128')
  choice = f'--gin.LongformerAttention.kernels={choice!r}'
  load_gin([str(file)], (*sizes, choice, *flags), modules=main.CONFIGURABLE_MODULES)
  return Setup(gin.get_configurable(StepSettings)())


def test_a_run_uses_a_kernel_only_where_it_agrees(tmp_path):
  said = []
  whole = setup(tmp_path, 'interpret')
  agreed = agreeing_lengths(whole, said.append)
  assert agreed == asked_lengths(whole) == {('LongformerAttention', 128)}
  assert 'of the norm from the plain form, on 1 x 128 tokens' in said[0]
  with pytest.raises(Disagreement, match=r'1 x 128 tokens, more than 0\. Set Longformer.* = None'):
    agreeing_lengths(whole, said.append, bound=0.0)
  phase = whole.curriculum.phases[0]
  other = whole.with_kernels({('LongformerAttention', 256), ('S5', 128)})
  assert 'pallas_call' not in str(other.trace(phase).jaxpr), 'nothing was compared here'
  assert 'pallas_call' in str(whole.with_kernels(agreed).trace(phase).jaxpr)


def test_a_kernel_that_computes_no_number_does_not_agree(tmp_path, monkeypatch):
  def results(make, shape, dtype, options, in_one_document):
    is_nan = in_one_document if options.kernel_lengths else False
    return [jnp.where(is_nan, jnp.nan, 1.0)[None]]

  monkeypatch.setattr(kernel_choice, 'results', results)
  with pytest.raises(Disagreement, match='nan of the norm from the plain form'):
    agreeing_lengths(setup(tmp_path, 'interpret'), str)


@pytest.mark.parametrize(
  ('fails', 'said'), [('kernel', 'it fails'), ('plain', 'the plain form fails')]
)
def test_a_form_that_does_not_run_is_named(fails, said, tmp_path, monkeypatch):
  def results(make, shape, dtype, options, in_one_document):
    form = 'kernel' if options.kernel_lengths else 'plain'
    if form == fails:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 9 GiB\nand more')
    return [jnp.ones(1)]

  monkeypatch.setattr(kernel_choice, 'results', results)
  with pytest.raises(Disagreement, match=rf'{said} \(.*RESOURCE_EXHAUSTED: 9 GiB\)\. Set'):
    agreeing_lengths(setup(tmp_path, 'interpret'), str)


@pytest.mark.parametrize('is_masked', [False, True])
def test_only_a_mask_becomes_a_bias_of_cudnn(is_masked, monkeypatch):
  called = []
  module = importlib.import_module('jax._src.cudnn.fused_attention_stablehlo')

  def bind(q, k, v, bias, *others, variadic_args, **options):
    called.append((bias.shape, variadic_args))
    return q, q[..., 0]

  primitive = types.SimpleNamespace(bind=bind)
  monkeypatch.setattr(module, '_dot_product_attention_fwd_p_wrapper', primitive)
  tokens = jnp.ones((1, HEADS, 4, WIDTH))
  mask = jnp.ones((1, 4, 4), bool) if is_masked else None
  cudnn.forward(tokens, tokens, tokens, mask)
  shape = (1, 1, 4, 4) if is_masked else (0,)
  assert called == [(shape, (is_masked, False))]


@pytest.mark.parametrize('in_one_document', [False, True])
def test_keys_without_a_mask_are_among_what_is_compared(in_one_document, monkeypatch):
  """Here, what cuDNN reads without a mask is NaN."""

  def forward(q, k, v, seen):
    value = 0.0 if seen is not None else jnp.nan
    return jnp.full(q.shape, value), jnp.full(q.shape[:-1], value)

  def backward(q, k, v, *others):
    return q, k, v

  monkeypatch.setattr(cudnn, 'forward', forward)
  monkeypatch.setattr(cudnn, 'backward', backward)
  monkeypatch.setattr(cudnn, 'PAIRS_AT_ONCE', PIECE**2)
  sizes = {'heads': HEADS, 'kv_heads': KV_HEADS, 'head_width': WIDTH, 'max_context': 4 * PIECE}
  make = functools.partial(FullAttention, **sizes, kernels='require')
  options = MixerOptions(kernel_lengths={('FullAttention', PIECE)})
  with ambient.within(devices=[types.SimpleNamespace(platform='gpu')]):
    outputs, *_ = kernel_choice.results(
      make, (1, PIECE, 8), jnp.float32, options, in_one_document=in_one_document
    )
  assert np.isnan(outputs).any() == in_one_document


def test_without_a_kernel_a_run_prefers_the_plain_form_or_ends(tmp_path):
  said, found = [], 'the kernels are for TPUs and GPUs, and this program for a CPU'
  assert agreeing_lengths(setup(tmp_path, 'prefer'), said.append) == set()
  assert said == [f'LongformerAttention.kernels: {found}: the plain form is used']
  with pytest.raises(ConfigurationError, match=f"kernels='require': {found}. Set"):
    agreeing_lengths(setup(tmp_path, 'require'), said.append)
  with pytest.raises(ConfigurationError, match='a device reads 96 tokens of a chunk at once'):
    agreeing_lengths(setup(tmp_path, 'interpret', '--gin.chunk_size=96'), said.append)


@pytest.mark.parametrize('scope', ['', 'recurrent/'])
def test_the_kernel_of_a_recurrence_is_compared_inside_of_the_mixer_around_it(tmp_path, scope):
  """The mixer that is compared has the bindings of its block's scope, as the mixer of the run."""
  said = []
  text = (
    f'--gin.LanguageModel.pattern=(@{scope}Block,)',
    f'--gin.{scope}Block.mixers=(@GatedRecurrence,)',
    f'--gin.{scope}GatedRecurrence.recurrence=@S5',
    f'--gin.{scope}GatedRecurrence.width=32',
    f'--gin.{scope}S5.state_size=8',
    f"--gin.{scope}S5.activation='linear'",
  )
  run = setup(tmp_path, None, *text, f"--gin.{scope}S5.kernels='interpret'")
  agreed = agreeing_lengths(run, said.append)
  assert agreed == {('S5', 128)} and said[0].startswith('S5.kernels: ')
  assert 'pallas_call' in str(run.with_kernels(agreed).trace(run.curriculum.phases[0]).jaxpr)
  found = 'the kernels are for GPUs, and this program for a CPU'
  with pytest.raises(ConfigurationError, match=f"S5.kernels='require': {found}"):
    required = setup(tmp_path, None, *text, f"--gin.{scope}S5.kernels='require'")
    agreeing_lengths(required, said.append)


@pytest.mark.parametrize(
  'option',
  [
    '--gin.LongformerAttention.dilations=(2,)',
    '--gin.LongformerAttention.dropout=0.5',
    '--gin.LongformerAttention.document_start=1',
  ],
)
def test_what_kernels_do_not_have_is_computed_by_the_plain_form_or_ends_the_run(tmp_path, option):
  options = ('--gin.LongformerAttention.window=9', option)
  found = 'the kernels have no dropout, no dilations, and no document_start with a window below 128'
  said = []
  prefers = setup(tmp_path, 'prefer', *options)
  with ambient.within(devices=[types.SimpleNamespace(platform='gpu')]):
    assert agreeing_lengths(prefers, said.append) == set()
  assert said == [f'LongformerAttention.kernels: {found}: the plain form is used']
  requires = setup(tmp_path, 'require', *options)
  with (
    ambient.within(devices=[types.SimpleNamespace(platform='gpu')]),
    pytest.raises(ConfigurationError, match=f"kernels='require': {found}. Set"),
  ):
    agreeing_lengths(requires, said.append)


def test_another_word_than_the_choices_of_kernels_is_refused(tmp_path):
  with pytest.raises(ConfigurationError, match="kernels='always' is unknown"):
    setup(tmp_path, 'always')
