"""The command line: flags, gin configuration, one run mode.

Nothing configurable is defined here, since `python -m` imports this module twice. jax and gin are
imported only after the flags are parsed, so that --help is fast.
"""

import signal

if __name__ == '__main__' and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # see `console.of_a_program`

import argparse
import atexit
from collections.abc import Mapping, Sequence
import contextlib
import gc
import importlib
import os
import pathlib
import sys
import traceback

from valkyrie import __version__
from valkyrie.checkpoint.compatibility import KINDS
from valkyrie.config.suggest import did_you_mean
from valkyrie.distributed import console, processes
from valkyrie.errors import ConfigurationError, UsageError, ValkyrieError, message_of
from valkyrie.storage import run_directory

# The modules of the configurables. They are imported before gin is locked; none can follow later.
CONFIGURABLE_MODULES = (
  'valkyrie.models.language_model',
  'valkyrie.models.layers',
  'valkyrie.models.lora',
  'valkyrie.models.attention.rotary',
  'valkyrie.models.block',
  'valkyrie.models.s5.layer',
  'valkyrie.models.recurrence.gated',
  'valkyrie.models.recurrence.gated_delta',
  'valkyrie.models.recurrence.mamba2',
  'valkyrie.models.recurrence.rg_lru',
  'valkyrie.models.attention.longformer',
  'valkyrie.models.attention.full',
  'valkyrie.models.attention.bidirectional_longformer',
  'valkyrie.models.planner.planner',
  'valkyrie.sharding.partitioner',
  'valkyrie.training.curriculum',
  'valkyrie.training.optimizers',
  'valkyrie.training.spikes',
  'valkyrie.training.divergence',
  'valkyrie.training.setup',
  'valkyrie.data.feed',
  'valkyrie.data.mixture',
  'valkyrie.distributed.consistency',
  'valkyrie.distributed.preemption',
  'valkyrie.checkpoint.manager',
  'valkyrie.monitoring.writers',
  'valkyrie.monitoring.trackers',
  'valkyrie.weights.initial',
  'valkyrie.inference.opened',
  'valkyrie.inference.text_samples',
  'valkyrie.run.evaluator',
  'valkyrie.run.train',
  'valkyrie.run.evaluate',
  'valkyrie.run.infer',
  'valkyrie.run.long_context',
  'valkyrie.run.export',
  'valkyrie.run.precompile',
)

# --run_mode -> (module, function).
RUN_MODES = {
  'train': ('valkyrie.run.train', 'train'),
  'eval': ('valkyrie.run.evaluate', 'evaluate'),
  'infer': ('valkyrie.run.infer', 'infer'),
  'long_context': ('valkyrie.run.long_context', 'long_context'),
  'export': ('valkyrie.run.export', 'export'),
  'precompile': ('valkyrie.run.precompile', 'precompile'),
}

# Flags that are arguments of some run modes.
_FLAGS_OF_MODES = {
  'prompt': ('infer',),
  'prompts': ('infer',),
  'output': ('infer', 'export'),
  'step': ('eval', 'infer', 'long_context', 'export'),
  'follow': ('eval',),
  'topology': ('precompile',),
  'allow_changed': ('train',),
}

_EXAMPLES = """
examples:
  python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --model_dir=runs/tiny
      train; the same command again resumes
  python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --model_dir=runs/tiny --gin.train_steps=500
      ... with one macro of the gin file changed
  python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --gin_file=mine.gin --gin.S5.state_size=64
      ... with a second file over the first, and one parameter bound
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=eval --step=best
      a run opens itself: without --gin_file its own configuration counts, flags over it
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=infer --prompt='def main():'
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=infer --prompts=mine.jsonl \\
      --output=answers.jsonl --gin.infer.samples=4 --gin.infer.temperature=0.8
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=long_context
      needles, variables, pairs: right answers by length and depth
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=export --output=exported
      the model for other programs: safetensors, configuration and tokenizer
  python -m valkyrie.main --gin_file=gin/v4_32.gin --run_mode=precompile --topology=v4:4x4x2
      compile a run for 32 TPU chips on a machine without one; print its memory and time
  python -m valkyrie.main --gin_file=mine.gin --gin_allow_import=my_package
      ... where mine.gin says `import my_package.mixers`
  python -m valkyrie.main --gin_file=mine.gin --processes=2 --process=0
      ... one of two processes on this machine; the other one has --process=1
  python -m valkyrie.main --gin_file=gin/v4_32.gin --processes=auto
      ... on each host of a TPU pod, or as each task of a SLURM job

values of --gin.NAME=VALUE are gin's: 8192, 1e-3, True, None, (1, 2), @S5, %chunk_size; strings
need quotes inside the shell's: --gin.task='"fineweb"'. There are no expressions. The
last of several flags for one name wins.

exit codes: 0 done; 2 usage; 65 bad data; 70 bug; 74 storage; 75 preempted and saved, or the other
processes did not join yet (run the same command again); 76 diverged; 78 bad configuration; 130
interrupted with nothing to save
"""


class _Parser(argparse.ArgumentParser):
  def error(self, message):
    raise UsageError(f'{message}\nTry --help.')


def _parser() -> _Parser:
  parser = _Parser(
    prog='valkyrie',
    usage='valkyrie {--gin_file=FILE | --model_dir=RUN} [--gin.NAME=VALUE ...] [other flags]',
    description='Trains, evaluates or runs the model that gin files describe.',
    epilog=_EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument('--version', action='version', version=f'valkyrie {__version__}')
  parser.add_argument(
    '--gin_file',
    action='append',
    metavar='FILE',
    help='a gin file; repeatable, later ones override earlier ones. Files named gin/... are found '
    'from any folder. Without one, the configuration that the run in --model_dir has recorded',
  )
  # Parsed by _split_gin_flags; listed here for --help.
  parser.add_argument(
    '--gin.NAME=VALUE',
    action='store_true',
    help='set a macro (--gin.chunk_size=8192) or bind a parameter (--gin.S5.state_size=64); '
    'repeatable',
  )
  parser.add_argument(
    '--gin_search_paths',
    action='append',
    default=[],
    metavar='DIRS',
    help='folders, separated by commas, to search for gin files and includes',
  )
  parser.add_argument(
    '--gin_allow_import',
    action='append',
    default=[],
    metavar='PACKAGE',
    help='a package of yours that gin files may import, and thereby execute; repeatable',
  )
  parser.add_argument(
    '--model_dir',
    metavar='DIR',
    help='the directory of the run, or its address in a bucket, such as gs://BUCKET/FOLDER '
    '(default: runs/NAME of the gin file, below the current folder)',
  )
  parser.add_argument(
    '--run_mode', choices=tuple(RUN_MODES), default='train', help='default: train'
  )
  parser.add_argument(
    '--allow_changed',
    type=_kinds,
    metavar='KINDS',
    help='accepted differences to the run that saved the checkpoint, separated by commas: '
    f'{", ".join(KINDS)} (default: none)',
  )
  parser.add_argument(
    '--prompt', metavar='TEXT', help='the text that infer continues (default: standard input)'
  )
  parser.add_argument(
    '--prompts',
    metavar='FILE',
    help='prompts for infer: JSON lines with the field "prompt" (.jsonl), or one on each line',
  )
  parser.add_argument(
    '--output',
    metavar='PATH',
    help='a new file for the JSON lines of infer (default: printed), or a new folder for export',
  )
  parser.add_argument(
    '--step',
    metavar='N',
    help='the checkpoint that eval, infer, long_context and export read: a number, latest or best, '
    'or numbers separated by commas, for the mean of their parameters (default: latest)',
  )
  parser.add_argument(
    '--follow',
    action='store_true',
    default=None,
    help='eval reads every checkpoint of a run as it is committed, until the last one',
  )
  parser.add_argument(
    '--topology',
    metavar='CHIP:SHAPE',
    help='the TPU slice that precompile compiles for, such as v4:4x4x2, on a machine without one '
    '(default: the devices of this machine)',
  )
  parser.add_argument(
    '--processes',
    metavar='N',
    help=f'the number of processes of the run; {processes.DETECTED} if jax can detect it: TPU '
    'pods, SLURM, Kubernetes, MPI (default: this process alone)',
  )
  parser.add_argument('--process', type=int, metavar='I', help='the number of this process, from 0')
  parser.add_argument(
    '--coordinator',
    metavar='HOST:PORT',
    help='the address at which process 0 listens; anyone who reaches it can join (default: '
    f'{processes.COORDINATOR}, reachable from this machine only)',
  )
  parser.add_argument(
    '--join_seconds',
    type=int,
    default=300,
    metavar='S',
    help='seconds to wait for the other processes (default: %(default)s)',
  )
  return parser


def _kinds(text: str) -> tuple[str, ...]:
  for kind in text.split(','):
    if kind not in KINDS:
      raise argparse.ArgumentTypeError(f'{kind!r} is not one of {", ".join(KINDS)}')
  return tuple(text.split(','))


def _split_gin_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """The arguments without --gin.NAME=VALUE, and those flags as they were typed."""
  others, gin_flags = [], []
  for argument in arguments:
    if argument.startswith('--gin.'):
      if not argument.removeprefix('--gin.').partition('=')[2]:
        raise UsageError(f'{argument}: expected --gin.NAME=VALUE, with = and without spaces')
      if argument.encode(errors='ignore').decode() != argument:
        raise UsageError(f'{argument!a} is not UTF-8')
      gin_flags.append(argument)
    else:
      others.append(argument)
  return others, gin_flags


def parse_command_line(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """The flags, and the --gin.NAME=VALUE ones as they were typed.

  Raises:
    UsageError: a flag is unknown, misspelled, lacks its value or conflicts with another.
    SystemExit: after --help or --version.
  """
  others, gin_flags = _split_gin_flags(arguments)
  parser = _parser()
  flags, unknown = parser.parse_known_args(others)
  if unknown:
    name = unknown[0].partition('=')[0]
    known = [option for action in parser._actions for option in action.option_strings]
    hint = did_you_mean(name, known)
    raise UsageError(f'{unknown[0]}: unknown flag.{hint} Try --help.')
  if not flags.gin_file and not flags.model_dir:
    raise UsageError(
      '--gin_file is missing: pass one, such as --gin_file=gin/tiny_cpu.gin, or the --model_dir of '
      'a run'
    )
  for name, modes in _FLAGS_OF_MODES.items():
    if getattr(flags, name) is not None and flags.run_mode not in modes:
      raise UsageError(f'--{name} needs --run_mode={" or ".join(modes)}')
  if flags.follow and (flags.step is not None or flags.processes is not None):
    raise UsageError('--follow reads every step in one process: remove --step and --processes')
  if flags.run_mode == 'export' and flags.output is None:
    raise UsageError('--run_mode=export needs --output=FOLDER')
  if flags.prompt is not None and flags.prompts is not None:
    raise UsageError('--prompt and --prompts exclude each other')
  if flags.processes is None and (flags.process is not None or flags.coordinator is not None):
    raise ConfigurationError('--process and --coordinator need --processes=N')
  if flags.processes is not None and flags.run_mode not in ('train', 'eval'):
    raise UsageError(f'--run_mode={flags.run_mode} runs in one process: remove --processes')
  return flags, gin_flags


def _default_model_dir(gin_files: Sequence[str]) -> str:
  name = '-'.join(pathlib.PurePath(file).stem for file in gin_files)
  model_dir = str(pathlib.PurePath('runs', name))
  print(f'model_dir: {model_dir} (--model_dir=DIR for another)', file=sys.stderr)
  return model_dir


def _read_prompt(typed: str | None) -> str:
  """The prompt of the command line, or else of standard input."""
  if typed is None and sys.stdin.isatty():
    print('Type the prompt, then Ctrl-D:', file=sys.stderr)
  try:
    return (sys.stdin.buffer.read() if typed is None else os.fsencode(typed)).decode()
  except UnicodeDecodeError as error:
    place = 'standard input' if typed is None else '--prompt'
    raise UsageError(f'{place} is not UTF-8: {error}') from None


def run(
  arguments: Sequence[str],
  modules: Sequence[str] = CONFIGURABLE_MODULES,
  run_modes: Mapping[str, tuple[str, str]] = RUN_MODES,
) -> None:
  """Runs the mode that the command line selects; every ending but success is an exception."""
  flags, gin_flags = parse_command_line(arguments)
  from valkyrie.config.load import check_call, load_gin  # noqa: PLC0415, imports gin

  directory = run_directory.opened(flags.model_dir) if flags.model_dir else None
  load_gin(
    flags.gin_file or (),
    gin_flags,
    run=None if flags.gin_file else directory,
    search_paths=[path for paths in flags.gin_search_paths for path in paths.split(',') if path],
    allowed_imports=flags.gin_allow_import,
    modules=modules,
  )
  model_dir = directory or run_directory.opened(_default_model_dir(flags.gin_file))
  if flags.processes is not None:
    from valkyrie.checkpoint.steps import steps_of  # noqa: PLC0415, imports jax
    from valkyrie.distributed.preemption import Preemption  # noqa: PLC0415, imports gin

    this = processes.member(flags.coordinator, flags.processes, flags.process)
    with Preemption():
      if this.process is not None and flags.run_mode == 'train':
        # Two processes of one number would make jax abort all the others; two of number 0 would
        # both listen at the coordinator's address.
        steps = steps_of(model_dir)
        steps.check_writable()
        lock = steps.lock(this.process)
        atexit.register(lock.release)
      processes.join(this, flags.join_seconds)
  if flags.run_mode != 'precompile':
    from valkyrie.distributed import compilation_cache  # noqa: PLC0415, imports jax

    if problem := compilation_cache.enable():
      print(problem, file=sys.stderr)
  module, name = run_modes[flags.run_mode]
  function = getattr(importlib.import_module(module), name)
  given = {'model_dir': model_dir}
  given |= {n: getattr(flags, n) for n in _FLAGS_OF_MODES if getattr(flags, n) is not None}
  if flags.run_mode == 'infer':
    # Only the command line names files to read and write, not the configuration of another's run.
    given = {'prompts': None, 'output': None, **given}
    if flags.prompts is None:
      given['prompt'] = _read_prompt(flags.prompt)
  check_call(function, *given)
  console.raise_interrupts()
  with run_directory.uploaded(model_dir):
    function(**given)


def main(arguments: Sequence[str] | None = None, **kinds) -> int:
  """The exit code of `run`; errors are printed on standard error.

  Args:
    arguments: the command line; None for that of this process, which ends afterwards.
    **kinds: of `run`.
  """
  with console.lasting_stderr():
    try:
      with console.of_a_program() if arguments is None else contextlib.nullcontext():
        run(sys.argv[1:] if arguments is None else arguments, **kinds)
      return 0
    except (Exception, KeyboardInterrupt) as error:
      code = _explain(error)
      processes.end(code, error)
      return code


def _explain(error: BaseException) -> int:
  """Prints the error, and returns its exit code."""
  if isinstance(error, ValkyrieError):
    print(
      '\n'.join([f'valkyrie: {message_of(error)}', *getattr(error, '__notes__', [])]),
      file=sys.stderr,
    )
    return error.exit_code
  if isinstance(error, KeyboardInterrupt):
    print('valkyrie: interrupted', file=sys.stderr)
    return 130
  traceback.print_exception(error)
  return ValkyrieError.exit_code


if __name__ == '__main__':
  # Imports and traces make many objects and few cycles: looking for them takes a tenth of a start.
  # Steps make none that hold arrays.
  gc.set_threshold(100_000, 20, 20)
  code = main()
  gc.freeze()  # or Python would look through all of them once more as it ends
  sys.exit(code)
