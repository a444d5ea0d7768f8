"""Steps that were altered, with manifests that fit: refused with a message, whatever they hold."""

import jax
import jax.numpy as jnp
import pytest

from valkyrie.checkpoint import manifest, steps
from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.errors import StorageError
from valkyrie.weights import source


@pytest.fixture
def run(tmp_path):
  """A run with the steps 2 and 3."""
  with Checkpoints().open(tmp_path / 'run') as checkpoints:
    for step in (2, 3):
      checkpoints.save(step, {'w': jnp.ones(300)}, {'position': step})
  return tmp_path / 'run'


def target():
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {'w': jax.ShapeDtypeStruct((300,), jnp.float32, sharding=sharding)}


def sealed(step):
  """Writes the manifest of an altered step."""
  (step / 'manifest.sha256').unlink()
  steps.write_manifest(step, int(step.name))


@pytest.mark.parametrize(
  'name, content',
  [
    ('state/_METADATA', b'[1]'),
    ('state/_METADATA', b'{"tree_'),
    ('state/_sharding', b'[1]'),
    ('state/array_metadatas/process_0', b'[1]'),
    ('state/manifest.ocdbt', bytes(99)),
    ('record.json', b'[1]'),
    ('record.json', b'[' * 10**6),
  ],
)
def test_files_of_another_form_with_a_manifest_are_a_storage_error(run, name, content):
  (run / 'checkpoints/3' / name).write_bytes(content)
  sealed(run / 'checkpoints/3')
  with open_to_read(run) as checkpoints:
    with pytest.raises(StorageError, match='cannot be read') as refusal:
      checkpoints.restore(target())
      checkpoints.latest_record()
    assert '/proc/' not in str(refusal.value)
    assert checkpoints.latest_step() == 3


def test_arrays_without_a_shape_are_a_storage_error(run):
  file = run / 'checkpoints/3/state/_METADATA'
  file.write_text(file.read_text().replace('jax.Array', 'string'))
  sealed(run / 'checkpoints/3')
  with open_to_read(run) as checkpoints:
    with pytest.raises(StorageError, match=r"cannot be read .*has no attribute 'shape'"):
      checkpoints.restore(target())
    with pytest.raises(StorageError, match='cannot be read'):
      checkpoints.restore_evaluated()


def test_odd_lines_of_a_manifest_are_damage(run):
  text = manifest.content(3, {'\0\n': 'x'})
  (run / 'checkpoints/3/manifest.sha256').write_bytes(text)
  with open_to_read(run) as checkpoints:
    assert checkpoints.latest_step() == 2
  with pytest.raises(StorageError, match='has other lines than digests and names'):
    open_to_read(run, '3')


@pytest.mark.parametrize('folder', ['state', 'state/d'])
def test_a_link_for_a_folder_is_found(run, folder):
  place = run / 'checkpoints/3'
  (place / folder).rename(run / 'elsewhere')
  kept = [f for f in manifest.DiskFiles(place).names() if not f.startswith('manifest')]
  (place / folder).symlink_to(run / 'elsewhere')
  digests = manifest.DiskFiles(place).digests(kept, manifest.SHA256)
  text = manifest.content(3, dict(zip(kept, digests, strict=True)))
  (place / 'manifest.sha256').write_bytes(text)
  with pytest.raises(StorageError, match=rf'{folder} is not in manifest\.sha256'):
    open_to_read(run, '3')


def test_the_step_of_something_else_has_no_weights(run, tmp_path):
  with pytest.raises(StorageError, match=r"cannot be read \(KeyError: 'params'\)"):
    source.open_source(str(run))
  with Checkpoints().open(tmp_path / 'other') as checkpoints:
    checkpoints.save(1, [jnp.ones(3)], {})
  with pytest.raises(StorageError, match='cannot be read'):
    source.open_source(str(tmp_path / 'other'))


def test_weights_of_a_record_without_a_vocabulary_have_none(tmp_path):
  with Checkpoints().open(tmp_path) as checkpoints:
    checkpoints.save(1, {'params': {'model': {'w': jnp.ones(3)}}}, {})
  loaded = source.open_source(str(tmp_path))
  assert len(loaded.tensors) == 1 and loaded.vocabularies == ['None']
