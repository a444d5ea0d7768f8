"""The storage of a run's steps: a file system, or a bucket."""

import os

from valkyrie.checkpoint.bucket_steps import BucketSteps
from valkyrie.checkpoint.disk_steps import DiskSteps
from valkyrie.checkpoint.steps import Steps
from valkyrie.storage.run_directory import BucketDirectory, opened


def steps_of(model_dir: str | os.PathLike) -> Steps:
  """The steps of a run, of which nothing is read yet.

  Args:
    model_dir: the directory of the run, the address of one in a bucket, or what
      `run_directory.opened` has made of it.

  Raises:
    ConfigurationError: no run can be there, or the packages for a bucket are missing.
    StorageError: the bucket cannot be read.
  """
  directory = opened(model_dir)
  return BucketSteps(directory) if isinstance(directory, BucketDirectory) else DiskSteps(directory)
