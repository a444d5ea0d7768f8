"""Work of a compiled program, instruction by instruction: products, bytes and cycles.

The text of a TPU program has the cycles that its compiler expects of most instructions. They count
what a roofline leaves out, such as elementwise work, heads that do not fill a matrix unit, and the
start of a small program; and nothing of it overlaps.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import NamedTuple

from valkyrie.certificates import collectives, hlo, hlo_flops, memory_traffic

_SCOPES = {name: re.compile(rf'(?:^|[/(]){name}(?:$|[/)])') for name in ('attention', 'scan')}
_KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work(hlo.Transfer):
  """An instruction whose `bytes` are those of its HBM traffic.

  part: 'communication' for a collective, 'kernels' for a program of Pallas, 'attention' or 'scan'
    for what jax.named_scope names so; then 'products' for a matrix product, and 'memory' for the
    rest: norms, activations, copies, the optimizer.
  flops: 2 for each multiplication of a matrix product.
  cycles: as the compiler expects; 0 if it does not say.
  """

  part: str
  flops: int
  cycles: int


class Seconds(NamedTuple):
  """The time of instructions that run one after the other.

  roofline: of each the longer of its products at the peak and its bytes at the bandwidth of HBM.
  cycles: of each as the compiler expects; of Pallas kernels the roofline again.
  """

  roofline: float
  cycles: float


def of_module(module: hlo.Module) -> list[Work]:
  """All instructions with work; of a conditional, those of the branch that moves least."""

  def read(computation: hlo.Computation, instruction: hlo.Instruction) -> Work | None:
    if instruction.opcode == 'call':
      return None
    flops = hlo_flops.of_instruction(module, computation, instruction)
    if _KERNEL in instruction.attributes:  # with an estimate by its author
      flops = int(instruction.find(r'"cost_estimate":\{[^{}]*"flops":"(\d+)"') or 0)
    return Work(
      bytes=memory_traffic.moved(module, computation, instruction),
      source=f'{instruction.op_name} {instruction.name}'.strip(),
      part=_part(instruction, flops),
      flops=flops,
      cycles=int(instruction.find(r'"estimated_cycles":"(\d+)"') or 0),
    )

  found = hlo.transfers(module, read)
  return [one for one in found if not one.rare and (one.bytes or one.flops or one.cycles)]


def _part(instruction: hlo.Instruction, flops: int) -> str:
  if instruction.opcode.removesuffix('-start') in collectives.KINDS:
    return 'communication'
  if _KERNEL in instruction.attributes:
    return 'kernels'
  scopes = (name for name, scope in _SCOPES.items() if scope.search(instruction.op_name))
  return next(scopes, 'products' if flops else 'memory')


def seconds(
  works: Sequence[Work], peak_flops: float, bytes_per_second: float, cycles_per_second: float
) -> Mapping[str, Seconds]:
  """The time of each part but communication, whose time is that of the network."""
  spent: dict[str, Seconds] = {}
  for one in works:
    if one.part != 'communication':
      roofline = max(one.flops / peak_flops, one.bytes / bytes_per_second)
      cycles = roofline if one.part == 'kernels' else one.cycles / cycles_per_second
      before = spent.get(one.part, Seconds(0.0, 0.0))
      spent[one.part] = Seconds(
        before.roofline + one.times * roofline, before.cycles + one.times * cycles
      )
  return spent
