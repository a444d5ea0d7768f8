"""Statistics and a printed report of the times measured by bench.py."""

from collections.abc import Iterable, Mapping, Sequence
import statistics
from typing import Any


def spread(values: Iterable[float]) -> dict[str, float]:
  """Smallest, median and largest."""
  values = list(values)
  return {'min': min(values), 'median': statistics.median(values), 'max': max(values)}


def speeds(
  seconds: Sequence[float], peaks: Sequence[float], tokens: int, flops_per_token: int
) -> dict[str, dict[str, float]]:
  """Speeds of steps of `tokens` tokens, from the seconds per step and the peak of every turn."""
  rates = [tokens * flops_per_token / s for s in seconds]
  return {
    'step_seconds': spread(seconds),
    'tokens_per_second': spread(tokens / s for s in seconds),
    'flops_per_second': spread(rates),
    'share_of_peak': spread(rate / peak for rate, peak in zip(rates, peaks, strict=True)),
  }


def parts(
  seconds: Mapping[str, Sequence[float]], layers: Mapping[str, int], whole: str, no_mixers: str
) -> dict[str, dict[str, float]]:
  """Seconds of a step by part, of each turn.

  Args:
    seconds: of the steps of each variant, by turn.
    layers: the layers of each kind of block in the model. A variant of that name has only these.
    whole, no_mixers: the names of the model itself, and of the variant without mixers.
  """
  if len(layers) == 1:
    seconds = {**seconds, **dict.fromkeys(layers, seconds[whole])}
  total = sum(layers.values())

  def share(name: str) -> Iterable[float]:
    turns = zip(seconds[name], seconds[no_mixers], strict=True)
    return (layers[name] / total * (alone - without) for alone, without in turns)

  found = {f'{name}, {layers[name]} of {total} layers': spread(share(name)) for name in layers}
  return {**found, 'the rest': spread(seconds[no_mixers])}


def report(records: Sequence[Mapping[str, Any]]) -> str:
  """Formats the records, which `bench.py` also writes to --json, for printing."""
  by_name = {record['name']: record for record in records}
  machine, peak, loop, of_parts = (by_name[n] for n in ('machine', 'peak', 'loop', 'parts'))
  size = peak['size']
  dtype = peak['dtype']
  variants = [record for record in records if 'forward' in record]
  words = {term: text for record in variants for term, text in record['forward']['words'].items()}
  lines = [
    '',
    f'{machine["device"]}, {machine["cpus"]} CPUs, Python {machine["python"]}, '
    f'jax {machine["jax"]}. Train step of {machine["model"]}: {machine["rows"]} rows x '
    f'{machine["tokens"]} tokens, {dtype}, AdamW.',
    f'{machine["repeats"]} turns of {machine["steps_together"]} steps each.',
    '',
    'Model operations per token; a multiply-add counts as two, recomputation as none:',
    '  train = 3 x forward: the backward pass has two matrix products for each of the forward pass',
    '  forward = repeats x (sum of the terms of the pattern) + unembedding',
    *(f'    {term}: {text}' for term, text in words.items()),
    '    unembedding: 2 x width x vocabulary.',
    *(_sum_of(record) for record in variants),
    '',
    f'{"":50}{"min":>10}{"median":>10}{"max":>10}',
    _row(f'{dtype} matmul peak, {size}^3', 'GFLOP/s', peak['flops_per_second'], 1e-9, '.1f'),
  ]
  for record in variants:
    lines += [
      _row(record['name'], 'tokens/s', record['tokens_per_second']),
      _row('', 'GFLOP/s', record['flops_per_second'], 1e-9, '.1f'),
      _row('', '% of peak', record['share_of_peak'], 100, '.1f'),
    ]
  lines += [_row(name, 'ms', seconds, 1e3, '.1f') for name, seconds in of_parts['seconds'].items()]
  over = {key: ratio - 1 for key, ratio in loop['times_bare_step'].items()}
  lines.append(_row('loop over bare step', '%', over, 100, '+.2f'))
  peers = [record for record in records if 'peer' in record]
  lines += [f'{peers[0]["peer"]}:'] if peers else []
  for record in peers:
    lines += [
      _row(f'{record["name"]}, {record["parameters"]:,}', 'tokens/s', record['tokens_per_second']),
      _row('  its step, divided by the model step', 'times', record['times_model'], form='.2f'),
    ]
  return '\n'.join(lines)


def _sum_of(record: Mapping[str, Any]) -> str:
  forward = record['forward']
  layer = ' + '.join(f'{term} {count}' for term, count in forward['terms'])
  return (
    f'  {record["name"]}: 3 x ({forward["repeats"]} x ({layer}) + unembedding '
    f'{forward["unembedding"]}) = {record["train_flops_per_token"]}'
  )


def _row(
  name: str, unit: str, values: Mapping[str, float], scale: float = 1, form: str = '.0f'
) -> str:
  numbers = ''.join(f'{scale * values[key]:{form}}'.rjust(10) for key in ('min', 'median', 'max'))
  return f'{name:<40}{unit:<10}{numbers}'.rstrip()
