"""Eight virtual devices on one CPU, and nothing that JAX would rather not do silently."""

import atexit
import contextlib
import gc
from importlib import metadata
import inspect
import os
import platform
import shutil
import signal
import sys
import tempfile
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
# A program that several tests need is compiled once in a run of the suite, by whichever process.
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
if 'PYTEST_XDIST_WORKER' not in os.environ:
  os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix='compiled-')
  atexit.register(shutil.rmtree, os.environ['JAX_COMPILATION_CACHE_DIR'], ignore_errors=True)

import gin
import haiku as hk
import hypothesis
import jax
import pytest

# Tracing makes many objects and few cycles: seldom looking for cycles saves a tenth of the time.
gc.freeze()
gc.set_threshold(200_000, 50, 50)

jax.config.update('jax_numpy_rank_promotion', 'raise')
hk.experimental.check_jax_usage()
# For scripts/mutants: the search for the smallest failing example takes minutes.
hypothesis.settings.register_profile('first_failure', phases=[hypothesis.Phase.generate])

# Tests that start no process, but take 4 seconds or more of a core. Others look at the same rooms.
SLOW = {
  'test_a_store_of_a_generated_task_is_compared_with_its_code',
  'test_a_schedule_that_more_steps_stretch_is_said_and_can_be_kept',
  'test_a_model_that_computes_in_one_precision_is_compared_in_this_one',
  'test_every_optimizer_of_optax_takes_the_steps_that_it_takes_in_optax',
  'test_a_run_that_was_stopped_is_the_same_run',
  'test_a_site_without_masks_is_the_matrix_and_masks_of_one_are_too',
  'test_ascents_raise_the_loss_and_the_step_gives_one_more',
  'test_cuts_change_no_loss_no_gradient_and_no_adversary',
  'test_layouts_and_micro_batches_change_nothing',
  'test_the_clean_memory_depends_on_the_cuts',
  'test_the_loss_of_a_step_and_its_gradient',
  'test_micro_batches_over_devices',
  'test_optimizer',
  'test_what_a_policy_names_is_not_computed_again',
  'test_a_run_ends_when_validation_no_longer_improves_and_stays_ended',
  'test_a_tokenizer_goes_with_the_model',
  'test_where_chunks_are_cut_changes_no_gradient',
  'test_a_decoder_is_a_llama',
  'test_a_device_holds_an_eighth_of_what_is_split',
  'test_a_layer_gathers_its_weights_once_for_each_pass_and_chunk',
  'test_a_mixer_of_ones_own',
  'test_a_mixture',
  'test_a_new_planner_and_one_passed_over_leave_the_model_as_it_is_without',
  'test_a_phase_without_it_leaves_its_parameters_and_moments_as_they_are',
  'test_a_resume_with_other_rows_and_then_with_other_chunks',
  'test_a_seqio_mixture',
  'test_a_spike_leads_back_to_the_checkpoint_that_was_due_however_often_the_run_stops',
  'test_a_step_that_does_not_fit_ends_with_78_and_a_recommendation',
  'test_a_token_depends_on_earlier_intervals_and_on_nothing_else',
  'test_adapters_change_nothing_at_first_and_are_the_sum_of_both_matrices',
  'test_an_export_is_read_back_bit_for_bit',
  'test_attention_draws_anew_on_each_device',
  'test_between_groups_the_gradient_is_cut_and_within_a_group_it_flows',
  'test_bfloat16_stays_with_float32_for_200_steps',
  'test_chosen_steps_are_profiled',
  'test_each_block_of_the_pattern_has_the_window_bound_in_its_scope',
  'test_every_chunk_draws_its_own_dropout_and_draws_it_again_when_recomputed',
  'test_every_power_is_right_to_a_few_roundings',
  'test_full_attention_refuses_a_longer_document',
  'test_full_attention_without_a_carry',
  'test_greedy_tokens_are_the_likeliest_of_the_model_read_at_once',
  'test_however_documents_end_and_chunks_are_cut_it_equals_the_loop_over_tokens',
  'test_in_float64_the_gradients_agree_to_rounding',
  'test_layers_that_gather_their_weights_change_nothing',
  'test_long_unrolls_change_the_gradient_and_resume_where_they_were',
  'test_micro_batches_are_the_whole_batch_in_float64',
  'test_mixers',
  'test_only_adapters_learn_and_count',
  'test_parameters_in_bfloat16_learn_as_much',
  'test_products_in_int8_learn_as_much',
  'test_planner',
  'test_programs_of_a_compiler_that_times_kernels_may_change',
  'test_remat_changes_nothing',
  'test_seqio_gets_the_tasks_by_a_call_and_not_by_an_import',
  'test_the_cuts_between_chunks_change_nothing',
  'test_the_first_module_is_named',
  'test_the_groups_of_s5_and_of_vectors',
  'test_the_hunt_for_a_nan_names_a_module',
  'test_the_size_of_a_tokenizer',
  'test_two_steps_end_where_one_device_ends',
  'test_values_carries_and_gradients_are_those_of_one_device',
}


# The packages whose versions decide most of what can fail.
NAMED_AT_THE_START = ('jax', 'dm-haiku', 'optax', 'orbax-checkpoint', 'numpy', 'tensorflow')


def pytest_report_header():
  """The Python and the versions that the suite runs on."""
  versions = (f'{name} {metadata.version(name)}' for name in NAMED_AT_THE_START)
  return f'Python {platform.python_version()} ({sys.executable}): {", ".join(versions)}'


def pytest_collection_modifyitems(items):
  """Marks what `scripts/test --fast` leaves out: processes, slow tests, and all cases but one."""
  for item in items:
    if _starts_processes(item.function, set()):
      item.add_marker('process')
    if hasattr(item, 'callspec') and any(item.callspec.indices.values()):
      item.add_marker('further_case')
    if item.originalname in SLOW:
      item.add_marker('slow')


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


@contextlib.contextmanager
def compiling_quickly():
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  try:
    yield
  finally:
    jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture(scope='module')
def quick_compiler():
  """For runs of a few steps: compiling well costs more than it saves."""
  with compiling_quickly():
    yield


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
  """(data_dir, model_dir) of a run of two steps that tests share. A test that changes it copies it.

  It is compiled as under `quick_compiler`. The data also have the task 'digits'.
  """
  import tiny_run  # noqa: PLC0415, few tests need it

  folder = tmp_path_factory.mktemp('trained')
  tiny_run.write_stores(folder / 'data', 'letters', 'abcdefgh')
  tiny_run.write_stores(folder / 'data', 'digits', '0123456789')
  with compiling_quickly():
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
