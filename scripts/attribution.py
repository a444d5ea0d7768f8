"""Whether `run.attribution` finds what matters: planted passages in long texts, and occlusion.

Each text has 131,072 tokens of filler, with keys and values at random places that the model of
gin/recall_cpu.gin is asked for. The strongest passage of each answer is compared with the planted
one, then overwritten with filler, and so is another: the log-probability of the answer tells
whether it mattered.

    PYTHONPATH=. python scripts/attribution.py runs/recall/gated_delta
"""

import argparse
from collections.abc import Sequence
import sys
from typing import NamedTuple

import numpy as np

import valkyrie
from valkyrie.tasks.recall import KEYS, filler

WIDTH = 4  # tokens of a passage


class Planted(NamedTuple):
  """A text, the places of its passages, and questions with their answers."""

  text: str
  places: Sequence[int]
  questions: Sequence[str]
  answers: Sequence[str]


def planted(random: np.random.RandomState, tokens: int, keys: int) -> Planted:
  """A text of filler with `keys` marked pairs, a pair in each of as many equal parts."""
  text = filler(random, tokens)
  names = random.permutation(list(KEYS))[:keys]
  values = [str(random.randint(10)) for _ in names]
  part = tokens // keys
  places = [number * part + random.randint(part - WIDTH) for number in range(keys)]
  for place, name, value in zip(places, names, values, strict=True):
    text = f'{text[:place]}!{name}{value}{text[place + 3 :]}'
  return Planted(text, places, [f'?{name}' for name in names], values)


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints a line for each text; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('run', help='the directory of a run of gin/recall_cpu.gin')
  parser.add_argument('--tokens', type=int, default=131072, help='of a text (default: %(default)s)')
  parser.add_argument('--keys', type=int, default=4, help='of a text (default: %(default)s)')
  parser.add_argument('--texts', type=int, default=4, help='default: %(default)s')
  options = parser.parse_args(arguments)
  run = valkyrie.load(options.run)
  right, drops, others = 0, [], []
  for number in range(options.texts):
    random = np.random.RandomState([options.tokens, number])
    now = planted(random, options.tokens, options.keys)
    found = 0
    for place, question, answer in zip(now.places, now.questions, now.answers, strict=True):
      result = run.attribution(now.text, question, answer)
      end = options.tokens - WIDTH  # the question itself is not of the text
      strongest = next(
        passage.begin for passage in result.passages(2, WIDTH) if passage.begin < end
      )
      found += abs(strongest - place) < WIDTH
      for hidden, into in ((strongest, drops), (random.randint(end), others)):
        noise = filler(random, WIDTH, 0.0)
        text = f'{now.text[:hidden]}{noise}{now.text[hidden + WIDTH :]}'
        (score,) = run.score(text + question + answer)
        into.append(result.log_prob - float(score.log_probs[-1]))
    right += found
    print(
      f'text {number}: {found} of {options.keys} planted passages are the strongest', flush=True
    )
  print(
    f'{right / len(drops):.0%} of {len(drops)} planted passages are the strongest; without them an '
    f'answer loses {np.mean(drops):.2f} nats, without a passage elsewhere {np.mean(others):.2f}'
  )
  return 0


if __name__ == '__main__':
  sys.exit(main())
