"""Import of AutoSparse's labels."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from sparseflow.errors import FileFormatError, InputError, OutputError
from sparseflow.tuning.measure.label_import import REJECTED_FILE, import_labels
from sparseflow.tuning.measure.labels import LABELS_FILE, LabelSet
from sparseflow.tuning.schedule import matrix_files
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.random_schedules import CSR_LINE, SDDMM_LINE, SPMM_LINE, SPMV_LINE

HEADER = "matrix\tschedule\tlatency_ms\n"
RACE = SPMM_LINE.replace("i0 1 i1 1", "i0 2 i1 1").replace("j0 j1 None", "i0 j1 None")
MATRIX = "%%MatrixMarket matrix coordinate pattern general\n5000 60000 2\n1 2\n5000 60000\n"


def spmm(**options: Any) -> dict[str, Any]:
    return {"operator": "spmm", **options}


def table(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "labels-of-a-xeon.tsv.gz"
    path.write_bytes(gzip.compress((HEADER + "".join(f"{row}\n" for row in rows)).encode()))
    return path


def test_import_table(tmp_path: Path) -> None:
    # Only the nominal sizes differ, so this is a repeat.
    same = SPMM_LINE.replace("i0 256 i1 16", "i0 7 i1 16")
    file = table(
        tmp_path,
        f"net100\t{SPMM_LINE}\t4.0",
        f"net150\t{SPMM_LINE}\t7.0",
        f"net100\t{CSR_LINE}\t2.5",
        f"net100\t{SPMM_LINE}\t1.0",
        f"net100\t{same}\t2.0",
    )
    result = import_labels(file, tmp_path / "out", **spmm())
    assert result.rows == 5 and not result.rejected and result.patterns == 0 and not result.warnings
    opened = LabelSet.open(tmp_path / "out")
    assert opened.tasks == result.tasks
    first, second = result.tasks
    assert (first.matrix, first.family, first.device) == ("net100", "net", "labels-of-a-xeon")
    assert (first.shape, first.nnz, first.n_cols) == ((4096, 65536), None, 128)
    assert (first.threads, first.dtype, first.pattern) == (128, "float32", None)
    assert (second.matrix, second.family) == ("net150", "net")
    rows = opened.read_latencies(first)
    line = str(Schedule.parse(SPMM_LINE).canonicalize(OPERATORS["spmm"], first.extents()))
    assert dict(zip(rows.schedules, rows.latency_ms, strict=True))[line] == 2.0
    assert sorted(rows.repeats) == [1, 3]
    assert (tmp_path / "out" / REJECTED_FILE).read_text() == "line\treason\n"


@pytest.mark.parametrize(("operator", "line"), [("spmv", SPMV_LINE), ("sddmm", SDDMM_LINE)])
def test_import_other_operators(operator: str, line: str, tmp_path: Path) -> None:
    (task,) = import_labels(table(tmp_path, f"a\t{line}\t1"), tmp_path / "out", operator=operator).tasks
    assert task.n_cols == (None if operator == "spmv" else 64)


def test_import_plain_lines(tmp_path: Path) -> None:
    file = tmp_path / "net100.txt"
    file.write_text(f"{SPMM_LINE} 4.25\n{CSR_LINE} 1e-2\n{CSR_LINE}\n")
    result = import_labels(
        file, tmp_path / "out", **spmm(matrix="net100", device="epyc", families={"net100": "x"})
    )
    (task,) = result.tasks
    assert (task.matrix, task.family, task.device, result.rows) == ("net100", "x", "epyc", 2)
    assert result.rejected == ((3, "latency", "latency: none; expected milliseconds, above 0"),)
    assert LabelSet.open(tmp_path / "out").read_latencies(task).latency_ms.tolist() == [4.25, 0.01]


def test_import_invalid_lines_are_listed(tmp_path: Path) -> None:
    file = table(
        tmp_path,
        f"a\t{SPMM_LINE}\t4.0",
        f"a\t{SPMM_LINE}",
        f"a\t{SPMM_LINE} 5\t4.0",
        f"a\t{SPMM_LINE}\tnan",
        f"a\t{SPMM_LINE}\t-1",
        f"a\t{SPMM_LINE}\tsoon",
        f"a\t{RACE}\t3.0",
        f"b\t{SPMV_LINE}\t3.0",
        f"\t{SPMM_LINE}\t3.0",
        "",
    )
    result = import_labels(file, tmp_path / "out", **spmm())
    assert result.rows == 1 and len(result.tasks) == 1
    kinds = [(number, kind) for number, kind, _ in result.rejected]
    assert kinds == [
        (3, "columns"), (4, "grammar"), (5, "latency"), (6, "latency"), (7, "latency"),
        (8, "parallel-shared"), (9, "split-axis"), (10, "matrix"), (11, "columns"),
    ]  # fmt: skip
    rejected = result.to_dict()["rejected"]
    assert rejected["latency"] == {
        "rows": 3, "first_line": 5, "first_reason": "latency: 'nan'; expected milliseconds, above 0"
    }  # fmt: skip
    written = (tmp_path / "out" / REJECTED_FILE).read_text().splitlines()
    assert len(written) == 10 and written[2].startswith("4\tschedule, column")


def test_import_reads_patterns_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "matrices"
    folder.mkdir()
    (folder / "a.mtx").write_text(MATRIX)
    (folder / "c.mtx.gz").write_bytes(gzip.compress(MATRIX.replace("5000", "50000").encode()))
    (tmp_path / "secret.mtx").write_text(MATRIX)
    rows = [f"{name}\t{SPMM_LINE}\t1" for name in ("a", "b", "c", "../secret")]
    result = import_labels(table(tmp_path, *rows), tmp_path / "out", **spmm(matrices=folder))
    opened = LabelSet.open(tmp_path / "out")
    shapes = {task.matrix: (task.shape, task.nnz) for task in opened.tasks}
    assert shapes == {
        "a": ((5000, 60000), 2),
        "b": ((4096, 65536), None),
        "c": ((50000, 60000), 2),
        "../secret": ((4096, 65536), None),
    }
    assert result.patterns == 2
    pattern = opened.read_pattern(opened.tasks[0])
    assert pattern is not None and (pattern.nnz, pattern.shape) == (2, (5000, 60000))
    assert result.warnings == (
        "c: the extent of axis i is 50000, but the splits of most schedules cover 4096",
    )


def test_import_matrix_without_valid_line_is_skipped(tmp_path: Path) -> None:
    matrices = tmp_path / "matrices"
    matrices.mkdir()
    (matrices / "net100.mtx").write_text(MATRIX)
    file = table(tmp_path, "net100\tgarbage\t1.0", f"net150\t{SPMM_LINE}\t2.0")
    result = import_labels(file, tmp_path / "out", **spmm(n_cols=128, matrices=matrices))
    assert [task.matrix for task in result.tasks] == ["net150"]
    assert [(number, kind) for number, kind, _ in result.rejected] == [(2, "grammar")]


def test_import_explicit_columns(tmp_path: Path) -> None:
    file = table(tmp_path, f"a\t{SPMM_LINE}\t1")
    result = import_labels(file, tmp_path / "out", **spmm(n_cols=200))
    assert result.tasks[0].n_cols == 200 and not result.warnings
    result = import_labels(file, tmp_path / "other", **spmm(n_cols=256))
    assert result.tasks[0].n_cols == 256 and "extent of axis j is 256" in result.warnings[0]


@pytest.mark.parametrize(
    ("rows", "options", "output"),
    [
        ([f"a\t{SPMV_LINE}\t1"], {}, "2"),
        ([], {}, "spmm"),
        (["x\ty\tz"], {}, "2"),
        ([f"a\t{CSR_LINE}\t1"], {}, "`matrices`"),
        ([f"a\t{SPMM_LINE}\t1"], {"operator": "spmx"}, "'spmx'"),
        ([f"a\t{SPMM_LINE}\t1"], {"n_cols": 0}, "`n_cols`"),
        ([f"a\t{SPMV_LINE}\t1"], {"operator": "spmv", "n_cols": 8}, "`n_cols`"),
        ([f"a\t{SPMM_LINE}\t1"], {"dtype": "half"}, "float32"),
        ([f"a\t{SPMM_LINE}\t1"], {"matrix": "a"}, ""),
        ([f"a\t{SPMM_LINE}\t1"], {"matrices": "nowhere"}, ""),
        ([f"a\t{SPMM_LINE}\t1"], {"matrices": "."}, ""),
    ],
)
def test_import_invalid_arguments_raise(
    rows: list[str], options: dict[str, Any], output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = table(tmp_path, *rows)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=output or None):
        import_labels(file, tmp_path / "out", **{**spmm(), **options})
    assert not (tmp_path / "out").exists()


def test_import_unknown_columns_raise(tmp_path: Path) -> None:
    full = SPMM_LINE.replace(" 1 j 2 j0 2 j1 64 ", " 0 ").replace(
        "6 j0 i0 i1 k0 k1 j1 j0 j1", "5 i0 i1 k0 k1 j i0 j"
    )
    file = table(tmp_path, f"a\t{full}\t1")
    with pytest.raises(InputError, match="`n_cols`"):
        import_labels(file, tmp_path / "out", **spmm())
    assert import_labels(file, tmp_path / "out", **spmm(n_cols=32)).tasks[0].n_cols == 32


@pytest.mark.parametrize(
    "content",
    [
        b"",
        f"{SPMM_LINE} 4\n".encode(),
        b"\x1f\x8bnot gzip",
        gzip.compress(HEADER.encode(), mtime=0)[:-9],
        b"\xff\n",
    ],
)
def test_import_foreign_format_raises(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "labels.gz"
    file.write_bytes(content if content.startswith(b"\x1f\x8b") else gzip.compress(content))
    with pytest.raises(FileFormatError):
        import_labels(file, tmp_path / "out", **spmm())


def test_import_existing_labels_raise(tmp_path: Path) -> None:
    file = table(tmp_path, f"a\t{SPMM_LINE}\t1")
    import_labels(file, tmp_path, **spmm())
    before = (tmp_path / LABELS_FILE).read_bytes()
    with pytest.raises(InputError):
        import_labels(file, tmp_path, **spmm())
    with pytest.raises(OutputError):
        import_labels(file, file, **spmm())
    with pytest.raises(InputError):
        import_labels(tmp_path / "none", tmp_path / "out", **spmm())
    assert (tmp_path / LABELS_FILE).read_bytes() == before


def test_import_damaged_matrix_gives_warning(tmp_path: Path) -> None:
    file = table(tmp_path, f"a\t{SPMM_LINE}\t1", f"b\t{SPMM_LINE}\t1")
    (tmp_path / "a.mtx").write_text(MATRIX[:-11])
    (tmp_path / "b.mtx").write_text(MATRIX)
    result = import_labels(file, tmp_path / "out", **spmm(matrices=tmp_path))
    assert [task.pattern is not None for task in result.tasks] == [False, True]
    assert [str(tmp_path / "a.mtx") in warning for warning in result.warnings][:1] == [True]


def test_import_huge_sizes_are_rejected(tmp_path: Path) -> None:
    valid = SPMM_LINE
    huge = valid.replace("i0 256 i1 16", f"i0 {10**17} i1 {10**17}")
    assert huge != valid
    file = table(tmp_path, *[f"a\t{huge}\t1"] * 2, f"a\t{valid}\t1")
    result = import_labels(file, tmp_path / "out", **spmm())
    assert (result.rows, [kind for _, kind, _ in result.rejected]) == (1, ["size", "size"])
    with pytest.raises(InputError, match="n_cols"):
        import_labels(file, tmp_path / "other", **spmm(n_cols=10**30))


def test_import_gzip_bomb_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_files, "_FREE_BYTES", 1 << 20)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    with pytest.raises(FileFormatError, match="expands"):
        import_labels(tmp_path / "a.tsv.gz", tmp_path / "out", **spmm())
