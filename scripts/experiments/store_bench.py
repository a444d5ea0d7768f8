"""A store of FineWeb's columns: seconds, most memory of a process, and a build that is killed.

bash scripts/experiment store_bench FILES FOLDER  # each file has 130 MB of text
"""
# Environment: base

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet

folder = pathlib.Path(sys.argv[2])
random = np.random.default_rng(0)
seconds = 0.0
words = [''.join(map(chr, random.integers(97, 123, n))) for n in random.integers(2, 12, 20_000)]
text = ' '.join(words[n] for n in np.minimum(random.zipf(1.2, 2_000_000), 20_000) - 1)
(folder / 'pages').mkdir(parents=True)
for file in range(int(sys.argv[1])):
  sizes = np.minimum(random.lognormal(7.5, 1, 43_000), 10**6).astype(int) + 50
  pages = [f'{n} {text[n : n + size]}' for n, size in enumerate(sizes, file * len(sizes))]
  columns = dict.fromkeys(('id', 'dump', 'date', 'file_path', 'language'), ['en'] * len(pages))
  columns |= {'url': [f'https://site-{n % 999}.org/{n}' for n in range(len(pages))]}
  columns |= {'text': pages, 'token_count': sizes, 'language_score': sizes / 10**7}
  place = folder / 'pages' / f'{file:03}.parquet'
  pyarrow.parquet.write_table(pa.table(columns), place, row_group_size=1000)

for name, processes, killed in (('one', 1, 0), ('two', 2, 0), ('killed', 2, 1), ('killed', 2, 0)):
  options = f'--task=fineweb --source={folder}/pages --output={folder}/{name} --shards=8'.split()
  command = [sys.executable, '-m', 'valkyrie.data.build_store', f'--processes={processes}']
  begin = time.monotonic()
  process = subprocess.Popen([*command, *options], start_new_session=True)
  if killed:
    time.sleep(seconds / 2)
    os.killpg(process.pid, signal.SIGKILL)
  _, status, used = os.wait4(process.pid, 0)
  seconds = time.monotonic() - begin
  print(f'{name}, {processes}: {seconds:.0f} s, {used.ru_maxrss / 2**20:.2f} GiB, status {status}')
