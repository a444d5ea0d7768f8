"""What hooks return, of every kind."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.monitoring import hook_values


@pytest.mark.parametrize(
  ('value', 'logged'),
  [
    (3, 3.0), (True, 1.0), (np.float16(0.5), 0.5), (np.array([2]).reshape(1, 1)[0, 0], 2.0),
    (jnp.float32(1.5), 1.5), (math.inf, math.inf), (10**400, math.inf), (-(10**400), -math.inf),
    ('text', 'text'), ('half \ud800', 'half \ufffd'),
  ],
)  # fmt: skip
def test_numbers_and_texts_are_logged(value, logged):
  assert hook_values.read_values({'name': value}) == ({'name': logged}, [])


@pytest.mark.parametrize('value', [object(), None, [1.0], np.zeros(3), 1j, b'12', {'a': 1}])
def test_other_values_are_named_and_left_out(value):
  noted, (refused,) = hook_values.read_values({'name': value, 'other': 1})
  assert noted == {'other': 1.0} and refused.startswith("'name' = ")
  assert len(refused) < 200


def test_what_is_no_mapping_is_named():
  assert hook_values.read_values(3.0) == (
    {},
    ['3.0, expected numbers and texts by their names, or None'],
  )


def test_names_and_texts_have_a_length_and_no_control_characters():
  noted, _ = hook_values.read_values({'a\nb\x1b[31m\ud800': 'x' * 10**6, 'n' * 1000: 1, 5: 2})
  text = noted.pop('a\ufffdb\ufffd[31m\ufffd')
  assert isinstance(text, str) and text.endswith('(900,000 more characters)')
  assert noted == {'n' * 200: 1.0, '5': 2.0}
  noted, (refused,) = hook_values.read_values({str(number): number for number in range(5000)})
  assert len(noted) == 1000 and 'more than 1,000 names' in refused
