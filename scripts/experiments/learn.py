"""Our models, Llama and Mamba-2 on the same text and cores, and tables of what they learned.

`scripts/compare` trains the candidates of learn.args, each for the same seconds. It takes some
hours on two cores, and continues after any interruption:

    bash scripts/experiment learn
    bash scripts/experiment learn --only=hybrid,mamba2-torch --seconds=60 --results=runs/learn_60
"""
# Environment: learn

import os
import pathlib
import subprocess
import sys

TOKENIZER = pathlib.Path('runs/words/tokenizer.model')
VOCABULARY = ('--gin_file=gin/words_cpu.gin', '--model_dir=runs/words', '--run_mode=vocabulary')
COMPARISON = (
  '@scripts/experiments/learn.args',
  '--seconds=120',
  '--over=learning_rate=1.5e-3,3e-3,6e-3',
  '--results=runs/learn',
)

if __name__ == '__main__':
  if not TOKENIZER.exists():
    subprocess.run([sys.executable, '-m', 'valkyrie.main', *VOCABULARY], check=True)
  # The candidates' commands say `python`, which must be the one of this environment.
  folder = pathlib.Path(sys.executable).parent
  os.environ['PATH'] = os.pathsep.join([str(folder), os.environ['PATH']])
  command = [sys.executable, '-m', 'valkyrie.lab.comparison.compare', *COMPARISON, *sys.argv[1:]]
  os.execv(sys.executable, command)
