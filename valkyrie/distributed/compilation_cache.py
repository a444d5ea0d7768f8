"""Compiled programs of earlier runs, kept beside the token stores by jax's compilation cache.

    CACHE/compiled/KEY/*-cache          a program; KEY depends on the processor and jaxlib
    CACHE/compiled/KEY/.start.*/        empty; a process that lives, and writes programs here
    CACHE/compiled/KEY/process-*-cache  a program of a process other than 0, which jax does not keep
    CACHE/compiled/KEY/*-cache.sha256   the hash of a program
    CACHE/compiled/precompiled/*-cache  a program of --run_mode=precompile, also for other machines

A program is code. So only its owner can read the directory, a directory of another owner is not
used, and a program with another hash than its own is deleted before jax can read it. So is one
without a hash, which a killed process has left, unless a process that lives may have written it.
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

from valkyrie import packages
from valkyrie.config import paths
from valkyrie.errors import StorageError
from valkyrie.storage import owned, whole_file

_PRECOMPILED = 'compiled/precompiled'
_MAX_BYTES = 2**30  # of all programs; the oldest are deleted
_REFUSED = 'compiled programs are not kept:'
_START = 'start'
_LEAST_SECONDS = 0.2  # of a compilation that is worth a file
_jax: Any = jax.config  # whose options have no types
_own = contextlib.ExitStack()  # the folder that shows that this process lives


def enable() -> str | None:
  """Lets jax read and write programs below `paths.cache()`; returns why not, or None if it can.

  JAX_COMPILATION_CACHE_DIR names another directory, which is used as it is.
  JAX_ENABLE_COMPILATION_CACHE=false disables the cache. Raises as `paths.cache`.
  """
  directory = paths.cache() / 'compiled' / _key()
  if _is_others():
    return None
  address = str(epath.Path(directory))  # as jax reads it
  if address != str(directory):
    return f'{_REFUSED} jax takes {directory} for {address}'
  problem = _private(paths.cache() / _PRECOMPILED)
  if problem is None:
    problem = _private(directory, is_used=True)
  if problem:
    return problem
  _jax.update('jax_compilation_cache_dir', str(directory))
  _jax.update('jax_persistent_cache_min_compile_time_secs', _LEAST_SECONDS)
  atexit.register(_end)
  return None


def keep(
  program: jax.stages.Compiled,
  lowered: jax.stages.Lowered,
  devices: Sequence[Any],
  seconds: float,
) -> str:
  """Keeps a program that took `seconds` for `compiled` in a run; returns its file, or why not."""
  name = _name(lowered, devices)
  file = paths.cache() / _PRECOMPILED / f'{name}-cache'
  if _is_others():
    return f'{_REFUSED} the environment disables the cache or sets JAX_COMPILATION_CACHE_DIR'
  problem = _private(file.parent)
  if problem:
    return problem
  try:
    _write(file, program, seconds)
  except (StorageError, ValueError, RuntimeError) as error:
    return f'{_REFUSED} {error}'
  return str(file)


def compiled(
  lowered: jax.stages.Lowered, devices: Sequence[Any]
) -> tuple[jax.stages.Compiled, float | None]:
  """`lowered.compile()` for these devices, or the program that an earlier compilation kept.

  The number is the seconds that a kept program took; None if it is compiled now. jax keeps only the
  programs of process 0, silently, and may name the programs of others differently.
  """
  directory = _directory()
  process = jax.process_index()
  precompiled = paths.cache() / _PRECOMPILED
  if directory is None:
    return lowered.compile(), None
  has_kept = process > 0 or any(precompiled.glob('*-cache'))
  if not has_kept:
    return lowered.compile(), None
  name = _name(lowered, devices)
  count = jax.process_count()
  own = directory / f'process-{process}-of-{count}-{name}-cache'
  for file in (precompiled / f'{name}-cache', own):
    if not _is_sealed(file):
      continue
    # It is one of another jax.
    with contextlib.suppress(OSError, ValueError, RuntimeError, pickle.UnpicklingError):
      seconds, _, content = file.read_bytes().partition(b'\n')
      program = serialize_executable.deserialize_and_load(
        content, lowered.in_tree, lowered.out_tree, execution_devices=devices
      )
      return program, float(seconds)
  began = time.monotonic()
  program = lowered.compile()
  took = time.monotonic() - began
  if process and took > _LEAST_SECONDS:
    # A backend without serialized programs, or a full disk: it is compiled again the next time.
    with contextlib.suppress(StorageError, ValueError, RuntimeError):
      _write(own, program, took)
  return program, None


def _write(file: pathlib.Path, program: jax.stages.Compiled, seconds: float) -> None:
  content, _, _ = serialize_executable.serialize(program)
  head = f'{seconds:.1f}\n'.encode()
  _keep(file, head + content)


def _keep(file: pathlib.Path, content: bytes) -> None:
  """Writes a program, after its hash: between the two, an earlier program counts as damaged."""
  digest = hashlib.sha256(content).hexdigest()
  whole_file.write(_hash_file(file), digest)
  whole_file.write(file, content)


def seal() -> None:
  """Writes the hashes of newly compiled programs; a program without a hash is not used."""
  directory = _directory()
  if directory is None:
    return
  with contextlib.suppress(OSError, StorageError):  # a full disk: they are compiled again
    for program in directory.glob('*-cache'):
      file = _hash_file(program)
      if not file.exists():
        whole_file.write(file, _hash(program))


def _end() -> None:
  """Ends the use of the directory by this process."""
  seal()
  _own.close()


def _directory() -> pathlib.Path | None:
  """The directory that `enable` has chosen, or None."""
  directory = _jax.jax_compilation_cache_dir
  if directory and directory.endswith(_key()):
    return pathlib.Path(directory)
  return None


def _is_others() -> bool:
  """Whether the environment, or a caller, disables the cache or sets a directory of its own."""
  names_directory = bool(_jax.jax_compilation_cache_dir)
  return names_directory or not _jax.jax_enable_compilation_cache


def _private(directory: pathlib.Path, is_used: bool = False) -> str | None:
  """Makes a directory of programs that only its owner reads, and cleans it; returns why not.

  is_used: whether this process writes programs there from now on.
  """
  try:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (directory.parent, directory):
      found = place.lstat()
      is_others = found.st_uid != os.geteuid()
      if is_others or place.is_symlink():
        return f'{_REFUSED} {place} belongs to another user'
      if found.st_mode & 0o077:
        place.chmod(0o700)
    _clean(directory)
    if is_used:
      _own.enter_context(owned.temporary_folder(directory / _START))
  except OSError as error:
    return f'{_REFUSED} {directory}: {error.strerror}'
  return None


def _name(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> str:
  """A hash of all that a program depends on, the same without its devices."""
  first = devices[0]
  if first.platform == 'tpu':  # whose programs do not depend on the processor of the host
    compiler = [*packages.compilers('tpu').values()]
  else:
    compiler = [_key(), first.client.platform_version]
  flags = [os.environ.get(name) for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')]
  places = [(device.id, device.device_kind) for device in devices]
  version_of_jax = f'{jax.__version__} {jaxlib.version.__version__}'
  settings = f'{version_of_jax} {compiler} {places} {flags}'
  program = lowered.as_text()
  described = f'{settings}\n{program}'
  return hashlib.sha256(described.encode()).hexdigest()


def _clean(directory: pathlib.Path) -> None:
  """Deletes programs that are damaged or unfinished, and the oldest ones above the limit."""
  owned.remove_litter(directory)
  starts = []
  for place in owned.unfinished(directory, _START):
    starts.append(_time(place))
  others_since = min(starts, default=float('inf'))  # their programs may lack a hash still
  programs = sorted(directory.glob('*-cache'), key=_time, reverse=True)
  total = 0
  for program in programs:
    is_sealed = _is_sealed(program)
    has_hash = _hash_file(program).exists()
    is_others = not has_hash and _time(program) >= others_since
    if is_sealed:
      total += _size(program)
    fits = is_sealed and total <= _MAX_BYTES
    if not is_others and not fits:
      for file in (program, _hash_file(program)):
        owned.delete_file(file)


def _time(place: pathlib.Path) -> float:
  """When a file or folder was written; 0 if another process has deleted it."""
  try:
    return place.stat().st_mtime
  except FileNotFoundError:
    return 0


def _size(file: pathlib.Path) -> int:
  try:
    return file.stat().st_size
  except FileNotFoundError:
    return 0


def _is_sealed(program: pathlib.Path) -> bool:
  """Whether a program has the hash that was recorded with it."""
  try:
    recorded = _hash_file(program).read_bytes()
    return recorded == _hash(program)
  except OSError:  # there is no hash, or another process deletes the program
    return False


def _hash_file(program: pathlib.Path) -> pathlib.Path:
  return program.with_name(f'{program.name}.sha256')


def _hash(program: pathlib.Path) -> bytes:
  digest = hashlib.sha256(program.read_bytes()).hexdigest()
  return digest.encode()


def _key() -> str:
  """A hash of jaxlib and the processor: a program may crash on one with fewer instructions."""
  processor = platform.machine() + platform.processor()
  with contextlib.suppress(OSError):
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    wanted = ('flags', 'model name', 'Features')
    described = {line for line in lines if line.startswith(wanted)}
    processor += ''.join(sorted(described))
  text = f'{jaxlib.version.__version__} {processor}'
  return hashlib.sha256(text.encode()).hexdigest()[:16]
