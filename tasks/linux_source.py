"""The C sources of a Linux kernel: long related text that a package installs.

Debian's package linux-source-6.1 has them in one file of 138 MB, 55,000 documents of 777 MB in
all. A file is a document, in the order of the archive. In 'train' the files of a directory are a
sequence; 'validation' has twelve subsystems of 3.3 to 6.5 MB, such as fs/xfs, and each is one. The
option is

  subsystem   the only subsystem of the split, such as fs/xfs (default: all of the split)
"""

from collections.abc import Iterator
import lzma
import tarfile
from typing import Any, Self

from valkyrie import foreign
from valkyrie.data.document_source import DocumentSource, TextDocument, register, stable_hash
from valkyrie.data.source_files import SourceFiles
from valkyrie.errors import ConfigurationError, DataError, converted

PACKAGED = '/usr/src/linux-source-6.1.tar.xz'
HELD_OUT = (
  *('drivers/acpi', 'drivers/crypto', 'drivers/hwmon', 'drivers/md', 'drivers/mmc', 'drivers/mtd'),
  *('drivers/pci', 'drivers/tty', 'fs/btrfs', 'fs/xfs', 'mm', 'net/netfilter'),
)
_DAMAGE = (tarfile.TarError, lzma.LZMAError, EOFError, ValueError, OverflowError)
_LARGEST = 2**26  # bytes of a source file
_GENERATED = '/asic_reg/'  # 400 MB of names of registers


class LinuxSource(DocumentSource):
  """The .c and .h files of the archive at `location`."""

  def __init__(self, location: str = PACKAGED, subsystem: str | None = None):
    super().__init__(splits=('train', 'validation'))
    self._location = location
    self._subsystem = subsystem

  def at(self, location: str | None, **options: str) -> Self:
    if unknown := {*options} - {'subsystem'}:
      raise ConfigurationError(f'This source has no option {min(unknown)}. It has subsystem.')
    return type(self)(location or self._location, **options)

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    files = self.files(split)
    advice = 'Install the package again, or name the .tar.xz of a kernel by TaskFeed.source.'
    with (
      converted(_DAMAGE, DataError, f'{files} cannot be read', advice),
      files.open(files.files[0]) as stream,
      tarfile.open(fileobj=stream, mode='r|*') as archive,
    ):
      for member in archive:
        path = member.name.partition('/')[2]
        directory = path.rpartition('/')[0]
        subsystem = '/'.join(directory.split('/')[:2])
        key = subsystem if split == 'validation' else directory
        if not member.isfile() or not path.endswith(('.c', '.h')) or _GENERATED in path:
          continue
        if not self._has(split, subsystem) or stable_hash(key) % shards != shard:
          continue
        if member.size > _LARGEST:
          raise ValueError(f'its file {foreign.shown(member.name)} has {member.size:,} bytes')
        text = archive.extractfile(member).read().decode('utf-8', errors='replace')
        yield TextDocument(text, sequence_key=key, name=path)

  def describe(self, split: str) -> dict[str, Any]:
    return {'kind': 'linux_source', 'subsystem': self._subsystem}

  def files(self, split: str) -> SourceFiles:
    try:
      found = SourceFiles(self._location, ('.xz', '.tar'))
    except DataError as error:
      raise DataError(
        f"{error}\nThis task reads the sources of a Linux kernel. Install Debian's: "
        'apt-get install linux-source-6.1. Or name the .tar.xz of another one: '
        '--gin.linux=\'"/data/linux-6.12.tar.xz"\''
      ) from None
    if len(found.files) > 1:
      raise DataError(f'{found} has {len(found.files)} archives. Name one of them.')
    return found

  def _has(self, split: str, subsystem: str) -> bool:
    is_held_out = subsystem in HELD_OUT
    return self._subsystem in (None, subsystem) and is_held_out == (split == 'validation')


register('linux_source', LinuxSource())
