"""Valkyrie: hybrid language models trained through very long sequences."""

import pathlib

# In a clone, gin/ and tasks/ stand beside this package; a wheel carries them inside it. Either way
# they have the same names: `valkyrie.tasks.fineweb`, and the folder `valkyrie.config.paths.GIN`.
if not (pathlib.Path(__file__).parent / 'tasks').is_dir():
  __path__.append(str(pathlib.Path(__file__).parents[1]))
