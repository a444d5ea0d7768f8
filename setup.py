"""Packaging: what Valkyrie needs, and how a wheel carries gin/ and tasks/ inside the package."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
(VERSION,) = re.findall(
  r"^__version__ = '(.*?)'", (ROOT / 'valkyrie/__init__.py').read_text(), re.M
)

setup(
  name='valkyrie',
  version=VERSION,
  description='Hybrid S5 and Longformer language models trained through very long sequences.',
  long_description=(ROOT / 'README.md').read_text(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  # In a clone gin/ and tasks/ stand at the top; a wheel carries them inside the package.
  packages=[*find_packages(include=['valkyrie', 'valkyrie.*']), 'valkyrie.gin', 'valkyrie.tasks'],
  package_dir={'valkyrie.gin': 'gin', 'valkyrie.tasks': 'tasks'},
  package_data={
    'valkyrie': ['py.typed', 'lab/decomposition/page_files/*'],
    'valkyrie.gin': ['**/*.gin'],
  },
  entry_points={
    'console_scripts': [
      'valkyrie = valkyrie.main:main',
      'valkyrie-build-store = valkyrie.data.build_store:main',
      'valkyrie-compare = valkyrie.lab.comparison.compare:main',
      'valkyrie-lm-eval = valkyrie.inference.harness:main',
      'valkyrie-report = valkyrie.monitoring.html_report:main',
      'valkyrie-sizes = valkyrie.training.sizes:main',
      'valkyrie-supervise = valkyrie.distributed.supervisor:main',
    ]
  },
  scripts=['scripts/launch_gke', 'scripts/launch_slurm', 'scripts/launch_tpu_vm'],
  # Ranges say what should work; constraints/ pins, for each Python, a solution of all extras, which
  # includes what the tests ran on. Only beam needs an environment and pins of its own.
  install_requires=[
    'absl-py>=2.1',
    'chex>=0.1.90',
    'clu>=0.0.12',
    'dm-haiku>=0.0.16',
    'etils[epath]>=1.12',
    'gin-config>=0.5.0',
    'jax>=0.10,<0.13',  # 0.10 is the last for Python 3.11
    'matplotlib>=3.9',
    'numpy>=2.0',
    'optax>=0.2.6',
    'orbax-checkpoint>=0.12,<0.13',
    'pillow>=10.4',
    'pyarrow>=18',
    'pyyaml>=6',  # the heads of dataset cards
    'safetensors>=0.6',
    'scipy>=1.13',
    'sentencepiece>=0.2',
    'seqio>=0.0.20',
    'tensorboard>=2.20',  # clu.metric_writers imports it without declaring it
    'tensorflow>=2.20',
    'tensorstore>=0.1.71',
    'tqdm>=4.60',
  ],
  extras_require={
    # Beam excludes protobuf 7, without which a newer sentencepiece cannot be imported.
    'beam': ['apache-beam>=2.77', 'sentencepiece<0.2.3'],
    'gcs': ['gcsfs>=2025.9'],  # runs, texts and stores in gs://
    'hf': ['datasets>=3', 'jinja2>=3.1', 'tokenizers>=0.21'],  # jinja2 renders conversations
    'lm-eval': ['lm-eval>=0.4.13'],  # EleutherAI's lm-evaluation-harness
    'learn': [
      'torch>=2.6',
      'transformers>=5',
    ],  # peers of the benches
    'trackers': ['wandb>=0.19', 'trackio>=0.3'],
    'tpu': ['jax[tpu]'],  # brings the libtpu that this jax was built for
    'cuda': ['jax[cuda13]'],
    'deltanet-tpu': ['deltanet-tpu>=0.3,<0.4', 'jax[tpu]'],  # GatedDeltaNet.kernels
    'docs': ['mkdocs-material>=9.6', 'mkdocstrings[python]>=0.30'],
    'test': [
      'gcsfs>=2025.9',
      'google-cloud-storage>=3',
      'hypothesis>=6.100',
      'jinja2>=3.1',
      'pre-commit>=4',
      'pyright[nodejs]>=1.1.400',  # with node from the registry instead of a download at first run
      'pytest>=8',
      'pytest-xdist>=3.6',
      'ruff>=0.17',
      'tokenizers>=0.21',
    ],
  },
)
