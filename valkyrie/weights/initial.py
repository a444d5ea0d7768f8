"""Weights of another run, or of other programs, as the first weights of a run."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import pathlib
import re
from typing import Any

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.errors import ConfigurationError, first_of, regular_expression, with_home
from valkyrie.models.attention.longformer import WindowAttention
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel, asked
from valkyrie.models.layers import RMSNorm
from valkyrie.models.model import Model
from valkyrie.models.sites import is_factor
from valkyrie.types import Array, Params
from valkyrie.weights import huggingface, named_tensors
from valkyrie.weights.named_tensors import TABLES, Leaf
from valkyrie.weights.source import Source, open_source
from valkyrie.weights.tensor_files import Tensor

FRESH, ZERO = 'fresh', 'zero'
_SHOWN = 8  # tensors in a message
_DTYPES = ('F64', 'F32', 'F16', 'BF16')  # others need scales, which are not known here


@gin.configurable
@dataclasses.dataclass(frozen=True)
class InitialWeights:
  """The choice of a tensor for each of the model's, by the names of `weights.named_tensors`.

  Attributes:
    source: the directory of a run, one of whose checkpoints is read; a safetensors file or index,
      or a folder with such files, as an export has; or a folder of Hugging Face's Llama, Mistral
      or Qwen3.
    rules: (pattern, tensor); the first rule whose regular expression is found in the name applies.
      The tensor is 'fresh' for the model's own initialization, 'zero', or the name of the tensor in
      the source, in which \\1 stands for a group of the pattern. `NAME.T` is the tensor NAME
      transposed, since matrices here are [inputs, outputs]. Without a rule, the name stays.
    partial: tensors that the source lacks are new: outputs (`out`) are zero, so that a new layer or
      mixer adds nothing at first; others, and tokens that the source lacks, are initialized. The
      factors of a decomposition may always be new.
    any_loss: accept weights whose validation loss is as high as for guessing, as on a task that is
      new to them.
    step: of a run: a number, 'latest' or 'best', see `checkpoint.manager.open_to_read`.
  """

  source: str
  rules: Sequence[tuple[str, str]] = ()
  partial: bool = False
  any_loss: bool = False
  step: str | int = LATEST

  def __post_init__(self):
    for rule in self.rules:
      if not isinstance(rule, list | tuple) or len(rule) != 2:
        raise ConfigurationError(
          f'InitialWeights.rules contains {rule!r}. Use pairs of a regular expression and of '
          "'fresh', 'zero' or the name of a tensor."
        )
      regular_expression('InitialWeights.rules', rule[0])

  def check_source(self) -> None:
    """Raises a ConfigurationError if the source is not there, before anything is read."""
    if not pathlib.Path(with_home(self.source)).exists():
      raise ConfigurationError(
        f'The weights {self.source} are not there. Name the directory of a run, a safetensors '
        'file, or a folder with such files.'
      )

  def load(
    self,
    model: Model,
    make: Callable[..., LanguageModel],
    params: Params,
    vocabulary: str,
    say: Callable[[str], None],
  ) -> tuple[Params, bool]:
    """Replaces parameters, which are deleted one by one, with the tensors of the source.

    Each device reads its own part of a tensor in a file. `make` is the class of the model, and
    `vocabulary` the fingerprint of its tokenizer.

    Returns the parameters on the same mesh, and whether all come from the source. Raises a
    ConfigurationError if a tensor is missing or has another shape, or if the source is of a model
    with other settings or of another tokenizer.
    """
    source = open_source(self.source, str(self.step))
    leaves = named_tensors.leaves(params)
    if not any(named_tensors.is_adapter(name) for leaf in leaves for name in leaf.tensors):
      source = source._replace(tensors=named_tensors.merged(source.tensors))
    source = source._replace(tensors=self._with_transposed(source.tensors, leaves))
    self._check_vocabulary(source, vocabulary)
    chosen = self._chosen(leaves, source.tensors, model.about.vocabulary_size)
    self._check_settings(source, make)
    for line in [*self._report(source, chosen, vocabulary), *_other_settings(source, make)]:
      say(line)
    loaded: dict[str, dict[str, Array]] = {module: dict(group) for module, group in params.items()}
    for leaf in leaves:
      of_leaf = [chosen[name] for name in leaf.tensors]
      if any(choice != FRESH for choice in of_leaf):
        before = params[leaf.module][leaf.name]
        tensors = [source.tensors.get(choice, choice) for choice in of_leaf]
        loaded[leaf.module][leaf.name] = _filled(before, tensors, leaf.stacked)
        before.delete()
    own = {choice for name, choice in chosen.items() if not is_factor(name, chosen)}
    return loaded, not {FRESH, ZERO} & own

  def _chosen(
    self, leaves: Sequence[Leaf], tensors: Mapping[str, Tensor], tokens: int
  ) -> dict[str, str]:
    """{tensor of the model: FRESH, ZERO or the tensor of the source}, checked."""
    chosen, missing, misfits = {}, [], []
    shapes = {name: leaf.shape[leaf.stacked :] for leaf in leaves for name in leaf.tensors}
    for pattern, _ in self.rules:
      if not any(re.search(pattern, name) for name in shapes):
        raise ConfigurationError(
          f'InitialWeights.rules has {pattern!r}, which is found in no name of the '
          f'{len(shapes)} tensors of the model, such as {", ".join([*shapes][:3])}. Correct it, '
          'or leave the rule out.'
        )
    for name, shape in shapes.items():
      choice = self._choice(name)
      if choice not in tensors and is_factor(name, shapes):
        choice = FRESH
      if choice not in tensors and choice not in (FRESH, ZERO):
        missing.append(name)
        choice = ZERO if name.endswith('.out') else FRESH
      chosen[name] = choice
      if choice in (FRESH, ZERO):
        continue
      found, dtype = tensors[choice].shape, tensors[choice].dtype
      fits = found == shape
      if name in TABLES:
        fewest = 1 if self.partial else tokens
        fits = found[1:] == shape[1:] and fewest <= found[0] <= shape[0]
      if not fits:
        misfits.append(f'{choice}: found {list(found)}, expected {list(shape)}')
      elif dtype not in _DTYPES:
        misfits.append(f'{choice}: found {dtype}, expected {", ".join(_DTYPES)}')
    if misfits:
      raise ConfigurationError(
        f'{self.source} is of another model, or quantized. These tensors do not fit:\n'
        f'{_lines(misfits)}\nBind the sizes of that model, take its weights in bfloat16, or leave '
        "tensors out with InitialWeights.rules = (('NAME', 'fresh'),)."
      )
    unused = sorted(tensors.keys() - set(chosen.values()))
    if not any(choice in tensors for choice in chosen.values()):
      raise ConfigurationError(
        f'{self.source} has none of the {len(chosen)} tensors of the model:\n{_lines([*chosen])}\n'
        f'It has:\n{_lines(unused)}\nName the tensors to take in InitialWeights.rules, such as '
        "(('^(.*)$', 'PREFIX.\\\\1'),), or leave the weights out to begin with new ones."
      )
    if missing and not self.partial:
      raise ConfigurationError(
        f'{self.source} lacks {len(missing)} of the {len(chosen)} tensors of the model:\n'
        f'{_lines(missing)}\n'
        + (f'It has these, which the model lacks:\n{_lines(unused)}\n' if unused else '')
        + 'Set InitialWeights.partial = True to begin with new ones, or name the tensors to take '
        'in InitialWeights.rules.'
      )
    return chosen

  def _with_transposed(
    self, tensors: Mapping[str, Tensor], leaves: Sequence[Leaf]
  ) -> dict[str, Tensor]:
    """The tensors, with `NAME.T` in the place of NAME where rules ask for it."""
    asked = {self._choice(name) for leaf in leaves for name in leaf.tensors}
    transposed = {name[: -len('.T')] for name in asked - {*tensors} if name.endswith('.T')}
    found = {}
    for name, tensor in tensors.items():
      if name in transposed:
        found[f'{name}.T'] = tensor.T
      if name not in transposed or name in asked:
        found[name] = tensor
    return found

  def _choice(self, name: str) -> str:
    for pattern, choice in self.rules:
      if match := re.search(pattern, name):
        return choice if choice in (FRESH, ZERO) else match.expand(choice)
    return name

  def _check_vocabulary(self, source: Source, vocabulary: str) -> None:
    reads_tokens = self._choice('embedding') in source.tensors
    codec, *codecs = (name.partition('+')[0] for name in (vocabulary, *source.vocabularies))
    if reads_tokens and codecs and codec not in codecs:
      raise ConfigurationError(
        f'{self.source} was trained with the vocabulary {" or ".join(source.vocabularies)}, but '
        f'{vocabulary} is given: its ids mean other texts. Bind that vocabulary, or begin with '
        "new embeddings: InitialWeights.rules = (('embedding$', 'fresh'),)."
      )

  def _check_settings(self, source: Source, make: Callable[..., LanguageModel]) -> None:
    """Compares what shapes do not tell; with `partial`, a token may see other tokens."""
    if source.config is None:
      return
    expected = huggingface.settings(source.config)
    lines = [
      f'{name} = {expected[name]}  # the model has {has}'
      for name, has in _settings(make)
      if expected.get(name, has) != has and not (self.partial and name in huggingface.SIGHT)
    ]
    if lines:
      raise ConfigurationError(
        f'{self.source}/config.json differs from the model. Bind:\n{_lines(lines)}\n'
        'InitialWeights.partial = True accepts another attention.'
      )

  def _report(self, source: Source, chosen: Mapping[str, str], vocabulary: str) -> list[str]:
    zero, fresh = ([name for name in chosen if chosen[name] == kind] for kind in (ZERO, FRESH))
    groups = {
      'new, zero': zero,
      'new, initialized': fresh,
      'not loaded from there': sorted(source.tensors.keys() - set(chosen.values())),
      'files that were not read there': source.unread,
    }
    used = len(chosen) - len(zero) - len(fresh)
    bos, has = (source.config or {}).get('bos_token_id'), vocabulary.partition('+')[2]
    begins = f'documents begin with BOS, the token {has}'
    if not has:
      begins = (
        f'warning: documents begin without the token {bos!r:.20} (bos_token_id) of the source. '
        'If it was trained with that (Qwen3 was not), "add_bos_token": true in the '
        'tokenizer_config.json beside the vocabulary adds it'
      )
    place = self.source if source.step is None else f'{self.source}, step {source.step}'
    return [
      f'loaded {used} of the {len(chosen)} tensors of the model from {place}',
      *(f'{title}: {_over_layers(group)}' for title, group in groups.items() if group),
      *([begins] if has or bos is not None else []),
    ]


def with_first_carry(
  model: Model, make: Callable[..., LanguageModel], params: Params, source: str
) -> Params:
  """The parameters of a run, with the first carry of a source for a model that has one.

  Raises a ConfigurationError if the source has none, or one that was learned with other weights.
  """
  tensors, scale = open_source(source).tensors, params['model/final_norm']['scale']
  found = tensors.get('final_norm.scale')
  same = found and found.shape == scale.shape and np.allclose(found.read((slice(None),)), scale)
  if not same or not any('.first_carry' in name for name in tensors):
    raise ConfigurationError(
      f'{source} has no first carry that was learned with the weights of this run. Learn one by '
      "gin/optimizers/first_carry.gin from this run; export.form = 'first_carry' exports it."
    )
  new = {
    module: {n: jnp.zeros_like(p.shape) for n, p in group.items() if n not in params[module]}
    for module, group in model.parameters().items()
  }
  rules = ((r'^(?!.*\.first_carry)', FRESH),)
  weights = InitialWeights(source, step=LATEST, rules=rules, partial=False)
  whole = hk.data_structures.merge(params, new)
  return weights.load(model, make, whole, '', lambda line: None)[0]


def check_loss(loss: float, tokens: int, strict: bool) -> str:
  """Says how good loaded weights are, by their validation loss.

  Raises a ConfigurationError if, with `strict`, it is not clearly lower than for guessing.
  """
  guess = float(np.log(tokens))
  found = f'the validation loss of the loaded weights is {loss:.4f}'
  if loss < 0.9 * guess:
    return found
  problem = f'{found}, not clearly below the {guess:.4f} of a guess'
  if not strict:
    return f'warning: {problem}'
  raise ConfigurationError(
    f'{problem[0].upper()}{problem[1:]}. They may be of another model or tokenizer, or damaged. '
    'Compare configuration and vocabulary with the source. If the task is only '
    'new to them, set InitialWeights.any_loss = True.'
  )


def _other_settings(source: Source, make: Callable[..., LanguageModel]) -> list[str]:
  """A warning of the numbers that a run or an export binds otherwise, which shapes do not tell.

  A binding that has others in scopes is left out: it may not be the one of this part.
  """
  bindings = source.bindings
  if not bindings:
    return []
  differ = []
  for name, has in _settings(make):
    there = bindings.get(name)
    is_scoped = any(other.endswith(f'/{name}') for other in bindings)
    are_numbers = isinstance(there, int | float) and isinstance(has, int | float)
    if are_numbers and there != has and not is_scoped:
      differ.append(f'{name} = {there} (here {has})')
  if not differ:
    return []
  return [f'warning: the source has other settings: {", ".join(first_of(differ, _SHOWN))}']


def _settings(make: Callable[..., LanguageModel]) -> list[tuple[str, object]]:
  """The settings of a model that shapes do not tell, as bindings of each of its parts."""

  def ask(blocks: Sequence[Block]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = [('RMSNorm.epsilon', RMSNorm().epsilon)]
    for mixer in [mixer for block in blocks for mixer in block.mixers]:
      if isinstance(mixer, WindowAttention):
        owner, rotary = type(mixer).__name__, dataclasses.asdict(mixer.rotary())
        names = ('heads', 'head_width', 'window', 'document_start', 'query_key_norm')
        dilations = None if {*(mixer.dilations or (1,))} == {1} else mixer.dilations
        found += [('Block.mixers', f'(@{owner},)'), (f'{owner}.dilations', dilations)]
        found += [(f'{owner}.{name}', getattr(mixer, name)) for name in names]
        found += [(f'Rotary.{name}', value) for name, value in rotary.items()]
    return found

  def of_model(model: LanguageModel) -> list[tuple[str, object]]:
    own = [('LanguageModel.tied', model.tied), ('LanguageModel.embedding_scale', model.scale)]
    return [*dict.fromkeys([*own, *model.inspect(ask)])]

  return asked(make, of_model)


def _filled(before: Array, tensors: Sequence[Tensor | str], stacked: bool) -> Array:
  """The array of these tensors, one for each layer of a stack; a string is FRESH or ZERO."""
  kept = {str(shard.index): shard.data for shard in before.addressable_shards}

  def of_device(index: Any) -> np.ndarray:
    block = np.array(kept[str(index)])
    layers, inside = (index[0], index[1:]) if stacked else (slice(None), index)
    parts = block if stacked else [block]
    for part, tensor in zip(parts, tensors[layers], strict=True):
      if tensor == ZERO:
        part[...] = 0
      elif isinstance(tensor, Tensor):
        _fill(part, tensor, inside)
    return block

  return jax.make_array_from_callback(before.shape, before.sharding, of_device)


def _fill(part: np.ndarray, tensor: Tensor, index: tuple[slice, ...]) -> None:
  """Copies the part of a tensor; the rows that it lacks stay."""
  if not index:
    part[...] = tensor.read(())
    return
  first = index[0].start or 0
  rows = min(len(part), tensor.shape[0] - first)
  if rows > 0:
    part[:rows] = tensor.read((slice(first, first + rows), *index[1:]))


def _over_layers(tensors: Sequence[str]) -> str:
  """Names in short: 'layers.0-3.mlp.out' stands for four."""
  found: dict[tuple[str, str], list[int]] = {}
  for name in tensors:
    layer = re.fullmatch(r'layers\.(\d+)\.(.+)', name)
    key = ('layers.', f'.{layer[2]}') if layer else (name, '')
    found.setdefault(key, []).append(int(layer[1]) if layer else 0)

  def ranges(layers: list[int]) -> str:
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(layers)), lambda one: one[1] - one[0]):
      numbers = [number for _, number in run]
      runs.append(str(numbers[0]) + (f'-{numbers[-1]}' if len(numbers) > 1 else ''))
    return ','.join(runs)

  texts = [a + (ranges(n) if b else '') + b for (a, b), n in found.items()]
  return ', '.join(first_of(texts, _SHOWN))


def _lines(texts: Sequence[str]) -> str:
  return '\n'.join(f'  {text}' for text in first_of(texts, _SHOWN))
