"""Facts in a text, after BABILong (Kuratov et al. 2024, arXiv 2406.10149).

Between the sentences of a user's text lie the sentences of a bAbI story (Weston et al. 2015, tasks
1 to 3): people move between rooms, take objects and drop them. The story lies in a fifth of the
text, which begins at the depth. The question comes without the benchmark's instructions, and with
the beginning of its answer. An answer is right if its first sentence names the room and no other
one that the question does not name.
"""

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import numpy as np

from valkyrie.lab.suites.problem import Order, Problem, Question, Suite, filler, placed, register

PEOPLE = ('Mary', 'John', 'Daniel', 'Sandra')
ROOMS = ('bathroom', 'bedroom', 'garden', 'hallway', 'kitchen', 'office')
OBJECTS = ('football', 'apple', 'milk')
_MOVES = ('moved', 'went', 'went back', 'journeyed', 'travelled')
_TAKES = ('got', 'grabbed', 'picked up', 'took')
_DROPS = ('dropped', 'discarded', 'left', 'put down')
_WIDTH = 0.2  # the part of the text that holds the story
_MOST_TOKENS = 20  # of an answer


class _World:
  """People and objects that move, and the sentences about it.

  Attributes:
    facts: the sentences so far.
    rooms: the rooms in which a person or an object has been, in order.
  """

  def __init__(self, random: np.random.Generator, objects: bool):
    self._random = random
    self._has_objects = objects
    self._holder: dict[str, str] = {}  # the person who holds an object
    self.facts: list[str] = []
    self.rooms: dict[str, list[str]] = {}

  def event(self) -> None:
    """Someone moves, takes an object from the floor, or drops one."""
    person = str(self._random.choice(PEOPLE))
    here = self._room_of(person)
    held = [thing for thing, holder in self._holder.items() if holder == person]
    free = self._free_objects(here)
    kind = 1.0
    if self._has_objects and here:
      kind = self._random.uniform()
    if kind < 0.25 and free:
      self._take(person, free)
    elif kind < 0.4 and held:
      self._drop(person, held[0])
    else:
      self._move(person, held, here)

  def _take(self, person: str, things: Sequence[str]) -> None:
    thing = str(self._random.choice(things))
    self._holder[thing] = person
    self._enter(thing, self.rooms[person][-1])
    self._tell(person, _TAKES, f'the {thing} there')

  def _drop(self, person: str, thing: str) -> None:
    del self._holder[thing]
    self._tell(person, _DROPS, f'the {thing}')

  def _move(self, person: str, held: Sequence[str], here: str | None) -> None:
    other_rooms = [room for room in ROOMS if room != here]
    room = str(self._random.choice(other_rooms))
    self._enter(person, room)
    for thing in held:
      self._enter(thing, room)
    self._tell(person, _MOVES, f'to the {room}')

  def _free_objects(self, room: str | None) -> list[str]:
    """The objects that someone in this room can take. One that was never seen may lie there."""
    free = []
    for thing in OBJECTS:
      is_near = self._room_of(thing) in (None, room)
      if is_near and thing not in self._holder:
        free.append(thing)
    return free

  def _room_of(self, name: str) -> str | None:
    if name not in self.rooms:
      return None
    return self.rooms[name][-1]

  def _enter(self, name: str, room: str) -> None:
    if room != self._room_of(name):
      rooms = self.rooms.setdefault(name, [])
      rooms.append(room)

  def _tell(self, person: str, verbs: Sequence[str], rest: str) -> None:
    verb = self._random.choice(verbs)
    self.facts.append(f'{person} {verb} {rest}.')


def _where_is(names: Sequence[str], world: _World, random: np.random.Generator) -> Question | None:
  """Where is this person or object? None while no name has a room."""
  known = [name for name in names if name in world.rooms]
  if not known:
    return None
  name = str(random.choice(known))
  answer = world.rooms[name][-1]
  if name in PEOPLE:
    text = f' Where is {name}? The most recent location of {name} is'
  else:
    text = f' Where is the {name}? The {name} is in the'
  return Question(text, [answer])


def _where_was(world: _World, random: np.random.Generator) -> Question | None:
  """Where was the object before its latest room? None if no object has been in two rooms."""
  moved = []
  for thing in OBJECTS:
    rooms = world.rooms.get(thing, ())
    if len(rooms) > 1:
      moved.append(thing)
  if not moved:
    return None
  thing = str(random.choice(moved))
  before, after = world.rooms[thing][-2:]
  text = f' Where was the {thing} before the {after}? Before the {after} the {thing} was in the'
  return Question(text, [before])


class _Task(NamedTuple):
  """The fewest and the most events of a story, and the function that asks about it."""

  fewest: int
  most: int
  ask: Callable[[_World, np.random.Generator], Question | None]


_TASKS = {
  'qa1': _Task(2, 10, functools.partial(_where_is, PEOPLE)),
  'qa2': _Task(8, 20, functools.partial(_where_is, OBJECTS)),
  'qa3': _Task(15, 35, _where_was),
}


def story(order: Order, task: str) -> Problem:
  """A story of the task in the order's text."""
  random = order.random
  world = _World(random, objects=task != 'qa1')
  question = None
  fewest, most, ask = _TASKS[task]
  events = random.integers(fewest, most + 1)
  while question is None or len(world.facts) < events:
    world.event()
    question = ask(world, random)

  text = filler(order)
  sentences = len(text)
  depth = order.depth or 0.0
  width = _WIDTH * sentences
  begin = depth * (1 - _WIDTH) * sentences
  end = begin + width
  drawn = random.uniform(begin, end, size=len(world.facts))
  places = sorted(round(place) for place in drawn)
  with_facts = placed(text, world.facts, places)
  context = ' '.join(with_facts)
  return Problem(context, [question])


def names_the_room(continuation: str, question: Question) -> float:
  """Whether the first sentence names the right room and no other, except rooms of the question."""
  sentence, _, _ = continuation.lower().partition('.')
  asked = question.text.lower()
  named = set()
  for room in ROOMS:
    if room in sentence and room not in asked:
      named.add(room)
  return float(named == set(question.answers))


for _name in _TASKS:
  _make = functools.partial(story, task=_name)
  register(_name, Suite(_make, names_the_room, _MOST_TOKENS, needs_text=True))
