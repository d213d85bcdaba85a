"""Files on disk: whole ones or none, and where what is remembered lies."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` through a temporary file beside it, synced and then renamed.

    Args:
        path: Where the file shall stand. Its folder must exist.
        data: The whole content; text is encoded as UTF-8.

    Raises:
        OSError: The folder is missing or cannot be written. `path` is then what it was before.
    """
    content = data.encode() if isinstance(data, str) else data
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes the file private; a result is meant to be read like any other file.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def get_cache_dir() -> Path:
    """Where what can be made again is kept: `$SPARSEFLOW_CACHE`, else `sparseflow` in `$XDG_CACHE_HOME`.

    Without either it is `~/.cache/sparseflow`. It may not be there yet.
    """
    own = os.environ.get("SPARSEFLOW_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparseflow"


def sync_dir(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    # The only portable way to read it is to set it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
