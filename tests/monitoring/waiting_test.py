"""What takes long says that it goes on: each run mode, and the save of a run."""

import contextlib
import re
import threading
import time
import types

import pytest

from valkyrie.inference.export import export
from valkyrie.inference.infer import infer
from valkyrie.models import language_model
from valkyrie.monitoring import waiting
from valkyrie.monitoring.waiting import doing
from valkyrie.run import observers
from valkyrie.run.evaluate import evaluate


class OverError(Exception):
  """What was waited for has been said."""


@pytest.fixture
def until_said(monkeypatch, capsys):
  """Makes a function that takes as long as it takes until standard error has a line."""
  monkeypatch.setattr(waiting, 'EVERY', 0.01)

  def make(line):
    def wait(*_, **__):
      end, said = time.monotonic() + 60, ''
      while line not in said:
        assert time.monotonic() < end, said
        said += capsys.readouterr().err
        time.sleep(0.01)
      raise OverError

    return wait

  return make


def test_what_takes_long_says_so_and_what_does_not_says_nothing():
  said = []
  second = threading.Event()

  def say(line):
    said.append(line)
    if len(said) == 2:
      second.set()

  with doing('compiling', say, every=0.001):
    assert second.wait(60)
  number = len(said)
  assert all(re.fullmatch(r'still compiling \(\d+ s\)', line) for line in said)
  with pytest.raises(ValueError, match='mine'), doing('something short', say):
    raise ValueError('mine')
  assert len(said) == number


def test_the_modes_that_read_a_checkpoint_say_so(until_said, tmp_path):
  opened = until_said('still reading the checkpoint (')
  with pytest.raises(OverError):
    infer('run', prompt='a', opened=opened, seed=0)
  with pytest.raises(OverError):
    export('run', str(tmp_path / 'exported'), opened=opened, model=None)


def test_prompts_and_answers_say_so(until_said):
  loaded = types.SimpleNamespace(tokenizer=None)

  def stream(*_, **__):
    until_said('still reading the prompt (')()
    yield ''

  loaded.stream = stream
  with pytest.raises(OverError):
    infer('run', prompt='a', opened=lambda *_: loaded, seed=0)
  loaded.generate = until_said('still continuing prompts 1 to 1 of 1 (')
  with pytest.raises(OverError):
    infer('run', prompt='a', samples=2, opened=lambda *_: loaded, seed=0)


def test_an_evaluation_says_what_it_prepares(until_said, monkeypatch):
  monkeypatch.setattr(language_model, 'transform', lambda model: model)
  with pytest.raises(OverError):
    evaluate(
      'run',
      model=None,
      partitioner=lambda: None,
      evaluator=until_said('still opening the validation data ('),
      last_step=1,
    )


@pytest.mark.parametrize('name', ['save', 'save_now'])
def test_a_save_that_takes_long_says_so(monkeypatch, name):
  monkeypatch.setattr(waiting, 'EVERY', 0.01)
  said = threading.Event()

  def say(line):
    if line.startswith('still saving step 8 ('):
      said.set()

  def save(*_):
    assert said.wait(60)

  directory = types.SimpleNamespace(**{name: save})
  run = types.SimpleNamespace(step=8, start=0, record=dict, state=None)
  log = types.SimpleNamespace(flush=lambda: None, untimed=contextlib.nullcontext)
  saver = observers.Saver(run, directory, log, say)
  {'save': saver, 'save_now': saver.save_now}[name]()
  assert said.is_set()
