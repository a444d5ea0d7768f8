"""Communication and memory traffic of programs for eight devices, counted by hand."""

import functools
import pathlib

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from valkyrie.lab.certificates import collectives, hlo, work

ROWS, WIDTH = 16, 32
LOCAL = ROWS * WIDTH * 4  # bytes per device


@functools.cache
def mesh(*sizes):
  return Mesh(np.asarray(jax.devices()).reshape(sizes or (8,)), ('x', 'y')[: len(sizes) or 1])


def compiled(f, *sizes):
  """The compiled program of `f`, whose argument is float32 [ROWS, WIDTH] on each device."""
  spec = PartitionSpec(mesh(*sizes).axis_names)
  sharding = NamedSharding(mesh(*sizes), spec)
  whole = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32, sharding=sharding)
  mapped = jax.shard_map(f, mesh=mesh(*sizes), in_specs=spec, out_specs=spec, check_vma=False)
  return hlo.parse(jax.jit(mapped).lower(whole).compile().as_text())


def sent(f, *sizes):
  return collectives.list_collectives(compiled(f, *sizes))


def test_bytes_of_each_kind_for_ring_algorithms():
  def f(x):
    gathered = lax.all_gather(x, 'x', tiled=True)
    scattered = lax.psum_scatter(gathered * 2, 'x', tiled=True)
    moved = lax.ppermute(scattered + 1, 'x', [(n, (n + 1) % 8) for n in range(8)])
    mixed = lax.all_to_all(moved * 3, 'x', 0, 0, tiled=True)
    return mixed + lax.psum(mixed * mixed, 'x')

  assert collectives.by_kind(sent(f)) == {
    'all-gather': 7 * LOCAL,
    'reduce-scatter': 7 * LOCAL,
    'collective-permute': LOCAL,
    'all-to-all': 7 * LOCAL // 8,
    'all-reduce': 2 * 7 * LOCAL // 8,
  }


def test_nested_loops_multiply():
  def inner(x, _):
    return lax.psum(jnp.sin(x), 'x') * 0.1, None

  def outer(x, _):
    x, _ = lax.scan(inner, x, length=5)
    return lax.ppermute(x, 'x', [(n, n ^ 1) for n in range(8)]), None

  def f(x):
    return lax.psum(lax.scan(outer, x, length=3)[0], 'x')

  found = sent(f)
  times = {(c.kind, c.in_loop): c.times for c in found}
  assert times == {
    ('all-reduce', True): 15,
    ('collective-permute', True): 3,
    ('all-reduce', False): 1,
  }
  assert hlo.total(found) == 16 * 2 * 7 * LOCAL / 8 + 3 * LOCAL
  assert collectives.largest_in_loops(found).kind == 'all-reduce'


def test_without_loops_no_collective_is_in_loops():
  assert collectives.largest_in_loops(sent(lambda x: lax.psum(x, 'x'))) is None


def test_groups_along_mesh_axes():
  def f(x):
    return lax.psum(x, 'y') + lax.psum(jnp.sin(x), 'x')

  found = sent(f, 2, 4)
  assert sorted(c.groups.shape for c in found) == [(2, 4), (4, 2)]
  for c in found:
    rows = {tuple(row) for row in c.groups.tolist()}
    expected = (
      [(0, 1, 2, 3), (4, 5, 6, 7)] if c.groups.shape[1] == 4 else [(0, 4), (1, 5), (2, 6), (3, 7)]
    )
    assert rows == set(expected)
  assert hlo.total(found) == 2 * LOCAL * (3 / 4 + 1 / 2)


def test_the_branch_that_sends_least_is_the_usual_one():
  def f(x):
    rare = lax.psum(x[0, 0], 'x') > 0
    return lax.cond(
      rare,
      lambda x: lax.psum(x, 'x') + lax.ppermute(x, 'x', [(n, n ^ 1) for n in range(8)]),
      lambda x: lax.ppermute(jnp.sin(x), 'x', [(n, n ^ 1) for n in range(8)]),
      x,
    )

  found = sent(f)
  assert collectives.by_kind(found) == {'all-reduce': 7, 'collective-permute': LOCAL}


@pytest.mark.parametrize(
  'written, expected',
  [
    ('{{0,1},{2,3}}', [[0, 1], [2, 3]]),
    ('{}', [[0, 1, 2, 3]]),
    ('[2,2]<=[4]', [[0, 1], [2, 3]]),
    ('[2,2]<=[2,2]T(1,0)', [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
    ("mesh['a'=2,'b'=2], device_ids=([4]) {'a'}", [[0, 2], [1, 3]]),
    ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
    ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
  ],
)
def test_notations_of_replica_groups(written, expected):
  groups = collectives.replica_groups(f'channel_id=1, replica_groups={written}, other=1', 4)
  assert groups.tolist() == expected


def test_an_unknown_notation_of_replica_groups_is_refused():
  for written in ('?', "mesh['a'=4], device_ids=(3,2,1,0) {'a'}"):
    with pytest.raises(ValueError, match='notation of the replica groups is unknown'):
      collectives.replica_groups(f'replica_groups={written}', 4)


# A program as libtpu prints it: a loop without a known trip count, with a counter step of two; a
# start and its done; a reduce-scatter as a fusion; layouts with tiles and memory spaces.
TPU = (pathlib.Path(__file__).parent / 'tpu_program.hlo').read_text()


def test_collectives_of_a_tpu_program():
  module = hlo.parse(TPU)
  assert hlo.trip_count(module.entry.instructions['loop']) == 8
  assert module.partitions == 4
  last = hlo.parse(TPU.replace('direction=LT', 'direction=LE'))  # 0, 2, .., 16
  assert hlo.trip_count(last.entry.instructions['loop']) == 9
  size = 8 * 128 * 4
  assert collectives.by_kind(collectives.list_collectives(module)) == {
    'collective-permute': 8 * size,
    'reduce-scatter': size * 3 // 4,
  }


def test_messages_between_slices():
  """What libtpu makes of sums, gathers and a permutation over four slices."""

  def message(number, dims, operand, kind, target):
    how = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    how, moved = f'frontend_attributes={{{how}}}', f'(f32[{dims}], u32[], token[])'
    return (
      f'  %s{number} = {moved} send(%{operand}, %token), is_host_transfer=true, {how}\n'
      f'  %d{number} = token[] send-done(%s{number}), is_host_transfer=true\n'
      f'  %r{number} = {moved} recv(%token), is_host_transfer=true, {how}\n'
    )

  text = (
    'HloModule m, num_partitions=4\n\nENTRY %m (a: f32[8,4]) -> f32[8,4] {\n'
    '  %a = f32[8,4] parameter(0)\n  %token = token[] after-all()\n'
    + message(1, '8,4', 'a', 'ALL_REDUCE', '"{1,2,3,4}x{0:3}"')
    + message(2, '8,4', 'a', 'ALL_GATHER', '"{1,2,3,4}x{0:3}"')
    + message(
      3, '8,4', 'a', 'REDUCE_SCATTER', '{{100000,200000,300000,400000},{100001,200001,3,4}}'
    )
    + message(4, '8,4', 'a', 'ONE_TO_ONE', '{{100000->200000},{100001->200001}}')
    + '  ROOT %sum = f32[8,4] add(%a, %a)\n}\n'
  )
  module = hlo.parse(text)
  size = 8 * 4 * 4
  assert collectives.by_kind(found := collectives.list_collectives(module)) == {
    'all-reduce between slices': 2 * size * 3 / 4,
    'all-gather between slices': size * 3,
    'reduce-scatter between slices': size * 3 / 4,
    'one-to-one between slices': size,
  }
  assert all(one.between_slices for one in found)
  parts = {one.part for one in work.list_work(module) if 's1' in one.source or 'r1' in one.source}
  assert parts == {'communication'}


def test_an_instruction_on_several_lines():
  """jax writes the metadata of a Pallas kernel, e.g. of splash attention, as indented JSON."""
  kernel = """  %kernel = f32[8,128]{1,0:T(8,128)} custom-call(%z), frontend_attributes={k={
"mesh_axes":"[]",
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="splash"}
"""
  module = hlo.parse(TPU.replace('  ROOT %scattered', kernel + '  ROOT %scattered'))
  assert module.entry.instructions['kernel'].opcode == 'custom-call'
  assert module.entry.root.name == 'scattered'
  assert 'splash kernel' in [m.source for m in work.list_work(module)]


def test_a_loop_of_unknown_length_has_no_trip_count():
  module = hlo.parse(TPU.replace('constant(16)', 'constant({16})'))
  assert hlo.trip_count(module.entry.instructions['loop']) is None


@pytest.mark.parametrize(
  'dtype, dims, layout, size, padded',
  [
    ('bf16', '8,128', '{1,0:T(8,128)(2,1)}', 2048, 2048),
    ('bf16', '3,5', '{1,0:T(8,128)(2,1)}', 30, 2048),
    ('f32', '36,16,24,64', '{3,1,2,0:T(8,128)}', 36 * 16 * 24 * 64 * 4, 36 * 16 * 24 * 128 * 4),
    ('f32', '5,3', '{0,1}', 60, 60),
    ('pred', '', '{:T(512)}', 1, 1),
  ],
)
def test_sizes_with_and_without_tiles(dtype, dims, layout, size, padded):
  line = f'ENTRY %m (p: {dtype}[{dims}]) -> {dtype}[{dims}] {{\n'
  line += f'  ROOT %p = {dtype}[{dims}]{layout} parameter(0)\n}}\n'
  (shape,) = hlo.parse(line).entry.root.arrays
  assert (shape.bytes, shape.padded_bytes) == (size, padded)


def test_memory_traffic_of_a_tpu_program():
  """The loop has a slice into vector memory, a permutation, a sum and a counter."""
  size, scalar = 8 * 128 * 4, 4
  counter = 3 * scalar  # reads the counter and the constant, writes the counter
  in_loop = counter + size + 2 * size + size  # counter, slice, permutation, write of the sum
  condition = 2 * scalar + 1
  outside = 2 * scalar + size + 8 * 128 * 4  # copy; fusion: z, and two rows padded to a tile
  movements = work.list_work(hlo.parse(TPU))
  assert hlo.total(movements) == 8 * (in_loop + condition) + outside


def test_memory_traffic_of_slices_of_a_buffer():
  """A scan that reads a large array row by row, and writes another one row by row."""
  length, width = 64, 1024

  def f(x):
    return lax.scan(lambda state, row: (state + row, state * row), x[0], x)[1]

  shape = jax.ShapeDtypeStruct((length, width), jnp.float32)
  module = hlo.parse(jax.jit(f).lower(shape).compile().as_text())
  whole = length * width * 4
  # Two results read each row, and write one. With whole arrays per step the factor would be 64.
  assert 4 * whole <= hlo.total(work.list_work(module)) <= 12 * whole


def test_memory_traffic_of_a_slice_of_which_a_fusion_reads_a_part():
  text = """%inside (p: f32[64,8], i: s32[]) -> f32[1,2] {
  %p = f32[64,8] parameter(0)
  %i = s32[] parameter(1)
  %half = f32[64,4] slice(%p), slice={[0:64], [0:4]}
  %same = f32[64,4] bitcast(%half)
  ROOT %row = f32[1,2] dynamic-slice(%same, %i, %i), dynamic_slice_sizes={1,2}
}

ENTRY %m (a: f32[64,8], i: s32[]) -> f32[1,2] {
  %a = f32[64,8] parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[1,2] fusion(%a, %i), kind=kLoop, calls=%inside
}
"""
  (fusion,) = work.list_work(hlo.parse(text))
  assert fusion.bytes == 2 * 8 + 4  # two numbers are read and written, and the place is read
  (fusion,) = work.list_work(
    hlo.parse(
      text.replace('ROOT %row', '%row').replace(
        'dynamic_slice_sizes={1,2}',
        'dynamic_slice_sizes={1,2}\n  ROOT %all = f32[64,4] negate(%same)',
      )
    )
  )
  assert fusion.bytes == 64 * 4 * 4 + 8 + 4  # all of the slice is read


def test_memory_traffic_of_a_scatter_inside_a_fusion():
  text = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inside (p: f32[1000,8], i: s32[3,1], u: f32[3,8]) -> f32[1000,8] {
  %p = f32[1000,8] parameter(0)
  %i = s32[3,1] parameter(1)
  %u = f32[3,8] parameter(2)
  ROOT %s = f32[1000,8] scatter(%p, %i, %u), update_window_dims={1}, to_apply=%add
}

ENTRY %m (a: f32[1000,8], i: s32[3,1], u: f32[3,8]) -> f32[1000,8] {
  %a = f32[1000,8] parameter(0)
  %i = s32[3,1] parameter(1)
  %u = f32[3,8] parameter(2)
  ROOT %f = f32[1000,8] fusion(%a, %i, %u), kind=kInput, calls=%inside
}
"""
  (fusion,) = work.list_work(hlo.parse(text))
  rows = 3 * 8 * 4
  assert fusion.bytes == 3 * rows + 3 * 4  # updates and indices are read; rows are read and written


def test_text_without_a_program_is_refused():
  with pytest.raises(ValueError, match='ENTRY'):
    hlo.parse('HloModule nothing\n')


def test_names_of_attributes_may_have_hyphens():
  module = hlo.parse(
    'HloModule m, num_partitions=2\n\nENTRY %main (p: f32[2]) -> f32[2] {\n'
    '  %p = f32[2]{0} parameter(0)\n'
    '  ROOT %copy.1 = f32[2]{0} copy(%p), control-predecessors={%p}\n}\n'
  )
  root = module.entry.root
  assert (root.opcode, root.attributes) == ('copy', 'control-predecessors={%p}')
  assert root.operands == [module.entry.parameters[0]]
