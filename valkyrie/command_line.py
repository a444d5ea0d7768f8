"""The flags of the command line. No large package is imported, so that --help is fast."""

import argparse
from collections.abc import Sequence
import re
from typing import Any

from valkyrie import __version__
from valkyrie.config.suggest import did_you_mean
from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, UsageError

# --run_mode -> (module, function).
RUN_MODES = {
  'vocabulary': ('valkyrie.data.train_vocabulary', 'train_vocabulary'),
  'train': ('valkyrie.run.train', 'train'),
  'eval': ('valkyrie.run.evaluate', 'evaluate'),
  'infer': ('valkyrie.inference.infer', 'infer'),
  'long_context': ('valkyrie.lab.suites.long_context', 'long_context'),
  'export': ('valkyrie.inference.export', 'export'),
  'components': ('valkyrie.lab.decomposition.components', 'components'),
  'verify': ('valkyrie.lab.verification.verify', 'verify'),
  'precompile': ('valkyrie.lab.certificates.precompile', 'precompile'),
}

# The run mode that prints which file or flag set each binding, and runs nothing.
EXPLAIN = 'explain'

# Flags that are arguments of some run modes.
FLAGS_OF_MODES = {
  'prompt': ('infer',),
  'prompts': ('infer',),
  'messages': ('infer',),
  'output': ('infer', 'export'),
  'step': ('eval', 'infer', 'long_context', 'export', 'components'),
  'follow': ('eval',),
  'topology': ('precompile',),
  'allow_changed': ('train',),
}

# The kinds of differences that --allow_changed accepts; `run.resume.facts` has a fact of each.
KINDS = ('configuration', 'rows', 'store', 'vocabulary', 'mesh', 'versions', 'executable')

# The flags: the name of the value stands behind one blank, the help behind two.
_FLAGS = f"""
--gin_file FILE  a gin file; repeatable, later ones override earlier ones. Files named gin/... are
  found from any folder (default: the configuration that the run in --model_dir has recorded)
--gin.NAME=VALUE  set a macro (--gin.chunk_size=8192) or bind a parameter (--gin.S5.state_size=64);
  repeatable
--gin_search_paths DIRS  folders, separated by commas, to search for gin files and includes
--gin_allow_import PACKAGE  a package of yours that gin files may import, and thereby execute; the
  current folder is searched for it, too; repeatable
--model_dir DIR  the directory of the run, or its address in a bucket, such as gs://BUCKET/FOLDER
  (default: runs/NAME of the gin file, below the current folder)
--run_mode  what to do; explain prints which file or flag set each binding (default: train)
--allow_changed KINDS  accepted differences from the run that saved the checkpoint, separated by
  commas: {', '.join(KINDS)} (default: none)
--prompt TEXT  the text that infer continues (default: standard input)
--prompts FILE  prompts for infer: JSON lines with the field "prompt" (.jsonl), or one on each line
--messages FILE  conversations that infer answers: JSON lines with the field "messages"
--output PATH  a new file for the JSON lines of infer (default: printed), or a new folder for export
--step N  the checkpoint that eval, infer, long_context, export and components read: a number,
  latest or best, or numbers separated by commas, for the mean of their parameters (default: latest)
--follow  eval reads every checkpoint of a run as it is committed, until the last one
--topology CHIP:SHAPE  the TPU slice that precompile compiles for, such as v4:4x4x2, or 2xv4:4x4x2
  for two, or GPUs, such as h100:8 or 4xh100:8, on a machine without them (default: the devices of
  this machine)
--processes N  the number of processes of the run; {processes.DETECTED} if jax can detect it: TPU
  pods, SLURM, Kubernetes, MPI (default: only this process)
--process I  the number of this process, from 0
--coordinator HOST:PORT  the address at which process 0 listens; anyone who reaches it can join
  (default: {processes.COORDINATOR}, reachable from this machine only)
--join_seconds S  seconds to wait for the other processes (default: %(default)s)
"""

_EXAMPLES = """
examples:
  python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --model_dir=runs/tiny
      train; the same command again resumes
  python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --model_dir=runs/tiny --gin.train_steps=500
      ... with one macro of the gin file changed
  python -m valkyrie.main --gin_file=gin/tiny_cpu.gin --gin_file=mine.gin --gin.S5.state_size=64
      ... with a second file that overrides the first, and one parameter bound
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=eval --step=best
      without --gin_file, a run is opened with its own configuration; flags override it
  python -m valkyrie.main --model_dir=runs/tiny --run_mode=infer --prompt='def main():'
  python -m valkyrie.main --gin_file=gin/v4_32.gin --processes=auto
      ... on each host of a TPU pod, or as each task of a SLURM job; --processes=2 --process=0 is
      one of two processes on this machine

values of --gin.NAME=VALUE are gin's: 8192, 1e-3, True, None, (1, 2), @S5, %chunk_size; strings
need quotes inside the shell's: --gin.task='"fineweb"'. There are no expressions. If a flag is
repeated with one name, the last one wins.

exit codes: 0 done; 2 usage; 65 bad data; 70 bug; 71 a device failed (run the same command again);
74 storage; 75 preempted and saved, or the other processes did not join in time (run the same
command again); 76 diverged; 77 forms of a model differ; 78 bad configuration; 130 interrupted with
nothing to save
"""


def _kinds(text: str) -> tuple[str, ...]:
  for kind in text.split(','):
    if kind not in KINDS:
      raise argparse.ArgumentTypeError(f'{kind!r} is not one of {", ".join(KINDS)}')
  return tuple(text.split(','))


_PARSED_AS: dict[str, dict[str, Any]] = {
  '--gin_file': {'action': 'append'},
  '--gin.NAME=VALUE': {'action': 'store_true'},  # for --help: `parse_command_line` reads them
  '--gin_search_paths': {'action': 'append', 'default': []},
  '--gin_allow_import': {'action': 'append', 'default': []},
  '--run_mode': {'choices': (*RUN_MODES, EXPLAIN), 'default': 'train'},
  '--allow_changed': {'type': _kinds},
  '--follow': {'action': 'store_true', 'default': None},
  '--process': {'type': int},
  '--join_seconds': {'type': int, 'default': 300},
}


def parse_command_line(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
  """The flags, and the --gin.NAME=VALUE arguments as they were typed.

  Raises:
    UsageError: a flag is unknown, misspelled, lacks its value or conflicts with another.
    SystemExit: after --help or --version.
  """
  gin_flags = [argument for argument in arguments if argument.startswith('--gin.')]
  for flag in gin_flags:
    _, _, value = flag.removeprefix('--gin.').partition('=')
    if not value:
      raise UsageError(f'{flag}: expected --gin.NAME=VALUE, with = and without spaces')
    utf8 = flag.encode(errors='ignore')
    if utf8.decode() != flag:
      raise UsageError(f'{flag!a} is not UTF-8: set the locale of the terminal to UTF-8')
  parser = _parser()
  others = [flag for flag in arguments if flag not in gin_flags]
  flags, unknown = parser.parse_known_args(others)
  if unknown:
    first, *_ = unknown
    name, _, _ = first.partition('=')
    known = []
    for action in parser._actions:
      known += action.option_strings
    hint = did_you_mean(name, known)
    raise UsageError(f'{first}: unknown flag.{hint} Try --help.')
  _check(flags)
  return flags, gin_flags


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
  rows = re.findall(r'^(--\S+)(?: (\S+))?  (.*(?:\n  .*)*)', _FLAGS, re.MULTILINE)
  for flag, value, text in rows:
    named = {}
    if value:
      named = {'metavar': value}
    parser.add_argument(flag, help=text, **named, **_PARSED_AS.get(flag, {}))
  return parser


def _check(flags: argparse.Namespace) -> None:
  """Raises an error if a flag is missing, or if flags contradict each other."""
  if not flags.gin_file and not flags.model_dir:
    raise UsageError(
      '--gin_file is missing: pass one, such as --gin_file=gin/tiny_cpu.gin, or the --model_dir of '
      'a run'
    )
  for name, modes in FLAGS_OF_MODES.items():
    is_given = getattr(flags, name) is not None
    if is_given and flags.run_mode not in modes:
      raise UsageError(f'--{name} needs --run_mode={" or ".join(modes)}')
  has_step = flags.step is not None
  if flags.follow and (has_step or flags.processes is not None):
    raise UsageError('--follow reads every step in one process: remove --step and --processes')
  if flags.run_mode == 'export' and flags.output is None:
    raise UsageError('--run_mode=export needs --output=FOLDER')
  asked = []
  for name in ('prompt', 'prompts', 'messages'):
    if getattr(flags, name) is not None:
      asked.append(name)
  if len(asked) > 1:
    raise UsageError(f'--{" and --".join(asked)} exclude each other: pass only one')
  if flags.processes is None and (flags.process is not None or flags.coordinator is not None):
    raise ConfigurationError('--process and --coordinator need --processes=N')
  if flags.processes is not None and flags.run_mode not in ('train', 'eval'):
    raise UsageError(f'--run_mode={flags.run_mode} runs in one process: remove --processes')
