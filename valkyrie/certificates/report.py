"""Text form of a certificate."""

from collections.abc import Mapping
from typing import Any


def text(c: Mapping[str, Any]) -> str:
  """A paragraph with the step, its memory, program, operations, traffic and estimated time."""
  lines = [
    f'phase {c["phase"]}: {c["rows"]} rows of {c["chunks"]} x {c["chunk_size"]:,} tokens, gradient '
    f'through {c["backprop_chunks"]} chunks, on {c["chips"]} x {c["device_kind"]}: {c["layout"]}'
  ]
  if 'refused' in c:
    return '\n'.join([*lines, f'  does not fit: {c["refused"]}'])
  offered = f' of {gib(c["hbm_bytes"])}' if c['hbm_bytes'] else ''
  verdict = {True: ': fits', False: ': DOES NOT FIT', None: ''}[c['fits']]
  once = c['executed_flops_per_token'] - c['recomputed_flops_per_token']
  lines += [
    f'  memory per chip     {gib(c["total_bytes"])}{offered}{verdict} (arguments '
    f'{gib(c["argument_bytes"])}, temporaries {gib(c["temporary_bytes"])})',
    f'  program             {c["parameters"]:,} parameters; {c["compiler"]}, in '
    f'{c["compile_seconds"]} s: {c["instructions"]:,} instructions, '
    f'{c["code_bytes"] / 1e6:.1f} MB of code',
    f'  GFLOP per token     {c["flops_per_token"] / 1e9:.3g} for the model; the program executes '
    f'{c["executed_flops_per_token"] / 1e9:.3g}: {once / 1e9:.3g} once and '
    f'{c["recomputed_flops_per_token"] / 1e9:.3g} recomputed',
    f'  memory traffic      {c["hbm_traffic_bytes"] / 1e12:.3g} TB per chip and step',
    f'  bytes sent          {_sizes(c["collective_bytes"])} per chip and step',
  ]
  if c['rare_collective_bytes']:
    lines.append(f'  in rare branches    {_sizes(c["rare_collective_bytes"])} more')
  if largest := c['largest_collective_in_loops']:
    lines.append(
      f'  largest in a loop   {largest["kind"]} of {largest["bytes"] / 1e6:.1f} MB, '
      f'{largest["times"]:,} times: {_short(largest["source"])}'
    )
  if 'estimated_seconds' in c:
    lines.append(_estimate(c))
  return '\n'.join(lines)


def _estimate(c: Mapping[str, Any]) -> str:
  axes = c['estimated_communication_seconds_by_axes']
  along = ', '.join(f'{name} {seconds:.2g} s' for name, seconds in axes.items())
  return (
    f'  estimate, not measured: {c["estimated_seconds"]:.3g} s per step '
    f'(the longer of compute {c["estimated_compute_seconds"]:.3g} s and memory '
    f'{c["estimated_memory_seconds"]:.3g} s, plus communication '
    f'{c["estimated_communication_seconds"]:.2g} s{": " + along if along else ""}); '
    f'{c["estimated_tokens_per_second_per_chip"]:,.0f} tokens/s per chip, '
    f'{c["estimated_share_of_peak"]:.1%} of peak'
  )


def gib(size: float) -> str:
  """'30.75 GiB'."""
  return f'{size / 2**30:.2f} GiB'


def _sizes(by_kind: Mapping[str, float]) -> str:
  kinds = ', '.join(f'{kind} {size / 1e9:.3g}' for kind, size in by_kind.items())
  return f'{sum(by_kind.values()) / 1e9:.3g} GB' + (f' ({kinds})' if kinds else '')


def _short(source: str) -> str:
  """The end of an operation's path, which differs between operations."""
  return source if len(source) <= 80 else '...' + source[-77:]
