"""Adapter of `Vocabulary` to the vocabulary class of seqio."""

from collections.abc import Iterable, Sequence

import numpy as np
import seqio
import tensorflow as tf

from valkyrie.data.vocabularies import Vocabulary


class SeqioVocabulary(seqio.Vocabulary):
  """Encodes by the wrapped vocabulary, inside tf.data too, so that the ids are the same."""

  def __init__(self, vocabulary: Vocabulary):
    super().__init__()
    self._vocabulary = vocabulary

  @property
  def eos_id(self) -> int:
    return self._vocabulary.eos_id

  @property
  def unk_id(self) -> None:
    return None

  @property
  def _base_vocab_size(self) -> int:
    return self._vocabulary.size

  def _encode(self, s: str) -> Sequence[int]:
    return self._vocabulary.encode(s)

  def _decode(self, ids: Iterable[int]) -> str:
    return self._vocabulary.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: tf.Tensor) -> np.ndarray:
      return self._vocabulary.ids(bytes(text.numpy()).decode('utf-8', errors='replace'))

    return tf.ensure_shape(tf.py_function(encode, [s], tf.int32), [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    text = tf.py_function(lambda i: self._vocabulary.decode(i.numpy().tolist()), [ids], tf.string)
    return tf.ensure_shape(text, [])
