"""The exact gradient of one very long row, beside a derivative that is computed forwards.

A row has random tokens. One of them occurs only once, after the window and the first tokens that
attention keeps, and only the last tokens have a weight. So the loss depends on its embedding only
through the states of all chunks between. Its gradient is computed by the training step's
backpropagation, which keeps about 2 sqrt(n) carries of n chunks. Along the gradient its length must
be the derivative that passes forwards through the chunks with the carry and saves nothing. Where
the states pass none on in the middle, only what the caches of attention hold passes.

    bash scripts/experiment planted_gradient --tokens=20971520
"""
# Environment: base

import argparse
from collections.abc import Callable, Sequence
import functools
import sys
import time
from typing import Any

from bench import MODULES
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.load import load_gin
from valkyrie.distributed import console
from valkyrie.models import language_model
from valkyrie.models.carry_cuts import cut_carry
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.training import tbptt
from valkyrie.training.objective import PREDICTION, read
from valkyrie.types import Array, Batch, Params

# where the token is that occurs once
PLACE = 1000
PLANTED = 3
ASKED = 64  # tokens at the end that have a weight


def row(tokens: int, vocabulary: int, dtype: str) -> Batch:
  """One document [1, tokens] of random tokens, with one planted."""
  found = np.random.default_rng(0).integers(PLANTED + 1, vocabulary, (1, tokens + 1), np.int32)
  found[:, PLACE] = PLANTED
  positions = np.arange(tokens, dtype=np.int32)[None]
  weights = (positions >= tokens - ASKED).astype(dtype)
  return Batch(found[:, :-1], found[:, 1:], weights, positions, np.ones_like(positions))


def backwards(model: Model, chunk_size: int, params: Params, batch: Batch) -> Array:
  """The gradient [D] of the planted token's embedding, as a training step computes it."""
  chunks = batch.inputs.shape[1] // chunk_size
  carry = model.initial_carry(1)
  total = jnp.asarray(ASKED, batch.weights.dtype)
  gradient, _, _ = tbptt.gradients(
    model,
    params,
    carry,
    batch,
    total,
    chunk_size=chunk_size,
    backprop_chunks=chunks,
    remat_chunks=True,
  )
  return gradient['model']['embedding'][PLANTED]


def forwards(
  model: Model, chunk_size: int, cut: int, params: Params, batch: Batch, along: Array
) -> Array:
  """[2]: the loss's derivative along a direction [D] of that embedding, as it is and with a cut.

  With the cut, the states before chunk `cut` pass no derivative on.
  """
  chunks = tbptt.split_chunks(batch, chunk_size)
  direction = jax.tree.map(jnp.zeros_like, params)
  embedding = direction['model']['embedding']
  direction['model']['embedding'] = embedding.at[PLANTED].set(along)

  def step(before, now):
    carry, *changes = before
    number, chunk = now
    floats, rebuild = tbptt.floats_of(carry)
    zeros = rebuild([jnp.zeros_like(leaf) for leaf in floats])
    less, _ = tbptt.floats_of(cut_carry(rebuild(changes[1]), zeros, 'state'))
    changes[1] = [jnp.where(number == cut, a, b) for a, b in zip(less, changes[1], strict=True)]

    def of(params, floats):
      loss, (after, _) = read(PREDICTION, model, params, rebuild(floats), chunk, total=ASKED)
      return (loss, tbptt.floats_of(after)[0]), after

    # The transpose of the transpose: some of the rules are only written backwards.
    found, pull_back, after = jax.vjp(of, params, floats, has_aux=True)
    _, push = jax.vjp(pull_back, jax.tree.map(jnp.zeros_like, found))
    ((whole, all_changes),), ((less, fewer),) = (push((direction, change)) for change in changes)
    return (after, all_changes, fewer), jnp.stack([whole, less])

  carry = model.initial_carry(1)
  zeros = [jnp.zeros_like(leaf) for leaf in tbptt.floats_of(carry)[0]]
  numbers = jnp.arange(len(chunks.inputs))
  _, losses = lax.scan(step, (carry, zeros, zeros), (numbers, chunks))
  return jnp.sum(losses, axis=0)


def timed(name: str, function: Callable[..., Array], *arguments: Any) -> np.ndarray:
  """Compiles, computes, and prints what it took."""
  compiled = jax.jit(function).lower(*arguments).compile()
  began = time.perf_counter()
  found = np.asarray(compiled(*arguments))
  memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
  seconds = time.perf_counter() - began
  print(f'{name}: {seconds:,.1f} s, {memory:,.1f} MiB of temporaries', flush=True)
  return found


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the derivatives; returns 1 if they differ."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('--tokens', type=int, default=20971520, help='of the row (default: %(default)s)')
  add('--chunk_size', type=int, default=1024, help='default: %(default)s')
  add('--gin_file', default='gin/models/tiny.gin', help='the model (default: %(default)s)')
  add('--dtype', choices=['float32', 'float64'], default='float32', help='default: %(default)s')
  flags = parser.parse_args(arguments)
  # Tied, the gradient would be of the logits, too.
  bindings = [f'--gin.S5.horizon={flags.tokens}', '--gin.LanguageModel.tied=False']
  load_gin([flags.gin_file], bindings, modules=MODULES)
  with jax.enable_x64(flags.dtype == 'float64'):
    make = functools.partial(LanguageModel, compute_dtype=flags.dtype)
    model = language_model.transform(make)
    params, _ = jax.jit(model.init, static_argnums=1)(jax.random.key(0), 1)
    params = jax.tree.map(lambda leaf: leaf.astype(flags.dtype), params)
    batch = row(flags.tokens, model.about.vocabulary_size, flags.dtype)
    backward = functools.partial(backwards, model, flags.chunk_size)
    gradient = timed('backwards', backward, params, batch)
    length = float(np.linalg.norm(gradient))
    middle = flags.tokens // flags.chunk_size // 2
    forward = functools.partial(forwards, model, flags.chunk_size, middle)
    whole, cut = timed('forwards', forward, params, batch, gradient / length)
  difference = abs(whole / length - 1)
  print(
    f'{flags.tokens:,} tokens, {flags.dtype}: the gradient has the length {length:.6e}, the '
    f'derivative forwards is {whole:.6e}: they differ by {difference:.1e}. With the states cut '
    f'before chunk {middle:,} it is {cut:.6e}.'
  )
  return int(not (length > 0 and difference < 1e-3 and abs(cut) < 1e-3 * length))


if __name__ == '__main__':
  sys.exit(main())
