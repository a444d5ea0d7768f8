"""Text form of a certificate."""

from collections.abc import Mapping, Sequence
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
  lines += [
    f'  memory per chip     {gib(c["total_bytes"])}{offered}{verdict} (arguments '
    f'{gib(c["argument_bytes"])}, temporaries {gib(c["temporary_bytes"])})',
    f'  program             {c["parameters"]:,} parameters; {c["compiler"]}, in '
    f'{c["compile_seconds"]} s: {c["instructions"]:,} instructions, '
    f'{c["code_bytes"] / 1e6:.1f} MB of code',
    f'  products            {c["useful_flops"] / 1e12:.3g} TFLOP per chip and step for the model; '
    f'the program executes {c["executed_flops"] / c["useful_flops"]:.2f} times as much',
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
  if 'estimated_instruction_seconds' in c:
    lines.append(_estimate(c))
  return '\n'.join(lines)


def _estimate(c: Mapping[str, Any]) -> str:
  """The range of the time, and its parts from the longest on."""
  by_part = sorted(c['estimated_seconds_by_part'].items(), key=lambda one: -one[1][1])
  parts = ', '.join(f'{name} {_range(seconds, ".2g")}' for name, seconds in by_part)
  axes = c['estimated_communication_seconds_by_axes']
  along = ', '.join(f'{name} {seconds:.2g} s' for name, seconds in axes.items())
  both = (c['estimated_instruction_seconds'], c['estimated_cycles_seconds'])
  rates, shares = c['estimated_tokens_per_second_per_chip'], c['estimated_share_of_peak']
  return (
    f'  estimate, not measured: {_range(both, ".3g")} s per step; {_range(rates[::-1], ",.0f")} '
    f'tokens/s per chip, {_range(shares[::-1], ".0%")} of peak\n'
    f'  seconds by part     {parts}{f"; links {along}" if along else ""}\n'
    '  the shortest time   each instruction at the peak or at the bandwidth of the memory, one '
    'after the other. Not priced: elementwise work, heads narrower than a matrix unit, the starts '
    f'of {c["executed_instructions"]:,} instructions\n'
    '  the longest time    the cycles that the compiler expects, with all of these, one after the '
    'other'
  )


def _range(pair: Sequence[float], form: str) -> str:
  """'1.2 to 3.4', or one number if they are equal."""
  first, second = (f'{number:{form}}' for number in pair)
  return first if first == second else f'{first} to {second}'


def gib(size: float) -> str:
  """'30.75 GiB'."""
  return f'{size / 2**30:.2f} GiB'


def _sizes(by_kind: Mapping[str, float]) -> str:
  kinds = ', '.join(f'{kind} {size / 1e9:.3g}' for kind, size in by_kind.items())
  return f'{sum(by_kind.values()) / 1e9:.3g} GB' + (f' ({kinds})' if kinds else '')


def _short(source: str) -> str:
  """The end of an operation's path, which differs between operations."""
  return source if len(source) <= 80 else '...' + source[-77:]
