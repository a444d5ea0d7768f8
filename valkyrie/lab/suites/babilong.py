"""Facts in a text, after BABILong (Kuratov et al. 2024, arXiv 2406.10149).

Between the sentences of a user's text lie the sentences of a bAbI story (Weston et al. 2015, tasks
1 to 3): people move between rooms, take objects and drop them. The story lies in a fifth of the
text, which begins at the depth. The question comes without the benchmark's instructions, and with
the beginning of its answer. An answer is right if its first sentence names the room and no other
one that the question does not name.
"""

from collections.abc import Sequence
import functools

import numpy as np

from valkyrie.lab.suites.problem import Order, Problem, Question, Suite, filler, placed, register

PEOPLE = ('Mary', 'John', 'Daniel', 'Sandra')
ROOMS = ('bathroom', 'bedroom', 'garden', 'hallway', 'kitchen', 'office')
OBJECTS = ('football', 'apple', 'milk')
_MOVES = ('moved', 'went', 'went back', 'journeyed', 'travelled')
_TAKES = ('got', 'grabbed', 'picked up', 'took')
_DROPS = ('dropped', 'discarded', 'left', 'put down')
_WIDTH = 0.2  # the part of the text that holds the story


class _World:
  """People and objects that move, and the sentences about it."""

  def __init__(self, random: np.random.Generator, objects: bool):
    self._random = random
    self._objects = objects
    self._holder: dict[str, str] = {}
    self.facts: list[str] = []
    self.rooms: dict[str, list[str]] = {}  # in which a person or an object has been, in order

  def event(self) -> None:
    """Someone moves, takes an object from the floor, or drops one."""
    person = str(self._random.choice(PEOPLE))
    held = [thing for thing, holder in self._holder.items() if holder == person]
    here = self._at(person)
    near = [thing for thing in OBJECTS if self._at(thing) in (None, here)]  # or never seen
    free = [thing for thing in near if thing not in self._holder]
    kind = self._random.uniform() if self._objects and here else 1.0
    if kind < 0.25 and free:
      thing = str(self._random.choice(free))
      self._holder[thing] = person
      self._seen(thing, self.rooms[person][-1])
      self._tell(person, _TAKES, f'the {thing} there')
    elif kind < 0.4 and held:
      thing = held[0]
      del self._holder[thing]
      self._tell(person, _DROPS, f'the {thing}')
    else:
      room = str(self._random.choice([room for room in ROOMS if room != here]))
      for moved in [person, *held]:
        self._seen(moved, room)
      self._tell(person, _MOVES, f'to the {room}')

  def _at(self, what: str) -> str | None:
    return self.rooms[what][-1] if what in self.rooms else None

  def _seen(self, what: str, room: str) -> None:
    if room != self._at(what):
      self.rooms.setdefault(what, []).append(room)

  def _tell(self, person: str, verbs: Sequence[str], rest: str) -> None:
    self.facts.append(f'{person} {self._random.choice(verbs)} {rest}.')


def _where_is(names: Sequence[str], world: _World, random: np.random.Generator) -> Question | None:
  known = [name for name in names if name in world.rooms]
  if not known:
    return None
  name = str(random.choice(known))
  answer = [world.rooms[name][-1]]
  if name in PEOPLE:
    return Question(f' Where is {name}? The most recent location of {name} is', answer)
  return Question(f' Where is the {name}? The {name} is in the', answer)


def _where_was(world: _World, random: np.random.Generator) -> Question | None:
  """Of an object before the last room that it came to, if it was in two."""
  moved = [thing for thing in OBJECTS if len(world.rooms.get(thing, ())) > 1]
  if not moved:
    return None
  thing = str(random.choice(moved))
  before, after = world.rooms[thing][-2:]
  asked = f' Where was the {thing} before the {after}? Before the {after} the {thing} was in the'
  return Question(asked, [before])


_TASKS = {  # the fewest and the most events of a story, and its question
  'qa1': (2, 10, functools.partial(_where_is, PEOPLE)),
  'qa2': (8, 20, functools.partial(_where_is, OBJECTS)),
  'qa3': (15, 35, _where_was),
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
  begin = (order.depth or 0.0) * (1 - _WIDTH) * len(text)
  places = random.uniform(begin, begin + _WIDTH * len(text), size=len(world.facts))
  return Problem(' '.join(placed(text, world.facts, sorted(map(round, places)))), [question])


def names_the_room(continuation: str, question: Question) -> float:
  """Whether the first sentence names the right room and no other, except rooms of the question."""
  said = continuation.lower().split('.')[0]
  named = {room for room in ROOMS if room in said and room not in question.text.lower()}
  return float(named == {*question.answers})


for _task in _TASKS:
  register(_task, Suite(functools.partial(story, task=_task), names_the_room, 20, needs_text=True))
