"""Files of matrices: Matrix Market, archives of SuiteSparse, and scipy's `.npz`."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError, SparseFlowError
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo, read_memory_bytes
from sparseflow.tuning.schedule.matrix_market import match_banner, parse_matrix_market

SUFFIXES = (".mtx", ".mtx.gz", ".mtx.bz2", ".tar.gz", ".tgz", ".npz")
"""Suffixes of the files that `read_matrix` reads; upper case is accepted."""

_MAX_EXPANSION = 100
"""Largest ratio of decompressed to compressed bytes. Text of a matrix compresses to a tenth."""

_FREE_BYTES = 32 << 20
"""Decompressed bytes that are accepted at any ratio."""

_CHUNK_BYTES = 1 << 20


def parse_matrix_name(path: Path) -> str:
    """Return the matrix name of a file: the file name without its suffix."""
    suffixes = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    return path.name[: -max(map(len, suffixes))] if suffixes else path.name


def find_matrix_files(paths: Iterable[Path]) -> list[Path]:
    """List the matrix files among `paths` and in the directories among them.

    Raises:
        InputError: A path does not exist, or a directory has no such file.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            matches = sorted(file for file in path.iterdir() if file.name.lower().endswith(SUFFIXES))
            if not matches:
                raise InputError(f"{path} has no file with a suffix of {', '.join(SUFFIXES)}")
            files += matches
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"file not found: {path}")
    return files


def read_matrix(path: Path | str, *, dtype: np.dtype | type | None = None) -> CooMatrix:
    """Read a matrix file.

    The content determines the format: Matrix Market, with or without gzip or bzip2; a tar archive of one
    matrix, as SuiteSparse provides it; or a file of `scipy.sparse.save_npz`. Elements of a pattern are ones.

    Args:
        path: File.
        dtype: float32 or float64; see `as_coo`.

    Raises:
        InputError: The file does not exist, or its matrix is unsupported.
        FileFormatError: The file has another format or is damaged.
    """
    file = Path(path)
    start = read_decompressed(file, max_bytes=_CHUNK_BYTES)
    try:
        is_npz, is_tar = start.startswith(b"PK\x03\x04"), start[257:262] == b"ustar"
        if not (is_npz or is_tar):
            match_banner(start)  # before a large file of another kind is read
        data = read_decompressed(file)
        if is_npz:
            matrix = _read_npz(data)
        else:
            if is_tar:
                data = _extract_matrix(data, parse_matrix_name(file))
            rows, cols, values, shape = parse_matrix_market(data)
            matrix = CooMatrix(rows=rows, cols=cols, values=values, shape=shape)
    except SparseFlowError:
        raise
    # The readers of archives raise errors of many classes for damaged data.
    except Exception as error:
        raise FileFormatError(f"{file} is not a readable matrix: {error}") from error
    try:
        return as_coo(matrix, dtype=dtype)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def read_decompressed(path: Path, *, max_bytes: int | None = None) -> bytes:
    """Read a file; gzip and bzip2 are recognized by their content.

    Args:
        path: File.
        max_bytes: Number of decompressed bytes to read, from the start; None reads all.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file cannot be read, exceeds a quarter of the memory, or expands to more than
            100 times its size.
    """
    if not path.is_file():
        raise InputError(f"file not found: {path}")
    limit = read_memory_bytes() // 4
    if max_bytes is None and path.stat().st_size > limit:
        raise FileFormatError(
            f"{path} exceeds a quarter of the memory, {limit >> 20} MiB; use a larger machine"
        )
    content = io.BytesIO()
    try:
        with path.open("rb") as raw:
            start = raw.read(3)
            raw.seek(0)
            stream: Any = raw
            if start.startswith(b"\x1f\x8b"):
                stream = gzip.GzipFile(fileobj=raw)
            elif start == b"BZh":
                stream = bz2.BZ2File(raw)
            if stream is not raw:
                limit = min(limit, max(_FREE_BYTES, _MAX_EXPANSION * os.fstat(raw.fileno()).st_size))
            if max_bytes is not None:
                return stream.read(max_bytes)
            while chunk := stream.read(_CHUNK_BYTES):
                content.write(chunk)
                if content.tell() > limit:
                    raise FileFormatError(
                        f"{path} expands to more than {limit >> 20} MiB; decompress it first"
                    )
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    return content.getvalue()


def _extract_matrix(data: bytes, name: str) -> bytes:
    """Return the Matrix Market file of a tar archive: the only one, or the one with the archive's name."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        # A sparse member can be larger than the archive.
        members = {
            PurePosixPath(member.name).name: member
            for member in archive
            if member.isreg() and not member.issparse() and member.name.lower().endswith(".mtx")
        }
        member = members.get(f"{name}.mtx") or (next(iter(members.values())) if len(members) == 1 else None)
        if member is None:
            names = ", ".join(list(members)[:5]) or "none"
            raise ValueError(f"the archive has these .mtx files: {names}; expected one, or {name}.mtx")
        stream = archive.extractfile(member)
        assert stream is not None  # the member is a regular file
        return stream.read()


def _read_npz(data: bytes) -> Any:
    """Read a file of `scipy.sparse.save_npz` without unpickling."""
    sparse = require("scipy.sparse", "tuning")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        total = sum(info.file_size for info in archive.infolist())
        if total > max(_FREE_BYTES, _MAX_EXPANSION * len(data)):
            raise ValueError(f"the archive expands to {total >> 20} MiB; save it without compression")
        for info in archive.infolist():
            with archive.open(info) as stream:
                _check_npy_size(stream, info.file_size)
    return sparse.load_npz(io.BytesIO(data))


def _check_npy_size(stream: Any, num_bytes: int) -> None:
    """Check that an array is as large as its file, before numpy allocates it."""
    version = np.lib.format.read_magic(stream)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = read_header[version](stream)
    if dtype.hasobject or stream.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize != num_bytes:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} does not fit its {num_bytes} bytes")
