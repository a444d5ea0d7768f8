"""The program `valkyrie`: loads a gin configuration and runs one mode.

Nothing configurable is defined here, since `python -m` imports this module twice. jax and gin are
imported only after `command_line` has parsed the flags.
"""

import signal

if __name__ == '__main__' and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # see `console.of_a_program`

import argparse
import atexit
from collections.abc import Mapping, Sequence
import gc
import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
from typing import Any

from valkyrie.command_line import EXPLAIN, FLAGS_OF_MODES, RUN_MODES, parse_command_line
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.data import apart
from valkyrie.distributed import backends, console, open_files, processes
from valkyrie.distributed.device_errors import device_error
from valkyrie.errors import ConfigurationError, UsageError, ValkyrieError
from valkyrie.storage import held_folder, run_directory


@console.lasting_streams()
def main(arguments: Sequence[str] | None = None, **kinds) -> int:
  """Calls `run`, prints its error on standard error, and returns the exit code.

  `arguments` is the command line; None is the one of this process, which ends afterwards.
  """
  try:
    if arguments is None:
      with console.of_a_program():
        run(sys.argv[1:], **kinds)
    else:
      run(arguments, **kinds)
    code = 0
  except (Exception, KeyboardInterrupt) as error:
    code = _explain(error)
    processes.end(code, error)
  if arguments is None:
    processes.exit_with(code)
  return code


def run(
  arguments: Sequence[str],
  modules: Sequence[str] = CONFIGURABLE_MODULES,
  run_modes: Mapping[str, tuple[str, str]] = RUN_MODES,
) -> None:
  """Runs the mode that the command line selects; raises an exception unless it succeeds."""
  flags, gin_flags = parse_command_line(arguments)
  open_files.check()
  _check_packages()
  importlib.import_module('valkyrie.models')  # refuses python -O before jax is imported
  from valkyrie.config import record  # noqa: PLC0415, imports gin
  from valkyrie.config.explain import explained  # noqa: PLC0415
  from valkyrie.config.load import check_call, load_gin  # noqa: PLC0415

  directory = None
  if flags.model_dir is not None:
    directory = run_directory.opened(flags.model_dir)
  search_paths = ','.join(flags.gin_search_paths).split(',')
  statements = load_gin(
    flags.gin_file or (),
    gin_flags,
    run=None if flags.gin_file else directory,
    search_paths=[path for path in search_paths if path],
    allowed_imports=flags.gin_allow_import,
    modules=modules,
  )
  if flags.run_mode == EXPLAIN:
    print(explained(statements))
    return
  model_dir = directory or run_directory.opened(_default_model_dir(flags.gin_file))
  if flags.run_mode in ('train', 'vocabulary'):
    apart.check_run(model_dir, record.bindings())
  if flags.processes is not None:
    _join(flags, model_dir)
  if flags.run_mode != 'precompile':
    from valkyrie.distributed import compilation_cache  # noqa: PLC0415, imports jax

    problem = compilation_cache.enable()
    if problem:
      print(problem, file=sys.stderr)
  module, name = run_modes[flags.run_mode]
  function = getattr(importlib.import_module(module), name)
  options = _options(flags)
  check_call(function, 'model_dir', *options)
  console.raise_interrupts()
  with run_directory.uploaded(model_dir), held_folder.held(model_dir):
    function(model_dir=model_dir, **options)


def _options(flags: argparse.Namespace) -> dict[str, Any]:
  """The arguments that the flags give the function of a run mode."""
  options: dict[str, Any] = {}
  if flags.run_mode == 'infer':
    # Only the command line may name files to read and write, not a configuration, which others may
    # have recorded.
    options = {'prompts': None, 'messages': None, 'output': None}
  for name in FLAGS_OF_MODES:
    value = getattr(flags, name)
    if value is not None:
      options[name] = value
  has_prompts = flags.prompts is not None or flags.messages is not None
  if flags.run_mode == 'infer' and not has_prompts:
    options['prompt'] = _read_prompt(flags.prompt)
  return options


def _join(flags: argparse.Namespace, model_dir: str | os.PathLike) -> None:
  """Connects this process with the others of the run."""
  from valkyrie.checkpoint.steps import steps_of  # noqa: PLC0415, imports jax
  from valkyrie.distributed.preemption import Preemption  # noqa: PLC0415, imports gin

  this = processes.member(flags.coordinator, flags.processes, flags.process)
  with Preemption():
    if this.process is not None and flags.run_mode == 'train':
      # Two processes with one number would make jax abort all the others; two with number 0 would
      # both listen at the coordinator's address.
      steps = steps_of(model_dir)
      steps.check_writable()
      lock = steps.lock(this.process)
      atexit.register(lock.release)
    processes.join(this, flags.join_seconds)


def _default_model_dir(gin_files: Sequence[str]) -> str:
  stems = [pathlib.PurePath(file).stem for file in gin_files]
  name = '-'.join(stems)
  model_dir = str(pathlib.PurePath('runs', name))
  print(f'model_dir: {model_dir} (--model_dir=DIR for another)', file=sys.stderr)
  return model_dir


def _check_packages() -> None:
  """Raises a ConfigurationError if this Python lacks our packages.

  In a clone, the folder gin/ would be taken for the package of that name.
  """
  if importlib.util.find_spec('haiku') is None:
    clone = pathlib.Path(__file__).resolve().parents[1]
    raise ConfigurationError(
      f'{sys.executable} lacks the packages of Valkyrie, such as dm-haiku. Activate the '
      f'environment that has them, as by `source {clone}/.venv/bin/activate`. '
      f'`bash {clone}/scripts/quickstart` makes this one.'
    )


def _read_prompt(typed: str | None) -> str:
  """The prompt from the command line, or from standard input."""
  place = '--prompt'
  if typed is not None:
    content = os.fsencode(typed)
  else:
    place = 'standard input'
    content = _read_standard_input()
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise UsageError(
      f'{place} is not UTF-8: {error}. Convert the text, for instance with iconv.'
    ) from None


def _read_standard_input() -> bytes:
  if sys.stdin is None:
    raise UsageError('Standard input is closed. Pass --prompt=TEXT.')
  if sys.stdin.isatty():
    print('Type the prompt, then Ctrl-D:', file=sys.stderr)
  return sys.stdin.buffer.read()


def _explain(error: BaseException) -> int:
  """Prints the error, and returns its exit code."""
  if not isinstance(error, ValkyrieError):
    error = backends.misfit(error) or error
  if isinstance(error, ValkyrieError | KeyboardInterrupt):
    return console.explain(error)
  traceback.print_exception(error)
  failure = device_error(error)
  if failure:
    print(f'valkyrie: {failure}', file=sys.stderr)
    return failure.exit_code
  return ValkyrieError.exit_code


if __name__ == '__main__':
  # Imports and traces create many objects and few cycles: the search for cycles takes a tenth of a
  # start. Steps create no cycles that hold arrays.
  gc.set_threshold(100_000, 20, 20)
  sys.exit(main())
