"""Steps in a bucket: whole or not there, on disk too, and added by one trainer at a time."""

from concurrent.futures import ThreadPoolExecutor
import itertools
import json
import pathlib
import re
import threading
import time

from etils import epath
from etils.epath import gpath
from faults.fake_faults import on, writes_of
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.checkpoint.bucket_steps import BucketLock
from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.checkpoint.steps import steps_of
from valkyrie.errors import ConfigurationError, StorageError, Unreachable
from valkyrie.storage import holder, lease
from valkyrie.storage.bucket import Bucket
from valkyrie.storage.run_directory import opened

BEAT = 0.05
CHANGES = on('POST|PUT|DELETE')


@pytest.fixture
def address(gcs, request, monkeypatch):
  monkeypatch.setattr(lease, 'BEAT_SECONDS', BEAT)
  return f'gs://bucket/{re.sub("[^a-z0-9]+", "-", request.node.name)}/run'


def weights(step):
  return {'w': jnp.arange(300, dtype=jnp.float32) * step}


def target():
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {'w': jax.ShapeDtypeStruct((300,), jnp.float32, sharding=sharding)}


def save(run, *steps, **options):
  with Checkpoints(**options).open(run) as checkpoints:
    for step in steps:
      checkpoints.save(step, weights(step), {'position': step})


def assert_has(run, step):
  """Asserts that a reader restores `step`, bit for bit, as the newest one."""
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == step
    assert checkpoints.latest_record() == {'position': step}
    np.testing.assert_array_equal(checkpoints.restore(target())['w'], weights(step)['w'])


def folders(run, below='checkpoints/'):
  return [name.split('/')[-2] for name in Bucket(run).browse(below)[1]]


@pytest.mark.invariant(11)
def test_steps_are_saved_kept_and_restored(address):
  save(address, 1, 2, 3, 4, 5)
  assert folders(address) == ['3', '4', '5'], 'the retention policy, and nothing unfinished'
  assert_has(address, 5)
  save(address, 6)
  assert folders(address) == ['4', '5', '6']
  with pytest.raises(ConfigurationError, match='has no step 3'):
    open_to_read(address, '3')
  with open_to_read(address, '4') as checkpoints:
    assert checkpoints.latest_step() == 4


def test_paths_on_disk_before_change_nothing(address, tmp_path, monkeypatch):
  monkeypatch.delenv('EPATH_USE_TF', raising=False)
  gpath._is_tf_installed.cache_clear()
  assert epath.Path(tmp_path).exists()  # for which epath looks for TensorFlow
  save(address, 1)
  assert_has(address, 1)


def test_epath_uses_the_same_client(address, gcs):
  Bucket(address).write('a', b'text')
  assert (epath.Path(address) / 'a').read_text() == 'text'
  Bucket(address).write('a', b'other text')
  assert [path.stat().length for path in epath.Path(address).iterdir()] == [10], 'no cache'
  denied = gcs.fail(403, on('GET'))
  with pytest.raises(PermissionError, match='access is denied'):
    (epath.Path(address) / 'a').read_text()
  denied.end()


def test_a_run_moves_between_bucket_and_disk(address, tmp_path):
  save(address, 1, 2)
  for name in Bucket(address).objects():
    file = tmp_path / 'run' / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(Bucket(address).read(name)[0])
  assert_has(tmp_path / 'run', 2)
  save(tmp_path / 'run', 3)
  again = f'{address}-again'
  for file in (tmp_path / 'run').rglob('*'):
    if file.is_file():
      Bucket(again).write(file.relative_to(tmp_path / 'run').as_posix(), file.read_bytes())
  assert_has(again, 3)
  save(again, 4)
  assert_has(again, 4)


@pytest.mark.invariant(11)
@pytest.mark.parametrize('damage', ['flipped', 'missing', 'manifest', 'added'])
def test_a_damaged_step_is_set_aside(address, damage):
  save(address, 1, 2)
  run = Bucket(address)
  name = next(n for n in run.objects('checkpoints/2/state/') if '/d/' in n)
  if damage == 'flipped':
    content = bytearray(run.read(name)[0])
    content[len(content) // 2] ^= 1
    run.write(name, bytes(content))
  elif damage == 'missing':
    run.delete(run.objects(name))
  elif damage == 'manifest':
    run.delete(run.objects('checkpoints/2/manifest.md5'))
  else:
    run.write('checkpoints/2/state/more', b'')
  assert_has(address, 1)
  save(address, 3)
  assert folders(address) == ['1', '3']
  assert folders(address, 'set_aside/') == ['2']
  assert_has(address, 3)


def test_what_a_lower_keep_frees_is_deleted_before_a_save(address, gcs):
  save(address, 1, 2, 3)
  with Checkpoints(keep=1).open(address) as checkpoints:
    assert steps_of(address).find() == [1, 2, 3], 'a start that fails has deleted nothing'
    full = gcs.fail(403, on('POST|PUT', '.*unfinished.*'))
    checkpoints.save(4, weights(4), {'position': 4})
    checkpoints.wait()
    assert steps_of(address).find() == [3], 'the newest step stays'
    full.end()
    step = next(step for step in range(5, 10_000) if checkpoints.is_due(step))
    checkpoints.save(step, weights(step), {'position': step})
  assert folders(address) == [str(step)]


@pytest.mark.parametrize('mark', ['/', '', '_$folder$'])
def test_objects_that_mark_folders_change_nothing(address, gcs, mark):
  address += f'/marked{len(mark)}'

  def mark_folders():
    run = address.removeprefix('gs://bucket/')
    names = {parent for name in gcs.objects() for parent in pathlib.PurePosixPath(name).parents}
    folders = {str(name) for name in names if str(name).startswith(run)}
    for folder in [run, f'{run}/eval', f'{run}/checkpoints', *sorted(folders)]:
      if mark or '/state' not in folder:  # which Orbax would take for the state
        gcs.put(f'{folder}{mark}', b'')

  mark_folders()
  save(address, 1, 2)
  Bucket(address).write('eval/metrics.jsonl', b'{"step": 2}\n')
  for step in (3, 4):
    mark_folders()
    assert_has(address, step - 1)
    assert pathlib.Path(opened(address), 'eval/metrics.jsonl').read_bytes() == b'{"step": 2}\n'
    save(address, step, keep=2)
  assert steps_of(address).find() == [3, 4]
  assert not Bucket(address).objects('set_aside/')
  assert not [name for name in Bucket(address).objects('checkpoints/2/') if mark not in name]
  with open_to_read(address, '3') as checkpoints:
    np.testing.assert_array_equal(checkpoints.restore(target())['w'], weights(3)['w'])


@pytest.mark.invariant(11)
@pytest.mark.parametrize('kept', ['nothing', 'manifest'])
def test_a_step_that_the_lock_does_not_name_does_not_count(address, kept):
  save(address, 1)
  run = Bucket(address)
  run.copy(run.objects('checkpoints/1/'), 'checkpoints/1/', 'checkpoints/2/')
  if kept == 'nothing':
    run.delete(run.objects('checkpoints/2/manifest.md5'))
  assert_has(address, 1)
  save(address, 3)
  assert folders(address) == ['1', '3']
  assert folders(address, 'set_aside/') == ['2'], 'no save of this run has made it'


def test_folders_of_a_user_beside_the_steps_stay_and_are_named(address):
  save(address, 1)
  run, said = Bucket(address), []
  names = ['1.before_i_deleted', '1.unfinished-forensics', '2.deleted']
  for name in names:
    run.write(f'checkpoints/{name}/notes.txt', b'precious')
  with Checkpoints().open(address, say=said.append) as checkpoints:
    checkpoints.save(2, weights(2), {'position': 2})
  assert sorted(folders(address)) == sorted(['1', '2', *names])
  assert any(', '.join(names) in line for line in said)


def test_a_second_trainer_is_refused_until_the_first_has_ended(address):
  with Checkpoints().open(address):
    with pytest.raises(StorageError, match=r'process \d+ on .* is training in gs://'):
      Checkpoints().open(address)
    time.sleep(5 * BEAT)  # which are beats of the first one
    with pytest.raises(StorageError, match='is training in'):
      Checkpoints().open(address)
  Checkpoints().open(address).close()
  first = BucketLock(Bucket(address), process=1)
  with pytest.raises(Unreachable, match='is process 1 of the run in gs://'):
    BucketLock(Bucket(address), process=1)
  first.release()


@pytest.mark.parametrize('change', [{'host': 'another'}, {'process': 2**22 + 1}])
def test_a_lock_without_beats_is_taken_over(address, change):
  save(address, 1)
  run = Bucket(address)
  content = json.loads(run.read('trainer.lock')[0]) | {'ended': False} | change
  run.write('trainer.lock', json.dumps(content).encode())
  save(address, 2)
  assert_has(address, 2)


@pytest.mark.parametrize('change', [{'host': 'another'}, {'process': 2**22 + 1}])
def test_a_lock_with_beats_is_not(address, monkeypatch, change):
  monkeypatch.setattr(lease, 'MISSED', 200)
  save(address, 1)
  run = Bucket(address)
  content = json.loads(run.read('trainer.lock')[0]) | {'ended': False} | change
  over = threading.Event()

  def beat():
    while not over.wait(BEAT):
      content['beat'] += 1
      run.write('trainer.lock', json.dumps(content).encode())

  run.write('trainer.lock', json.dumps(content).encode())
  beat_thread = threading.Thread(target=beat)
  beat_thread.start()
  try:
    with pytest.raises(
      StorageError, match=f'process {content["process"]} on {content["host"]} is training in'
    ):
      Checkpoints().open(address)
  finally:
    over.set()
    beat_thread.join()


@pytest.mark.invariant(11)
def test_a_step_that_the_holder_adds_at_its_end_counts(address, gcs):
  save(address, 1)
  run = Bucket(address)
  content = json.loads(run.read('trainer.lock')[0]) | {'ended': False}
  run.write('trainer.lock', json.dumps(content).encode())
  number = itertools.count()
  reads = on('GET', '.*/trainer.lock')
  third = gcs.hold(lambda call: reads(call) and next(number) == 2, times=1)
  with ThreadPoolExecutor(1) as pool:
    waiting = pool.submit(BucketLock, run)
    assert third.wait(10.0), 'the other one has read the lock, and waits'
    run.write('trainer.lock', json.dumps({**content, 'ended': True, 'steps': [1, 2]}).encode())
    third.end()
    lock = waiting.result()
  assert lock.content['steps'] == [1, 2]
  lock.release()


@pytest.mark.invariant(11)
def test_a_trainer_that_lost_its_lock_adds_and_deletes_nothing(address, gcs, monkeypatch):
  save(address, 1)
  paused = Checkpoints(keep=1).open(address)
  writes = gcs.hold(writes_of('.*/checkpoints/2/manifest.md5'), times=1)
  paused.save(2, weights(2), {'position': 2})
  assert writes.wait(10.0), 'the save has come to its last but one write'
  monkeypatch.setattr(holder, 'has_ended', lambda token: True)  # as from another container, later
  other = Checkpoints().open(address)
  other.save(2, weights(4), {'position': 2})
  other.wait()
  writes.end()
  with pytest.raises(StorageError, match='no longer belongs to this run'):
    paused.close()
  other.close()
  with open_to_read(address) as checkpoints:
    np.testing.assert_array_equal(checkpoints.restore(target())['w'], weights(4)['w'])
  assert folders(address) == ['1', '2']


@pytest.mark.invariant(11)
def test_a_trainer_that_lost_its_lock_sets_nothing_aside(address, gcs, monkeypatch):
  save(address, 1)
  paused = steps_of(address)
  paused.lock()
  paused.open()
  monkeypatch.setattr(holder, 'has_ended', lambda token: True)  # as from another container, later
  with Checkpoints().open(address) as other:
    other.save(2, weights(4), {'position': 2})
    other.wait()
    with pytest.raises(StorageError, match='no longer belongs to this run'):
      paused.delete(())
  assert not Bucket(address).objects('set_aside/')


@pytest.mark.parametrize('fault', ['429', '503', 'tear', 'lose'])
def test_saves_outlive_bursts_of_errors(address, gcs, fault):
  with Checkpoints().open(address) as checkpoints:
    for step in (1, 2):
      if fault.isdecimal():
        gcs.fail(int(fault), times=3)
      else:
        getattr(gcs, fault)(CHANGES, times=3)
      checkpoints.save(step, weights(step), {'position': step})
  assert_has(address, 2)
  assert folders(address) == ['1', '2']


@pytest.mark.parametrize('failing', [on('POST|PUT|DELETE', '.*/checkpoints/.*'), on('.*')])
def test_a_save_that_fails_is_dropped_and_made_again_later(address, gcs, failing):
  said = []
  with Checkpoints().open(address, say=said.append) as checkpoints:
    checkpoints.save(1, weights(1), {'position': 1})
    checkpoints.wait()
    rule = gcs.fail(403, failing)
    checkpoints.save(2, weights(2), {'position': 2})
    checkpoints.wait()
    rule.end()
    step = next(step for step in range(3, 10_000) if checkpoints.is_due(step))
    checkpoints.save(step, weights(step), {'position': step})
  assert any('step 2 could not be saved in gs://' in line for line in said)
  assert_has(address, step)


def test_no_access_is_said_at_once(address, gcs):
  rule = gcs.fail(403, CHANGES)
  with pytest.raises(StorageError, match='cannot be written: access is denied'):
    Checkpoints().open(address)
  rule.end()


@pytest.mark.parametrize('wrong', ['gs://', 'gs://bucket', 'gs://bucket/'])
def test_the_address_of_a_whole_bucket_is_refused(gcs, wrong):
  with pytest.raises(ConfigurationError, match='is not the address of a folder for a run'):
    Bucket(wrong)


@pytest.mark.parametrize(
  'folder',
  ['lr=[1e-3]', 'a*b', 'a?b', 'a#b', 'new\nline', 'x//y', '.', 'x/..', 'gs:', '\udcff', 'a\\b'],
)
def test_an_address_that_libraries_read_otherwise_is_refused(gcs, folder):
  with pytest.raises(ConfigurationError, match='is not the address of a folder for a run'):
    Checkpoints().open(f'gs://bucket/{folder}/run')


@pytest.mark.parametrize('folder', ['a]b', 'a%20b', 'a b', 'é', 'a|b', 'c:d', '~', '{a}'])
def test_other_names_in_an_address_are_taken_literally(address, folder):
  save(f'{address}/{folder}', 1)
  assert_has(f'{address}/{folder}', 1)


def test_other_storage_is_refused(tmp_path):
  with pytest.raises(ConfigurationError, match='may also be in a bucket of Google Cloud Storage'):
    Checkpoints().open('s3://bucket/run')
  assert not pathlib.Path('s3:').exists()
