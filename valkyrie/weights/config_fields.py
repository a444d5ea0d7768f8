"""The fields of a config.json of Hugging Face: each is used, known to be harmless, or refused."""

from collections.abc import Mapping, Sequence
import json
import pathlib
import re
import sys
from typing import Any, NamedTuple

from valkyrie.errors import ConfigurationError, first_of

FETCH = 'Fetch it again.'
_KINDS = {
  int: 'an integer above 0',
  float: 'a number above 0',
  bool: 'true or false',
  str: 'a string',
  dict: 'an object',
  list: 'a list',
}
_MOST = {int: 2**31, float: sys.float_info.max}  # numbers are below
# The fields whose null the classes of these models read as a default or as "without".
_MAY_BE_NULL = (
  'num_key_value_heads',
  'head_dim',
  'sliding_window',
  'rope_scaling',
  'rope_parameters',
)
# The fields that change logits unless they have one of these values. One that is not in a table
# here is refused whatever its value is: a class may compute something else where it is false.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  **dict.fromkeys(('attention_bias', 'mlp_bias', 'use_sliding_window'), (False, None)),
  **dict.fromkeys(('rope_interleaved', 'use_qk_norm', 'use_mrope'), (False, None)),
  **dict.fromkeys(('is_encoder_decoder', 'add_cross_attention'), (False, None)),
  **dict.fromkeys(('quantization_config', 'clip_qkv', 'auto_map'), (None,)),
  **dict.fromkeys(('attn_logit_softcapping', 'final_logit_softcapping'), (None,)),
  **dict.fromkeys(('cross_attention_hidden_size', 'layer_types', 'sliding_window'), (None,)),
  **dict.fromkeys(('residual_multiplier', 'embedding_multiplier', 'logits_scaling'), (1,)),
  'partial_rotary_factor': (1,),
  'pruned_heads': ({}, None),
}
# The fields that change no logit, and those that other tools leave.
_NO_EFFECT = re.compile(
  r'_.*|unsloth_.*|architectures|model_type|.*_token_id|(torch_)?dtype|use_cache|return_dict|'
  r'transformers_version|initializer_range|pretraining_tp|.*_?dropout|tokenizer_class|'
  r'output_.*|id2label|label2id|chunk_size_feed_forward|max_length|min_length|top_[kp]|temperature|'
  r'num_(beams|beam_groups|return_sequences)|typical_p|do_sample|.*_penalty|early_stopping|'
  r'problem_type|finetuning_task|attn_implementation|max_window_layers|is_decoder|prefix|'
  r'(encoder_)?no_repeat_ngram_size|bad_words_ids|(begin_)?suppress_tokens|torchscript|'
  r'use_bfloat16|tf_legacy_loss|tie_encoder_decoder|task_specific_params|remove_invalid_values|'
  r'is_llama_config|transformers\.js_config|name_or_path'
)


class Fields(NamedTuple):
  """What a class of models does with the fields of its config.json.

  Attributes:
    used: the types of the fields that the class reads, and Valkyrie too; numbers are above 0. The
      class itself checks a field of the type `object`.
    needed: those that must be there.
    required: {field: values}; it must have one of these, since Valkyrie computes no other.
    no_effect: fields that change no logit of this class, besides those that change none of any.
    nullable: fields whose null is a default, or means "without".
  """

  used: Mapping[str, type]
  needed: Sequence[str] = ()
  required: Mapping[str, Sequence[Any]] = {}
  no_effect: Sequence[str] = ()
  nullable: Sequence[str] = _MAY_BE_NULL


def check(file: pathlib.Path, fields: Mapping[str, Any], kinds: Fields) -> None:
  """Raises a ConfigurationError if a field has another type, or may change what is computed."""
  _check_required(file, fields, kinds)
  _check_known(file, fields, kinds)
  for name, value in fields.items():
    kind = kinds.used.get(name, object)
    is_null = value is None and name in kinds.nullable
    if kind is object or is_null:
      continue
    is_whole_number = kind is float and type(value) is int
    fits = type(value) is kind or is_whole_number
    most = _MOST.get(kind)
    if fits and most is not None:
      fits = _is_inside(value, most)
    if not fits:
      raise ConfigurationError(
        f'{file} has {name}: {json.dumps(value):.80}, but {_KINDS[kind]} was expected. {FETCH}'
      )


def _check_required(file: pathlib.Path, fields: Mapping[str, Any], kinds: Fields) -> None:
  """Raises a ConfigurationError if a field has none of the values that are computed."""
  for name, values in kinds.required.items():
    if name not in fields:
      continue
    is_computed = any(_equal(fields[name], value) for value in values)
    if not is_computed:
      choices = ' or '.join(json.dumps(value) for value in values)
      raise ConfigurationError(
        f'{file} has {name}: {json.dumps(fields[name]):.80}, but Valkyrie computes this class of '
        f'models only with {choices}. Take a model with it.'
      )


def _check_known(file: pathlib.Path, fields: Mapping[str, Any], kinds: Fields) -> None:
  """Raises a ConfigurationError if a field is not used, and is not known to be harmless."""
  known = {*kinds.used, *kinds.required, *kinds.no_effect}
  unknown = []
  for name, value in fields.items():
    if name not in known and not _is_neutral(name, value):
      quoted_name = json.dumps(name)[1:-1]
      text = json.dumps(value)
      unknown.append(f'{quoted_name:.80}: {text:.80}')
  if unknown:
    raise ConfigurationError(
      f'{file} has {", ".join(first_of(unknown, 8))}, which Valkyrie does not compute or does not '
      'know. Take a model without it. If it has no effect on this model, remove it from the file.'
    )


def check_needed(
  file: pathlib.Path,
  fields: Mapping[str, Any],
  names: Sequence[str],
  a_model: str,
) -> None:
  """Raises a ConfigurationError if fields are missing, which `a_model` has ('a Llama')."""
  missing = [name for name in names if name not in fields]
  if missing:
    raise ConfigurationError(f'{file} lacks {", ".join(missing)}, which {a_model} has. {FETCH}')


def _equal(found: Any, value: Any) -> bool:
  """Whether a field has a value; true is not 1."""
  are_truths = isinstance(found, bool) == isinstance(value, bool)
  return found == value and are_truths


def _is_inside(value: Any, most: float) -> bool:
  return 0 < value < most


def _is_neutral(name: str, value: Any) -> bool:
  """Whether a field that is not used changes no logit."""
  if name in _NEUTRAL:
    return value in _NEUTRAL[name]
  return _NO_EFFECT.fullmatch(name) is not None
