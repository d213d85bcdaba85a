"""Mutations that know a format: they keep a file valid enough to reach what lies behind the first check.

Each mutation takes a random source and the content of a file, and returns changed content. The fuzzer
applies them beside its own mutations of bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

Mutation = Callable[[Random, bytes], bytes]

ATOMS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 1e308, -1e-320, 0.5, -0.0,
    1e-9, "", "x", "\0", "1", "nan", "../../x", "é" * 40, "a" * 5000, [], {}, [[]], [0], [None], {"a": 1},
    [[1, 2], [3]],
)  # fmt: skip
"""Values that replace others."""

TOKENS = (
    b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000, b"0x10", b"1_0", b"1e-400",
    b"9223372036854775808", b"\xff\xfe", b"\0", b"\xef\xbb\xbf", b"\xc3\xa9", b"\\ud800", b"\r\n", b"\n",
    b"[" * 100, b"{" * 100, b'"', b",", b"-", b"%", b"%%", b"&a ", b"*a ", b"!!python/object:os.system ",
    b"2020-13-45", b"1:2:3", b"<<: ", b"? ", b"- ", b": ",
)  # fmt: skip
"""Pieces of text that are written over or between others."""


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Cut, repeat, overwrite or insert; keeps most of a binary file as it is."""
    content = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        start = random.randrange(len(content) + 1)
        length = min(random.choice((1, 1, 2, 4, 8, 64)), len(content) - start)
        kind = random.randrange(6)
        if kind == 0:
            content[start : start + length] = random.randbytes(length)
        elif kind == 1:
            content[start:start] = random.choice(TOKENS)
        elif kind == 2:
            del content[start : start + length]
        elif kind == 3:
            content[start:start] = content[start : start + length] * random.choice((1, 2, 16))
        elif kind == 4 and length:
            content[start] ^= 1 << random.randrange(8)
        else:
            piece = random.choice(
                (b"\xff" * 4, b"\0" * 4, struct.pack("<I", 2**31), struct.pack("<Q", 2**40))
            )
            content[start : start + len(piece)] = piece
    return bytes(content if random.random() < 0.95 else content[: random.randrange(len(content) + 1)])


def mutate_text(random: Random, data: bytes) -> bytes:
    """Replace, swap, repeat or remove words of lines."""
    lines = data.split(b"\n")
    for _ in range(random.choice((1, 1, 2, 3))):
        index = random.randrange(len(lines))
        words = lines[index].split(b" ")
        position = random.randrange(len(words))
        kind = random.randrange(8)
        if kind == 0:
            words[position] = random.choice(TOKENS)
        elif kind > 4:
            words[position] = random.choice(
                (b"0", b"1", b"2", b"3", b"-1", b"+1", b"0.5", b"1e10", b"1.5D+02")
            )
        elif kind == 1:
            del words[position]
        elif kind == 2:
            words.insert(position, words[random.randrange(len(words))])
        elif kind == 3:
            lines.insert(index, lines[random.randrange(len(lines))])
            continue
        else:
            words[position] += random.choice(TOKENS)
        lines[index] = b" ".join(words)
    return b"\n".join(lines)


def mutate_json(random: Random, data: bytes) -> bytes:
    """Change the value, name or number of entries of a JSON document."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_text(random, data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        content = _change_value(random, content)
    text = json.dumps(content)
    if random.random() < 0.1:
        deep = random.choice(("[" * 70 + "]" * 70, "NaN", "Infinity", "1e999", "9" * 400, '"\\ud800"'))
        text = text.replace(random.choice(("1", "0", "null", '"')), deep, 1)
    return text.encode()


def mutate_yaml(random: Random, data: bytes) -> bytes:
    """Change the entries of a YAML document, which becomes JSON, or its text."""
    import yaml

    try:
        content = yaml.safe_load(data) if random.random() < 0.6 else None
        text = json.dumps(content).encode()
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return mutate_text(random, data)
    return mutate_text(random, data) if content is None else mutate_json(random, text)


def mutate_json_lines(random: Random, data: bytes) -> bytes:
    """Change one line of JSON, or the order and number of lines."""
    lines = data.split(b"\n")
    index = random.randrange(len(lines))
    if random.random() < 0.8:
        lines[index] = mutate_json(random, lines[index])
    elif random.random() < 0.5:
        lines.insert(index, random.choice(lines))
    else:
        del lines[index]
    return b"\n".join(lines)


def mutate_safetensors(random: Random, data: bytes) -> bytes:
    """Change the JSON header, and within it the record of the metadata, and keep the length field right."""
    if len(data) < 8 or (length := struct.unpack("<Q", data[:8])[0]) > len(data):
        return mutate_bytes(random, data)
    try:
        header = json.loads(data[8 : 8 + length])
        record = header["__metadata__"]["sparseflow"].encode()
    except (ValueError, KeyError, TypeError, AttributeError):
        return mutate_bytes(random, data)
    if random.random() < 0.7:
        header["__metadata__"]["sparseflow"] = mutate_json(random, record).decode("utf-8", "replace")
    else:
        header = _change_value(random, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def mutate_parquet(random: Random, data: bytes) -> bytes:
    """Change the record of the metadata or one column of a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError, ValueError):
        return mutate_bytes(random, data)
    if not table.num_columns:
        return mutate_bytes(random, data)
    if random.random() < 0.4:
        metadata = {
            key: mutate_json(random, value) if key == b"sparseflow" else value
            for key, value in (table.schema.metadata or {}).items()
        }
        table = table.replace_schema_metadata(metadata)
    else:
        index = random.randrange(table.num_columns)
        name, values = table.column_names[index], table.column(index).to_pylist()
        if random.random() < 0.3:
            table = table.drop_columns([name])
        else:
            changed = [random.choice(ATOMS) if random.random() < 0.3 else value for value in values]
            try:
                column = pa.array(changed)
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                column = pa.array([random.choice((None, 0, -1))] * len(values), pa.int64())
            table = table.set_column(index, name, column)
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def within_gzip(mutation: Mutation) -> Mutation:
    """Apply a mutation to the content of a gzip file."""

    def mutate(random: Random, data: bytes) -> bytes:
        try:
            content = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            return mutate_bytes(random, data)
        return gzip.compress(mutation(random, content), 1)

    return mutate


def _change_value(random: Random, content: Any) -> Any:
    """Return the content with one random entry changed."""
    if not isinstance(content, dict | list) or not content or random.random() < 0.05:
        return random.choice(ATOMS)
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = random.choice(keys)
    changed = content.copy()
    kind = random.random()
    if kind < 0.75:
        changed[key] = _change_value(random, content[key])
    elif kind < 0.85:
        del changed[key]
    elif isinstance(changed, dict):
        changed[random.choice(("", "x", "format", "version", str(key) * 2))] = content[key]
    else:
        changed.insert(key, random.choice(content))
    return changed
