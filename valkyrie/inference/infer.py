"""Continuations of prompts: by the run mode `infer`, and by a hook while a model trains."""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import io
import json
import os
import pathlib
from typing import Any, TextIO

import gin
import jax

from valkyrie import errors, foreign
from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import (
  Fraction,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveInt,
  Seed,
  checked,
)
from valkyrie.data import vocabularies
from valkyrie.data.chat_template import ChatTemplate
from valkyrie.distributed import console
from valkyrie.inference.generation import Penalty, PositiveFraction, Sampling
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring.waiting import doing
from valkyrie.storage import owned


@may_change_on_resume()
@gin.configurable
@checked
def infer(
  model_dir: str,
  prompt: str | None = None,
  prompts: str | None = None,
  messages: str | None = None,
  output: str | None = None,
  step: str = LATEST,
  *,
  opened: Callable[..., LoadedModel],
  seed: Seed,
  max_tokens: NonNegativeInt = 256,
  samples: PositiveInt = 1,
  stop: str | Sequence[str] = (),
  temperature: NonNegativeFloat = 0.0,
  top_k: PositiveInt | None = None,
  top_p: PositiveFraction = 1.0,
  min_p: Fraction = 0.0,
  repetition_penalty: Penalty = 1.0,
  batch_size: PositiveInt = 8,
) -> None:
  """Continues prompts by a run's checkpoint.

  One sample of one prompt is printed behind the prompt, as it comes. Others are JSON lines with
  prompt, sample, text, tokens (their number) and ended ('eos', 'stop' or 'length'), in UTF-8.

  Args:
    model_dir, step: name the checkpoint, see `weights.restored`.
    prompt: a text to continue.
    prompts: a file instead: JSON lines with the field `prompt` (.jsonl), or one on each line.
    messages: a file instead: JSON lines with the field `messages`, conversations to answer.
    output: a new file for the JSON lines, which appears when all are made; None is standard output.
    seed, max_tokens, samples, stop, batch_size: see `LoadedModel.generate`.
    temperature, top_k, top_p, min_p, repetition_penalty: the choice of tokens, see `Sampling`;
      greedy by default.

  Raises:
    UsageError: a prompt is empty.
    DataError: the file of prompts is not readable, or a prompt is not a text.
    StorageError: the output is there already, or cannot be written.
    ConfigurationError: a prompt is longer than the model can read, or the vocabulary is another.
  """
  talks = []
  if messages is not None:
    talks = _read_conversations(errors.with_home(messages))
  texts: list[Any] = [prompt or '']
  if prompts is not None:
    texts = _read_prompts(pathlib.Path(errors.with_home(prompts)))
  if messages is None and not all(texts):
    raise errors.UsageError('The prompt is empty. Pass --prompt=TEXT, or a text on standard input.')
  sampling = Sampling(repetition_penalty, temperature, top_k, top_p, min_p)
  options = {'max_tokens': max_tokens, 'stop': stop, 'seed': seed, 'sampling': sampling}
  with doing('reading the checkpoint'):
    loaded = opened(model_dir, step)
  if messages is not None:
    template = ChatTemplate(loaded.tokenizer)
    texts = [template.prompt(**talk) for talk in talks]
    options['stop'] = template.stops(stop)
  with _writer(output) as file:
    if prompts is None and messages is None and samples == 1 and output is None:
      pieces = loaded.stream(texts[0], **options)
      with doing('reading the prompt'):
        first_piece = next(pieces, '')
      begun = texts[0] + first_piece
      print(begun, end='', file=file, flush=True)
      for piece in pieces:
        print(piece, end='', file=file, flush=True)
      print(file=file, flush=True)
      return
    for first in range(0, len(texts), batch_size):
      batch = texts[first : first + batch_size]
      last = first + len(batch)
      numbers = f'{first + 1} to {last} of {len(texts)}'
      with doing(f'continuing prompts {numbers}'):
        continuations = loaded.generate(
          batch,
          first=first,
          samples=samples,
          batch_size=batch_size,
          **options,
        )
      for continuation in continuations:
        number = continuation.prompt
        line = continuation._asdict()
        line['prompt'] = texts[number]
        if talks:
          line['prompt'] = talks[number]['messages']
        line['tokens'] = len(continuation.tokens)
        text = json.dumps(line, ensure_ascii=False)
        print(text, file=file, flush=True)


def _read_prompts(path: pathlib.Path) -> list[str]:
  """The prompts in a file; raises a DataError that names the line."""
  is_json = path.suffix.lower() in ('.jsonl', '.ndjson', '.json')
  form = 'UTF-8 text'
  if is_json:
    form = 'a JSON object with the field "prompt"'
  try:
    lines = foreign.content(path).removeprefix(codecs.BOM_UTF8).splitlines()
  except (OSError, ValueError, MemoryError) as error:
    reason = errors.reason_of(error) or 'it is larger than the memory'
    raise errors.DataError(
      f'The prompts {path} cannot be read ({reason}). Write them to a file, one on each line.'
    ) from error
  prompts = []
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    begin = line[:40]
    message = f'{path}:{number}: {form} was expected, found {begin!r}'
    kinds = (ValueError, KeyError, TypeError)
    with errors.converted(kinds, errors.DataError, message, 'Correct the line.'):
      prompt = foreign.json_value(line)['prompt'] if is_json else line.decode()
    if not prompt or not isinstance(prompt, str):
      raise errors.DataError(f'{path}:{number}: "prompt" is {prompt!r:.40}. Write a text.')
    vocabularies.as_utf8(prompt, f'{path}:{number}: "prompt"')
    prompts.append(prompt)
  if not prompts:
    raise errors.DataError(f'{path} has no prompts. Write one on each line.')
  return prompts


def _read_conversations(location: str) -> list[dict[str, Any]]:
  """The arguments of `ChatTemplate.prompt` of each conversation in a file."""
  from valkyrie.data import messages  # noqa: PLC0415  (only for conversations)
  from valkyrie.data.records import Records  # noqa: PLC0415  (pyarrow)

  column = messages.COLUMNS[0]

  def read(row: dict[str, Any], columns: Sequence[str], place: str) -> dict[str, Any]:
    del columns
    arguments = messages.conversation(row, column, place)._asdict()
    arguments['place'] = place
    return arguments

  records = Records(location, {column: 'conversation'}, check=read, also=messages.also(column))
  return list(records.rows(0, 1))


@contextlib.contextmanager
def _writer(output: str | None) -> Iterator[TextIO]:
  if output is None:
    with console.standard_output('name an --output') as file:
      yield file
    return
  output = errors.usable_path('--output', output)
  if os.path.lexists(output):
    raise errors.StorageError(f'{output} is there already. Name another --output.')
  # An interruption or a full disk leaves no part, which would be in the way of the next try.
  with (
    errors.write_errors(f'{output} cannot be written', 'name another --output'),
    owned.new_file(pathlib.Path(output), replaces=False) as content,
  ):
    file = io.TextIOWrapper(content, encoding='utf-8')
    yield file
    file.flush()
    file.detach()


@may_change_on_resume()
@gin.configurable
class TextSamples:
  """A hook that logs continuations of prompts every `every` steps, while training waits.

  Their names in metrics.jsonl, TensorBoard and reports are `hooks/sample_1`, ...
  """

  @checked
  def __init__(
    self,
    prompts: Sequence[str],
    every: PositiveInt,
    max_tokens: NonNegativeInt = 64,
    temperature: NonNegativeFloat = 0.0,
    *,
    model: Callable[..., LanguageModel],
    vocabulary: str,
    chunk_size: PositiveInt,
  ):
    """Configures the samples; for the arguments see `infer` and `open_run`."""
    if jax.process_count() > 1:
      raise errors.ConfigurationError(
        'TextSamples needs all parameters in one process, and this run has '
        f'{jax.process_count()}. Continue its checkpoints by --run_mode=infer.'
      )
    self._prompts = prompts
    self._every = every
    self._options = {'max_tokens': max_tokens, 'sampling': Sampling(temperature=temperature)}
    functions = language_model.transform(model)
    tokenizer = vocabularies.load(vocabulary)
    self._loaded = LoadedModel(
      functions,
      {},
      tokenizer,
      model_dir='',
      steps=(),
      chunk_size=chunk_size,
    )

  def pauses(self, step: int) -> bool:
    """Whether there are samples after this step."""
    return step % self._every == 0

  def __call__(self, step: int, state: Any, metrics: Any) -> Mapping[str, str] | None:
    if not self.pauses(step):
      return None
    device, *_ = jax.local_devices()
    self._loaded.params = jax.device_put(state.evaluated, device)
    continuations = self._loaded.generate(self._prompts, seed=step, **self._options)
    self._loaded.params = {}
    samples = {}
    for prompt, continuation in zip(self._prompts, continuations, strict=True):
      number = len(samples) + 1
      samples[f'sample_{number}'] = prompt + continuation.text
    return samples
