"""The command that asks and reports how well labels predict where components are active.

    python -m valkyrie.lab.decomposition.label_scores RUN/labels_STEP

It writes `questions.jsonl`: a judge is given a label and held-out passages, without marks, and
names those in which the component is active (detection: Paulo et al. 2024, arXiv 2410.13928). Each
component is asked about twice, with its own label and with another component's. Once
`answers.jsonl` has answers, the command prints the shares of right ones, and writes `scores.jsonl`.

    own          with its own label
    shuffled     with the label of another component
    tokens       without a judge: active where one of its telling tokens is
    constant     the same answer for all passages; it is active in half of them
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib
import re
import sys
from typing import NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.distributed import console
from valkyrie.errors import first_of, with_home
from valkyrie.lab.decomposition import exchange, labels
from valkyrie.lab.decomposition.exchange import Request
from valkyrie.lab.decomposition.labels import Described

QUESTIONS = 'questions.jsonl'
ANSWERS = 'answers.jsonl'
SCORES = 'scores.jsonl'
_COLUMNS = ('own', 'shuffled', 'tokens', 'constant')
_MOST_NAMED = 3
_LIST = re.compile(r'\[[\s\d,]*\]')
_SYSTEM = """You are given a description of when one part of a language model is active, and \
numbered passages, as JSON strings. Decide by the description alone in which passages the part is \
active at one token or more. Answer with a JSON list of the numbers of these passages, such as \
[2, 5], or [] if there are none, and nothing else."""


class Score(NamedTuple):
  """A labeled component: the shares of held-out passages that are judged right, None without any.

  passages: their number.
  """

  site: str
  component: int
  label: str
  passages: int
  own: float | None
  shuffled: float | None
  tokens: float | None
  constant: float | None


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Writes the questions, and prints the scores."""
  about = 'Asks and reports how well labels predict where components are active.'
  parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
  parser.add_argument('folder', help='RUN/labels_STEP, which --run_mode=components has written')
  flags = parser.parse_args(arguments)
  console.print_result(_answer(pathlib.Path(with_home(flags.folder))))


def _answer(folder: pathlib.Path) -> str:
  """Writes the questions and scores of a folder; returns the text that is printed."""
  components = labels.described(folder)
  found = labels.of_answers(components, exchange.read_answers(folder / labels.LABELS))
  asked = questions(components, found.by_id)
  requests = [question._asdict() for pair in asked.values() for question in pair]
  exchange.write_lines(folder / QUESTIONS, requests)
  answers = exchange.read_answers(folder / ANSWERS)
  scores = scored(components, found.by_id, asked, answers)
  exchange.write_lines(folder / SCORES, (score._asdict() for score in scores))
  lines = [
    *_about_labels(components, found),
    *_about_questions(folder, len(found.by_id), asked, answers),
    *_about_answers(components, asked, answers),
    *_table(scores),
  ]
  return ''.join(f'{line}\n' for line in lines)


def questions(
  components: Sequence[Described], by_id: Mapping[str, str]
) -> dict[str, tuple[Request, ...]]:
  """{id of a component: its own question, and one with another's label} for labels `by_id`.

  A component without held-out passages has no questions, and a single labeled one no other label.
  """
  order = np.random.default_rng(0).permutation(len(components))
  # In a circle, so that a label that comes later changes one other question only.
  labeled = [components[n] for n in order if components[n].id in by_id]
  found = {}
  for place, component in enumerate(labeled):
    if component.held_out:
      asked = [_question(component, by_id[component.id], 'own')]
      other = labeled[(place + 1) % len(labeled)]
      if other is not component:
        asked.append(_question(component, by_id[other.id], 'other'))
      found[component.id] = tuple(asked)
  return found


def _question(component: Described, label: str, kind: str) -> Request:
  lines = [f'Description: {labels.quoted(label)}']
  for number, passage in enumerate(component.held_out, 1):
    lines.append(f'Passage {number}: {labels.quoted(passage.text)}')
  name = f'{component.site}/{component.component}/{kind}'
  return exchange.request(name, _SYSTEM, '\n'.join(lines))


def scored(
  components: Sequence[Described],
  by_id: Mapping[str, str],
  asked: Mapping[str, Sequence[Request]],
  answers: Mapping[str, str],
) -> list[Score]:
  """The scores of the components that have labels `by_id`."""
  scores = []
  for component in components:
    if component.id in by_id:
      truth = np.array([passage.active for passage in component.held_out], bool)
      questions_of = asked.get(component.id, ())
      guesses = [judged(answers.get(each.id, ''), len(truth)) for each in questions_of]
      own, shuffled = [*guesses, None, None][:2]
      has_telling = np.array([passage.has_telling for passage in component.held_out], bool)
      scores.append(
        Score(
          component.site,
          component.component,
          by_id[component.id],
          len(truth),
          own=_right(own, truth),
          shuffled=_right(shuffled, truth),
          tokens=_right(has_telling, truth),
          constant=_right(np.zeros_like(truth), truth),
        )
      )
  return scores


def _right(guess: np.ndarray | None, truth: np.ndarray) -> float | None:
  """The share of passages that a guess has right; None without a guess or a passage."""
  if guess is None or not len(truth):
    return None
  return float(np.mean(guess == truth))


def judged(answer: str, passages: int) -> np.ndarray | None:
  """Which passages an answer names, bool [passages]; None if it is no list of such numbers."""
  lists = _LIST.findall(answer)
  if len(lists) != 1:
    return None
  try:
    numbers = json.loads(lists[0])
  except ValueError:
    return None
  named = set(numbers)
  if len(named) < len(numbers) or not named <= {*range(1, passages + 1)}:
    return None
  return np.isin(np.arange(1, passages + 1), numbers)


def _about_labels(components: Sequence[Described], found: labels.Labels) -> Iterator[str]:
  """Lines about the labels."""
  yield f'{len(found.by_id):,} of {len(components):,} components have labels.'
  if found.refused:
    reasons = [f'{foreign.shown(name)}: {reason}' for name, reason in found.refused.items()]
    yield f'No labels: {"; ".join(first_of(reasons, _MOST_NAMED))}.'
  if found.strange:
    yield f'Answers in {labels.LABELS} that belong to no prompt: {found.strange:,}.'


def _about_questions(
  folder: pathlib.Path,
  labeled: int,
  asked: Mapping[str, Sequence[Request]],
  answers: Mapping[str, str],
) -> Iterator[str]:
  """Lines about the questions on so many labeled components."""
  ids = [question.id for of_component in asked.values() for question in of_component]
  answered = sum(name in answers for name in ids)
  yield f'{folder / QUESTIONS}: {len(ids):,} questions about {len(asked):,} components.'
  without = labeled - len(asked)
  if without:
    yield f'Not asked about, since active in all held-out passages or in none: {without:,}.'
  yield f'{folder / ANSWERS} answers {answered:,} of them.'


def _about_answers(
  components: Sequence[Described],
  asked: Mapping[str, Sequence[Request]],
  answers: Mapping[str, str],
) -> Iterator[str]:
  """A line about answers that say nothing."""
  unclear = []
  for component in components:
    for question in asked.get(component.id, ()):
      answer = answers.get(question.id)
      if answer is not None and judged(answer, len(component.held_out)) is None:
        unclear.append(foreign.shown(question.id))
  if unclear:
    names = ', '.join(first_of(unclear, _MOST_NAMED))
    yield (
      f'Answers that are no list of passages: {len(unclear):,} ({names}). Remove their lines from '
      f'{ANSWERS} to ask again.'
    )


def _table(scores: Sequence[Score]) -> Iterator[str]:
  """The mean scores of the components that have all, with the standard errors of the means."""
  whole = [score for score in scores if None not in score]
  if not whole:
    yield 'There are no scores yet: a component needs an answer to both of its questions.'
    return
  yield f'Right answers, the mean of {len(whole):,} components and its standard error:'
  for name in _COLUMNS:
    values = np.array([getattr(score, name) for score in whole])
    error = ''
    if len(values) > 1:
      error = f' ± {values.std(ddof=1) / len(values) ** 0.5:.1%}'
    yield f'{name:<10}{values.mean():.1%}{error}'


if __name__ == '__main__':
  sys.exit(main())
