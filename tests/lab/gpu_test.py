"""Programs for GPUs: operations and bytes by hand, names of GPUs, and messages between nodes.

Outside of the suite, this compiles a step for an H100, with jax's CUDA plugin and without a GPU:

    source scripts/gpu_environment
    python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --run_mode=precompile --topology=h100:1
"""

import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import gpu_calls, gpu_nodes, hlo, topologies, work
from valkyrie.lab.certificates.collectives import Collective
from valkyrie.monitoring.chips import GPUS

# jaxlib 0.10.2 wrote it for an H100: the gradient, for w, of tokens x [1024, 512] times w, causal
# attention by cuDNN with 8 heads of 64, and three products with w in a loop.
MODULE = hlo.parse((pathlib.Path(__file__).parent / 'gpu_program.hlo').read_text())
WORKS = work.list_work(MODULE)


def test_products_of_cublas():
  """Queries, and for each of three products one forward and two backward; then w's gradient."""
  products = [one for one in WORKS if 'dot_product_attention' not in one.source]
  count = sum(one.flops * one.times for one in products)
  assert count == (1 + 3 * 3 + 1) * 2 * 1024 * 512 * 512


def test_attention_of_cudnn():
  """Half of the logits are computed: twice forward, five times backward."""
  kernels = [one for one in WORKS if 'dot_product_attention' in one.source and one.flops]
  once = 2 * 8 * (1024 * 1025 // 2) * 64
  assert sorted(one.flops for one in kernels) == [2 * once, 5 * once]
  assert {one.part for one in kernels} == {'attention'}


def test_a_call_reads_its_operands_and_writes_no_workspace():
  calls = [one for c in MODULE.computations.values() for one in c.instructions.values()]
  product = next(one for one in calls if 'lt$matmul' in one.attributes)
  assert product.arrays[-1].bytes == 4194304, 'the program has a workspace'
  left, right = (operand.arrays[0].bytes for operand in product.operands)
  assert work.bytes_of(product) == left + right + product.arrays[0].bytes
  assert gpu_calls.is_library_call(product)


@pytest.mark.parametrize(
  'mask, window, pairs',
  [('NO_MASK', 0, 1024 * 1024), ('CAUSAL', 128, 1024 * 128), ('PADDING_CAUSAL', 0, 512 * 1025)],
)
def test_masks_of_attention(mask, window, pairs):
  calls = [one for c in MODULE.computations.values() for one in c.instructions.values()]
  forward = next(one for one in calls if 'fmhaSoftmax"' in one.attributes)
  changed: Any = types.SimpleNamespace(
    attributes=forward.attributes.replace('"CAUSAL"', f'"{mask}"').replace(
      '"sliding_window_length": 0', f'"sliding_window_length": {window}'
    ),
    operands=forward.operands,
    arrays=forward.arrays,
  )
  changed.find = lambda pattern: hlo.Instruction.find(changed, pattern)
  assert gpu_calls.flops_of(changed) == 2 * 2 * 8 * pairs * 64


def test_the_range_of_time():
  """Products, then bytes; the second time has the cost of every kernel of loops, too."""
  gpu = GPUS['h100']
  parts = gpu_nodes.seconds(WORKS, gpu)
  fast, slow = (sum(column) for column in zip(*parts.values(), strict=True))
  flops = sum(one.flops * one.times for one in WORKS)
  expected = flops / 989e12 + hlo.total(WORKS) / 3.35e12
  assert fast == pytest.approx(expected)
  kernels = sum(one.times for one in WORKS)
  assert slow == pytest.approx(expected + kernels * gpu_nodes.KERNEL_SECONDS)


def test_names_of_gpus():
  nodes = gpu_nodes.parse('4xh100:8')
  assert nodes == (4, 'h100', 8)
  assert nodes.usable_bytes == int(0.9 * 84942979072)
  assert gpu_nodes.parse('a100:1') == (1, 'a100', 1)
  assert gpu_nodes.named('4xh100:8') == nodes
  assert gpu_nodes.named('v4:2x2x1') is None and gpu_nodes.named(None) is None


@pytest.mark.parametrize(
  'name, message',
  [
    ('H100:8', "the GPU 'H100' is unknown.*Did you mean h100"),
    ('h100-mig:1', r'For a part of a card \(MIG\).*precompile.hbm_bytes=BYTES'),
    ('a100-40gb:8', 'a card with less memory'),
    ('h100', 'expected the GPUs of a node. Use one of h100:1, h100:2, h100:4, h100:8'),
    ('h100:16', 'or several nodes, as in 4xh100:8'),
    ('0xh100:8', "the GPU '0xh100' is unknown"),
  ],
)
def test_gpus_that_are_not_described_are_refused(name, message):
  with pytest.raises(ConfigurationError, match=message):
    topologies.devices(name)


def test_a_missing_plugin_is_reported_with_its_installation(monkeypatch):
  monkeypatch.setitem(sys.modules, 'jax_cuda13_plugin', None)
  with pytest.raises(ConfigurationError, match=r"pip install 'jax\[cuda13\]'"):
    topologies.devices('h100:1')


def test_messages_inside_and_between_nodes():
  """Two nodes of two: inside by NVLink; between, one network a GPU, or both of the node."""
  numbers = np.arange(4).reshape(2, 2)
  devices = np.vectorize(lambda number: types.SimpleNamespace(id=number))(numbers)
  mesh: Any = types.SimpleNamespace(devices=devices, axis_names=('rows', 'time'))
  nodes = gpu_nodes.Nodes(2, 'h100', 2)

  def message(kind, groups):
    size = 900_000_000_000
    return Collective(
      kind=kind, operand_bytes=size, bytes=size, groups=np.asarray(groups), source='here'
    )

  inside = message('all-gather', [[0, 1], [2, 3]])
  pairs = message('all-reduce', [[0, 2], [1, 3]])
  all_gpus = message('all-reduce', [[0, 1, 2, 3]])
  halo = message('collective-permute', [[1, 2], [3, 0]])
  spent, between = gpu_nodes.message_seconds([inside, pairs, all_gpus], mesh, nodes, None)
  assert spent == pytest.approx({'time': 2.0, 'rows': 18.0, 'rows+time': 9.0})
  assert between == pairs.bytes + all_gpus.bytes
  spent, _ = gpu_nodes.message_seconds([halo], mesh, nodes, 9e10)
  assert spent == pytest.approx({'rows+time': 10.0})
