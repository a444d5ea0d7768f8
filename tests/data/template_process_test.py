"""Templates that loop, allocate or fail: in a process of their own, and named."""

import json
import os
import signal

import pytest

from valkyrie.data import template_process
from valkyrie.data.template_process import TemplateProcess

pytest.importorskip('jinja2', reason="only pip install '.[hf]' or '.[test]' installs jinja2")
TALK = [{'role': 'user', 'content': 'Hello é \ud83d', 'weight': 0}]
LONG = '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'
DOUBLE = (
  "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)


def rendered(source, **names):
  return TemplateProcess(source, names).render(TALK, asks=True)


def test_a_template_gets_messages_and_names():
  source = '{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ tools }}'
  assert rendered(source, bos_token='<s>') == '<s>Hello é \ud83dTrueNone'
  assert rendered("{{ messages | tojson }}{{ strftime_now('%Y') }}") == (
    json.dumps(TALK, ensure_ascii=False) + '2024'
  )


@pytest.mark.parametrize(
  'source',
  [DOUBLE, "{{ 'a' * 10**10 }}", "{{ 'a' | center(10**10) }}", "{{ '%9999999999d' | format(1) }}"],
)
def test_a_template_that_allocates_without_end_is_refused(source):
  with pytest.raises(ValueError, match=r'MemoryError|process ended with|too wide|too big|too many'):
    rendered(source)


@pytest.mark.parametrize('source', [LONG, '{{ 10 ** (10 ** 9) }}'])
def test_a_template_that_takes_long_is_ended(source, monkeypatch):
  monkeypatch.setattr(template_process, 'SECONDS', 1)
  with pytest.raises(ValueError, match=f'its process ended with -{signal.SIGXCPU:d}: '):
    rendered(source)


@pytest.mark.parametrize(
  ('source', 'said'),
  [
    ('{% if %}', 'Expected an expression'),
    ('{{ ' + '(' * 300 + ')' * 300 + ' }}', 'recursion|nested|parenthes|memory'),
    ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
    ('{{ messages.__class__.__mro__ }}', 'unsafe'),
    ("{% include '/etc/passwd' %}", 'no loader'),
    ('{% for i in range(10**6) %}{% endfor %}', 'Range too big'),
    ("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}", 'more than 67,108,864 characters'),
  ],
)
def test_a_template_that_fails_says_why(source, said):
  with pytest.raises(ValueError, match=rf'(?i){said}'):
    rendered(source)


def test_a_process_that_ended_is_followed_by_another():
  template = TemplateProcess('{{ messages[0].content }}', {})
  first = template.render(TALK, asks=True)
  os.kill(template._process.pid, signal.SIGKILL)
  template._process.wait()
  with pytest.raises(ValueError, match='its process ended with -9'):
    template.render(TALK, asks=True)
  assert template.render(TALK, asks=True) == first
