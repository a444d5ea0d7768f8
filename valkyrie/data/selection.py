"""The documents of a token store: a split of a task, tokenized."""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import platform
import re
from typing import Any

from valkyrie.config import paths, redact
from valkyrie.data import file_names
from valkyrie.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class Selection:
  """The documents of a store: a split of a task, tokenized.

  A path in `source` becomes absolute, since a relative one names other files in another folder.
  """

  task: str
  split: str
  vocabulary: Vocabulary
  source: str | None = None
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unique: bool = False

  def __post_init__(self):
    if self.source is not None and not paths.is_address(self.source):
      object.__setattr__(self, 'source', file_names.absolute(self.source))

  def __str__(self) -> str:
    return f'{self.task}/{self.split}'

  @property
  def name(self) -> str:
    """The name of the store's directory: <task>-<split>-<vocabulary>-<origin of the documents>.

    The documents of a task without a `source` may depend on the Python version (python_stdlib), so
    the version is their origin. With a source or options, the origin is a hash of these.
    """
    origin = f'python{platform.python_version()}'
    if self.source is not None or self.options:
      described = self.source or origin
      if self.options:
        options = json.dumps(self.options, sort_keys=True)
        described += f' {options}'
      digest_of_origin = hashlib.sha256(described.encode()).hexdigest()
      origin = digest_of_origin[:8]
    kind, _, digest = self.vocabulary.fingerprint.partition('-')
    digest, plus, bos = digest.partition('+')
    vocabulary = f'{digest[:8]}{plus}{bos}'
    words = [self.task, self.split, kind, vocabulary, origin]
    if self.unique:
      words.append('unique')
    plain_words = [re.sub(r'[^\w.]+', '_', word) for word in words if word]
    return '-'.join(plain_words)

  @property
  def places(self) -> tuple[str | None, ...]:
    """The source and the options, which may name files."""
    return self.source, *self.options.values()

  def recorded(self) -> dict[str, Any]:
    """The entry of the selection in store.json, without secrets."""
    return {
      'task': self.task,
      'split': self.split,
      'unique': self.unique,
      'vocabulary': self.vocabulary.fingerprint,
      'source': self.source and redact.in_value(self.source),
      'options': {name: redact.in_value(value) for name, value in self.options.items()},
    }
