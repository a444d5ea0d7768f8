"""The text of a row as its tokens come, up to the end of the document or a stop string."""

from collections.abc import Sequence

from valkyrie.data.vocabularies import Vocabulary

EOS, STOP, LENGTH = 'eos', 'stop', 'length'
_UNFINISHED = '\N{REPLACEMENT CHARACTER}'
_LONGEST_CHARACTER = 8  # tokens, after which a character is not expected to be completed


class Continuation:
  """A text that grows. Each token is decoded with its few neighbors, never with the whole text.

  Attributes:
    tokens: all tokens.
    text: as far as it is certain: not a part of a character, nor the beginning of a stop string.
    ended: 'eos', 'stop' or 'length', the reason why the text is complete; None before.
  """

  def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()):
    """Takes the codec, and strings before which the text ends."""
    self._vocabulary = vocabulary
    self._stop = tuple(stop)
    self._context, self._decoded = 0, 0  # tokens before the context, and before what is not decoded
    self._held = ''  # decoded, but perhaps the beginning of a stop string
    self.tokens: list[int] = []
    self.text = ''
    self.ended: str | None = None

  def add(self, token: int) -> str:
    """Takes a token -> the text that it makes certain."""
    if token == self._vocabulary.eos_id:
      return self.end(EOS)
    self.tokens.append(token)
    return self._certain(self._decode(last=False), last=False)

  def end(self, reason: str = LENGTH) -> str:
    """Completes the text -> what was held back."""
    new = self._certain(self._decode(last=True), last=True)
    self.ended = self.ended or reason
    return new

  def _decode(self, last: bool) -> str:
    """The new characters. Neighbors matter: SentencePiece drops the first space of a text."""
    before = self._vocabulary.decode(self.tokens[self._context : self._decoded])
    now = self._vocabulary.decode(self.tokens[self._context :])
    waits = len(self.tokens) - self._decoded < _LONGEST_CHARACTER
    if not last and waits and now.endswith(_UNFINISHED):
      return ''
    self._context, self._decoded = self._decoded, len(self.tokens)
    return now[len(before) :]

  def _certain(self, new: str, last: bool) -> str:
    self._held += new
    found = [at for at in map(self._held.find, self._stop) if at >= 0]
    if found:
      certain, self._held, self.ended = self._held[: min(found)], '', STOP
    else:
      kept = 0 if last else max((_overlap(self._held, stop) for stop in self._stop), default=0)
      split = len(self._held) - kept
      certain, self._held = self._held[:split], self._held[split:]
    self.text += certain
    return certain


def _overlap(text: str, stop: str) -> int:
  """Characters at the end of a text that a stop string begins with."""
  sizes = range(min(len(text), len(stop) - 1), 0, -1)
  return next((size for size in sizes if text.endswith(stop[:size])), 0)
