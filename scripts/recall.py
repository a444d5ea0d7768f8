"""Recall at distances far beyond those of training, mixer by mixer, with and without memory.

Trains gin/recall_cpu.gin with each mixer's gin file over it. Then 1, 4 and 16 keys at a time are
written at the start of a stream and asked for at its end, once with the whole carry, and once with
the recurrent states cut between chunks. The streams are of tasks/recall.py, with seeds that no
split of the task has. The table has the share of right answers, each of one token; a guess is right
one time in ten. Every measurement is appended to RUNS/results.jsonl, and none is repeated.

    PYTHONPATH=. python scripts/recall.py
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie import main as command_line
from valkyrie.config.load import load_gin
from valkyrie.data.vocabularies import ByteVocabulary
from valkyrie.models import language_model
from valkyrie.models.carry_cuts import cut_carry
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.tasks.recall import recall
from valkyrie.training.losses import token_scores
from valkyrie.types import Batch, Params
from valkyrie.weights.restored import restored_params

RUN = 'gin/recall_cpu.gin'
PAIRS = (1, 4, 16)  # keys at a time
CUTS = (None, 'state')


class Streams:
  """Rows of one stream each, which ask for all their keys at one distance.

  Attributes:
    pairs: [B], the keys of each row.
    length: tokens of the longest row.
  """

  def __init__(self, distance: int, streams: Mapping[int, int]):
    """Writes the streams: {keys at a time: number of streams}."""
    encode, eos = ByteVocabulary().encode, ByteVocabulary.eos_id
    self.pairs = np.repeat([*streams], [*streams.values()])
    rows, answers = [], []
    for row, pairs in enumerate(self.pairs):
      tokens = []
      for prompt, answer in recall(np.random.RandomState([distance, row]), pairs, distance):
        tokens += encode(prompt)
        answers.append((row, len(tokens)))
        tokens += [*encode(answer), eos]
      rows.append(np.array(tokens, np.int16))
    self.length = max(map(len, rows))
    self._tokens, self._answers = rows, np.array(answers)

  def chunk(self, begin: int, size: int) -> Batch:
    """The tokens [begin, begin + size) of all rows."""
    tokens = np.zeros((len(self.pairs), size + 1), np.int32)
    segments, weights = np.zeros_like(tokens[:, 1:]), np.zeros(tokens[:, 1:].shape, np.float32)
    for row, whole in enumerate(self._tokens):
      some = whole[begin : begin + size + 1]
      tokens[row, : len(some)] = some
      segments[row, : len(some)] = 1
    row, at = self._answers.T
    at = at - 1 - begin  # a target is one token after its input
    here = (at >= 0) & (at < size)
    weights[row[here], at[here]] = 1
    positions = np.tile(np.arange(begin, begin + size, dtype=np.int32), (len(tokens), 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, segments)


def measure(
  model: Model, params: Params, streams: Streams, chunk_size: int, cut: str | None
) -> dict[int, float]:
  """{keys at a time: the share of right answers}, with the part `cut` of the carry cut."""
  initial = model.initial_carry(len(streams.pairs))

  def read(params, carry, chunk):
    carry = cut_carry(carry, initial, cut)
    return model.apply(params, carry, chunk.inputs, chunk.positions, chunk.segment_ids)

  @jax.jit
  def passing(params, carry, chunk):
    return read(params, carry, chunk)[1]

  @jax.jit
  def scoring(params, carry, chunk):
    features, carry = read(params, carry, chunk)
    scores = token_scores(features, chunk.targets, model.about.vocabulary_size)
    return jnp.sum(chunk.weights * scores.right, axis=1), carry

  begins = [*range(0, streams.length, chunk_size)]
  if cut is not None:
    # All that is carried then is the document's start, and tokens within the reach of attention.
    recent = 4 + 16 * model.about.window // chunk_size
    begins = begins[:1] + begins[1:][-recent:]
  carry, right, asked = initial, 0, 0
  for begin in begins:
    chunk = streams.chunk(begin, chunk_size)
    if chunk.weights.any():
      found, carry = scoring(params, carry, chunk)
      right, asked = right + np.asarray(found), asked + chunk.weights.sum(axis=1)
    else:
      carry = passing(params, carry, chunk)
    jax.block_until_ready(carry)
  return {
    int(pairs): float(np.sum(right[streams.pairs == pairs]) / np.sum(asked[streams.pairs == pairs]))
    for pairs in np.unique(streams.pairs)
  }


def table(records: Iterable[Mapping[str, Any]]) -> str:
  """The measurements as a Markdown table: the whole carry, and the recurrent states cut."""
  found = {(r['mixer'], r['distance'], r['cut']): r['accuracy'] for r in records}
  distances = sorted({distance for _, distance, _ in found})
  lines = [
    '| mixer | keys | ' + ' | '.join(f'{distance:,} | cut' for distance in distances) + ' |',
    '| --- ' * (2 + 2 * len(distances)) + '|',
  ]
  for mixer in dict.fromkeys(mixer for mixer, _, _ in found):
    for pairs in PAIRS:
      cells = [
        f'{found[mixer, distance, cut][str(pairs)]:.0%}' if (mixer, distance, cut) in found else ''
        for distance in distances
        for cut in CUTS
      ]
      lines.append(f'| {mixer} | {pairs} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def train(file: str, model_dir: pathlib.Path, gin_flags: Sequence[str]) -> None:
  """Trains a run, or continues it; a finished one ends at once."""
  command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={RUN}', f'--gin_file={file}']
  subprocess.run([*command, f'--model_dir={model_dir}', *gin_flags], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table after every mixer."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--mixers', nargs='+', help='gin files (default: gin/models/recall/*.gin)')
  parser.add_argument('--distances', type=int, nargs='+', default=[2**14, 2**17, 2**20])
  parser.add_argument(
    '--streams', type=int, nargs=3, default=[32, 8, 4], help='numbers of streams of 1, 4, 16 keys'
  )
  parser.add_argument(
    '--chunk_size', type=int, default=512, help='tokens that a test reads at once'
  )
  parser.add_argument('--runs', type=pathlib.Path, default=pathlib.Path('runs/recall'))
  flags, gin_flags = parser.parse_known_args(arguments)
  folder = sorted(pathlib.Path('gin/models/recall').glob('*.gin'))
  results = flags.runs / 'results.jsonl'

  def records():
    return [json.loads(line) for line in results.read_text().splitlines()]

  flags.runs.mkdir(parents=True, exist_ok=True)
  results.touch()
  for file in flags.mixers or map(str, folder):
    mixer = pathlib.Path(file).stem
    done = {(r['distance'], r['cut']) for r in records() if r['mixer'] == mixer}
    missing = [(d, cut) for d in flags.distances for cut in CUTS if (d, cut) not in done]
    if not missing:
      continue
    train(file, flags.runs / mixer, gin_flags)
    gin.clear_config(clear_constants=True)
    load_gin([RUN, file], gin_flags, modules=command_line.CONFIGURABLE_MODULES)
    model = language_model.transform(LanguageModel)
    params, _ = restored_params(model, Partitioner(), str(flags.runs / mixer), ByteVocabulary())
    for distance, cut in missing:
      began = time.monotonic()
      streams = Streams(distance, dict(zip(PAIRS, flags.streams, strict=True)))
      accuracy = measure(model, params, streams, flags.chunk_size, cut)
      record = {'mixer': mixer, 'distance': distance, 'cut': cut, 'accuracy': accuracy}
      record |= {'streams': flags.streams, 'seconds': round(time.monotonic() - began, 1)}
      with results.open('a') as file_of_results:
        file_of_results.write(json.dumps(record) + '\n')
      print(json.dumps(record), file=sys.stderr, flush=True)
    print(table(records()), flush=True)


if __name__ == '__main__':
  main()
