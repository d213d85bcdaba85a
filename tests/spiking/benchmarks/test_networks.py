"""The benchmark of whole networks: cases, silenced networks, a run on a CPU, and what is recorded of it."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("spikingjelly")

from spikingjelly.activation_based import neuron

from sparseflow.core.timing import Comparison
from sparseflow.errors import InputError
from sparseflow.spiking.models import model_zoo
from tests.spiking.nets import Small

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "spiking"
sys.path.insert(0, str(SCRIPTS))
cases: Any = importlib.import_module("network_cases")
networks: Any = importlib.import_module("networks")
network_claims: Any = importlib.import_module("network_claims")
silenced: Any = importlib.import_module("silenced")

# Cases

CASES = st.builds(
    cases.Job,
    model=st.sampled_from(["spiking_resnet18", "sew_resnet50"]),
    settings=st.builds(
        model_zoo.NetworkConfig,
        time_steps=st.integers(1, 32),
        image_size=st.sampled_from([16, 32, 64]),
        num_classes=st.sampled_from([3, 10, 100]),
        width=st.sampled_from([8, 64]),
        firing_rate=st.sampled_from([None, 0.05, 0.3]),
    ),
    batch=st.integers(1, 64),
    silent=st.sampled_from([0.0, 0.25, 0.5]),
)


@given(CASES)
def test_case_matches_its_name(job: Any) -> None:
    assert cases.parse(job.name) == job


def test_case_without_options() -> None:
    job = cases.parse("spiking_resnet50:4:32")
    assert job.name == "spiking_resnet50:4:32" and job.settings == model_zoo.NetworkConfig()
    assert cases.parse("spiking_resnet50:4:32:32,classes=10").name == job.name, "usual values are not named"


@pytest.mark.parametrize(
    "text",
    ["", "spiking_resnet18", "spiking_resnet18:4", "spiking_resnet18:4:x", "spiking_resnet18:4:32,classes",
     "spiking_resnet18:4:32,colour=3", "spiking_resnet18:4:32,classes=many", "a:4:32:64:5", "a:4:32,"],
)  # fmt: skip
def test_bad_cases_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cases.parse(text)


def test_grid_is_complete_and_unique() -> None:
    quick, full = cases.grid("quick"), cases.grid("full")
    assert full[: len(quick)] == quick
    plain = {
        (job.model, job.settings.num_classes, job.settings.time_steps, job.batch)
        for job in full
        if job.settings.firing_rate is None
    }
    depths = [f"spiking_resnet{d}" for d in (18, 34, 50, 101, 152)]
    assert plain == {(d, c, t, n) for d in depths for c in (10, 100) for t in (4, 16) for n in (1, 8, 32)}
    firing = {(job.model, job.settings.time_steps) for job in quick if job.settings.firing_rate == 0.3}
    assert firing == {(d, t) for d in depths for t in (4, 16)}
    assert len({job.name for job in full}) == len(full) == 70
    assert all(job.grid for job in full)


def test_networks_of_the_same_layers_are_prepared_once() -> None:
    actual = cases.distinct(cases.grid("full"))
    assert len(actual) == 2 * 2 * 3
    assert {job.model for job in actual} == {"spiking_resnet18", "spiking_resnet50"}
    assert len(cases.distinct([cases.parse("a_resnet18:4:1"), cases.parse("a_resnet18:4:1,silent=0.5")])) == 2


# Silenced networks


@pytest.mark.parametrize(
    ("channels", "share", "count"),
    [
        (64, 0.5, 32),
        (128, 0.5, 64),
        (512, 0.5, 256),
        (192, 0.5, 128),
        (256, 0.25, 64),
        (8, 0.25, 2),
        (64, 0, 0),
    ],
)
def test_whole_groups_are_silenced(channels: int, share: float, count: int) -> None:
    assert silenced.silent_count(channels, share) == count


def channels_firing(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    actual: dict[str, torch.Tensor] = {}

    def look(name: str, spikes: torch.Tensor) -> None:
        actual[name] = spikes.transpose(0, 2).flatten(1).any(1)

    for name, module in net.named_modules():
        if isinstance(module, neuron.BaseNode):
            module.register_forward_hook(lambda *observed, name=name: look(name, observed[-1]))
    with torch.no_grad():
        net(x)
    return actual


@pytest.mark.parametrize("text", [
    "spiking_resnet18:2:3:8,silent=0.5", "sew_resnet18:2:3:16,width=8,silent=0.25",
    "spiking_resnet50:2:3:16,width=16,silent=0.5", "sew_resnet50:2:3:16,width=8,silent=0.5,firing=0.3",
])  # fmt: skip
def test_only_silenced_channels_never_fire(text: str) -> None:
    job = cases.parse(text)
    net = model_zoo.build_network(job.model, job.settings)
    silent = silenced.silence_channels(net, job.silent)
    model_zoo.calibrate_batchnorm(net, model_zoo.sample_images(job.settings, 4))
    # Brighter than what the statistics were taken from: the others have every occasion to fire.
    actual = channels_firing(net, 1.5 * model_zoo.sample_images(job.settings, 16))
    assert set(actual) == set(silent), "every neuron has silent channels"
    for name, fires in actual.items():
        quiet = torch.zeros_like(fires)
        quiet[silent[name]] = True
        assert int(quiet.sum()) == silenced.silent_count(len(fires), job.silent)
        assert not (fires & quiet).any(), name
        assert fires[~quiet].float().mean() > 0.9, (name, "the other channels still fire")
        ordered = silent[name].unique()
        assert torch.equal(ordered, silent[name])
        if len(ordered) >= 8:
            assert ordered.diff().max() > 1, "scattered"


def test_blocks_of_a_stage_share_silent_channels() -> None:
    net = model_zoo.build_network(
        "spiking_resnet18", model_zoo.NetworkConfig(width=16, image_size=16, time_steps=1)
    )
    silent = silenced.silence_channels(net, 0.5)
    assert torch.equal(silent["sn1"], silent["layer1.1.sn2"]), "identity shortcuts tie the stem to stage 1"
    assert torch.equal(silent["layer3.0.sn2"], silent["layer3.1.sn2"])
    assert not torch.equal(silent["layer3.0.sn1"], silent["layer3.1.sn1"]), "inner ones are drawn anew"
    second = model_zoo.build_network(
        "spiking_resnet18", model_zoo.NetworkConfig(width=16, image_size=16, time_steps=1)
    )
    assert all(torch.equal(a, silent[name]) for name, a in silenced.silence_channels(second, 0.5).items())


def test_unsupported_networks_are_not_silenced() -> None:
    with pytest.raises(InputError, match="Small"):
        silenced.silence_channels(Small(), 0.5)
    with pytest.raises(InputError, match="`share`"):
        silenced.silence_channels(
            model_zoo.build_network(
                "spiking_resnet18", model_zoo.NetworkConfig(width=8, time_steps=1, image_size=8)
            ),
            1.0,
        )


# Choosing what to time


def comparison(**times: float) -> Comparison:
    return Comparison(
        baseline="optimised",
        times_ms={name.replace("_", " "): (ms, ms, ms) for name, ms in times.items()},
        order=((*times,),) * 3,
        timer="none", device="cpu", warmup=0, seed=0,
    )  # fmt: skip


def test_only_forms_near_the_fastest_dense_one_are_timed_on() -> None:
    observed = comparison(eager=9.0, tf32=2.0, fp16=2.4, bf16=2.6, optimised=1.0)
    assert networks.fastest_dense(observed) == "tf32"
    assert set(networks.finalists(observed, eager=False)) == {"tf32", "fp16", "optimised"}
    assert set(networks.finalists(observed, eager=True)) == {"tf32", "fp16", "optimised", "eager"}
    single = comparison(eager=2.0, optimised=3.0)
    assert set(networks.finalists(single, eager=False)) == {"eager", "optimised"}
    times_ms = {networks.FUSED_DENSE: (0.1,), "eager": (1.0,), "optimised": (0.2,)}
    with_ours = Comparison(
        baseline="eager",
        times_ms=times_ms,
        order=((*times_ms,),),
        timer="",
        device="cpu",
        warmup=0,
        seed=0,
    )
    assert networks.fastest_dense(with_ours) == "eager", "nobody has ours without SparseFlow"
    assert networks.FUSED_DENSE in networks.finalists(with_ours, eager=False)


# A run


@pytest.fixture(autouse=True)
def no_cache_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))


def test_cpu_run_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba")
    out = tmp_path / "n.json"
    common = ["--cpu", "--out", str(out), "--rounds", "2", "--exact", "--case"]
    networks.main([*common, "no_such_network:2:2", "--seconds"])
    assert "InputError" in json.loads(out.read_text())["rows"][0]["error"]
    case = "spiking_resnet18:2:2:8,classes=3,width=8,silent=0.5"
    networks.main([*common, case, "--seconds"])
    (row,) = json.loads(out.read_text())["rows"]  # what failed is tried again or gone, never kept
    assert row["case"] == case and row["silent_target"] == 0.5 and row["settings"]["classes"] == 3
    assert all(len(times) == 2 for times in row["samples"].values())
    assert {row["baseline"], "optimised", "eager"} <= set(row["samples"])
    assert row["top1_agreement"] == 1 and row["error_optimised"] < 1e-5
    assert 0.4 < row["silent_channels"] < 0.9 and 0.01 < row["firing_rate"] < 0.3
    assert {"build", "optimise", "dense forms", "screening", "rounds"} <= set(row["seconds"])
    assert "build" in capsys.readouterr().out
    stamp = out.stat().st_mtime_ns
    networks.main([*common, case])
    assert out.stat().st_mtime_ns == stamp, "nothing was left to do"
    networks.main([*common, case, "--case", "sew_resnet18:2:2", "--list"])
    assert capsys.readouterr().out.split() == ["sew_resnet18:2:2"]


@pytest.mark.parametrize("argv", [[], ["--trained", "x"], ["--case", "nonsense"], ["--grid", "huge"]])
def test_bad_arguments_exit_with_2(argv: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as first:
        networks.main(["--out", str(tmp_path / "x.json"), "--cpu", *argv])
    assert first.value.code == 2


# What is recorded


def row(text: str, dense: float = 1.6, **more: Any) -> dict[str, Any]:
    """A row as a GPU would have given it."""
    span = {"median": dense, "low": dense, "high": dense}
    times = {"eager": [5.0], "tf32": [dense], networks.FUSED_DENSE: [2.0], "optimised": [1.0]}
    return {
        **cases.parse(text).facts(), "dtype": "torch.float16", "compiled": False, "command": "networks.py",
        "baseline": "tf32", "speedup": span, "speedup_our_dense": {**span, "median": 2.0},
        "speedup_eager": {**span, "median": 5.0}, "latency_ms": {k: v[0] for k, v in times.items()},
        "samples": times, "screening": times, "firing_rate": 0.12, "silent_channels": 0.1,
        "memory_eager_bytes": 2000, "memory_optimised_bytes": 1000, "decisions": {}, "layer_ms": {},
        "nearly_silent": [], **more,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_claims, "write_samples", lambda name, content: name)


def claims(*rows: dict[str, Any]) -> dict[str, Any]:
    """Claims of rows by id without the wing."""
    claims = list(network_claims.make_claims({"device": "GPU", "argv": [], "rows": list(rows)}))
    assert all(len(claim.claim.split()) <= 25 for claim in claims)
    by_id = {claim.id.partition("/")[2]: claim for claim in claims}
    assert len(by_id) == len(claims)
    return by_id


@pytest.mark.parametrize(
    ("text", "more", "dense", "eager"),
    [
        ("spiking_resnet50:4:32", {}, 1.5, 4.0),
        ("spiking_resnet50:4:8", {}, 0.98, None),
        ("spiking_resnet18:16:32", {}, 1.2, None),
        ("spiking_resnet34:4:32", {}, 0.98, None),
        ("spiking_resnet50:4:32,firing=0.3", {}, 0.98, None),
        ("spiking_resnet18:4:32,silent=0.5", {}, 2.0, None),
        ("spiking_resnet50:4:32", {"dtype": "None"}, 0.98, None),
        ("spk_w64:4:32", {"trained": True}, 1.4, 4.0),
        ("spk_w64:16:32", {"trained": True}, 1.2, None),
    ],
)
def test_compute_targets_per_network(
    text: str, more: dict[str, Any], dense: float, eager: float | None
) -> None:
    assert network_claims.compute_targets(row(text, **more)) == (dense, eager)


def test_make_claims_of_one_network() -> None:
    result = claims(row("spiking_resnet50:4:32", 1.4))
    assert set(result) == {f"3-spiking-resnet50-4-32-{slug}" for slug in ("dense", "eager", "memory")}
    assert not result["3-spiking-resnet50-4-32-dense"].met
    assert "torch.compile was not tried" in result["3-spiking-resnet50-4-32-dense"].baseline
    both = claims(row("a:4:32"), row("a:4:32", dtype="None"), {"grid": False, "error": "broke"})
    assert {"3-a-4-32-dense", "3-a-4-32-fp32-dense"} <= set(both)


def test_make_claims_of_grid_uses_slowest_network() -> None:
    rows = [row("a:4:1", 1.5, grid=True), row("b:4:1", 1.2, grid=True), row("c:4:1", 3.0, grid=True)]
    result = claims(*rows)
    assert set(result) == {"3-grid-dense", "3-grid-own-dense", "3-grid-memory"}
    assert result["3-grid-dense"].value == 1.2 and result["3-grid-dense"].details["slowest"] == "b:4:1"
    assert "but torch.compile" in result["3-grid-dense"].baseline
    rows[2]["speedup_our_dense"] = {"median": 0.9}
    result = claims(*rows)
    assert result["3-grid-dense"].value == 1.2 and result["3-grid-own-dense"].value == 0.9
    assert not result["3-grid-own-dense"].met and result["3-grid-own-dense"].details["slowest"] == "c:4:1"
    failed = {**cases.parse("d:4:1").facts(), "grid": True, "error": "broke"}
    broken = claims(failed, *rows)["3-grid-dense"]
    assert broken.value == 0 and not broken.met and broken.details["failed"] == 1
    assert claims(failed)["3-grid-dense"].value == 0


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(1e-7, 1e-2), st.floats(1e-7, 1e-2))
def test_make_claims_of_errors_compares_same_precision(optimized: float, dense: float) -> None:
    half = "fp16 channels_last, folded, CUDA graph"
    errors = {"eager": dense, "eager, without TF32": dense, half: 10 * dense, "optimised": optimized}
    more = {"errors": errors, "agreement": dict.fromkeys(errors, 1.0), "images_for_errors": 3}
    single = claims(row("a:4:32", dtype="None", **more))
    assert single["5-fp32-error-a-4-32"].value == pytest.approx(optimized / dense, abs=1e-3, rel=1e-3)
    assert len(single) == 1 and single["5-fp32-error-a-4-32"].baseline == "eager"
    claim = claims(row("a:4:32", **more))["5-fp16-error-a-4-32"]
    assert claim.baseline == half
    assert claim.value == pytest.approx(optimized / dense / 10, abs=1e-3, rel=1e-3)


def test_make_claims_of_cpu_record_raises() -> None:
    with pytest.raises(InputError, match="--cpu"):
        list(network_claims.make_claims({"device": "CPU", "rows": []}))
