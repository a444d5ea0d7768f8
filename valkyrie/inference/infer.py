"""The run mode `infer`: continuations of prompts, printed as they come or written as JSON lines."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import pathlib
import sys
from typing import TextIO

import gin

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import DataError, StorageError, storage_errors
from valkyrie.inference.generation import Sampling
from valkyrie.inference.loaded import LoadedModel


@may_change_on_resume()
@gin.configurable
def infer(
  model_dir: str,
  prompt: str | None = None,
  prompts: str | None = None,
  output: str | None = None,
  step: str = LATEST,
  *,
  opened: Callable[..., LoadedModel],
  seed: int,
  max_tokens: int = 256,
  samples: int = 1,
  stop: Sequence[str] = (),
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float = 1.0,
  min_p: float = 0.0,
  repetition_penalty: float = 1.0,
  batch_size: int = 8,
) -> None:
  """Continues prompts by a run's checkpoint.

  One sample of one prompt is printed behind the prompt, as it comes. Others are JSON lines with
  prompt, sample, text, tokens (their number) and ended ('eos', 'stop' or 'length').

  Args:
    model_dir: the directory of the run.
    prompt: a text to continue.
    prompts: a file instead: JSON lines with the field `prompt` (.jsonl), or one on each line.
    output: a new file for the JSON lines; None is standard output.
    step: of the checkpoint, see `weights.restored`.
    opened: opens the run.
    seed: of the samples.
    max_tokens: the most tokens of a continuation, if the document does not end before.
    samples: continuations of each prompt.
    stop: strings before which a continuation ends.
    temperature, top_k, top_p, min_p, repetition_penalty: the choice of tokens, see `Sampling`;
      greedy by default.
    batch_size: continuations that are made at the same time.

  Raises:
    UsageError: a prompt is empty.
    DataError: the file of prompts is not readable.
    StorageError: the output is there already, or cannot be written.
    ConfigurationError: a prompt is longer than the model can read, or the run has another
      vocabulary.
  """
  texts = read_prompts(pathlib.Path(prompts)) if prompts is not None else [str(prompt)]
  options = {
    'max_tokens': max_tokens,
    'stop': stop,
    'seed': seed,
    'sampling': Sampling(repetition_penalty, temperature, top_k, top_p, min_p),
  }
  loaded = opened(model_dir, step)
  if prompts is None and samples == 1 and output is None:
    for number, piece in enumerate(loaded.stream(texts[0], **options)):
      print(piece if number else texts[0] + piece, end='', flush=True)
    print()
    return
  with _writer(output) as file:
    for first in range(0, len(texts), batch_size):
      batch = texts[first : first + batch_size]
      made = loaded.generate(batch, first=first, samples=samples, batch_size=batch_size, **options)
      for one in made:
        line = {
          'prompt': texts[one.prompt],
          'sample': one.sample,
          'text': one.text,
          'tokens': len(one.tokens),
          'ended': one.ended,
        }
        print(json.dumps(line, ensure_ascii=False), file=file, flush=True)


def read_prompts(path: pathlib.Path) -> list[str]:
  """The prompts in a file; raises a DataError that names the line."""
  try:
    lines = path.read_bytes().splitlines()
  except OSError as error:
    raise DataError(f'The prompts {path} cannot be read ({error.strerror}).') from error
  found = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      found.append(json.loads(line)['prompt'] if path.suffix == '.jsonl' else line.decode())
    except (ValueError, KeyError, TypeError) as error:
      wanted = 'a JSON object with the field "prompt"' if path.suffix == '.jsonl' else 'UTF-8 text'
      raise DataError(
        f'{path}:{number}: {wanted} was expected, found {line[:40]!r} ({error}). Correct the line.'
      ) from error
    if not isinstance(found[-1], str):
      raise DataError(f'{path}:{number}: "prompt" is {found[-1]!r:.40}. Write a text.')
  if not found:
    raise DataError(f'{path} has no prompts. Write one on each line.')
  return found


@contextlib.contextmanager
def _writer(output: str | None) -> Iterator[TextIO]:
  if output is None:
    yield sys.stdout
    return
  with storage_errors(f'{output} cannot be written', 'Name another --output.'):
    try:
      file = open(output, 'x', encoding='utf-8')  # noqa: SIM115, closed below
    except FileExistsError as error:
      raise StorageError(f'{output} is there already. Name another --output.') from error
    with file:
      yield file
