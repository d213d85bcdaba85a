"""Parser of Matrix Market files.

The format: R. Boisvert, R. Pozo and K. Remington, "The Matrix Market Exchange Formats: Initial Design",
NISTIR 5935, 1996. The parser runs no code of scipy, whose reader can end the process on a damaged file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import csv

MAX_EXTENT = 2**31 - 1
"""Largest extent whose coordinates fit 32 bits."""

_VALUE_TYPES = {
    "real": (pa.float64(),),
    "double": (pa.float64(),),
    "integer": (pa.int64(),),
    "unsigned-integer": (pa.uint64(),),
    "complex": (pa.float64(), pa.float64()),
    "pattern": (),
}
"""Field of the banner -> types of the columns of a value."""

_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")

_BANNER = re.compile(rb"(?:\xef\xbb\xbf)?\s*+%{1,2}MatrixMarket(?=\s)([^\n]*+)\n?", re.IGNORECASE)
_COMMENTS = re.compile(rb"(?:[ \t\r]*+(?:%[^\n]*+)?+\n)*+")
_SIZE = re.compile(rb"[0-9]{1,18}")
_BODY_CHARACTERS = b"0123456789+-.eE \t\r\n"
_TINY_EXPONENT = re.compile(rb"[eE]-0*+[3-9][0-9]{2}")
_NONZERO_MANTISSA = re.compile(rb"[-+0.]*+[1-9]")

_INTEGER = rb"[-+]?[0-9]{1,20}"
_REAL = rb"[-+]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?+"


@dataclass(frozen=True, kw_only=True)
class _Header:
    """Banner and size line.

    Attributes:
        coordinate: Whether each line has coordinates; otherwise the file lists all values by columns.
        field: Key of `_VALUE_TYPES`.
        symmetry: One of `_SYMMETRIES`.
        shape: Rows and columns.
        num_lines: Number of lines after the header.
    """

    coordinate: bool
    field: str
    symmetry: str
    shape: tuple[int, int]
    num_lines: int

    @property
    def column_types(self) -> tuple[pa.DataType, ...]:
        return ((pa.int64(), pa.int64()) if self.coordinate else ()) + _VALUE_TYPES[self.field]


def parse_matrix_market(
    text: bytes | bytearray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
    """Parse the content of a Matrix Market file.

    Symmetric matrices are expanded. The values of a pattern are ones.

    Returns:
        Row indices and column indices, shape [n], int64; values, shape [n], float64, int64, uint64 or int8;
        rows and columns of the matrix.

    Raises:
        ValueError: The text violates the format, or the matrix is complex.
    """
    header, body = _parse_header(text)
    columns = _parse_body(body, header, num_header_lines=text.count(b"\n", 0, len(text) - len(body)))
    if header.coordinate:
        rows, cols, *parts = columns
        rows, cols = rows - 1, cols - 1
        for name, indices, extent in zip(("row", "column"), (rows, cols), header.shape, strict=True):
            outside = (indices < 0) | (indices >= extent)
            if outside.any():
                entry = int(np.argmax(outside))
                raise ValueError(f"entry {entry + 1} has {name} {indices[entry] + 1}; expected 1 to {extent}")
    else:
        parts = columns
        rows, cols = _list_array_coordinates(header)
    if header.field == "complex":
        if parts[1].any():
            raise ValueError("the matrix is complex; expected real numbers")
        parts = parts[:1]
    values = parts[0] if parts else np.ones(len(rows), np.int8)
    return (*_expand_symmetry(header, rows, cols, values), header.shape)


def match_banner(text: bytes | bytearray) -> re.Match[bytes]:
    """Match the banner, the first line, of a Matrix Market file.

    Args:
        text: Content of a file, or its start.

    Raises:
        ValueError: The text does not start with a banner.
    """
    banner = _BANNER.match(text)
    if banner is not None:
        return banner
    if text.lstrip().startswith(b"<"):
        raise ValueError("it is a web page; download the matrix itself")
    raise ValueError(f"it starts with {_quote(bytes(text[:200]))}; expected %%MatrixMarket")


def _parse_header(text: bytes | bytearray) -> tuple[_Header, bytes]:
    """Return the header and the text after it."""
    banner = match_banner(text)
    words = banner[1].decode("latin-1").lower().split()
    if len(words) == 3:
        words.append("general")
    if len(words) != 4 or words[0] != "matrix":
        raise ValueError(
            f"the banner is {_quote(banner[1])}; expected `matrix`, a format, a field and a symmetry"
        )
    _, layout, field, symmetry = words
    for value, choices in (
        (layout, ("coordinate", "array")), (field, tuple(_VALUE_TYPES)), (symmetry, _SYMMETRIES),
    ):  # fmt: skip
        if value not in choices:
            raise ValueError(f"the banner has {value[:40]!r}; expected one of {', '.join(choices)}")
    coordinate = layout == "coordinate"
    if field == "pattern" and (not coordinate or symmetry not in ("general", "symmetric")):
        raise ValueError(f"a pattern cannot be {symmetry if coordinate else layout}")
    if symmetry == "hermitian" and field != "complex":
        raise ValueError(f"a {field} matrix cannot be hermitian; expected symmetric")
    comments = _COMMENTS.match(text, banner.end())
    assert comments is not None  # the expression matches an empty text
    end = text.find(b"\n", comments.end())
    end = len(text) if end < 0 else end
    line = bytes(text[comments.end() : end])
    sizes = line.split()
    if len(sizes) != 2 + coordinate or not all(_SIZE.fullmatch(size) for size in sizes):
        expected = "rows, columns and entries" if coordinate else "rows and columns"
        raise ValueError(f"the size line is {_quote(line)}; expected numbers of {expected}")
    height, width, *entries = map(int, sizes)
    if not (1 <= height <= MAX_EXTENT and 1 <= width <= MAX_EXTENT):
        raise ValueError(
            f"the matrix has {height} rows and {width} columns; expected 1 to {MAX_EXTENT} of each"
        )
    if symmetry != "general" and height != width:
        raise ValueError(f"a {symmetry} matrix must be square, got {height} rows and {width} columns")
    if coordinate:
        num_lines = entries[0]
    elif symmetry == "general":
        num_lines = height * width
    else:
        num_lines = height * (height + (-1 if symmetry == "skew-symmetric" else 1)) // 2
    header = _Header(
        coordinate=coordinate, field=field, symmetry=symmetry, shape=(height, width), num_lines=num_lines
    )
    # Each column has a digit and a separator. This also bounds the memory of an array.
    max_lines = (len(text) - end) // (2 * len(header.column_types))
    if num_lines > max_lines:
        raise ValueError(f"the header announces {num_lines} entries; the file has room for {max_lines}")
    return header, bytes(text[end + 1 :])


def _quote(line: bytes) -> str:
    return repr(line[:40].decode("latin-1").strip())


def _parse_body(body: bytes, header: _Header, *, num_header_lines: int) -> list[np.ndarray]:
    """Parse the lines after the header; return one array for each column."""
    types = header.column_types
    names = [str(number) for number in range(len(types))]
    # Arrow also reads hexadecimal numbers, NaN and infinity.
    if body.translate(None, _BODY_CHARACTERS):
        raise ValueError(_describe_bad_line(body, header, num_header_lines))
    lines = _normalize_spaces(body)
    if not lines:
        columns = [np.empty(0, data_type.to_pandas_dtype()) for data_type in types]
    else:
        try:
            table = csv.read_csv(
                pa.BufferReader(lines),
                csv.ReadOptions(column_names=names, use_threads=False),
                csv.ParseOptions(delimiter=" ", quote_char=False, escape_char=False),
                csv.ConvertOptions(
                    column_types=dict(zip(names, types, strict=True)), null_values=[], check_utf8=False
                ),
            )
        except pa.ArrowException as error:
            raise ValueError(_describe_bad_line(body, header, num_header_lines)) from error
        columns = [table[name].to_numpy() for name in names]
    if len(columns[0]) != header.num_lines:
        raise ValueError(f"the header announces {header.num_lines} entries; the file has {len(columns[0])}")
    _check_range(columns, lines)
    return columns


def _normalize_spaces(body: bytes) -> bytes:
    """Separate numbers by one space, and remove spaces around lines."""
    if b"\r" in body or b"\t" in body:
        body = body.replace(b"\r\n", b"\n").translate(bytes.maketrans(b"\r\t", b"  "))
    while b"  " in body:
        body = body.replace(b"  ", b" ")
    return body.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" \n")


def _check_range(columns: list[np.ndarray], lines: bytes) -> None:
    """Check that no number overflows to infinity or underflows to zero."""
    for column in columns:
        if column.dtype.kind == "f" and np.isinf(column).any():
            entry = int(np.argmax(np.isinf(column)))
            raise ValueError(f"entry {entry + 1} exceeds the range of float64")
    has_zero = any(column.dtype.kind == "f" and not column.all() for column in columns)
    if has_zero and _TINY_EXPONENT.search(lines):
        for token in lines.split():
            if _NONZERO_MANTISSA.match(token) and float(token) == 0.0:
                raise ValueError(f"the value {_quote(token)} is below the range of float64")


def _describe_bad_line(body: bytes, header: _Header, num_header_lines: int) -> str:
    """Describe the first line that violates the grammar."""
    fields = [_REAL if pa.types.is_floating(data_type) else _INTEGER for data_type in header.column_types]
    good = rb"[ \t\r]*+(?:" + rb"[ \t\r]++".join(fields) + rb")?+[ \t\r]*+$"
    bad = re.compile(rb"(?m)^(?!" + good + rb").*").search(body)
    expected = ", ".join(
        (["row", "column"] if header.coordinate else [])
        + ([header.field] if header.field != "pattern" else [])
    )
    if bad is None:
        return f"a number exceeds 64 bits; expected {expected}"
    line = num_header_lines + body.count(b"\n", 0, bad.start()) + 1
    return f"line {line} is {_quote(bad[0])}; expected {expected}"


def _list_array_coordinates(header: _Header) -> tuple[np.ndarray, np.ndarray]:
    """List the coordinates of the values of an array, which are stored by columns."""
    height, width = header.shape
    if header.symmetry == "general":
        cols, rows = np.divmod(np.arange(height * width), height)
        return rows, cols
    # The lower triangle by columns has the order of the upper triangle by rows.
    cols, rows = np.triu_indices(height, k=int(header.symmetry == "skew-symmetric"))
    return rows, cols


def _expand_symmetry(
    header: _Header, rows: np.ndarray, cols: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add the other triangle of a symmetric matrix."""
    if header.symmetry == "general":
        return rows, cols, values
    skew = header.symmetry == "skew-symmetric"
    if skew and header.field == "unsigned-integer":
        raise ValueError("an unsigned matrix cannot be skew-symmetric")
    if skew and values[rows == cols].any():
        raise ValueError("a skew-symmetric matrix has a diagonal of zeros; the file has other values")
    lower, upper = rows > cols, rows < cols
    keys = rows * header.shape[1] + cols
    duplicates = np.intersect1d(keys[lower], (cols * header.shape[1] + rows)[upper])
    if len(duplicates):
        row, col = divmod(int(duplicates[0]), header.shape[1])
        raise ValueError(
            f"a {header.symmetry} matrix lists one triangle; the file has ({row + 1}, {col + 1}) and "
            f"({col + 1}, {row + 1})"
        )
    off = lower | upper
    mirrored = -values[off] if skew else values[off]
    return (
        np.concatenate([rows, cols[off]]),
        np.concatenate([cols, rows[off]]),
        np.concatenate([values, mirrored]),
    )
