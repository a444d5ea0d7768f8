"""The task of a kernel's sources: documents, sequences, what is held out and what is refused."""

import io
import tarfile

import pytest

from valkyrie.data import document_source, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks.linux_source import LinuxSource

FILES = {
  'Makefile': 'all:',
  'drivers/net/phy/one.c': 'int one;',
  'drivers/net/phy/two.h': 'int two;',
  'drivers/net/three.c': 'int three;',
  'drivers/gpu/drm/amd/include/asic_reg/four.h': '#define FOUR',
  'fs/xfs/five.c': 'int fünf;',
  'fs/xfs/libxfs/six.c': 'int six;',
  'init/seven.c': 'int seven;',
  'mm/eight.c': 'int eight;',
}


@pytest.fixture
def archive(tmp_path):
  path = tmp_path / 'linux.tar.xz'
  with tarfile.open(path, 'w:xz') as file:
    for name, text in FILES.items():
      member = tarfile.TarInfo(f'linux-source-6.1/{name}')
      member.size = len(text.encode())
      file.addfile(member, io.BytesIO(text.encode()))
  return path


def documents(archive, split, shards=1, **options):
  source = LinuxSource().at(str(archive), **options)
  parts = [[*source.documents(split, shard, shards)] for shard in range(shards)]
  return sorted((doc.name, doc.sequence_key, doc.text) for part in parts for doc in part)


@pytest.mark.parametrize('shards', [1, 3])
def test_directories_are_sequences_and_whole_subsystems_are_held_out(archive, shards):
  assert documents(archive, 'train', shards) == [
    ('drivers/net/phy/one.c', 'drivers/net/phy', 'int one;'),
    ('drivers/net/phy/two.h', 'drivers/net/phy', 'int two;'),
    ('drivers/net/three.c', 'drivers/net', 'int three;'),
    ('init/seven.c', 'init', 'int seven;'),
  ]
  assert documents(archive, 'validation', shards) == [
    ('fs/xfs/five.c', 'fs/xfs', 'int fünf;'),
    ('fs/xfs/libxfs/six.c', 'fs/xfs', 'int six;'),
    ('mm/eight.c', 'mm', 'int eight;'),
  ]
  assert documents(archive, 'validation', shards, subsystem='mm') == [
    ('mm/eight.c', 'mm', 'int eight;')
  ]


def test_without_the_package_the_message_names_it(tmp_path):
  selection = Selection('linux_source', 'train', vocabularies.ByteVocabulary(), str(tmp_path / 'x'))
  with pytest.raises(DataError, match=r'apt-get install linux-source-6\.1'):
    document_source.document_reader(document_source.TASKS['linux_source'], selection)


def test_one_archive_is_read(archive):
  (archive.parent / 'older.tar.xz').write_bytes(archive.read_bytes())
  with pytest.raises(DataError, match=r'has 2 archives\. Name one'):
    documents(archive.parent, 'train')


def test_a_damaged_archive_and_an_unknown_option_are_named(archive):
  archive.write_bytes(archive.read_bytes()[:100])
  with pytest.raises(DataError, match=r'linux.tar.xz .*Install the package again'):
    documents(archive, 'train')
  with pytest.raises(ConfigurationError, match=r'no option directory\. It has subsystem'):
    LinuxSource().at(str(archive), directory='mm')
