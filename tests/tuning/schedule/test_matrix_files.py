"""Matrix files: formats, damaged files and bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.schedule import matrix_files
from sparseflow.tuning.schedule.matrix_files import find_matrix_files, parse_matrix_name, read_matrix

BANNER = "%%MatrixMarket matrix coordinate real general\n"
TEXT = BANNER + "% a comment\n2 3 2\n1 2 1.5\n2 3 -2\n"
DENSE = [[0, 1.5, 0], [0, 0, -2]]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(content: str | bytes, name: str = "a.mtx") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def read_dense(path: Path) -> list[list[float]]:
    return read_matrix(path).to_scipy().toarray().tolist()


def make_tar(**members: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name.replace("__", "/") + ".mtx")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.mtx", TEXT),
        ("a.mtx.gz", gzip.compress(TEXT.encode(), mtime=0)),
        ("A.MTX.GZ", gzip.compress(TEXT.encode(), mtime=0)),
        ("a.mtx.bz2", bz2.compress(TEXT.encode())),
        ("a.tar.gz", make_tar(a__a=TEXT)),
        ("a.tar.gz", make_tar(a__a_b=BANNER + "1 1 0\n", a__a=TEXT)),
        ("b.tgz", make_tar(a__a=TEXT)),
        ("a", TEXT),
        ("a.mtx.gz", TEXT),
        ("a.mtx", b"\xef\xbb\xbf" + TEXT.encode()),
        ("a.mtx", "\n \n" + TEXT),
        ("a.mtx", TEXT.replace("\n", "\r\n")),
        ("a.mtx", TEXT.replace(" ", "\t")),
        ("a.mtx", TEXT.replace("1 2 1.5", "  1   2  1.5  \n\n").replace("2 3 -2", "\t2\t3 -2 ")),
        ("a.mtx", TEXT.replace("1.5", "+1.5")),
        ("a.mtx", TEXT.replace("1.5", "+.15E+01")),
        ("a.mtx", TEXT.rstrip("\n")),
        ("a.mtx", TEXT.replace("2 3 2\n", "\n%\n\n2 3 2\n")),
        ("a.mtx", TEXT.replace(" general", "")),
        ("a.mtx", TEXT.replace("matrix coordinate real", "MATRIX Coordinate Double")),
        ("a.mtx", TEXT.replace("%%M", "%M")),
        ("a.mtx", TEXT.replace("real", "complex").replace("1.5", "1.5 0").replace("-2", "-2 -0.0")),
        ("a.mtx", "%%MatrixMarket matrix array real general\n2 3\n0\n0\n1.5\n0\n0\n-2\n"),
    ],
)  # fmt: skip
def test_read_matrix_accepts(name: str, content: str | bytes, write: Write) -> None:
    assert read_dense(write(content, name)) == DENSE


@pytest.mark.parametrize("storage", ["csr", "csc", "coo", "bsr", "dia"])
@pytest.mark.parametrize("compressed", [False, True])
def test_read_matrix_npz(storage: str, compressed: bool, tmp_path: Path) -> None:
    matrix = scipy.sparse.csr_array(np.array(DENSE)).asformat(storage)
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix, compressed=compressed)
    assert read_dense(tmp_path / "a.npz") == DENSE


@pytest.mark.parametrize(
    ("banner", "body", "dense"),
    [
        ("coordinate real symmetric", "2 2 2\n1 1 3\n2 1 4\n", [[3, 4], [4, 0]]),
        ("coordinate real symmetric", "2 2 1\n1 2 4\n", [[0, 4], [4, 0]]),
        ("coordinate integer skew-symmetric", "2 2 1\n2 1 4\n", [[0, -4], [4, 0]]),
        ("coordinate complex hermitian", "2 2 1\n2 1 4 0\n", [[0, 4], [4, 0]]),
        ("coordinate pattern symmetric", "3 3 3\n1 1\n2 1\n3 2\n", [[1, 1, 0], [1, 0, 1], [0, 1, 0]]),
        ("coordinate pattern", "2 2 1\n1 2\n", [[0, 1], [0, 0]]),
        ("array real symmetric", "3 3\n1\n2\n3\n4\n5\n6\n", [[1, 2, 3], [2, 4, 5], [3, 5, 6]]),
        ("array integer skew-symmetric", "3 3\n1\n2\n3\n", [[0, -1, -2], [1, 0, -3], [2, 3, 0]]),
        ("array unsigned-integer general", "1 2\n7\n0\n", [[7, 0]]),
        ("coordinate real general", "2 2 3\n1 2 1\n1 2 2\n2 1 0\n", [[0, 3], [0, 0]]),
        ("coordinate real general", "2 2 0\n", [[0, 0], [0, 0]]),
    ],
)
def test_read_matrix_fields_and_symmetries(
    banner: str, body: str, dense: list[list[float]], write: Write
) -> None:
    for text in (f"%%MatrixMarket matrix {banner}\n{body}", f"%%MatrixMarket\tmatrix {banner}\n{body}"):
        assert read_dense(write(text.replace(" ", "\t", 3))) == dense
        assert read_dense(write(text)) == dense


def test_read_matrix_equals_scipy(tmp_path: Path) -> None:
    matrix = scipy.sparse.random_array((50, 40), density=0.2, rng=np.random.default_rng(0), dtype=np.float64)
    scipy.io.mmwrite(tmp_path / "a.mtx", matrix, precision=17)
    result = read_matrix(tmp_path / "a.mtx")
    assert result.values.dtype == np.float64
    assert np.array_equal(result.to_scipy().toarray(), matrix.toarray())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "3 3 1\n1 1 1.5\n",
        "<!DOCTYPE html>\n<html><body>404 Not found</body></html>\n",
        BANNER.encode("utf-16"),
        BANNER,
        BANNER + "% only comments\n",
        TEXT.replace("matrix", "vector"),
        TEXT.replace("coordinate", "elemental"),
        TEXT.replace("real", "quaternion"),
        TEXT.replace("general", "triangular"),
        TEXT.replace("general", "general general"),
        TEXT.replace("general", "symmetric"),  # not square
        TEXT.replace("general", "hermitian").replace("2 3 2", "3 3 2"),
        TEXT.replace("real", "pattern"),
        TEXT.replace("coordinate real", "array pattern"),
        TEXT.replace("2 3 2", "2 3"),
        TEXT.replace("2 3 2", "2 3 2 1"),
        TEXT.replace("2 3 2", "2 3 -2"),
        TEXT.replace("2 3 2", "0 3 2"),
        TEXT.replace("2 3 2", "2.0 3 2"),
        TEXT.replace("2 3 2", "2 3 3"),
        TEXT.replace("2 3 2", "2 3 1"),
        TEXT.replace("2 3 2", "3000000000 3000000000 2"),
        TEXT.replace("2 3 2", f"1000000 1000000 {10**11}"),
        TEXT.replace("2 3 2", f"2 3 {10**30}"),
        TEXT.replace("1 2 1.5", "0 2 1.5"),
        TEXT.replace("1 2 1.5", "1 4 1.5"),
        TEXT.replace("1 2 1.5", "-1 2 1.5"),
        TEXT.replace("1 2 1.5", "1.0 2.0 1.5"),
        TEXT.replace("1 2 1.5", "0x1 2 1.5"),
        TEXT.replace("1 2 1.5", f"{10**30} 2 1.5"),
        TEXT.replace("1 2 1.5", "1 2"),
        TEXT.replace("1 2 1.5", "1 2 1.5 1"),
        TEXT.replace("1 2 1.5", "1 2 1.5 % a comment"),
        TEXT.replace("1 2 1.5", "% a comment\n1 2 1.5"),
        *(
            TEXT.replace("1.5", value)
            for value in ("x", "1,5", "1.5D+02", "1.5d2", "1 .5", "9E", "9E-", "-", ".", "--1", "nan", "inf",
                          "0x10", "1e400", "1e-400", "1_5", "1.5\0")
        ),
        TEXT.replace("real", "integer"),
        TEXT.replace("real", "complex").replace("1.5", "1.5 1").replace("-2", "-2 0"),
        BANNER.replace("general", "symmetric") + "2 2 2\n1 2 1\n2 1 1\n",
        BANNER.replace("general", "skew-symmetric") + "2 2 2\n1 1 1\n2 1 1\n",
        "%%MatrixMarket matrix array real general\n100000 100000\n1\n",
    ],
)  # fmt: skip
def test_read_matrix_damaged_file_raises(text: str | bytes, write: Write) -> None:
    with pytest.raises(FileFormatError, match=r"a\.mtx"):
        read_matrix(write(text))


def test_read_matrix_error_shows_the_line(write: Write) -> None:
    with pytest.raises(FileFormatError, match="line 5 is '2 3 -2D0'; expected row, column, real"):
        read_matrix(write(TEXT.replace("-2", "-2D0")))


def test_read_matrix_cut_file_raises(write: Write, tmp_path: Path) -> None:
    full_text = write(TEXT.replace("1.5", "1.5E+00").replace("-2", "-2.5e-01")).read_bytes()
    for end in range(len(full_text) - 4):  # a shorter cut leaves a complete number
        if full_text[:end].endswith((b"-2", b"-2.", b"-2.5")):
            continue
        with pytest.raises(FileFormatError):
            read_matrix(write(full_text[:end]))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [(("real", "1e-60"), np.float32), (("real", "1e300"), np.float32), (("integer", "16777217"), np.float32)],
)
def test_read_matrix_value_outside_dtype_raises(values: tuple[str, str], dtype: type, write: Write) -> None:
    field, value = values
    path = write(BANNER.replace("real", field) + f"1 1 1\n1 1 {value}\n")
    with pytest.raises(InputError, match="--dtype float64"):
        read_matrix(path, dtype=dtype)
    assert read_matrix(path).values.tolist() == [float(value)]
    assert read_matrix(path).values.dtype == np.float64


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_read_matrix_bomb_raises(
    compress: Callable[[bytes], bytes], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_files, "_FREE_BYTES", 1 << 20)
    with pytest.raises(FileFormatError, match="expands to more than 1 MiB"):
        read_matrix(write(compress(BANNER.encode() + b"%" * (2 << 20)), "a.mtx.gz"))


def test_read_matrix_truncated_archives_raise(write: Write) -> None:
    for content in (gzip.compress(TEXT.encode() * 50), bz2.compress(TEXT.encode()), make_tar(a=TEXT)):
        with pytest.raises(FileFormatError):
            read_matrix(write(content[: len(content) // 2], "a.mtx.gz"))


@pytest.mark.parametrize("members", [{}, {"x": TEXT, "y": TEXT}, {"a": "hello"}])
def test_read_matrix_unsuitable_archive_raises(members: dict[str, str], write: Write) -> None:
    with pytest.raises(FileFormatError):
        read_matrix(write(make_tar(**members), "a.tar.gz"))


def test_read_matrix_unsafe_npz_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_files, "_FREE_BYTES", 1 << 20)
    path = tmp_path / "a.npz"
    np.savez(path, data=np.array([print], object), format=b"coo")
    with pytest.raises(FileFormatError, match="object"):
        read_matrix(path)
    np.savez(path, x=np.ones(3))
    with pytest.raises(FileFormatError):
        read_matrix(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.npy", bytes(2 << 20))
    with pytest.raises(FileFormatError, match="expands"):
        read_matrix(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", header.getvalue())
    with pytest.raises(FileFormatError, match="does not fit"):
        read_matrix(path)


def test_read_matrix_inconsistent_npz_raises(tmp_path: Path) -> None:
    arrays = {"format": b"csr", "shape": (2, 2), "data": np.ones(2), "indptr": np.array([0, 1, 2])}
    np.savez(tmp_path / "a.npz", **arrays, indices=np.array([0, 7]))
    with pytest.raises(InputError):
        read_matrix(tmp_path / "a.npz")


def test_read_matrix_missing_file_raises(tmp_path: Path) -> None:
    for path in (tmp_path / "none.mtx", tmp_path):
        with pytest.raises(InputError):
            read_matrix(path)


def test_find_matrix_files_by_suffix(tmp_path: Path) -> None:
    names = ["a.mtx", "b.MTX.GZ", "c.tar.gz", "d.npz", "e.mtx.bz2", "f.tgz"]
    for name in (*names, "README", "g.txt"):
        (tmp_path / name).touch()
    files = find_matrix_files([tmp_path])
    assert [file.name for file in files] == names
    assert [parse_matrix_name(file) for file in files] == ["a", "b", "c", "d", "e", "f"]
    assert parse_matrix_name(Path("x.y")) == "x.y"
