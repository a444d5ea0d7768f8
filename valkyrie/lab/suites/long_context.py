"""The run mode `long_context`: answers by length and depth, with the memory and without it.

Each measurement is a line of RUN/long_context/results.jsonl, and is not repeated; each suite has a
heat map there.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import pathlib
from typing import NamedTuple
import zlib

import gin
import numpy as np

from valkyrie import foreign
from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError, DataError, check_choice, converted
from valkyrie.inference.loaded import LoadedModel
from valkyrie.inference.text_rows import batches
from valkyrie.lab.suites import babilong, ruler  # noqa: F401, they register theirs
from valkyrie.lab.suites.problem import SUITES, TooShortError, fitted, sentences_of
from valkyrie.models.carry_cuts import CUTS
from valkyrie.monitoring import json_lines, pictures
from valkyrie.monitoring.json_lines import JsonLines


class _Cell(NamedTuple):
  """One measurement. `depth` is None if the places are random, `cut` if the carry is whole."""

  suite: str
  length: int
  depth: float | None
  cut: str | None

  def __str__(self) -> str:
    depth = '' if self.depth is None else f', depth {self.depth:.0%}'
    cut = '' if self.cut is None else f', {self.cut} cut'
    return f'{self.suite}, {self.length:,} tokens{depth}{cut}'


@may_change_on_resume()
@gin.configurable
def long_context(
  model_dir: str,
  step: str = LATEST,
  *,
  opened: Callable[..., LoadedModel],
  seed: int,
  suites: Sequence[str] | None = None,
  lengths: Sequence[int] = (4096, 16384, 65536),
  depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
  samples: int = 4,
  cuts: Sequence[str] = (),
  text: str | None = None,
  batch_size: int = 4,
) -> None:
  """Asks a run's checkpoint about long contexts; prints and writes the share of right answers.

  Args:
    model_dir, step: of the checkpoint, see `weights.restored`.
    seed: of the problems.
    suites: names of `valkyrie.lab.suites`; None for all, without a text all that need none.
    lengths: tokens of a problem with its answer, at most.
    depths: places of the facts, from 0 to 1.
    samples: problems of each length and depth.
    cuts: parts of the carry, 'state' or 'all': for each, the same is measured with this part set
      back before every chunk of the context.
    text: files, a folder or a pattern of .txt and .md, in which facts are hidden.
    batch_size: contexts, and then questions, that are read at the same time.

  Raises:
    ConfigurationError: a suite is unknown, needs a text, or fits no length; or the step is missing.
    DataError: the text cannot be read.
  """
  for cut in cuts:
    check_choice('long_context.cuts', cut, CUTS)
  names = _chosen(suites, text)
  sentences = _sentences(text)
  run = opened(model_dir, step)
  steps = ', '.join(map(str, run.steps))
  folder = pathlib.Path(model_dir, 'long_context')
  content = zlib.crc32('\n'.join(sentences).encode())
  about = {'step': steps, 'samples': samples, 'seed': seed, 'text': content}
  results = JsonLines(folder / 'results.jsonl')
  scores = {
    _Cell._make(map(line.get, _Cell._fields)): line['score']
    for line in json_lines.read(folder / 'results.jsonl')
    if about.items() <= line.items() and isinstance(line.get('score'), float)
  }
  for name in names:
    places = depths if SUITES[name].has_depth else (None,)
    for cell in itertools.starmap(_Cell, itertools.product([name], lengths, places, (None, *cuts))):
      if cell in scores:
        continue
      try:
        scores[cell] = _score(run, cell, samples, seed, sentences, batch_size)
      except TooShortError as error:
        print(f'{error} It is left out.', flush=True)
        continue
      results.write({**cell._asdict(), 'score': scores[cell], **about})
      print(f'{cell}: {scores[cell]:.1%}', flush=True)
    _draw(folder, name, steps, scores, lengths, cuts)
  if not scores:
    raise ConfigurationError('No suite has a problem of long_context.lengths. Choose larger ones.')


def _chosen(suites: Sequence[str] | None, text: str | None) -> list[str]:
  if suites is None:
    return [name for name, suite in SUITES.items() if text is not None or not suite.needs_text]
  for name in suites:
    if name not in SUITES:
      raise ConfigurationError(
        f'long_context.suites contains {name!r}.{did_you_mean(name, [*SUITES])} There are '
        f'{", ".join(SUITES)}.'
      )
    if text is None and SUITES[name].needs_text:
      raise ConfigurationError(
        f'{name} hides facts in a text. Name one by long_context.text: .txt or .md files.'
      )
  return [*suites]


def _sentences(text: str | None) -> list[str]:
  if text is None:
    return []
  from valkyrie.data.source_files import SourceFiles  # noqa: PLC0415, pyarrow

  files = SourceFiles(text, ('.txt', '.md'))
  message = f'The text {text} cannot be read'
  advice = 'UTF-8 is expected.'
  with converted((OSError, ValueError), DataError, message, advice):
    contents = [foreign.whole(files.open(file)) for file in files.files]
    return sentences_of('\n'.join(content.decode() for content in contents))


def _score(
  run: LoadedModel, cell: _Cell, samples: int, seed: int, sentences: Sequence[str], batch_size: int
) -> float:
  """The mean score of all questions; raises a TooShortError if no problem is so short."""
  name, length, depth, cut = cell

  def tokens(text: str) -> int:
    return len(run.tokenizer.begun(text))

  place = zlib.crc32(f'{name}, {length}, {depth}'.encode())
  seeds = [(seed, place, number) for number in range(samples)]
  problems = [fitted(name, length, depth, sentences, tokens, one) for one in seeds]
  suite = SUITES[name]
  found = []
  for batch in batches(problems, batch_size):
    carry = run.read([problem.context for problem in batch], cut=cut)
    asked = [(row, question) for row, one in enumerate(batch) for question in one.questions]
    for part in batches(asked, batch_size):
      answers = run.generate(
        [question.text for _, question in part],
        run.rows(carry, [row for row, _ in part]),
        max_tokens=suite.max_tokens,
        batch_size=batch_size,
      )
      found += [
        suite.score(answer.text, question)
        for answer, (_, question) in zip(answers, part, strict=True)
      ]
  return sum(found) / len(found)


def _draw(
  folder: pathlib.Path,
  name: str,
  steps: str,
  scores: Mapping[_Cell, float],
  lengths: Sequence[int],
  cuts: Sequence[str],
) -> None:
  """The heat map of a suite, with a panel for each cut."""
  cells = [cell for cell in scores if cell.suite == name and cell.length in lengths]
  if not cells:
    return
  columns = sorted({cell.length for cell in cells})
  rows = sorted({cell.depth for cell in cells}, key=lambda depth: depth or 0)
  panels = {}
  for cut in (None, *cuts):
    grid = [[scores.get(_Cell(name, x, y, cut), np.nan) for x in columns] for y in rows]
    panels['memory' if cut is None else f'{cut} cut'] = np.array(grid)
  pictures.write_heat_map(
    folder / f'{name}.png',
    f'{name}, step {steps}: right answers by tokens and depth',
    panels,
    [f'{length:,}' for length in columns],
    ['random' if depth is None else f'{depth:.0%}' for depth in rows],
  )
  print(folder / f'{name}.png', flush=True)
