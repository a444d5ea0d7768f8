"""A long document that is kept and changed, as in document_bench, by a llama-server of llama.cpp.

Reads a document of random tokens, changes it so many tokens before its end and reads it on, and
writes the server's slot to a file. With --restore, after a new start of the server, it opens that
file and reads the same document.

    llama-server -m QWEN3.5-0.8B.gguf -c 16384 -np 1 -t 1 -ctk f32 -ctv f32 --slot-save-path .
    bash scripts/experiment document_llama_cpp --tokens 14906
    bash scripts/experiment document_llama_cpp --tokens 14906 --restore
"""
# Environment: base

import argparse
from collections.abc import Mapping, Sequence
import json
import sys
import time
from typing import Any
import urllib.request

import numpy as np

from valkyrie.distributed import console

FILE = 'document.bin'
MIB = 2**20


class Server:
  """The first slot of a llama-server."""

  def __init__(self, address: str):
    self._address = address.rstrip('/')

  def post(self, path: str, fields: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """(seconds, the answer) of a request."""
    request = urllib.request.Request(
      f'{self._address}/{path}',
      json.dumps(fields).encode(),
      {'Content-Type': 'application/json'},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request) as response:
      answer = json.load(response)
    return time.perf_counter() - began, answer

  def read(self, what: str, tokens: np.ndarray) -> None:
    """Reads a document, makes one token, and prints what the server read for it."""
    fields = {'prompt': tokens.tolist(), 'n_predict': 1, 'id_slot': 0, 'cache_prompt': True}
    seconds, answer = self.post('completion', fields)
    count = answer['timings']['prompt_n']
    print(f'{what}: {seconds:.2f} s, in which {count:,} tokens were read')


@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints a line for each thing that is done."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--server', default='http://127.0.0.1:8080', help='its address')
  parser.add_argument('--tokens', type=int, default=14906, help='of the document')
  parser.add_argument('--before', type=int, nargs='+', default=[1, 64, 1024], help='of the changes')
  parser.add_argument('--vocabulary_size', type=int, default=248320, help='of the model')
  parser.add_argument('--restore', action='store_true', help='begin with the file of a slot')
  flags = parser.parse_args(arguments)
  server = Server(flags.server)
  text = np.random.default_rng(0).integers(3, flags.vocabulary_size, flags.tokens)
  if flags.restore:
    seconds, _ = server.post('slots/0?action=restore', {'filename': FILE})
    print(f'the file opened: {seconds:.2f} s')
    server.read('the same document', text)
    return
  server.read('first read', text)
  for before in flags.before:
    changed = text.copy()
    changed[-before] = 3 + (changed[-before] - 2) % (flags.vocabulary_size - 3)
    server.read(f'changed {before:,} tokens before the end', changed)
    server.read('changed back', text)
  seconds, answer = server.post('slots/0?action=save', {'filename': FILE})
  print(f'the file written: {seconds:.2f} s, {answer["n_written"] / MIB:,.1f} MiB')


if __name__ == '__main__':
  sys.exit(main())
