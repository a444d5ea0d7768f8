"""Recall at distances far beyond training, mixer by mixer, with and without memory.

Trains gin/recall_cpu.gin with each mixer's gin file over it. Then 1, 4 and 16 keys at a time are
written at the start of a stream and asked for at its end, once with the whole carry, and once with
the recurrent states cut between chunks. The streams are of tasks/recall.py, with seeds that no
split of the task has. The table has the share of right answers, each of one token; a guess is right
one time in ten. Every measurement is appended to RUNS/results.jsonl, and none is repeated. One that
is interrupted goes on from RUNS/MIXER/reading.npz, which is written once a minute.

    bash scripts/experiment recall
"""
# Environment: base

import argparse
from collections.abc import Iterable, Mapping, Sequence
import io
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
from valkyrie.distributed import console
from valkyrie.models import language_model
from valkyrie.models.carry_cuts import cut_carry
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.tasks.recall import filler, recall
from valkyrie.training.losses import token_scores
from valkyrie.types import Batch, Params
from valkyrie.weights.restored import restored_params

RUN = 'gin/recall_cpu.gin'
PAIRS = (1, 4, 16)  # keys at a time
CUTS = (None, 'state')
BLOCK = 2**20  # letters of a stream that are generated at once
SAVE_SECONDS = 60


class Streams:
  """Rows of one stream each, which ask for all their keys at one distance.

  Of a distance above BLOCK, whole blocks of letters follow the pairs; a row holds one at a time.

  Attributes:
    pairs: [B], the keys of each row.
    length: tokens of the longest row.
  """

  def __init__(self, distance: int, streams: Mapping[int, int]):
    """Writes the streams, without their blocks: {keys at a time: number of streams}."""
    encode = ByteVocabulary().encode
    eos = ByteVocabulary.eos_id
    self.pairs = np.repeat([*streams], [*streams.values()])
    self._distance = distance
    self._blocks = (distance - 1) // BLOCK
    self._latest: dict[int, tuple[int, np.ndarray]] = {}
    inserted = self._blocks * BLOCK
    rows = []
    answers = []
    for row, pairs in enumerate(self.pairs):
      tokens = []
      random = np.random.RandomState([distance, row])
      for prompt, answer in recall(random, pairs, distance - inserted):
        tokens += encode(prompt)
        answers.append((row, inserted + len(tokens)))
        tokens += [*encode(answer), eos]
      rows.append(np.array(tokens, np.int16))
    self.length = inserted + max(map(len, rows))
    self._tokens = rows
    self._answers = np.array(answers)

  def _row(self, row: int, begin: int, end: int) -> np.ndarray:
    """The tokens [begin, end) of a row, or up to its end."""
    tokens = self._tokens[row]
    first = 3 * self.pairs[row]
    inserted = self._blocks * BLOCK
    parts = [tokens[begin : min(end, first)]]
    blocks = range(max(0, begin - first) // BLOCK, min(self._blocks, -((first - end) // BLOCK)))
    for number in blocks:
      at = first + number * BLOCK
      parts.append(self._block(row, number)[max(0, begin - at) : end - at])
    parts.append(tokens[max(first, begin - inserted) : max(first, end - inserted)])
    return np.concatenate(parts)

  def _block(self, row: int, number: int) -> np.ndarray:
    """Letters of a row, as a pure function of its number and of the block's."""
    if row not in self._latest or self._latest[row][0] != number:
      letters = filler(np.random.RandomState([self._distance, row, number]), BLOCK)
      self._latest[row] = number, ByteVocabulary().ids(letters).astype(np.int16)
    return self._latest[row][1]

  def chunk(self, begin: int, size: int) -> Batch:
    """The tokens [begin, begin + size) of all rows."""
    tokens = np.zeros((len(self.pairs), size + 1), np.int32)
    segments = np.zeros_like(tokens[:, 1:])
    weights = np.zeros(tokens[:, 1:].shape, np.float32)
    for row in range(len(tokens)):
      some = self._row(row, begin, begin + size + 1)
      tokens[row, : len(some)] = some
      segments[row, : len(some)] = 1
    row, at = self._answers.T
    at = at - 1 - begin  # a target is one token after its input
    here = (at >= 0) & (at < size)
    weights[row[here], at[here]] = 1
    positions = np.tile(np.arange(begin, begin + size, dtype=np.int32), (len(tokens), 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, segments)


def measure(
  model: Model,
  params: Params,
  streams: Streams,
  chunk_size: int,
  cut: str | None,
  saved: pathlib.Path,
  key: str = '',
) -> dict[int, float]:
  """{keys at a time: the share of right answers}, with the part `cut` of the carry cut.

  It goes on from the file `saved`, if that was written with the same `key`.
  """
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
  state = 0, initial, np.zeros(len(streams.pairs)), np.zeros(len(streams.pairs))
  done, carry, right, asked = state = _saved(saved, key, state)
  if done:
    print(f'goes on at token {begins[done]:,} from {saved}', file=sys.stderr, flush=True)
  latest = began = time.monotonic()
  for number in range(done, len(begins)):
    begin = begins[number]
    chunk = streams.chunk(begin, chunk_size)
    if chunk.weights.any():
      found, carry = scoring(params, carry, chunk)
      right, asked = right + np.asarray(found), asked + chunk.weights.sum(axis=1)
    else:
      carry = passing(params, carry, chunk)
    jax.block_until_ready(carry)
    now = time.monotonic()
    if now - latest >= SAVE_SECONDS:
      latest = now
      leaves = jax.tree.leaves((number + 1, carry, right, asked))
      np.savez(file := io.BytesIO(), key, *leaves)
      whole_file.write(saved, file.getvalue())
      rest = (len(begins) - number - 1) * (now - began) / (number + 1 - done)
      print(f'token {begin:,}, {rest / 3600:.1f} hours left', file=sys.stderr, flush=True)
  saved.unlink(missing_ok=True)
  return {
    int(pairs): float(np.sum(right[streams.pairs == pairs]) / np.sum(asked[streams.pairs == pairs]))
    for pairs in np.unique(streams.pairs)
  }


def _saved(path: pathlib.Path, key: str, state: Any) -> Any:
  """The state in a file of this key, or the given one."""
  if not path.exists():
    return state
  with np.load(path) as arrays:
    found, *leaves = (arrays[name] for name in arrays.files)
  if found != key:
    return state
  done, *rest = jax.tree.unflatten(jax.tree.structure(state), leaves)
  return int(done), *rest


def table(records: Iterable[Mapping[str, Any]]) -> str:
  """The measurements as a Markdown table: the whole carry, and the recurrent states cut."""
  found: dict[tuple, dict[str, float]] = {}
  for r in records:
    found.setdefault((r['mixer'], r['distance'], r['cut']), {}).update(r['accuracy'])
  distances = sorted({distance for _, distance, _ in found})
  lines = [
    '| mixer | keys | ' + ' | '.join(f'{distance:,} | cut' for distance in distances) + ' |',
    '| --- ' * (2 + 2 * len(distances)) + '|',
  ]
  for mixer in dict.fromkeys(mixer for mixer, _, _ in found):
    for pairs in PAIRS:
      shares = [
        found.get((mixer, distance, cut), {}).get(str(pairs))
        for distance in distances
        for cut in CUTS
      ]
      cells = ['' if share is None else f'{share:.0%}' for share in shares]
      if any(cells):
        lines.append(f'| {mixer} | {pairs} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def train(file: str, model_dir: pathlib.Path, gin_flags: Sequence[str]) -> None:
  """Trains a run, or continues it; a finished one ends at once."""
  command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={RUN}', f'--gin_file={file}']
  subprocess.run([*command, f'--model_dir={model_dir}', *gin_flags], check=True)


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table after every mixer."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--mixers', nargs='+', help='gin files (default: gin/models/recall/*.gin)')
  parser.add_argument('--distances', type=int, nargs='+', default=[2**14, 2**17, 2**20])
  parser.add_argument(
    '--streams',
    type=int,
    nargs=3,
    default=[32, 8, 4],
    help='numbers of streams of 1, 4, 16 keys; 0 for none',
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
    done = {
      (r['distance'], r['cut'], pairs)
      for r in records()
      if r['mixer'] == mixer
      for pairs in r['accuracy']
    }
    streams = dict(zip(PAIRS, flags.streams, strict=True))
    missing = {
      (d, cut): {n: streams[n] for n in PAIRS if streams[n] and (d, cut, str(n)) not in done}
      for d in flags.distances
      for cut in CUTS
    }
    if not any(missing.values()):
      continue
    train(file, flags.runs / mixer, gin_flags)
    gin.clear_config(clear_constants=True)
    load_gin([RUN, file], gin_flags, modules=command_line.CONFIGURABLE_MODULES)
    model = language_model.transform(LanguageModel)
    run = flags.runs / mixer
    params, steps = restored_params(model, Partitioner(), str(run), ByteVocabulary())
    for (distance, cut), wanted in missing.items():
      if not wanted:
        continue
      began = time.monotonic()
      key = json.dumps([steps, distance, cut, wanted, flags.chunk_size])
      of_run = model, params, Streams(distance, wanted), flags.chunk_size, cut
      accuracy = measure(*of_run, run / 'reading.npz', key)
      record = {'mixer': mixer, 'distance': distance, 'cut': cut, 'accuracy': accuracy}
      record |= {'streams': flags.streams, 'seconds': round(time.monotonic() - began, 1)}
      with results.open('a') as file_of_results:
        file_of_results.write(json.dumps(record) + '\n')
      print(json.dumps(record), file=sys.stderr, flush=True)
    print(table(records()), flush=True)


if __name__ == '__main__':
  sys.exit(main())
