"""Compiled programs of earlier runs, kept beside the token stores by jax's compilation cache.

    CACHE/compiled/KEY/*-cache          a program; KEY stands for the processor and jaxlib
    CACHE/compiled/KEY/process-*-cache  a program of a process other than 0, which jax does not keep
    CACHE/compiled/KEY/*-cache.sha256   the hash of a program

A program is code. So only its owner can read the directory, a directory of another owner is not
used, and a program without a hash or with another one is deleted before jax can read it.
"""

import atexit
from collections.abc import Sequence
import contextlib
import hashlib
import os
import pathlib
import pickle
import platform
import time
from typing import Any

from etils import epath
import jax
from jax.experimental import serialize_executable
import jaxlib.version

from valkyrie.config import paths
from valkyrie.errors import StorageError
from valkyrie.storage import whole_file

_MAX_BYTES = 2**30  # of all programs; the oldest are deleted
_LEAST_SECONDS = 0.2  # of a compilation that is worth a file
_jax: Any = jax.config  # whose options have no types


def enable() -> str | None:
  """Lets jax read and write programs below `paths.cache()`; returns why not, or None if it can.

  JAX_COMPILATION_CACHE_DIR names another directory, which is used as it is.
  JAX_ENABLE_COMPILATION_CACHE=false disables the cache. Raises as `paths.cache`.
  """
  directory = paths.cache() / 'compiled' / _key()
  if _jax.jax_compilation_cache_dir or not _jax.jax_enable_compilation_cache:
    return None
  refused = 'compiled programs are not kept:'
  if (address := str(epath.Path(directory))) != str(directory):  # as jax reads it
    return f'{refused} jax takes {directory} for {address}'
  try:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (directory.parent, directory):
      found = place.lstat()
      if found.st_uid != os.geteuid() or place.is_symlink():
        return f'{refused} {place} belongs to another user'
      if found.st_mode & 0o077:
        place.chmod(0o700)
    _clean(directory)
  except OSError as error:
    return f'{refused} {directory}: {error.strerror}'
  _jax.update('jax_compilation_cache_dir', str(directory))
  _jax.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)
  atexit.register(seal)
  return None


def compiled(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> jax.stages.Compiled:
  """`lowered.compile()` for these devices, or the program that an earlier run made of it.

  jax writes only the programs of process 0, and may name the programs of others differently.
  """
  directory = _directory()
  if directory is None or jax.process_index() == 0:
    return lowered.compile()
  file = directory / f'process-{_name(lowered, devices)}-cache'
  try:
    return serialize_executable.deserialize_and_load(
      file.read_bytes(), lowered.in_tree, lowered.out_tree, execution_devices=devices
    )
  except (OSError, ValueError, RuntimeError, pickle.UnpicklingError):  # none, or of another jax
    began = time.monotonic()
    program = lowered.compile()
  if time.monotonic() - began > _LEAST_SECONDS:
    # A backend without serialized programs, or a full disk: it is compiled again the next time.
    with contextlib.suppress(StorageError, ValueError, RuntimeError):
      whole_file.write(file, serialize_executable.serialize(program)[0])
  return program


def seal() -> None:
  """Writes the hashes of newly compiled programs; a program without a hash is not used."""
  if (directory := _directory()) is None:
    return
  with contextlib.suppress(OSError):  # of a full disk: the programs are compiled again
    for program in directory.glob('*-cache'):
      hash_file = pathlib.Path(f'{program}.sha256')
      if not hash_file.exists():
        hash_file.write_bytes(_hash(program))


def _directory() -> pathlib.Path | None:
  """The directory that `enable` has chosen, or None."""
  directory = _jax.jax_compilation_cache_dir
  return pathlib.Path(directory) if directory and directory.endswith(_key()) else None


def _name(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> str:
  """A hash of all that a program depends on besides `_key`."""
  flags = [os.environ.get(name) for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')]
  places = [(device.id, device.process_index, device.device_kind) for device in devices]
  version = devices[0].client.platform_version
  settings = f'{jax.__version__} {version} {jax.process_index()} {places} {flags}'
  return hashlib.sha256(f'{settings}\n{lowered.as_text()}'.encode()).hexdigest()


def _clean(directory: pathlib.Path) -> None:
  """Deletes programs that changed since they were sealed, and the oldest ones above the limit."""
  programs = []
  for program in directory.glob('*-cache'):
    with contextlib.suppress(FileNotFoundError):  # another process deletes it, too
      found = program.stat()
      programs.append((found.st_mtime, found.st_size, program))
  total = 0
  for _, size, program in sorted(programs, reverse=True):
    total += size
    hash_file = pathlib.Path(f'{program}.sha256')
    with contextlib.suppress(FileNotFoundError):
      if total <= _MAX_BYTES and hash_file.read_bytes() == _hash(program):
        continue
    for file in (program, hash_file):
      file.unlink(missing_ok=True)


def _hash(program: pathlib.Path) -> bytes:
  return hashlib.sha256(program.read_bytes()).hexdigest().encode()


def _key() -> str:
  """A hash of jaxlib and the processor: a program may crash on one with fewer instructions."""
  processor = platform.machine() + platform.processor()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    wanted = ('flags', 'model name', 'Features')
    processor += ''.join(sorted({line for line in lines if line.startswith(wanted)}))
  return hashlib.sha256(f'{jaxlib.version.__version__} {processor}'.encode()).hexdigest()[:16]
