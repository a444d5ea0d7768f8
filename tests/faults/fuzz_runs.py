"""Altered files of weights, exports, carries and runs."""

from collections.abc import Callable, Iterator
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from faults import fuzz
from faults.fuzz import Kind
from faults.harness import Harness
from faults.table import Trial, fault
from valkyrie.checkpoint import chosen_steps, manifest, state_files, steps
from valkyrie.config import record
from valkyrie.inference import documents
from valkyrie.inference.documents import Document
from valkyrie.inference.reader import Reader
from valkyrie.models import language_model
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.monitoring import html_report, recorded_run
from valkyrie.storage import lease
from valkyrie.weights import huggingface
from valkyrie.weights.source import open_source

ORIGIN = {'weights': '1' * 64, 'tokenizer': 'bytes'}
LLAMA = {
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'head_dim': None,
  'hidden_act': 'silu',
  'hidden_size': 8,
  'intermediate_size': 12,
  'max_position_embeddings': 64,
  'model_type': 'llama',
  'num_attention_heads': 2,
  'num_hidden_layers': 2,
  'num_key_value_heads': 1,
  'quantization_config': None,
  'rms_norm_eps': 1e-5,
  'rope_scaling': {
    'factor': 8.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 32,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': False,
  'vocab_size': 50,
}
LINE = {
  'step': 3,
  'loss': 2.5,
  'tokens': 30,
  'phase': 0,
  'step_seconds': 0.5,
  'learning_rate': 1e-3,
  'tokens_per_second': 5.0,
  'tokens_per_second_per_device': 5.0,
  'tflops_per_second_per_device': 1e-3,
  'bits_per_byte': 1.5,
  'loss_by_position/1': 4.0,
  'loss_by_position/16': 3.0,
  'hooks/sample_1': 'a text',
  'grad_norm': 'NaN',
}
SHORT_LINE = {'step': 3, 'loss': 2.5, 'tokens': 30}


def _tensors() -> dict[str, np.ndarray]:
  return {
    'model.embed_tokens.weight': np.ones((50, 8), np.float32),
    'model.layers.0.mlp.down_proj.weight': np.ones((8, 12), np.float16),
    'model.layers.1.mlp.down_proj.weight': np.ones((8, 12), jnp.bfloat16),
    'model.norm.weight': np.ones(8, np.float64),
    'one': np.array(1, np.int32),
  }


def _folder(name: str, config: dict[str, Any]) -> Callable[[pathlib.Path], pathlib.Path]:
  """Weights in two files with an index; the file `name` is altered."""

  def make(folder: pathlib.Path) -> pathlib.Path:
    file_of = {}
    for number in (1, 2):
      file = f'model-{number:05}-of-00002.safetensors'
      part = dict([*_tensors().items()][number - 1 :: 2])
      save_file(part, folder / file)
      file_of |= dict.fromkeys(part, file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': file_of}))
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'tokenizer.json').write_text('{}')
    return folder / name

  return make


def _read_weights(file: pathlib.Path) -> None:
  """Reads all that a start reads, and every value."""
  source = open_source(str(file.parent))
  if source.config is not None:
    huggingface.gin_text(source.config)
  for tensor in source.tensors.values():
    if tensor.dtype in ('F64', 'F32', 'F16', 'BF16'):  # others are refused by their dtype
      tensor.read((slice(None),) * len(tensor.shape))


@functools.cache
def _reader() -> Reader:
  mixer = functools.partial(GatedDeltaNet, heads=2, key_width=4, value_width=4)
  block = functools.partial(Block, mixers=(mixer,), mlp_width=8)
  make = functools.partial(
    LanguageModel, vocabulary_size=256, d_model=8, layers=1, pattern=(block,)
  )
  return Reader(language_model.transform(make), 16)


def _carry(folder: pathlib.Path) -> pathlib.Path:
  """A document, as after 40 tokens."""
  fresh = _reader().fresh(1)
  kept = {16: fresh, 32: fresh}
  document = Document(*fresh[:3], tokens=np.arange(40, dtype=np.int32), kept=kept)
  documents.save(folder / 'document.safetensors', document, ORIGIN)
  return folder / 'document.safetensors'


def _read_carry(file: pathlib.Path) -> list:
  document = documents.load(file, _reader(), ORIGIN)
  return [
    (leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in map(np.asarray, jax.tree.leaves(document))
  ]


def _run(name: str) -> Callable[[pathlib.Path], pathlib.Path]:
  """What readers look for in the folder of a run; the file `name` is altered."""

  def make(folder: pathlib.Path) -> pathlib.Path:
    # Curves take almost all of the time of a page: all are drawn where their numbers are altered.
    line = LINE if name.endswith('metrics.jsonl') else SHORT_LINE
    lines = ''.join(json.dumps(line | {'step': step}) + '\n' for step in (3, 6, 9))
    step = folder / 'checkpoints/9'
    (folder / 'eval').mkdir()
    (step / 'state').mkdir(parents=True)
    configuration = {'model': 'LanguageModel', 'a': ['@b', 1, None]}
    contents = {
      'metrics.jsonl': lines,
      'eval/metrics.jsonl': lines,
      'refused_steps.jsonl': json.dumps({'step': 7, 'why': 'not finite', 'read': 'a'}) + '\n',
      'eval/data.json': json.dumps({'': '1' * 64}),
      'model_info.txt': '1,234 parameters in 3 arrays\n\ntable',
      'config.json': json.dumps(
        record.sealed(
          {
            'written_by': 'valkyrie',
            'version': '0.3.0',
            'imports': [],
            'macros': {'seed': 1},
            'statements': {'seed': '1', 'LanguageModel.d_model': '16'},
            'bindings': {'LanguageModel.d_model': 16},
          }
        )
      ),
      'checkpoints/9/record.json': json.dumps(
        {
          'position': 90,
          'rows': 4,
          'stretches': [[0, 0, 4]],
          'vocabulary': 'bytes',
          'store': '1' * 64,
          'configuration': configuration,
          'versions': {'jax': '1'},
          'mesh': [['data', 1]],
        }
      ),
      'checkpoints/9/state/a': 'a' * 99,
      'trainer.lock': json.dumps({'host': 'a', 'pid': 3, 'boot': 'b', 'start': 5}),
    }
    for place, content in contents.items():
      (folder / place).write_text(content)
    files = manifest.DiskFiles(step)
    digests = files.digests(['record.json', 'state/a'], manifest.SHA256)
    names = zip(['record.json', 'state/a'], digests, strict=True)
    (step / 'manifest.sha256').write_bytes(manifest.content(9, dict(names)))
    return folder / name

  return make


def _report(depth: int) -> Callable[[pathlib.Path], None]:
  """Draws the page about a run, `depth` folders above the file."""

  def read(file: pathlib.Path) -> None:
    html_report.page([recorded_run.read_run(file.parents[depth])])

  return read


def _read_configuration(file: pathlib.Path) -> list:
  statements = record.read_configuration(file.parent)
  return [(statement.name, repr(statement.parsed.value)) for statement in statements]


def _read_record(file: pathlib.Path) -> None:
  chosen_steps.record(steps.DiskSteps(file.parents[2]), 9)


def _read_manifest(file: pathlib.Path) -> None:
  with state_files.checkpoint_errors('The step cannot be opened'):
    manifest.damage(manifest.DiskFiles(file.parent), 9)


KINDS = {
  'safetensors': Kind(_folder('model-00001-of-00002.safetensors', LLAMA), _read_weights),
  'an index': Kind(_folder('model.safetensors.index.json', LLAMA), _read_weights),
  'config.json of Hugging Face': Kind(_folder('config.json', LLAMA), _read_weights),
  'config.json of an export': Kind(
    _folder('config.json', {'format': 'valkyrie', 'vocabulary': 'bytes'}), _read_weights
  ),
  'tokenizer.json beside weights': Kind(_folder('tokenizer.json', LLAMA), _read_weights),
  'a carry': Kind(_carry, _read_carry, is_hashed=True),
  'metrics.jsonl': Kind(_run('metrics.jsonl'), _report(0)),
  'eval/metrics.jsonl': Kind(_run('eval/metrics.jsonl'), _report(1)),
  'refused_steps.jsonl': Kind(_run('refused_steps.jsonl'), _report(0)),
  'eval/data.json': Kind(_run('eval/data.json'), _report(1)),
  'model_info.txt': Kind(_run('model_info.txt'), _report(0)),
  'config.json in a report': Kind(_run('config.json'), _report(0)),
  'config.json of a run': Kind(_run('config.json'), _read_configuration, is_hashed=True),
  'record.json': Kind(_run('checkpoints/9/record.json'), _read_record),
  'manifest.sha256': Kind(
    _run('checkpoints/9/manifest.sha256'),
    _read_manifest,
  ),
  'trainer.lock': Kind(_run('trainer.lock'), lambda file: lease.lock_holder(file.parent)),
}


@fault(
  'an altered file of weights, an export, a carry or a run, or a pipe or device in its place',
  'is read, or refused in one sentence, within 20 seconds and 2 GiB',
  full=300,
)
def fuzzed_runs(harness: Harness, times: int) -> Iterator[Trial]:
  yield from fuzz.trials('faults.fuzz_runs', KINDS, 0, times)
