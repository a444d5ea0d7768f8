"""The run mode `long_context`: answers by length and depth, with the memory and without it.

Each measurement is a line of RUN/long_context/results.jsonl, and is not repeated; each suite has a
heat map there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple
import zlib

import gin
import numpy as np

from valkyrie import foreign
from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import Fraction, PositiveInt, Seed
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError, DataError, check_choice, converted
from valkyrie.inference.loaded import LoadedModel
from valkyrie.inference.text_rows import batches
from valkyrie.lab.suites import babilong, ruler  # noqa: F401, they register theirs
from valkyrie.lab.suites.problem import SUITES, TooShortError, fitted, sentences_of
from valkyrie.models.carry_cuts import CUTS
from valkyrie.monitoring import json_lines, pictures
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.weights.changed import changed_bindings


class _Cell(NamedTuple):
  """One measurement. `depth` is None if the places are random, `cut` if the carry is whole."""

  suite: str
  length: int
  depth: float | None
  cut: str | None

  @property
  def is_cut(self) -> bool:
    return self.cut is not None

  def __str__(self) -> str:
    text = f'{self.suite}, {self.length:,} tokens'
    if self.depth is not None:
      text += f', depth {self.depth:.0%}'
    if self.cut is not None:
      text += f', {self.cut} cut'
    return text


@may_change_on_resume()
@gin.configurable
def long_context(
  model_dir: str,
  step: str = LATEST,
  *,
  opened: Callable[..., LoadedModel],
  seed: Seed,
  suites: Sequence[str] | None = None,
  lengths: Sequence[PositiveInt] = (4096, 16384, 65536),
  depths: Sequence[Fraction] = (0.0, 0.25, 0.5, 0.75, 1.0),
  samples: PositiveInt = 4,
  cuts: Sequence[str] = (),
  text: str | None = None,
  batch_size: PositiveInt = 4,
) -> None:
  """Asks a run's checkpoint about long contexts; prints and writes the share of right answers.

  Args:
    model_dir: the directory of the run.
    step: the checkpoint, see `weights.restored`.
    opened: opens the checkpoint.
    seed: the seed of the problems.
    suites: names of `valkyrie.lab.suites`; None for all, or without a text all that need none.
    lengths: the most tokens of a problem with its answer.
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
  checksum = zlib.crc32('\n'.join(sentences).encode())
  roots = ('open_run.model', 'open_run.chunk_size')
  settings = {}  # {whether a part of the carry is cut: what the scores depend on}
  for is_cut in (False, True):
    changed = changed_bindings(model_dir, step, roots, is_cut=is_cut)
    settings[is_cut] = {
      'step': steps,
      'samples': samples,
      'seed': seed,
      'text': checksum,
      'first_carry': (run.origin or {}).get('first_carry'),
      'changed': '; '.join(changed) or None,
    }
    if is_cut == bool(cuts):
      for line in changed:
        print(f'changed since the checkpoint: {line}', flush=True)
  left_out: set[tuple[str, int]] = set()
  with JsonLines(folder / 'results.jsonl') as results:
    scores = _recorded_scores(folder / 'results.jsonl', settings)
    for name in names:
      for cell in _cells(name, lengths, depths, cuts):
        if cell in scores:
          continue
        try:
          scores[cell] = _score(run, cell, samples, seed, sentences, batch_size)
        except TooShortError as error:
          case = (name, cell.length)
          if case not in left_out:
            print(f'{error} This length is left out.', flush=True)
          left_out.add(case)
          continue
        known = settings[cell.is_cut]
        results.write({**cell._asdict(), 'score': scores[cell], **known})
        print(f'{cell}: {scores[cell]:.1%}', flush=True)
      _draw(folder, name, steps, scores, lengths, cuts)
  if not scores:
    raise ConfigurationError(
      f'long_context.lengths = {tuple(lengths)}: every problem of the suites is longer. Choose '
      'larger lengths.'
    )


def _recorded_scores(
  file: pathlib.Path,
  settings: Mapping[bool, Mapping[str, Any]],
) -> dict[_Cell, float]:
  """The scores that an earlier call measured with the same settings, by whether a carry is cut."""
  scores = {}
  for line in json_lines.read_lines(file):
    for name in ('changed', 'first_carry'):  # earlier versions did not write them
      line.setdefault(name, None)
    cell = _Cell._make(map(line.get, _Cell._fields))
    is_same = settings[cell.is_cut].items() <= line.items()
    if is_same and isinstance(line.get('score'), float):
      scores[cell] = line['score']
  return scores


def _cells(
  name: str,
  lengths: Sequence[int],
  depths: Sequence[float],
  cuts: Sequence[str],
) -> Iterator[_Cell]:
  """All measurements of a suite, each first with the whole carry."""
  places = (None,)
  if SUITES[name].has_depth:
    places = depths
  for length in lengths:
    for place in places:
      for cut in (None, *cuts):
        yield _Cell(name, length, place, cut)


def _chosen(suites: Sequence[str] | None, text: str | None) -> list[str]:
  """The names of the suites to run; raises a ConfigurationError."""
  if suites is None:
    if text is not None:
      return [*SUITES]
    return [name for name, suite in SUITES.items() if not suite.needs_text]
  for name in suites:
    if name not in SUITES:
      raise ConfigurationError(
        f'long_context.suites contains {name!r}.{did_you_mean(name, [*SUITES])} The suites are '
        f'{", ".join(SUITES)}.'
      )
    if text is None and SUITES[name].needs_text:
      raise ConfigurationError(
        f'The suite {name} hides facts in a text. Set long_context.text to .txt or .md files, or '
        'leave the suite out of long_context.suites.'
      )
  return [*suites]


def _sentences(text: str | None) -> list[str]:
  if text is None:
    return []
  from valkyrie.data.source_files import SourceFiles  # noqa: PLC0415, pyarrow

  files = SourceFiles(text, ('.txt', '.md'))
  message = f'The text {text} cannot be read'
  advice = 'Expected files in UTF-8: convert others, for instance by iconv.'
  with converted((OSError, ValueError), DataError, message, advice):
    contents = []
    for file in files.files:
      content = foreign.whole(files.open(file))
      contents.append(content.decode())
    return sentences_of('\n'.join(contents))


def _score(
  run: LoadedModel,
  cell: _Cell,
  samples: int,
  seed: int,
  sentences: Sequence[str],
  batch_size: int,
) -> float:
  """The mean score of all questions; raises a TooShortError if no problem is so short."""
  name, length, depth, cut = cell

  def tokens(text: str) -> int:
    return len(run.tokenizer.begun(text))

  place = zlib.crc32(f'{name}, {length}, {depth}'.encode())
  problems = []
  for number in range(samples):
    problem_seed = (seed, place, number)
    problem = fitted(name, length, depth, sentences, tokens, problem_seed)
    problems.append(problem)
  suite = SUITES[name]
  scores = []
  for batch in batches(problems, batch_size):
    contexts = [problem.context for problem in batch]
    carry = run.read(contexts, cut=cut)
    rows_and_questions = []
    for row, problem in enumerate(batch):
      for question in problem.questions:
        rows_and_questions.append((row, question))
    for part in batches(rows_and_questions, batch_size):
      rows = [row for row, _ in part]
      questions = [question for _, question in part]
      answers = run.generate(
        [question.text for question in questions],
        run.rows(carry, rows),
        max_tokens=suite.max_tokens,
        batch_size=batch_size,
      )
      for answer, question in zip(answers, questions, strict=True):
        scores.append(suite.score(answer.text, question))
  return sum(scores) / len(scores)


def _draw(
  folder: pathlib.Path,
  name: str,
  steps: str,
  scores: Mapping[_Cell, float],
  lengths: Sequence[int],
  cuts: Sequence[str],
) -> None:
  """The heat map of a suite, with a panel for each cut."""
  cells = []
  for cell in scores:
    if cell.suite == name and cell.length in lengths:
      cells.append(cell)
  if not cells:
    return
  columns = sorted({cell.length for cell in cells})
  rows = sorted({cell.depth for cell in cells}, key=lambda depth: depth or 0)
  panels = {}
  for cut in (None, *cuts):
    grid = np.full((len(rows), len(columns)), np.nan)
    for i, depth in enumerate(rows):
      for j, length in enumerate(columns):
        cell = _Cell(name, length, depth, cut)
        grid[i, j] = scores.get(cell, np.nan)
    title = f'{cut} cut'
    if cut is None:
      title = 'memory'
    panels[title] = grid
  file = folder / f'{name}.png'
  pictures.write_heat_map(
    file,
    f'{name}, step {steps}: right answers by tokens and depth',
    panels,
    [f'{length:,}' for length in columns],
    ['random' if depth is None else f'{depth:.0%}' for depth in rows],
  )
  print(file, flush=True)
