"""The advice for a split with too few documents names bindings that exist for its task."""

import pytest

from valkyrie.data import vocabularies
from valkyrie.data.few_documents import more_documents
from valkyrie.data.selection import Selection

OPTIONS = {'held_out': '0.1'}


def advice(task):
  vocabulary = vocabularies.ByteVocabulary()
  return more_documents(Selection(task, 'validation', vocabulary, '/data', OPTIONS))


def test_a_task_of_text_has_macros():
  assert '--gin.held_out=0.2 --gin.text_cut=2048' in advice('text')
  assert '--gin.held_out=0.2' in advice('prompts') and 'text_cut' not in advice('prompts')


def test_fineweb_has_options():
  said = advice('fineweb')
  assert "add {'held_out': 0.2, 'cut': 2048} to TaskFeed.options" in said
  assert '--gin.' not in said


@pytest.mark.parametrize('task', ['linux_source', 'my_package.riddles:sums'])
def test_a_task_without_a_share_has_neither(task):
  assert advice(task) == 'use another task, or another source of it'
