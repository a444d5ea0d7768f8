"""scripts/compare: fair, continued after a stop, and its tables and verdicts are right.

Its trials are ordinary runs, whose resumes other tests hold; here most are of a small program.
"""

import json
import math
import pathlib
import re
import shlex
import sys

import learn_validation
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.command_line import parse_command_line
from valkyrie.config.load import load_gin
from valkyrie.data import store_writer
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.data.token_store import TokenStore
from valkyrie.errors import ConfigurationError, ValkyrieError
from valkyrie.lab.comparison import compare, findings, trials, verdicts
from valkyrie.lab.comparison.findings import Outcome
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring.recorded_run import Run

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A program of someone else: a step reads 64 tokens. Its bits (of rate and seed) and the seconds of
# a step are its arguments. It stops once, fails or diverges where they say so.
PROGRAM = r"""
import json, math, pathlib, sys
bits, seconds = eval(sys.argv[1]), eval(sys.argv[2])
flags = dict(flag.split('=', 1) for flag in sys.argv[3:])
rate, seed = float(flags.get('--gin.learning_rate', 0)), int(flags.get('--gin.seed', 0))
steps, folder = int(flags['--gin.train_steps']), pathlib.Path(flags['--model_dir'])
(folder / 'eval').mkdir(parents=True, exist_ok=True)
with (folder.parents[1] / 'started').open('a') as started:
  print(f'{folder.parent.name}/{folder.name} of {steps}', file=started)
result = 4.0 if folder.name == 'rehearsal' else bits(rate, seed, folder)
if isinstance(result, str):
  sys.exit(int(result))
speed = {'step_seconds': seconds(folder.name), 'tokens_per_second_per_device': 128.0}
speed |= {'tflops_per_second_per_device': 0.002}
lines = [{'step': n, 'tokens': 64 * n, 'loss': 3.0, **speed} for n in range(1, steps + 1)]
nats = result * math.log(2)
bins = (1, 2, 4) if 'brief' in folder.parent.name else (1, 2, 4, 8)
by_position = {f'loss_by_position/{p}': 9.0 if p < 4 else nats for p in bins}
by_position |= {f'targets_by_position/{p}': 1000.0 * p for p in bins}
last = {'step': steps, 'loss': nats, 'bits_per_token': result, 'bits_per_byte': result / 2}
for name, found in (('metrics', lines), ('eval/metrics', [{**last, **by_position}])):
  (folder / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in found))
"""


@pytest.fixture
def common(tmp_path):
  """Flags that all comparisons here have."""
  file = tmp_path / 'toy.gin'
  file.write_text(tiny_run.gin_text(tmp_path))
  (tmp_path / 'program.py').write_text(PROGRAM)
  return [f'--gin_file={file}', f'--results={tmp_path / "results"}', '--context=4']


def peer(tmp_path, name, bits, seconds='0.5'):
  """A candidate whose trials have so many bits per token, and steps of so many seconds."""
  program = [sys.executable, str(tmp_path / 'program.py')]
  functions = [f'lambda rate, seed, at: {bits}', f'lambda title: {seconds}']
  return f'--peer={name}: {shlex.join(program + functions)}'


def started(tmp_path):
  return (tmp_path / 'results' / 'started').read_text().splitlines()


def test_a_comparison_by_two_budgets(common, tmp_path, capsys):
  arguments = [
    *common,
    peer(tmp_path, 'good', '2 + 100 * rate + 0.02 * seed'),
    peer(tmp_path, 'bad', '6 - 100 * rate if rate < 4e-3 else "76"'),
    '--over=learning_rate=1e-3,3e-3,9e-3',
    '--seconds=10',
    '--tokens=320',
    '--seeds=0,1',
  ]
  assert compare.main(arguments) == 0
  said = capsys.readouterr().out
  # The best rate of each: 2.1 and 2.12 bits per token, 5.7 and 5.7; half of them per byte.
  assert (
    'good is better than bad by 1.795 bits per byte; the seeds of one candidate differ by' in said
  )
  (good,) = re.findall(r'^\| good \| 0\.001 .*1,280.*$', said, re.M)
  assert good.split(' | ')[3:] == ['1,280', '128', '10.0', '0.02', '1.055', '1.050 to 1.060 |']
  assert '| bad | 2.950 | 2.850 | inf |' in said  # by rate, with the first seed
  assert '| candidate | 4 to 7 | 8 to 15 |\n| --- | --- | --- |\n| good | 1.055 | 1.055 |' in said
  by_tokens = said.partition('## The same 320 tokens')[2]
  assert '| good | 0.001 |  | 320 | 128 | 2.5 |' in by_tokens
  assert '0.009' not in by_tokens  # only the budget that comes first tries the rates

  done = started(tmp_path)
  # A rehearsal and the trial for which it counts steps see the same moments of the machine.
  assert done[:2] == [
    'good/rehearsal of 40',
    'good/seconds=10,learning_rate=0.001,seed=0 of 20',
  ]
  assert done[2] == 'bad/rehearsal of 40'
  assert done[-1] == 'bad/tokens=320,learning_rate=0.003,seed=1 of 5'
  assert len(done) == len({*done}) == 2 * (1 + 3 + 1 + 2)
  page = (tmp_path / 'results/compare.html').read_text()
  assert page.count('<img') > 4 and 'good is better than bad' in page
  # Again: nothing is trained but what diverged, which no file tells.
  assert compare.main(arguments) == 0
  assert started(tmp_path)[len(done) :] == ['bad/seconds=10,learning_rate=0.009,seed=0 of 20']
  assert capsys.readouterr().out == said


def test_a_trial_that_took_another_time_than_planned_is_repeated(common, tmp_path, capsys):
  steady = peer(tmp_path, 'steady', '3.0')
  busy = peer(tmp_path, 'busy', '2.0', '1.0 if title == "rehearsal" else 0.5')
  arguments = [*common, steady, busy, '--seconds=10', '--seeds=0,1']
  assert compare.main(arguments) == 0
  said = capsys.readouterr()
  assert 'It took 5 of 10 seconds, so it is repeated with other steps.' in said.err
  done = [each for each in started(tmp_path) if each.startswith('busy')]
  assert done == [
    'busy/rehearsal of 40',
    'busy/seconds=10,seed=0 of 10',
    'busy/seconds=10,seed=0,repeated of 20',
    'busy/seconds=10,seed=1 of 20',  # the newest run gives the pace
  ]
  assert 'busy is better than steady by 0.500 bits per byte' in said.out
  assert 'Not all trained' not in said.out
  assert compare.main(arguments) == 0
  assert [each for each in started(tmp_path) if each.startswith('busy')] == done
  assert capsys.readouterr().out == said.out


def test_a_longer_training_wins_nothing(common, tmp_path, capsys):
  steady = peer(tmp_path, 'steady', '3.0')
  faster_and_faster = '0.5 if title == "rehearsal" else 0.05 if "repeated" in title else 0.1'
  hasty = peer(tmp_path, 'hasty', '4.0', faster_and_faster)
  assert compare.main([*common, steady, hasty, '--seconds=10', '--seeds=0']) == 0
  said = capsys.readouterr().out
  assert 'steady and hasty: no verdict. steady is ahead by 0.500 bits per byte, but ' in said
  assert 'steady trained for 10.0 seconds, hasty for 5.0 seconds' in said
  assert 'Not all trained for 10.0 seconds: hasty for 5.0 seconds.' in said


def test_unequal_amounts_are_part_of_the_verdict():
  scores = {'a': [2.0, 2.0], 'b': [2.5, 2.5], 'c': [2.6, 2.6], 'd': [2.7, 2.7]}
  amounts = {'a': 7.7, 'b': 6.4, 'c': 7.2, 'd': 12.0}
  said = verdicts.verdict(scores, 'bits per byte', 'seconds', amounts)
  assert said[0].startswith('a and b: no verdict. a is ahead by 0.500')
  assert said[1] == (
    'a is better than c by 0.600 bits per byte; the seeds of one candidate differ by at most 0.000.'
  )
  assert said[2].endswith('The amounts differ: a trained for 7.7 seconds, d for 12.0 seconds.')
  assert said[2].startswith('a is better than d by 0.700')


def test_positions_of_a_handful_of_targets_are_left_out():
  counts = {1: 900, 2: 256, 4: 255, 8: 3}
  last = {'loss': 1.0, 'bits_per_token': 1.0, 'bits_per_byte': 1.0, 'step': 1}
  for position, count in counts.items():
    last |= {f'loss_by_position/{position}': 1.0, f'targets_by_position/{position}': count}
  lines = [{'step': 1, 'tokens': 64, 'seconds': 0.5, 'flops': None}]
  found = [Outcome('a', {}, 0, Run('a', lines, [last], [], '', {}, '', (), ()))]
  text = findings.markdown(findings.findings('tokens', 64, found, found, 1))
  assert '| candidate | 1 | 2 to 3 |\n' in text
  assert 'Positions with fewer than 256 targets are left out: 4 to 7, 8 to 15.' in text


def test_it_continues_after_a_stop_and_leaves_out_what_fails(common, tmp_path, capsys):
  once = '2.0 if (at / "stopped").exists() else (at / "stopped").touch() or "75"'
  arguments = [*common, peer(tmp_path, 'stopped', once), peer(tmp_path, 'broken', '"3"')]
  arguments += [peer(tmp_path, 'sound', '3.0'), '--tokens=640', '--gin.learning_rate=1e-3']
  assert compare.main([*arguments, '--seeds=0,1']) == 75
  assert 'asked to stop, and saved. Run the same command again.' in capsys.readouterr().err
  assert compare.main([*arguments, '--seeds=0']) == 1
  said = capsys.readouterr()
  assert said.err.count('broken is left out: exit code 3') == 1
  _, command = said.err.split('when the trial is done:\n  ')
  *_, last_flag = shlex.split(command.splitlines()[0])
  assert last_flag == f'--model_dir={tmp_path}/results/broken/tokens=640,seed=0'
  assert 'stopped is ahead of sound by 0.500 bits per byte with one seed' in said.out
  assert '| broken' not in said.out
  trial = 'stopped/tokens=640,seed=0 of 10'
  assert started(tmp_path).count(trial) == 2
  assert started(tmp_path)[-1] == 'sound/tokens=640,seed=0 of 10'


def test_a_position_that_a_candidate_never_reads_is_left_empty(common, tmp_path, capsys):
  candidates = [peer(tmp_path, 'whole', '3.0'), peer(tmp_path, 'brief', '4.0')]
  assert compare.main([*common, *candidates, '--tokens=640', '--seeds=0']) == 0
  said = capsys.readouterr().out
  assert '| whole | 1.500 | 1.500 |' in said and '| brief | 2.000 |  |' in said


def test_results_of_another_program_are_refused(common, tmp_path, capsys):
  arguments = [*common, '--tokens=640', '--gin.learning_rate=1e-3', '--seeds=0']
  assert compare.main([*arguments, peer(tmp_path, 'a', '3.0')]) == 0
  assert compare.main([*arguments, peer(tmp_path, 'a', '2.0')]) == 78
  assert 'rehearsal has a run with program = ' in capsys.readouterr().err
  assert compare.main([*arguments, '--candidate=a']) == 78
  assert "which is 'valkyrie.main' in this comparison" in capsys.readouterr().err
  assert len(started(tmp_path)) == 2


def test_a_context_that_no_target_has_is_refused_after_the_first_run(common, tmp_path, capsys):
  arguments = [*common, peer(tmp_path, 'a', '3.0'), '--tokens=64', '--context=16']
  assert compare.main(arguments) == 65
  assert 'no target of the validation split has 16 tokens before it' in capsys.readouterr().err
  assert started(tmp_path) == ['a/rehearsal of 40']


def test_warmup_phases_and_evaluations_keep_their_shares(common, tmp_path):
  text = tiny_run.gin_text(tmp_path, curriculum='short_then_long')
  (tmp_path / 'toy.gin').write_text(text.replace('train_steps = 2', 'train_steps = 20'))
  flags = compare.parse_flags(
    [
      *common,
      '--tokens=1',
      '--gin.eval_every=5',
      '--gin.short_steps=8',
      '--candidate=a: warmup_steps = 2',
    ]
  )
  trial = compare.make_trial(flags, flags.candidates[0], 't', 200, {'seed': 7, 'S5.horizon': '9.0'})
  found = {name: trial.bindings[name] for name in (
    'train.train_steps', 'Optimizer.train_steps', 'Optimizer.warmup_steps', 'train.eval_every',
    'short/Phase.steps', 'train.log_every', 'StepSettings.seed', 'S5.horizon',
  )}  # fmt: skip
  assert [*found.values()] == [200, 200, 20, 50, 80, 1, 7, 9.0]
  assert (tmp_path / 'results/a/candidate.gin').read_text() == 'warmup_steps = 2\n'


def test_a_trial_is_a_run_and_is_trained_once(common, tmp_path):
  tiny_run.write_stores(tmp_path, 'letters', 'abcd')
  arguments = [*common, '--candidate=thin: Block.mlp_width = 16', '--tokens=512']
  flags = compare.parse_flags(arguments)
  trial = compare.make_trial(flags, flags.candidates[0], 'trial', 2, {'seed': 1})
  assert trials.recorded(trial) is None
  assert trial.program == trials.VALKYRIE
  main.run(trial.flags)
  run = trials.recorded(trial)
  last = tiny_run.metrics(trial.folder, 'eval')[2]
  assert findings.bits(run, 1) == pytest.approx(last['bits_per_byte'], rel=1e-6)
  weights = {p: last[f'targets_by_position/{p}'] for p in (16, 32)}
  nats = sum(weight * last[f'loss_by_position/{p}'] for p, weight in weights.items())
  per_byte = last['bits_per_byte'] / last['loss']
  assert findings.bits(run, 16) == pytest.approx(nats / sum(weights.values()) * per_byte)
  assert sum(last[f'targets_by_position/{2**k}'] for k in range(6)) == last['targets']
  with pytest.raises(ConfigurationError, match=r'trial has a run with Block\.mlp_width = 16'):
    flags = compare.parse_flags([*arguments[:-2], '--candidate=thin', '--tokens=512'])
    trials.recorded(compare.make_trial(flags, flags.candidates[0], 'trial', 2, {'seed': 1}))
  with pytest.raises(ValkyrieError, match='no target of the validation split has 64'):
    findings.bits(run, 64)


def test_the_cost_of_a_step_is_a_median_by_phase():
  seconds = [1.0, 1.0, 9.0, 4.0, 4.0, 5.0, 4.0]  # one slow moment in each phase
  lines = [
    {'step': 2 * n, 'tokens': 100 * n, 'flops': None, 'step_seconds': s, 'phase': int(n > 3)}
    for n, s in enumerate(seconds, 1)
  ]
  run = Run('', lines, [], [], '', {}, '', (), ())
  assert trials.costs(run) == {'seconds': (3 * 1.0 + 4 * 4.0) / 7, 'tokens': 50, 'flops': None}


def test_a_verdict_weighs_the_difference_against_the_seeds():
  scores = {'a': [2.0, 2.012], 'b': [2.03, 2.04], 'c': [2.0, 2.1], 'd': [math.inf, 2.0]}
  said = verdicts.verdict(scores, 'bits per byte')
  assert said[0] == (
    'a is better than b by 0.029 bits per byte; the seeds of one candidate differ by at most 0.012.'
  )
  assert said[1] == (
    'a and c: no difference that the seeds do not explain. Their means differ by 0.044 bits per '
    'byte, the seeds of one candidate by up to 0.100.'
  )
  assert said[2] == 'd diverged.'


def test_other_tokenizers_are_mentioned():
  def outcome(name, tokens):
    last = {'loss': 1.0, 'bits_per_token': 1.4, 'bits_per_byte': 1.4, 'step': 1}
    last |= {'loss_by_position/1': 1.0, 'targets_by_position/1': 2.0}
    lines = [{'step': 1, 'tokens': 64, 'seconds': 0.5, 'flops': None}]
    return Outcome(name, {}, 0, Run(name, lines, [last], [], '', {}, '', tokens, ()))

  note = 'The tokenizers or the validation data differ'
  for others, expected in ((('x',), False), (('y',), True)):
    found = [outcome('a', ('x',)), outcome('b', others)]
    text = findings.markdown(findings.findings('tokens', 64, found, found, 1))
    assert (note in text) == expected
    assert text.count('| 1.443 | 1.443 to 1.443 |') == 2  # 1 / ln 2


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    ([], 'pass --seconds=S, --tokens=T or --flops=F'),
    (['--seconds=-1'], 'more than 0'),
    (['--tokens=9', '--context=500'], 'expected a power of 2'),
    (['--tokens=9', '--seeds=a'], 'expected numbers separated by commas'),
    (['--tokens=9', '--over=S5.horizon'], 'expected NAME=VALUE,VALUE'),
    (['--tokens=9', '--over=S5.horizon=1,('], 'expected NAME=VALUE,VALUE'),
    (['--tokens=9', '--candidate=a', '--only=b'], 'the candidates are a'),
    (['--tokens=9', '--candidate=a', '--candidate=a'], "candidate 'a'"),
    (['--tokens=9', '--candidate=../a'], "candidate '../a'"),
    (['--tokens=9', '--sedes=1'], '--sedes=1: unknown flag'),
  ],
)
def test_wrong_flags_are_refused(common, arguments, said, capsys):
  with pytest.raises(SystemExit, match='2'):
    compare.main([*common[:2], *arguments])
  assert said in capsys.readouterr().err


def test_a_wrong_candidate_is_refused_before_anything_is_trained(common, tmp_path, capsys):
  sound = peer(tmp_path, 'sound', '3.0')
  wrong = '--candidate=wide: Block.mlp_widht = 8'
  assert compare.main([*common, sound, wrong, '--tokens=64']) == 78
  assert "no parameter 'mlp_widht'" in capsys.readouterr().err
  assert compare.main([*common, sound, '--over=S5.horizon="far"', '--tokens=64']) == 78
  assert compare.main(['--gin_file=gin/models/toy.gin', '--tokens=64', common[1]]) == 78
  assert 'set no train_steps' in capsys.readouterr().err
  of_all = '--candidate=mine: S5.horizon = 9.0; warmup_steps = 2'
  for flag in ('--gin.S5.horizon=8.0', '--over=S5.horizon=7.0,8.0'):
    assert compare.main([*common, of_all, flag, '--tokens=64']) == 78
    assert 'The candidate mine sets S5.horizon, but' in capsys.readouterr().err
  assert compare.main([*common, '--candidate=mine: seed = 3', '--tokens=64']) == 78
  assert not (tmp_path / 'results/sound').exists()


def test_files_of_others_stay(common, tmp_path, capsys):
  report, statements = tmp_path / 'results/compare.md', tmp_path / 'results/mine/candidate.gin'
  statements.parent.mkdir(parents=True)
  report.write_text('of a user')
  statements.write_text('of a user')
  mine = '--candidate=mine: S5.horizon = 9.0; seed = 3'
  assert compare.main([*common, mine, '--tokens=64']) == 74
  assert f'{report} exists, but' in capsys.readouterr().err
  assert report.read_text() == statements.read_text() == 'of a user'
  report.rename(tmp_path / 'moved.md')  # the advice
  assert compare.main([*common, mine, '--tokens=64']) == 78  # it sets the seed
  assert statements.with_name('candidate.gin.1').read_text() == 'of a user'


def test_the_arguments_of_a_text(common, tmp_path, capsys):
  folder = tmp_path / "it's mine"
  folder.mkdir()
  (folder / 'one.txt').write_text('a line of text.\n' * 1000)
  flags = compare.parse_flags([*common, f'--text={folder}', '--tokens=9', '--gin.held_out=0.2'])
  compare.add_text(flags)
  assert flags.gin_file[1:] == ['gin/data/text.gin']
  values = dict(flag.removeprefix('--gin.').split('=', 1) for flag in flags.gin)
  assert values['text'] == repr(str(folder)) and values['held_out'] == '0.2'
  assert 'They are cut into pieces of at most ' in capsys.readouterr().err
  assert [candidate.name for candidate in flags.candidates] == ['toy']


def test_the_commands_of_the_pages_name_what_exists(capsys):
  pages = ('compare', 'learning', 'results/learning')
  texts = [(ROOT / 'docs' / f'{page}.md').read_text() for page in pages]
  joined = '\n'.join(texts).replace('\\\n', '')
  commands = re.findall(r'^ +(?:NPROC=1 |OMP_NUM_THREADS=1 )*scripts/compare (.*)', joined, re.M)
  assert len(commands) >= 7
  for command in commands:
    arguments = shlex.split(command.replace('@scripts', f'@{ROOT}/scripts'))
    assert compare.parse_flags(arguments).candidates, command


def variants():
  files = ('screen.args', 'widths.args', 'words.args', 'learn.args')
  for flags in (
    compare.parse_flags([f'@{ROOT}/scripts/experiments/{file}', '--tokens=9']) for file in files
  ):
    yield from (pytest.param(flags, each, id=each.name) for each in flags.candidates)


@pytest.mark.parametrize(('flags', 'candidate'), [*variants()])
def test_every_shipped_candidate_reads_the_tokens_of_a_step(flags, candidate, tmp_path):
  flags.results = tmp_path
  # The tokenizer of a run is made by its first command. Bytes need no file.
  values = {'learning_rate': '1e-3', 'vocabulary': "'bytes'"}
  trial = compare.make_trial(flags, candidate, 'trial', 100, values)
  names = ('StepSettings.batch_size', 'Phase.chunk_size', 'Phase.chunks')
  assert math.prod(trial.bindings[name] for name in names) == 1024
  flags, gin_flags = parse_command_line(trial.flags)
  imports = flags.gin_allow_import
  load_gin(flags.gin_file, gin_flags, allowed_imports=imports, modules=main.CONFIGURABLE_MODULES)
  assert language_model.transform(LanguageModel).about.forward_flops > 0


def write_store(data_dir: pathlib.Path, lengths) -> TokenStore:
  """A store of random bytes; the last token of a document is EOS."""
  selection = Selection('letters', 'validation', tiny_run.BYTES)
  path, random = store_path(selection, str(data_dir)), np.random.default_rng(0)
  documents = [random.integers(3, 259, n - 1) for n in lengths]
  store_writer.StoreWriter(path, selection, {}, shards=1).write(
    lambda shard: [store_writer.Document(tokens, len(tokens)) for tokens in documents]
  )
  return TokenStore.open(path, tiny_run.BYTES)


@pytest.mark.parametrize('size', [32, 64, 256, 1024])
def test_peers_score_each_target_once_with_the_context_of_their_windows(size, tmp_path):
  lengths = (20, 513, 600, 1024, 1025, 1536, 1537, 4000)
  for length in lengths:
    scored = []
    for begin, first, end in learn_validation.windows(length, size):
      assert begin + (size // 2 if begin else 1) <= first < end <= begin + size
      scored += range(first, end)
    assert scored == list(range(1, length))
  store = write_store(tmp_path, lengths)
  assert store.lengths.tolist() == [*lengths]

  def nats(rows):
    return rows[:, 1:] % 7 + rows[:, :-1] / 1000

  found = learn_validation.validation(store, 4, size, nats)
  losses, weights = np.zeros((2, 31))
  for number, length in enumerate(lengths):
    tokens = store.read(*np.array([[number], [0], [length]])).astype(float)
    for target in range(1, length):
      losses[target.bit_length() - 1] += tokens[target] % 7 + tokens[target - 1] / 1000
      weights[target.bit_length() - 1] += 1
  assert found['targets'] == sum(lengths) - len(lengths)
  assert found['loss'] == pytest.approx(losses.sum() / weights.sum())
  text_bytes = sum(lengths) - len(lengths)
  assert found['bits_per_byte'] == pytest.approx(
    found['loss'] / math.log(2) * sum(lengths) / text_bytes
  )
  for k in range(12):
    assert found[f'loss_by_position/{2**k}'] == pytest.approx(losses[k] / weights[k])
    assert found[f'targets_by_position/{2**k}'] == weights[k]


def test_training_rows_of_peers_are_whole_batches_of_the_store(tmp_path):
  store = write_store(tmp_path, (3000, 2500, 900))
  rows = learn_validation.training_rows(store, 2, 1024, seed=5)
  batches = [next(rows) for _ in range(4)]
  assert {batch.shape for batch in batches} == {(2, 1025)}
  again = learn_validation.training_rows(store, 2, 1024, seed=5)
  np.testing.assert_array_equal(batches, [next(again) for _ in range(4)])
  text = json.dumps(store.read(*np.array([[0, 1, 2], [0, 0, 0], store.lengths])).tolist())[1:-1]
  inside = [json.dumps(row[10:20].tolist())[1:-1] in text for row in np.concatenate(batches)]
  assert sum(inside) >= len(inside) - 3
