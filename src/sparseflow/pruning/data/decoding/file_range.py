"""Video files on disk and in tar files, as ranges of bytes that FFmpeg reads in place."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparseflow.errors import FileFormatError


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes of a file.

    Attributes:
        path: File.
        offset: First byte.
        size: Number of bytes.
    """

    path: Path
    offset: int
    size: int

    @property
    def url(self) -> str:
        """URL for FFmpeg. With an explicit protocol, a colon in the path is not parsed as one."""
        if not self.offset:
            return f"file:{self.path}"
        return f"subfile,,start,{self.offset},end,{self.offset + self.size},,:file:{self.path}"

    def read(self, size: int) -> bytes:
        """Read the first bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(min(size, self.size))


def find_file_range(path: Path) -> FileRange | None:
    """Find a file, or a member of a tar file: `shards/train-000.tar/clip.mp4`.

    Returns:
        The bytes of the file; None if it does not exist.

    Raises:
        FileFormatError: The tar file is damaged or compressed.
    """
    if path.is_file():
        return FileRange(path=path, offset=0, size=path.stat().st_size)
    for tar in path.parents:
        if tar.suffix.lower() == ".tar" and tar.is_file():
            return list_members(tar).get(path.relative_to(tar).as_posix())
    return None


def list_members(tar: Path) -> Mapping[str, FileRange]:
    """List the regular files of a tar file, name -> bytes, in their order.

    Raises:
        FileFormatError: The tar file is damaged or compressed.
    """
    status = tar.stat()
    return _list_members(tar, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _list_members(tar: Path, size: int, mtime_ns: int) -> Mapping[str, FileRange]:
    del mtime_ns  # A changed file is listed again.
    members: dict[str, FileRange] = {}
    try:
        with tarfile.open(tar, "r:") as file:
            for member in file:
                if member.isreg() and not member.issparse():
                    name = member.name.removeprefix("./")
                    members[name] = FileRange(path=tar, offset=member.offset_data, size=member.size)
                    if member.offset_data + member.size > size:
                        raise FileFormatError(f"{tar} is truncated in {name}; download it again")
    except (tarfile.TarError, OSError) as error:
        raise FileFormatError(f"{tar} is not an uncompressed tar file: {error}") from error
    return members
