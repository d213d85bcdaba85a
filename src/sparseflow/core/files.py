"""Reading and writing whole files: atomic writes, bounded JSON, Parquet tables, the cache directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sparseflow.errors import FileFormatError, InputError, OutputError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_JSON_BYTES = 256 * 2**20
MAX_JSON_DEPTH = 64

_PROBE_BYTES = 2**16
"""Free space that a test of an output requires."""

_MAX_ROWS_PER_BYTE = 64
"""Limit on the rows of Parquet files: a few bytes can announce billions of equal rows."""

_MAX_TEXT_BYTES = 2**30
"""Limit on the text of a column of a Parquet file, which can repeat one long text."""

_TEMPORARY_PREFIX = ".sparseflow-tmp-"
_cleaned_directories: set[Path] = set()

# The closing quote is optional so that an unterminated string costs linear time; the parser refuses it later.
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_MASK_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_OVERFLOW = re.compile(rb"[eE]\+?000")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_output(path: Path | str, *, directory: bool = False) -> None:
    """Check that a result can be written, before the work that computes it. Nothing is left behind.

    Args:
        path: File or directory; it and the directories above it need not exist.
        directory: Whether the result is a directory of files.

    Raises:
        OutputError: A directory has the name of the file, or a file that of the directory, the place is not
            writable, its disk is full, or the name is not UTF-8.
    """
    target = Path(path).absolute()
    expected, other = ("directory", "file") if directory else ("file", "directory")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise OutputError(f"the name {path!r} is not UTF-8; give another {expected}") from error
    try:
        if target.exists() and target.is_dir() != directory:
            raise OutputError(f"{path} is a {other}; give the name of a {expected}")
        parent = target if directory else target.parent
        while not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent) as stream:
            stream.write(bytes(_PROBE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another {expected}") from error


def write_atomic(path: Path, data: bytes | str, *, rescue: bool = True) -> None:
    """Replace a file through a temporary file in the same directory, synced and then renamed.

    If the file cannot be written, `path` keeps its previous content, and the new content is saved elsewhere.
    The first write into a directory removes the temporary files that killed processes left there.

    Args:
        path: File to write. Its directory must exist.
        data: Full content; text is encoded as UTF-8.
        rescue: Whether to save elsewhere what cannot be written; False for caches.

    Raises:
        InputError: The text contains half of a surrogate pair, such as from a file name that is not UTF-8.
        OutputError: The directory is missing or not writable, a directory has the name, or the disk is full.
            The message names the file with the saved content.
    """
    try:
        content = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError as error:
        raise InputError(
            f"cannot write {path}: its text contains {error.object[error.start]!r}, which is not UTF-8; "
            "rename the file that has this name"
        ) from error
    try:
        with replace_file(path) as stream:
            stream.write(content)
    except OSError as error:
        rescued = _save_elsewhere(path, content) if rescue else ""
        raise OutputError(f"cannot write {path}: {error.strerror}{rescued}") from error


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path`, synced and then renamed, if the `with` block completes.

    The first use in a directory removes the temporary files that killed processes left there.

    Args:
        path: File to write. Its directory must exist. It keeps its content if the block raises.

    Raises:
        OSError: The file cannot be written.
    """
    _remove_abandoned(path.parent)
    # The name does not depend on that of `path`, whose length can be the longest possible.
    temporary = path.parent / f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            # The lock tells other processes until here that the writer lives.
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def write_json(path: Path, content: object, *, indent: int | None = None, rescue: bool = True) -> None:
    """Write a JSON file as `write_atomic` does. Its directory must exist.

    Raises:
        ValueError: `content` contains NaN or infinity.
        TypeError: `content` contains something that JSON cannot represent.
        OutputError: The file cannot be written.
    """
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, text, rescue=rescue)


def find_file(path: Path | str) -> Path:
    """Return the path of an existing file.

    Raises:
        InputError: There is no such file, it is a directory or a device, or its name is impossible.
    """
    file = Path(path)
    try:
        if file.is_file():
            return file
        exists = file.exists()
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    raise InputError(f"{file} is not a regular file" if exists else f"{file} does not exist")


def read_json(path: Path | str, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file that may come from an untrusted source.

    Args:
        path: File to read.
        max_bytes: Largest accepted file.

    Raises:
        InputError: The file does not exist or cannot be read.
        FileFormatError: The file is too large or `parse_json` refuses its content.
    """
    data = read_bounded(path, max_bytes)
    try:
        return parse_json(data)
    except ValueError as error:
        raise FileFormatError(f"{path} is not valid JSON: {error}") from error


def read_bounded(path: Path | str, max_bytes: int) -> bytes:
    """Read a file that may come from an untrusted source.

    Raises:
        InputError: The file does not exist or cannot be read.
        FileFormatError: The file exceeds `max_bytes`.
    """
    file = find_file(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise FileFormatError(f"{file} exceeds the limit of {max_bytes} bytes")
    return data


def parse_json(data: bytes | str) -> Any:
    """Parse JSON strictly: UTF-8, numbers that fit a float, no duplicate keys, bounded nesting.

    Raises:
        ValueError: `data` violates one of these rules.
    """
    raw = data.encode() if isinstance(data, str) else data
    # Brackets within strings do not nest, but few brackets cannot nest deeply in any case.
    if raw.count(b"[") + raw.count(b"{") > MAX_JSON_DEPTH and _measure_depth(raw) > MAX_JSON_DEPTH:
        raise ValueError(f"nesting is deeper than {MAX_JSON_DEPTH} levels")
    # Parsing numbers in Python is slow, so it is done only if a literal could overflow to infinity.
    digits = raw.translate(_MASK_DIGITS)
    overflow = bool(_OVERFLOW.search(digits)) or b"0" * 300 in digits
    try:
        content = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_build_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float if overflow else None,
            parse_int=_parse_int if overflow else None,
        )
    except RecursionError as error:
        raise ValueError("nesting is too deep") from error
    if _SURROGATE.search(raw):
        # Half of a surrogate pair is no character; nothing can print or store it.
        json.dumps(content, ensure_ascii=False).encode()
    return content


def write_parquet(
    path: Path,
    table: pa.Table,
    *,
    use_dictionary: bool | Sequence[str] = True,
    column_encoding: Mapping[str, str] | None = None,
) -> None:
    """Write a table as Parquet atomically, with zstd compression and page checksums.

    Args:
        path: File to write. Its directory must exist.
        table: Rows and schema metadata.
        use_dictionary: Whether to dictionary-encode, or the columns to encode so.
        column_encoding: Column -> Parquet encoding, for columns without a dictionary.

    Raises:
        OutputError: The file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    dictionary: Any = use_dictionary if isinstance(use_dictionary, bool) else list(use_dictionary)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=dictionary,
        column_encoding=dict(column_encoding) if column_encoding else None,
        write_page_checksum=True,
    )
    write_atomic(path, sink.getvalue().to_pybytes())


def read_parquet(path: Path | str) -> pa.Table:
    """Read a Parquet file and verify its page checksums.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not Parquet, is damaged, or announces far more rows than bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = find_file(path)
    try:
        texts = [field for field in pq.read_schema(file) if _is_text(field.type)]
        names = [field.name for field in texts]
        with pq.ParquetFile(file, page_checksum_verification=True, read_dictionary=names) as stream:
            num_rows, size = stream.metadata.num_rows, file.stat().st_size
            if num_rows > _MAX_ROWS_PER_BYTE * size:
                raise ValueError(f"{num_rows} rows in {size} bytes")
            table = stream.read()
        for field in texts:
            table = _expand_texts(table, field)
        return table
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        raise FileFormatError(f"{file} is not a readable Parquet file: {error}") from error


def _is_text(data_type: pa.DataType) -> bool:
    import pyarrow as pa

    return data_type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _expand_texts(table: pa.Table, field: pa.Field) -> pa.Table:
    """Convert a column that was read as a dictionary to `field`; raises ValueError if its text is long."""
    import pyarrow as pa
    from pyarrow.compute import call_function

    column = table[field.name]
    if not pa.types.is_dictionary(column.type):
        return table
    num_bytes = 0
    for chunk in column.chunks:
        lengths = call_function("binary_length", [chunk.dictionary]).take(chunk.indices)
        num_bytes += call_function("sum", [lengths]).as_py() or 0
    if num_bytes > _MAX_TEXT_BYTES:
        raise ValueError(
            f"column {field.name} has {num_bytes} bytes of text; expected at most {_MAX_TEXT_BYTES}"
        )
    return table.set_column(table.schema.get_field_index(field.name), field, column.cast(field.type))


def get_cache_dir() -> Path:
    """Return the directory for reproducible files; it may not exist yet.

    `$SPARSEFLOW_CACHE` if set, otherwise `sparseflow` in `$XDG_CACHE_HOME` or in `~/.cache`.
    """
    configured = os.environ.get("SPARSEFLOW_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparseflow"


def sync_dir(path: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(directory: Path) -> None:
    """Remove the temporary files of killed writers, once per directory and process."""
    if directory in _cleaned_directories:
        return
    for temporary in directory.glob(f"{_TEMPORARY_PREFIX}*"):
        # Between its creation and its lock, the file of a living writer is empty.
        with contextlib.suppress(OSError), temporary.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(stream.fileno()).st_size:
                temporary.unlink()
    _cleaned_directories.add(directory)


def _save_elsewhere(path: Path, content: bytes) -> str:
    """Save the content of a file that cannot be written; return the end of the sentence that says so."""
    # The last one is in memory; it helps if there is only one disk.
    for find in (tempfile.gettempdir, Path.home, lambda: "/dev/shm"):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
            copy = Path(tempfile.mkdtemp(prefix="sparseflow-", dir=find())) / path.name[-100:]
            try:
                with replace_file(copy) as stream:
                    stream.write(content)
            except OSError:
                copy.parent.rmdir()
                raise
            return f"; its content is saved as {copy}"
    return "; there is no other place for its content"


def _measure_depth(raw: bytes) -> int:
    """Return the deepest nesting of JSON text."""
    brackets = np.frombuffer(_JSON_STRING.sub(b"", raw).translate(None, _NOT_BRACKETS), np.uint8)
    opening = (brackets == ord("[")) | (brackets == ord("{"))
    return int(np.cumsum(np.where(opening, 1, -1)).max(initial=0))


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key {duplicate!r}")
    return content


def _parse_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _parse_int(text: str) -> int:
    _parse_float(text)
    return int(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
