"""Weights of another run, or of other programs, as the first weights of a run."""

from collections.abc import Callable, Container, Mapping, Sequence
import dataclasses
import re

import gin
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.patterns import check_all_choose
from valkyrie.errors import ConfigurationError, converted, first_of, regular_expression
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.models.sites import is_factor
from valkyrie.types import Array, Params
from valkyrie.weights import huggingface, listing, named_tensors, priming, settings
from valkyrie.weights.filled_arrays import FRESH, ZERO, filled
from valkyrie.weights.named_tensors import TABLES, Leaf
from valkyrie.weights.priming import Primed
from valkyrie.weights.source import Source, open_source
from valkyrie.weights.tensor_files import Tensor

_SHOWN = 8  # tensors in a message
_PLAIN = int | float | str  # values of bindings that are compared
_DTYPES = ('F64', 'F32', 'F16', 'BF16')  # others need scales, which are not known here


@gin.configurable
@dataclasses.dataclass(frozen=True)
class InitialWeights:
  """The choice of a tensor for each of the model's, by the names of `weights.named_tensors`.

  Attributes:
    source: the directory of a run, one of whose checkpoints is read; a safetensors file or index,
      or a folder with such files, as an export has; or a folder of Hugging Face with a model of
      one of `weights.classes`.
    rules: (pattern, tensor); the first rule whose regular expression is found in the name applies.
      The tensor is 'fresh' for the model's own initialization, 'zero', or the name of the tensor in
      the source, in which \\1 is replaced by a group of the pattern. `NAME.T` is the tensor NAME
      transposed, since matrices here are [inputs, outputs]. Without a rule, the name stays.
    partial: tensors that the source lacks are new: outputs (`out`) are zero, so that a new layer or
      mixer adds nothing at first; others, and tokens that the source lacks, are initialized. The
      factors of a decomposition may always be new.
    primed: layers of `GatedDeltaNet` begin from the attention of the source that they replace, see
      `priming`; what such a layer has besides is new. `LanguageModel.pattern` says which layers.
    any_loss: accept weights whose validation loss is as high as for guessing, as on a task that is
      new to them.
    step: the step of a run: a number, 'latest' or 'best', see `checkpoint.manager.open_to_read`.
  """

  source: str
  rules: Sequence[tuple[str, str]] = ()
  partial: bool = False
  primed: bool = False
  any_loss: bool = False
  step: str | int = LATEST

  def __post_init__(self):
    for rule in self.rules:
      if not isinstance(rule, list | tuple) or len(rule) != 2:
        raise ConfigurationError(
          f'InitialWeights.rules contains {rule!r}. Use pairs of a regular expression and of '
          "'fresh', 'zero' or the name of a tensor."
        )
      pattern = regular_expression('InitialWeights.rules', rule[0])
      message = f'InitialWeights.rules has {rule[1]!r}, which cannot be filled from {rule[0]!r}'
      advice = 'Use the groups of the pattern, \\1 for the first one.'
      kinds = (TypeError, IndexError, re.error)
      with converted(kinds, ConfigurationError, message, advice):
        pattern.sub(rule[1], '')

  def check(self, model: Model, make: Callable[..., LanguageModel], vocabulary: str) -> None:
    """Raises a ConfigurationError where `load` would, and reads no tensor."""
    source = open_source(self.source, str(self.step), lazily=True)
    leaves = named_tensors.declared_leaves(model.parameters())
    self._matched(source, leaves, model, make, vocabulary)

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
    source, primed, chosen = self._matched(source, leaves, model, make, vocabulary)
    lines = self._report(source, primed, chosen, vocabulary)
    lines += _other_settings(source, make)
    for line in lines:
      say(line)
    loaded: dict[str, dict[str, Array]] = {}
    for module, group in params.items():
      loaded[module] = dict(group)
    for leaf in leaves:
      choices = [chosen[name] for name in leaf.tensors]
      if any(choice != FRESH for choice in choices):
        initial = params[leaf.module][leaf.name]
        tensors = [source.tensors.get(choice, choice) for choice in choices]
        loaded[leaf.module][leaf.name] = filled(initial, tensors, leaf.stacked)
        initial.delete()
    new = [name for name, choice in chosen.items() if choice in (FRESH, ZERO)]
    all_come_from_source = all(_is_beside_weights(name, chosen) for name in new)
    return loaded, all_come_from_source

  def _matched(
    self,
    source: Source,
    leaves: Sequence[Leaf],
    model: Model,
    make: Callable[..., LanguageModel],
    vocabulary: str,
  ) -> tuple[Source, Primed, dict[str, str]]:
    """The source with its tensors as the model takes them, those that are primed, and `_chosen`."""
    tensors = named_tensors.merged(source.tensors, kept=self._kept_halves(source.tensors, leaves))
    primed = Primed(tensors)
    if self.primed:
      primed = priming.primed(self.source, tensors, source.all_bindings, make)
    source = source._replace(tensors=self._with_transposed(primed.tensors, leaves))
    self._check_vocabulary(source, vocabulary)
    chosen = self._chosen(leaves, source.tensors, model.about.vocabulary_size, primed.layers)
    self._check_settings(source, make)
    return source, primed, chosen

  def _kept_halves(self, tensors: Mapping[str, Tensor], leaves: Sequence[Leaf]) -> set[str]:
    """The halves of adapters that the model takes as they are, by name and size.

    The others belong to their matrices: a model with adapters of another rank begins with new ones.
    """
    fitting = set()
    for leaf in leaves:
      shape = leaf.shape[1:] if leaf.stacked else leaf.shape
      for name in leaf.tensors:
        is_taken = name in tensors and self._choice(name) == name
        if named_tensors.is_adapter(name) and is_taken and tensors[name].shape == shape:
          fitting.add(name)
    return {name for name in fitting if named_tensors.other_half(name) in fitting}

  def _chosen(
    self,
    leaves: Sequence[Leaf],
    tensors: Mapping[str, Tensor],
    tokens: int,
    new: Sequence[str],
  ) -> dict[str, str]:
    """{tensor of the model: FRESH, ZERO or the tensor of the source}, checked.

    Tensors whose names begin as in `new` may be missing.
    """
    chosen: dict[str, str] = {}
    missing: list[str] = []
    misfits: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf in leaves:
      for name in leaf.tensors:
        shapes[name] = leaf.shape[1:] if leaf.stacked else leaf.shape
    patterns = [pattern for pattern, _ in self.rules]
    check_all_choose('InitialWeights.rules', patterns, shapes, 'tensors of the model')
    for name, shape in shapes.items():
      choice = self._choice(name)
      may_be_new = _is_beside_weights(name, shapes) or name.startswith(tuple(new))
      if choice not in tensors and may_be_new:
        choice = FRESH
      if choice not in tensors and choice not in (FRESH, ZERO):
        missing.append(name)
        choice = ZERO if name.endswith('.out') else FRESH
      chosen[name] = choice
      if choice in (FRESH, ZERO):
        continue
      fewest = shape[0] if shape else 1
      if name in TABLES:
        fewest = 1 if self.partial else tokens
      misfit = _misfit(tensors[choice], shape, fewest)
      if misfit:
        misfits.append(f'{choice}: {misfit}')
    if misfits:
      raise ConfigurationError(
        f'{self.source} is of another model, or quantized. These tensors do not fit:\n'
        f'{listing.lines(misfits)}\nBind the sizes of that model, take its weights in bfloat16, '
        "or leave tensors out with InitialWeights.rules = (('NAME', 'fresh'),)."
      )
    unused = sorted(tensors.keys() - set(chosen.values()))
    self._check_first_carry(unused)
    if not any(choice in tensors for choice in chosen.values()):
      raise ConfigurationError(
        f'{self.source} has none of the {len(chosen)} tensors of the model:\n'
        f'{listing.lines([*chosen])}\nIt has:\n{listing.lines(unused)}\n'
        'Name the tensors to take in InitialWeights.rules, such as '
        "(('^(.*)$', 'PREFIX.\\\\1'),), or leave the weights out to begin with new ones."
      )
    if missing and not self.partial:
      others = ''
      if unused:
        others = f'It has these, which the model lacks:\n{listing.lines(unused)}\n'
      raise ConfigurationError(
        f'{self.source} lacks {len(missing)} of the {len(chosen)} tensors of the model:\n'
        f'{listing.lines(missing)}\n{others}'
        'Set InitialWeights.partial = True to begin with new ones, or name the tensors to take '
        'in InitialWeights.rules.'
      )
    return chosen

  def _check_first_carry(self, unused: Sequence[str]) -> None:
    """Raises a ConfigurationError if the model lacks a first carry that the source has learned."""
    names = [name for name in unused if named_tensors.is_first_carry(name)]
    if names and not self.partial:
      raise ConfigurationError(
        f'{self.source} begins with a first carry that it has learned, which the model lacks: '
        f'{listing.over_layers(names)}. Bind LanguageModel.learned_carry = True, or set '
        'InitialWeights.partial = True to begin without.'
      )

  def _with_transposed(
    self,
    tensors: Mapping[str, Tensor],
    leaves: Sequence[Leaf],
  ) -> dict[str, Tensor]:
    """The tensors, with `NAME.T` in the place of NAME where rules ask for it."""
    choices: set[str] = set()
    for leaf in leaves:
      choices.update(self._choice(name) for name in leaf.tensors)
    new_names = choices - tensors.keys()
    transposed = {name.removesuffix('.T') for name in new_names if name.endswith('.T')}
    result = {}
    for name, tensor in tensors.items():
      if name in transposed:
        result[f'{name}.T'] = tensor.T
      if name not in transposed or name in choices:
        result[name] = tensor
    return result

  def _choice(self, name: str) -> str:
    """FRESH, ZERO or the tensor of the source that the rules choose for a tensor of the model."""
    for pattern, choice in self.rules:
      match = re.search(pattern, name)
      if match:
        return choice if choice in (FRESH, ZERO) else match.expand(choice)
    return name

  def _check_vocabulary(self, source: Source, vocabulary: str) -> None:
    reads_tokens = self._choice('embedding') in source.tensors
    codec, _, _ = vocabulary.partition('+')
    codecs = [name.partition('+')[0] for name in source.vocabularies]
    if reads_tokens and codecs and codec not in codecs:
      raise ConfigurationError(
        f'{self.source} was trained with the vocabulary {" or ".join(source.vocabularies)}, but '
        f'{vocabulary} is given: its ids mean other texts. Bind that vocabulary, or begin with '
        "new embeddings: InitialWeights.rules = (('embedding$', 'fresh'),)."
      )

  def _check_settings(self, source: Source, make: Callable[..., LanguageModel]) -> None:
    """Compares the settings that shapes do not tell; `partial` lets `OF_PARTIAL` differ."""
    if source.config is None:
      return
    lines = []
    plan = huggingface.plan(source.config)
    for name, line in settings.differences(plan, settings.settings_of(make)):
      if not (self.partial and name in settings.OF_PARTIAL):
        lines.append(line)
    if lines:
      raise ConfigurationError(
        f'{self.source}/config.json differs from the model. Bind:\n{listing.lines(lines)}\n'
        'InitialWeights.partial = True accepts another attention and tokens without weights.'
      )

  def _report(
    self,
    source: Source,
    primed: Primed,
    chosen: Mapping[str, str],
    vocabulary: str,
  ) -> list[str]:
    """Lines about the tensors that were taken and those that were not."""
    taken = [name for name in primed.taken if chosen[name] == name]
    used_names = {*chosen.values(), *primed.taken}
    unused = sorted(source.tensors.keys() - used_names)
    zero = [name for name in chosen if chosen[name] == ZERO]
    fresh = [name for name in chosen if chosen[name] == FRESH]
    groups = {
      'begin from the attention that they replace': taken,
      'new, zero': zero,
      'new, initialized': fresh,
      'not loaded from there': unused,
      'left out, which models of this class do not use here': source.skipped,
      'files that were not read there': source.unread,
    }
    used = len(chosen) - len(zero) - len(fresh)
    place = self.source
    if source.step is not None:
      place += f', step {source.step}'
    lines = [f'loaded {used} of the {len(chosen)} tensors of the model from {place}']
    for title, group in groups.items():
      if group:
        lines.append(f'{title}: {listing.over_layers(group)}')
    bos = (source.config or {}).get('bos_token_id')
    _, _, vocabulary_bos = vocabulary.partition('+')
    if vocabulary_bos:
      lines.append(f'documents begin with BOS, the token {vocabulary_bos}')
    elif bos is not None:
      lines.append(
        f'warning: documents begin without the token {bos!r:.20} (bos_token_id) of the source. '
        'If it was trained with that (Qwen3 was not), "add_bos_token": true in the '
        'tokenizer_config.json beside the vocabulary adds it'
      )
    return lines


def _misfit(tensor: Tensor, shape: tuple[int, ...], fewest: int) -> str:
  """Why a tensor cannot fill an array of at least the `fewest` rows; '' if it can."""
  has_rank = len(tensor.shape) == len(shape)
  fits = has_rank and tensor.shape[1:] == shape[1:]
  if fits and shape:
    rows = tensor.shape[0]
    fits = fewest <= rows <= shape[0]
  if not fits:
    return f'found {list(tensor.shape)}, expected {list(shape)}'
  if tensor.dtype not in _DTYPES:
    return f'found {tensor.dtype}, expected {", ".join(_DTYPES)}'
  return ''


def check_loss(loss: float, tokens: int, strict: bool) -> str:
  """Says how good loaded weights are, by their validation loss.

  Raises a ConfigurationError if, with `strict`, it is not clearly lower than for guessing.
  """
  guess = float(np.log(tokens))
  finding = f'the validation loss of the loaded weights is {loss:.4f}'
  if loss < 0.9 * guess:
    return finding
  problem = f'{finding}, not clearly below the {guess:.4f} of a guess'
  if not strict:
    return f'warning: {problem}'
  raise ConfigurationError(
    f'{problem[0].upper()}{problem[1:]}. They may be of another model or tokenizer, or damaged. '
    'Compare configuration and vocabulary with the source. If the task is only '
    'new to them, set InitialWeights.any_loss = True.'
  )


def _other_settings(source: Source, make: Callable[..., LanguageModel]) -> list[str]:
  """A warning of values that a run or an export binds differently, which shapes do not tell.

  A binding that has others in scopes is left out: it may not apply to this part.
  """
  bindings = source.bindings
  if not bindings:
    return []
  differ = []
  for name, value in settings.settings_of(make).all:
    source_value = bindings.get(name)
    is_scoped = any(other.endswith(f'/{name}') for other in bindings)
    are_known = isinstance(source_value, _PLAIN) and isinstance(value, _PLAIN)
    if isinstance(source_value, str) and source_value.startswith('@'):  # a part, not its value
      continue
    if are_known and source_value != value and not is_scoped:
      differ.append(f'{name} = {source_value!r} (here {value!r})')
  if not differ:
    return []
  return [f'warning: the source has other settings: {", ".join(first_of(differ, _SHOWN))}']


def _is_beside_weights(name: str, names: Container[str]) -> bool:
  """Whether a tensor changes nothing as it begins: of a component, an adapter or a first carry."""
  is_beside = named_tensors.is_adapter(name) or named_tensors.is_first_carry(name)
  return is_beside or is_factor(name, names)
