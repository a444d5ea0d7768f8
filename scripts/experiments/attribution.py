"""Whether `run.attribution` finds what matters: planted passages in long texts, and occlusion.

Each text has 131,072 tokens of filler, with k keys and values at random places, and the model of
gin/recall_cpu.gin is asked for all k; or 128 letters, with a number of two digits, for which
the model of gin/passkey_cpu.gin is asked. The strengths of each answer are divided by their
largest, since a certain answer depends on all tokens less than an uncertain one. The k passages
that are the strongest for all answers together are compared with the planted ones, then overwritten
with filler, and so are k others: the log-probabilities of the answers tell whether they mattered.

    bash scripts/experiment attribution runs/recall/gated_delta
    bash scripts/experiment attribution runs/passkey --task passkey --tokens 128 --texts 64
"""
# Environment: base

import argparse
from collections.abc import Sequence
import sys
from typing import NamedTuple

import numpy as np

import valkyrie
from valkyrie.data.document_source import DIGITS, NOISE, symbols
from valkyrie.distributed import console
from valkyrie.tasks.recall import KEYS, filler

WIDTH = 4  # tokens of a passage


class Planted(NamedTuple):
  """A text, the places of its passages, and questions with their answers."""

  text: str
  places: Sequence[int]
  questions: Sequence[str]
  answers: Sequence[str]


def passkey(random: np.random.RandomState, tokens: int, keys: int) -> Planted:
  """A text of letters with one number, which is asked for."""
  text = symbols(random, NOISE, tokens)
  key = symbols(random, DIGITS, 2)
  place = random.randint(tokens - WIDTH)
  return Planted(f'{text[:place]}{key}{text[place + 2 :]}', [place], ['?'], [key])


def recall(random: np.random.RandomState, tokens: int, keys: int) -> Planted:
  """A text of filler with `keys` marked pairs, a pair in each of as many equal parts."""
  text = filler(random, tokens)
  names = random.permutation(list(KEYS))[:keys]
  values = [str(random.randint(10)) for _ in names]
  part = tokens // keys
  places = [number * part + random.randint(part - WIDTH) for number in range(keys)]
  for place, name, value in zip(places, names, values, strict=True):
    text = f'{text[:place]}!{name}{value}{text[place + 3 :]}'
  return Planted(text, places, [f'?{name}' for name in names], values)


TASKS = {'recall': recall, 'passkey': passkey}


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Prints a line for each text; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('run', help='the directory of a run of gin/recall_cpu.gin, or of the task')
  parser.add_argument('--task', choices=TASKS, default='recall')
  parser.add_argument('--tokens', type=int, default=131072, help='of a text (default: %(default)s)')
  parser.add_argument('--keys', type=int, default=4, help='of a text (default: %(default)s)')
  parser.add_argument('--texts', type=int, default=8, help='default: %(default)s')
  options = parser.parse_args(arguments)
  run = valkyrie.load(options.run)
  right = 0
  drops = []
  others = []
  for number in range(options.texts):
    random = np.random.RandomState([options.tokens, number])
    now = TASKS[options.task](random, options.tokens, options.keys)
    keys = len(now.places)
    results = [
      run.attribution(now.text, *pair) for pair in zip(now.questions, now.answers, strict=True)
    ]
    of_text = np.stack([result.strengths[: options.tokens] for result in results])
    strengths = np.sum(of_text / np.max(of_text, axis=1, keepdims=True), axis=0)
    passages = results[0]._replace(strengths=strengths).passages(keys, WIDTH)
    strongest = [passage.begin for passage in passages]
    found = sum(any(abs(place - at) < WIDTH for at in strongest) for place in now.places)
    right += found
    elsewhere = random.randint(options.tokens - WIDTH, size=keys)
    for places, into in ((strongest, drops), (elsewhere, others)):
      text = now.text
      for place in places:
        text = f'{text[:place]}{filler(random, WIDTH, 0.0)}{text[place + WIDTH :]}'
      for result, *pair in zip(results, now.questions, now.answers, strict=True):
        (score,) = run.score(text + ''.join(pair))
        into.append(result.log_prob - float(np.sum(score.log_probs[-len(pair[1]) :])))
    print(f'text {number}: {found} of {keys} planted passages found', flush=True)
  print(
    f'{right / len(drops):.0%} of {len(drops)} planted passages are among the first {keys}; '
    f'without these an answer loses {np.mean(drops):.2f} nats, without others {np.mean(others):.2f}'
  )
  return 0


if __name__ == '__main__':
  sys.exit(main())
