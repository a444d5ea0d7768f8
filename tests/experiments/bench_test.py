"""scripts/experiment bench: what it says adds up. How fast anything is, is not tested."""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIANTS = ['the model', 'GatedRecurrence', 'LongformerAttention', 'no mixers']
# Runs bench.py as a script, on a machine that has none of what only data and logging need. Products
# of large matrices would take most of the time.
BARE = """
import pathlib, sys
for package in ('tensorflow', 'seqio', 'clu', 'orbax', 'tensorboard'):
  sys.modules[package] = None
sys.path.insert(0, 'scripts/experiments')
program = pathlib.Path('scripts/experiments/bench.py').read_text()
exec(program.replace('MATRIX = 2048', 'MATRIX = 64'))
"""
# The layers and blocks of the default model, in programs that are compiled and run sooner.
SMALL = (
  '--gin.LanguageModel.d_model=32', '--gin.LanguageModel.unroll=1',
  '--gin.LanguageModel.remat_policy=None', '--gin.Block.mlp_width=48',
  '--gin.GatedRecurrence.width=32', '--gin.LongformerAttention.head_width=8',
)  # fmt: skip


def test_bench_prints_operations_that_add_up_and_writes_every_number(tmp_path):
  file = tmp_path / 'bench.jsonl'
  command = [sys.executable, '-c', BARE, '--rows=2', '--tokens=32', '--repeats=2', f'--json={file}']
  command += SMALL
  one_device = f'{os.environ["XLA_FLAGS"]} --xla_force_host_platform_device_count=1'
  environment = {**os.environ, 'XLA_FLAGS': one_device}
  done = subprocess.run(
    command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  records = [json.loads(line) for line in file.read_text().splitlines()]
  assert [record['name'] for record in records] == ['machine', 'peak', *VARIANTS, 'parts', 'loop']
  _, peak, *variants, parts, loop = records
  assert peak['size'] == 64

  printed = dict(re.findall(r'^  ([^:\n]+): (3 x .*)$', done.stdout, re.MULTILINE))
  for record in variants:
    # Left as it is printed but for the names of the terms: 3 * (2 * (1 + 2) + 3) = 27.
    said, total = printed[record['name']].split(' = ')
    summed = eval(re.sub(r'[A-Za-z]\w+ ', '', said.replace(' x ', ' * ')))
    assert summed == int(total) == record['train_flops_per_token']
    assert record['train_flops_per_token'] == 3 * record['forward_flops_per_token']
    assert all(term in done.stdout for term in record['forward']['words'].values())
  both, recurrent, attention, neither = (record['parameters'] for record in variants)
  assert 3 * (both - neither) == 2 * (recurrent - neither) + attention - neither
  assert min(attention, recurrent) > neither
  names = ['GatedRecurrence, 4 of 6 layers', 'LongformerAttention, 2 of 6 layers', 'the rest']
  assert list(parts['seconds']) == names
  assert all(name in done.stdout for name in names)

  spreads = [peak['flops_per_second'], loop['step_seconds'], loop['times_bare_step']]
  for record in variants:
    names = ('step_seconds', 'tokens_per_second', 'flops_per_second', 'share_of_peak')
    spreads += [record[name] for name in names]
    tokens = record['step_seconds']['min'] * record['tokens_per_second']['max']
    assert round(tokens, 6) == 64
  assert all(0 < s['min'] <= s['median'] <= s['max'] for s in spreads)
