"""Studies: files, resume, evaluation and refused inputs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import budget_grid
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.adaptive.study import SampleCounts, evaluate, train, write_page
from sparseflow.adaptive.study.outcome_tables import OUTCOMES_DIR
from sparseflow.adaptive.study.results import load_results
from sparseflow.adaptive.study.run import PLAN_QUALITY_FILE
from sparseflow.core.training.history import read_history
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.study import small


@pytest.fixture(scope="module")
def studied(study_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a study that was interrupted three times."""
    out = tmp_path_factory.mktemp("studied")

    def stop_at(word: str) -> Any:
        def progress(message: str, share: float) -> None:
            if message.startswith(word):
                raise KeyboardInterrupt

        return progress

    config = small.make_config(study_inputs, out=out, command="sparseflow adaptive train")
    for word in ("plans evaluated on 72 val", "supervised, seed 0: step 4", "evaluating: random"):
        with pytest.raises(KeyboardInterrupt):
            train(config, small.CONFIG, num_seeds=2, progress=stop_at(word))
    assert train(config, small.CONFIG, num_seeds=2) is not None
    return out


def test_train_writes_results_controllers_and_page(studied: Path, study_inputs: Path) -> None:
    results = load_results(studied)
    assert results["samples"] == {"train": 48, "validation": 24, "test": 40}
    assert [policy["name"] for policy in results["policies"]] == [
        "controllers", "lookup table", "supervised on oracle", "best static plan", "random", "oracle"
    ]  # fmt: skip
    assert results["attainment"] == 0.99 and results["seeds"] == 2 and results["verdict"]
    space = PlanProfile.load(study_inputs / "profile.parquet").space
    quality = PlanQuality.load(studied / PLAN_QUALITY_FILE)
    quality.check(results["model_id"], space)
    assert quality.samples == 72
    best = Controllers.load(studied / "controllers.safetensors", model_id=results["model_id"])
    seeds = [
        Controllers.load(studied / "controllers" / f"seed-{seed}" / "controllers.safetensors")
        for seed in range(2)
    ]
    states = [dict(policy.state_dict()) for policy in seeds]
    assert small.same(dict(best.state_dict()), states[results["best_seed"]])
    assert not small.same(*states)
    assert (
        len([row for row in read_history(studied / "controllers" / "seed-1") if row["kind"] == "train"]) == 4
    )
    assert "Comparison of policies" in (studied / "report.html").read_text("utf-8")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the page, which takes longer than the results."""
    monkeypatch.setattr("sparseflow.adaptive.study.run.write_page", lambda *_: None)


@pytest.mark.usefixtures("no_page")
def test_train_after_interrupts_gives_same_results(studied: Path, study_inputs: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    results = train(
        small.make_config(study_inputs, out=tmp_path),
        small.CONFIG,
        num_seeds=2,
        progress=lambda _, fraction: fractions.append(fraction),
    )
    assert results is not None and fractions == sorted(fractions)
    interrupted = load_results(studied)
    for name in ("policies", "compared", "plans", "predictor", "budgets_ms", "model_id"):
        assert json.loads(json.dumps(results[name])) == interrupted[name], name


@pytest.mark.usefixtures("undrawn_figures")
def test_evaluate_without_and_with_controllers(studied: Path, study_inputs: Path, tmp_path: Path) -> None:
    config = small.make_config(study_inputs, out=tmp_path, attainment=0.9)
    baselines = evaluate(config)
    assert baselines is not None and baselines["attainment"] == 0.9
    assert [policy["name"] for policy in baselines["policies"]] == [
        "lookup table",
        "best static plan",
        "random",
        "oracle",
    ]
    assert (tmp_path / PLAN_QUALITY_FILE).is_file() and (tmp_path / "report.html").is_file()
    results = evaluate(config, controllers=studied / "controllers.safetensors")
    assert results is not None and results["policies"][0]["name"] == "controllers"
    assert results["plans"] == baselines["plans"]
    assert results["judged_at"]["attainment"] == "argument"


@pytest.mark.usefixtures("no_page")
def test_evaluate_uses_conditions_of_study_of_controllers(
    studied: Path, study_inputs: Path, tmp_path: Path
) -> None:
    config = small.make_config(study_inputs, out=tmp_path / "judged")
    shutil.copytree(studied / OUTCOMES_DIR, config.out / OUTCOMES_DIR)
    study = json.loads((studied / "results.json").read_text("utf-8"))
    elsewhere = tmp_path / "study"
    (elsewhere / "controllers" / "seed-0").mkdir(parents=True)
    moved = elsewhere / "controllers" / "seed-0" / "controllers.safetensors"
    moved.write_bytes((studied / "controllers.safetensors").read_bytes())
    results = evaluate(config, controllers=moved)
    assert results is not None and results["attainment"] == 0.99
    assert results["judged_at"]["attainment"] == "default"
    assert results["judged_at"]["budgets"].startswith("default")
    narrower = budget_grid((1.1 * study["budgets_ms"][0], 0.9 * study["budgets_ms"][-1]), 6).tolist()
    content = study | {"attainment": 0.8, "budgets_ms": narrower}
    (elsewhere / "results.json").write_text(json.dumps(content))
    known = evaluate(config, controllers=moved)
    assert known is not None and known["attainment"] == 0.8
    assert known["budgets_ms"] == pytest.approx(narrower)
    assert set(known["judged_at"].values()) == {"study of the controllers"}
    (elsewhere / "results.json").write_text(json.dumps(content | {"device": {"name": "another"}}))
    other = evaluate(config, controllers=moved)
    assert other is not None and other["attainment"] == 0.8
    assert other["budgets_ms"] == results["budgets_ms"]


def test_write_page_again_gives_same_page(studied: Path, tmp_path: Path) -> None:
    page = write_page(studied, tmp_path / "again.html")
    second, first = (path.read_text("utf-8") for path in (page, studied / "report.html"))
    assert len(second) == len(first)


def test_train_and_evaluate_with_invalid_arguments_raise(
    studied: Path, study_inputs: Path, tmp_path: Path
) -> None:
    config = small.make_config(study_inputs, out=tmp_path / "study")
    with pytest.raises(InputError, match=r"absent.parquet"):
        train(replace(config, profile=tmp_path / "absent.parquet"), small.CONFIG)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"`out` \(=.*file\) is a file"):
        train(replace(config, out=tmp_path / "file"), small.CONFIG)
    with pytest.raises(InputError, match=r"`num_seeds` \(=0\)"):
        train(replace(config, counts=SampleCounts(train=8, validation=4, test=4)), small.CONFIG, num_seeds=0)
    with pytest.raises(InputError, match=r"steps"):
        train(
            small.make_config(study_inputs, out=studied),
            small.CONFIG.model_copy(update={"steps": 9}),
            num_seeds=2,
        )
    other = Controllers.load(studied / "controllers.safetensors")
    other.model_id = "other"
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"model other"):
        evaluate(config, controllers=tmp_path / "other.safetensors")
    before = (studied / "results.json").read_bytes()
    with pytest.raises(InputError, match=r"`out`.*training"):
        evaluate(small.make_config(study_inputs, out=studied))
    assert (studied / "results.json").read_bytes() == before
    with pytest.raises(InputError, match=r"results.json"):
        write_page(tmp_path, tmp_path / "page.html")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(FileFormatError, match=r"results.json"):
        write_page(tmp_path, tmp_path / "page.html")
    content = json.loads((studied / "results.json").read_text("utf-8"))
    del content["policies"][0]["curve"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match=r"KeyError\('curve'\)"):
        write_page(tmp_path, tmp_path / "page.html")
