"""A short fixed effort of the fuzzer, and its own behavior."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from random import Random

import pytest

from sparseflow.errors import SparseFlowError
from tests.harness import fuzz
from tests.harness.targets import CORPUS, TARGETS

NUM_INPUTS = 8
"""Mutated inputs of each target."""


def _skip_without_packages(name: str) -> None:
    packages = {"latency": ["onnx", "onnxruntime", "xgboost"], "pruning": ["yaml", "av", "transformers"],
                "codesign": ["yaml", "sklearn", "numba"], "adaptive": ["yaml", "transformers", "PIL"],
                "tuning": ["yaml", "pyarrow"]}  # fmt: skip
    for package in packages.get(name.partition("-")[0], ["yaml"]):
        pytest.importorskip(package)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_target_accepts_its_seeds_and_refuses_mutations_with_our_errors(name: str, tmp_path: Path) -> None:
    _skip_without_packages(name)
    target, random = TARGETS[name], Random(name)
    for seed in sorted((CORPUS / name).iterdir()):
        for index in range(1 + NUM_INPUTS):
            directory = tmp_path / str(index)
            directory.mkdir()
            content = seed.read_bytes() if index == 0 else target.mutation(random, seed.read_bytes())
            (directory / target.file).write_bytes(content)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    target.parse(directory / target.file)
                except SparseFlowError as error:
                    assert index, f"the seed {seed} is refused; run python -m tests.harness.seeds: {error}"
            shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("content", "kind", "error"),
    [
        ("d", "death", "SIGSEGV"),
        ("h", "hang", "SIGALRM"),
        ("e", "exception", "KeyError"),
        ("m", "memory", ""),
    ],
)
def test_fuzz_records_a_failure(
    content: str, kind: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("atheris")
    monkeypatch.setattr(fuzz, "WORKER", "tests.harness.faulty_worker")
    monkeypatch.setattr(fuzz, "MAX_DEATHS", 1)
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path / "corpus")
    (tmp_path / "corpus" / "json").mkdir(parents=True)
    (tmp_path / "corpus" / "json" / "a").write_text("x")  # imports the parser
    (tmp_path / "corpus" / "json" / "b").write_text(content)
    assert fuzz.main(["--target", "json", "--inputs", "3", "--out", str(tmp_path / "out")]) == 1
    tally = json.loads((tmp_path / "out" / "tally.json").read_text())["targets"]["json"]
    (failure,) = (row for row in tally["failures"] if row["kind"] == kind)
    assert error in failure["error"]
    assert (tmp_path / "out" / "json" / failure["input"]).read_text()[0] == content


def test_fuzz_of_a_sound_parser_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    assert fuzz.main(["--target", "json", "--inputs", "200", "--out", str(tmp_path)]) == 0
    total = json.loads((tmp_path / "tally.json").read_text())["total"]
    assert total["inputs"] >= 200 and not any(total[kind] for kind in fuzz.KINDS)
