"""Eight virtual devices on one CPU, and nothing that JAX would rather not do silently."""

import gc
from importlib import metadata
import inspect
import os
import pathlib
import platform
import signal
import sys
import types

from faults import quick_compiler

# Before jax is imported anywhere. A child process that a test starts inherits it.
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
    quick_compiler.FLAGS,
  ]
).strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
# A program that tests need is compiled once, by whichever process and run of the suite.
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(
    pathlib.Path(__file__).parents[1] / '.pytest_cache' / 'compiled'
  )

import gin
import haiku as hk
import hypothesis
import jax
import kept_programs
import pytest
import shared_context

if 'PYTEST_XDIST_WORKER' not in os.environ:
  kept_programs.check(pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR']))

shared_context.share()

# Tracing makes many objects and few cycles: seldom looking for cycles saves a tenth of the time.
gc.freeze()
gc.set_threshold(200_000, 50, 50)

jax.config.update('jax_numpy_rank_promotion', 'raise')
hk.experimental.check_jax_usage()
# For scripts/mutants: the search for the smallest failing example takes minutes.
hypothesis.settings.register_profile('first_failure', phases=[hypothesis.Phase.generate])

# The packages whose versions decide most of what can fail.
NAMED_AT_THE_START = ('jax', 'dm-haiku', 'optax', 'orbax-checkpoint', 'numpy', 'tensorflow')


def pytest_report_header():
  """The Python and the versions that the suite runs on."""
  versions = (f'{name} {metadata.version(name)}' for name in NAMED_AT_THE_START)
  return f'Python {platform.python_version()} ({sys.executable}): {", ".join(versions)}'


def pytest_collection_modifyitems(items):
  """Marks what `scripts/test --fast` leaves out: processes, and all cases of a test but one."""
  for item in items:
    if _starts_processes(item.function, set()):
      item.add_marker('process')
    if hasattr(item, 'callspec') and any(item.callspec.indices.values()):
      item.add_marker('further_case')


def _starts_processes(function, seen) -> bool:
  """Whether it uses `subprocess`, or a function or fixture of its module that does."""
  seen.add(function)
  names = set(_names(function.__code__))
  used = [inspect.unwrap(function.__globals__.get(name)) for name in names]
  return 'subprocess' in names or any(
    _starts_processes(other, seen)
    for other in used
    if isinstance(other, types.FunctionType)
    and other.__module__ == function.__module__
    and other not in seen
  )


def _names(code):
  """The names of arguments, hence of fixtures, and of what a function uses of its module."""
  yield from code.co_varnames[: code.co_argcount]
  yield from code.co_names
  for inner in code.co_consts:
    if isinstance(inner, types.CodeType):
      yield from _names(inner)


@pytest.fixture(autouse=True)
def _fresh_gin():
  """No test sees another's bindings."""
  yield
  gin.clear_config(clear_constants=True)  # unlocks too, where `gin.unlock_config` would lock again


@pytest.fixture(autouse=True, scope='module')
def _fresh_context():
  """No file keeps the constants of another's programs in memory."""
  yield
  shared_context.renew()


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
  """(data_dir, model_dir) of a run of two steps that tests share. A test that changes it copies it.

  The data also have the task 'digits'.
  """
  import tiny_run  # noqa: PLC0415, few tests need it

  folder = tmp_path_factory.mktemp('trained')
  tiny_run.write_stores(folder / 'data', 'letters', 'abcdefgh')
  tiny_run.write_stores(folder / 'data', 'digits', '0123456789')
  tiny_run.train(folder / 'run', folder / 'data')
  return folder / 'data', folder / 'run'


@pytest.fixture
def hang_up():
  """Sets the handler of SIGHUP, which the tests themselves may run without."""
  before = signal.getsignal(signal.SIGHUP)
  yield lambda handler: signal.signal(signal.SIGHUP, handler)
  signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope='session')
def gcs_server():
  """A server of Cloud Storage; one for each process, since clients keep its address."""
  from faults.fake_gcs import FakeGcs  # noqa: PLC0415, few tests need it

  with FakeGcs() as server:
    yield server


@pytest.fixture
def gcs(gcs_server, monkeypatch):
  """The server, which clients of the test find."""
  for name, value in gcs_server.environment.items():
    monkeypatch.setenv(name, value)
  return gcs_server
