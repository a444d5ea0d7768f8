"""Products, bytes and cycles of compiled programs, counted by hand."""

import dataclasses
import math
import pathlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.lab.certificates import hlo, work
from valkyrie.monitoring import chips

TPU = (pathlib.Path(__file__).parent / 'tpu_program.hlo').read_text()


def flops(f, *shapes):
  """Of the compiled program of `f`, with its loops multiplied out."""
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  module = hlo.parse(jax.jit(f).lower(*arguments).compile().as_text())
  return sum(one.flops * one.times for one in work.list_work(module))


def test_products_of_loops_and_fusions():
  def f(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  assert flops(f, (32, 64), (5, 64, 64)) == 5 * 2 * 32 * 64 * 64


def test_batched_products():
  assert flops(lambda a, b: jnp.einsum('bik,bkj->bij', a, b), (3, 32, 48), (3, 48, 64)) == (
    2 * 3 * 32 * 48 * 64
  )


def test_all_products_of_a_fusion_count():
  text = """%inside (p: f32[8,16], q: f32[16,32], r: f32[32,4]) -> f32[8,4] {
  %p = f32[8,16] parameter(0)
  %q = f32[16,32] parameter(1)
  %r = f32[32,4] parameter(2)
  %first = f32[8,32] convolution(%p, %q), dim_labels=bf_io->bf
  ROOT %second = f32[8,4] convolution(%first, %r), dim_labels=bf_io->bf
}

ENTRY %m (a: f32[8,16], b: f32[16,32], c: f32[32,4]) -> f32[8,4] {
  %a = f32[8,16] parameter(0)
  %b = f32[16,32] parameter(1)
  %c = f32[32,4] parameter(2)
  ROOT %f = f32[8,4] fusion(%a, %b, %c), kind=kOutput, calls=%inside
}
"""
  (fusion,) = [one for one in work.list_work(hlo.parse(text)) if one.flops]
  assert fusion.flops == 2 * 8 * 16 * 32 + 2 * 8 * 32 * 4


def convolution(left, right, out, labels, window):
  text = f"""ENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {{
  %a = f32[{left}] parameter(0)
  %b = f32[{right}] parameter(1)
  ROOT %c = f32[{out}] convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
"""
  return work.flops_of(hlo.parse(text).entry.root)


@pytest.mark.parametrize(
  'left, right, out, labels, window, expected',
  [
    ('8,16', '16,32', '8,32', 'bf_io->bf', '', 2 * 8 * 16 * 32),
    ('16,8', '32,16', '8,32', 'fb_oi->bf', '', 2 * 8 * 16 * 32),
    # A batch of 24 products, as libtpu writes it: each output meets one place of the kernel.
    (
      '24,512,64', '24,128,64', '24,512,128', '0bf_0oi->0bf', 'size=24 stride=23 lhs_dilate=24',
      2 * 24 * 512 * 64 * 128,
    ),
    # Three taps over ten steps, with two steps of padding before: 2 + 1 products meet padding.
    ('10,4,8', '3,8,16', '10,4,16', '0bf_0io->0bf', 'size=3 pad=2_0', 2 * 4 * 8 * 16 * 27),
    ('10,4,8', '3,8,16', '4,4,16', '0bf_0io->0bf', 'size=3 stride=2', 2 * 4 * 8 * 16 * 12),
    ('10,4,8', '3,8,16', '6,4,16', '0bf_0io->0bf', 'size=3 rhs_dilate=2', 2 * 4 * 8 * 16 * 18),
  ],
)  # fmt: skip
def test_products_of_convolutions(left, right, out, labels, window, expected):
  assert convolution(left, right, out, labels, window) == expected


def test_convolutions_agree_with_the_number_of_terms_of_a_sum():
  """Of ones with ones, a convolution adds as many terms as it multiplies."""
  steps, taps, before, after, dilate, stride, gaps = 9, 4, 2, 1, 2, 3, 2
  ones = lax.conv_general_dilated(
    jnp.ones((1, 1, steps)),
    jnp.ones((1, 1, taps)),
    (stride,),
    [(before, after)],
    (gaps,),
    (dilate,),
  )
  window = f'size={taps} stride={stride} pad={before}_{after} lhs_dilate={gaps} rhs_dilate={dilate}'
  counted = convolution(f'{steps},1,1', f'{taps},1,1', f'{ones.size},1,1', '0bf_0io->0bf', window)
  assert counted == 2 * int(np.sum(ones)) > 0


KERNEL = (
  '  %kernel = f32[8,128]{1,0:T(8,128)} custom-call(%z), custom_call_target="tpu_custom_call", '
  'metadata={op_name="m/attention/pallas_call"}, backend_config={"custom_call_config":{"body":"x",'
  '"cost_estimate":{"flops":"70","transcendentals":"2","bytes_accessed":"3"}}}\n'
)


def of_parts(text):
  found = work.list_work(hlo.parse(text))
  return {part: [one for one in found if one.part == part] for part in {one.part for one in found}}


def test_parts_and_cycles_of_a_tpu_program():
  """The loop of 8 iterations has a permutation, a slice and an addition."""
  cycles = ', backend_config={"window_config":{"estimated_cycles":"210"}}'
  scoped = ', metadata={op_name="jit(step)/transpose(jvp(block))/scan/add"}'
  text = TPU.replace('add(%came, %one)', f'add(%came, %one){scoped}{cycles}')
  text = text.replace('  ROOT %scattered', KERNEL + '  ROOT %scattered')
  parts = of_parts(text)
  assert set(parts) == {'communication', 'scan', 'kernels', 'memory'}
  (scan,), (kernel,) = parts['scan'], parts['kernels']
  assert (scan.cycles, scan.times, scan.flops) == (210, 8, 0)
  assert (kernel.flops, kernel.bytes, kernel.times) == (70, 2 * 8 * 128 * 4, 1)

  chip = chips.Chip('TPU', 10.0, 0, scan.bytes, 0.0, 3, 105.0, 20.0, 0.0)
  spent = work.seconds([scan, kernel, *parts['communication']], chip)
  assert set(spent) == {'scan', 'kernels'}, 'the network has its own estimate'
  assert spent['scan'] == pytest.approx([8.0, 8 * 2.0])
  half = work.seconds([dataclasses.replace(kernel, int8=True)], chip)
  assert half['kernels'] == pytest.approx([3.5, 3.5])
  assert spent['kernels'] == pytest.approx([7.0, 7.0]), 'its products are longer than its bytes'


@pytest.mark.parametrize('kind, products', [('fwd', 2), ('dq', 3), ('dkv', 4)])
def test_splash_attention_is_priced_by_its_logits(kind, products):
  """8 x 512 x 512 logits of heads of 128 in float32: a block of two arrays again for each block."""
  scope = f'attention/splash_{8 * 512**2}_512/vmap(x)/splash_mha_{kind}_segmented'
  (kernel,) = of_parts(
    TPU.replace(
      '  ROOT %scattered', KERNEL.replace('attention/pallas_call', scope) + '  ROOT %scattered'
    )
  )['kernels']
  assert kernel.flops == products * 2 * 128 * 8 * 512**2
  assert kernel.bytes == 2 * 8 * 128 * 4 + 8 * 2 * 512 * 128 * 4
  chip = chips.Chip('TPU', 1e9, 0, 1e12, 0.0, 3, 1e6, 1e9, 0.0)
  (assumed,) = work.seconds([kernel], chip, 2e-3).values()
  assert assumed == pytest.approx([kernel.flops / 1e9, kernel.flops * 2e-3 / 1e6])


@pytest.mark.parametrize(
  'operation, part',
  [
    ('jit(step)/model/while/block_2/longformer_attention/attention/while/exp', 'attention'),
    ('jit(step)/transpose(jvp(attention))/exp', 'attention'),
    ('jit(step)/model/block_2/longformer_attention/reshape', 'memory'),
    ('jit(step)/associative_scan/add', 'memory'),
  ],
)
def test_a_scope_is_a_whole_name(operation, part):
  named = TPU.replace('add(%came, %one)', f'add(%came, %one), metadata={{op_name="{operation}"}}')
  parts = of_parts(named)
  assert any(one.source == f'{operation} y' for one in parts[part])


def test_scopes_of_a_model_reach_forward_and_backward_pass():
  from valkyrie.models.recurrence.scan import diagonal_scan  # noqa: PLC0415

  def loss(growth, inputs):
    reset = jnp.zeros(inputs.shape[:2], bool)
    states = diagonal_scan(growth, inputs, inputs[0], reset, form='associative')
    return jnp.sum(jnp.sin(states))

  shapes = (jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((16, 2, 8), jnp.float32))
  text = jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text()
  named = [one for one in work.list_work(hlo.parse(text)) if one.part == 'scan']
  assert any('transpose' in one.source for one in named)
  assert any('transpose' not in one.source for one in named)
  assert math.isclose(sum(one.flops for one in named), 0)
