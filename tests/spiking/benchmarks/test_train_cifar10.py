"""The training script, its neuron, its data and its packaging, on a few synthetic images."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sparseflow.errors import FileFormatError, InputError
from sparseflow.spiking.models import pretrained

pytest.importorskip("spikingjelly")
Image = pytest.importorskip("PIL.Image")

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "spiking"
sys.path.insert(0, str(SCRIPTS))
cifar10: Any = importlib.import_module("cifar10")
training_lif: Any = importlib.import_module("training_lif")
train: Any = importlib.import_module("train_cifar10")
package_network: Any = importlib.import_module("package_network")


def make_archive(path: Path, *, per_class: int = 4, extra: dict[str, bytes] | None = None) -> Path:
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w:gz") as archive:
        members = dict(extra or {})
        # Out of order on purpose: the loader sorts.
        for label in reversed(range(len(cifar10.CLASSES))):
            for i in range(per_class):
                pixels = rng.integers(0, 40, (32, 32, 3), dtype=np.uint8)
                pixels[..., label % 3] += np.uint8(20 * label)
                stream = io.BytesIO()
                Image.fromarray(pixels).save(stream, format="PNG" if i else "JPEG")
                members[f"test/{cifar10.CLASSES[label]}/{i:04d}.jpg"] = stream.getvalue()
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_archive(tmp_path_factory.mktemp("cifar") / "images.tar.gz")


# Data


def test_archive_is_decoded_sorted_and_limited(archive: Path) -> None:
    data = cifar10.load_archive(archive)
    assert data.images.shape == (40, 3, 32, 32) and data.images.dtype == np.uint8
    assert data.labels.tolist() == [k for k in range(10) for _ in range(4)]
    assert data.images[39, 0].mean() > data.images[0, 0].mean() + 100  # truck's channel 0 is bright
    limited = cifar10.load_archive(archive, limit=15)
    assert np.bincount(limited.labels).tolist() == [2] * 10


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("test/cat/x.jpg", b"not an image"),
        ("test/cow/0.jpg", b""),
        ("plain.jpg", b""),
        ("test/cat/y.jpg", b""),
    ],
)
def test_bad_members_are_named(tmp_path: Path, name: str, data: bytes) -> None:
    path = make_archive(tmp_path / "bad.tar.gz", per_class=1, extra={name: data})
    with pytest.raises(FileFormatError, match=name):
        cifar10.load_archive(path)


def test_wrong_size_image_is_named(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (31, 32)).save(stream, format="PNG")
    path = make_archive(tmp_path / "bad.tar.gz", per_class=1, extra={"test/dog/z.png": stream.getvalue()})
    with pytest.raises(FileFormatError, match="31x32"):
        cifar10.load_archive(path)


def test_unreadable_archives(tmp_path: Path, archive: Path) -> None:
    with pytest.raises(FileFormatError, match="no such file"):
        cifar10.load_archive(tmp_path / "absent.tar.gz")
    (tmp_path / "junk.tar.gz").write_bytes(b"\x80\x04junk")
    with pytest.raises(FileFormatError, match="not a readable"):
        cifar10.load_archive(tmp_path / "junk.tar.gz")
    full = archive.read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(full[: len(full) // 2])
    with pytest.raises(FileFormatError, match="not a readable"):
        cifar10.load_archive(tmp_path / "cut.tar.gz")


# The neuron


@pytest.mark.parametrize("steps", [1, 4])
def test_training_neuron_equals_spikingjelly(steps: int) -> None:
    from sparseflow.spiking.models.spiking_resnet import lif_neuron

    torch.manual_seed(0)
    x = torch.randn(steps, 3, 5, 7, 3) * 2
    weight = torch.randn_like(x)
    grads, spikes = [], []
    for node in (lif_neuron(), training_lif.TrainingLIF(backend="torch")):
        leaf = x.clone().requires_grad_()
        out = node(leaf)
        (out * weight).sum().backward()
        spikes.append(out.detach())
        grads.append(leaf.grad)
    assert 0.02 < spikes[0].mean() < 0.5
    assert torch.equal(spikes[0], spikes[1])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_triton_neuron_equals_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = "import torch, training_lif; print(training_lif.disagreement(torch.device('cpu')))"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPTS)}
    completed = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == 0, completed.stderr
    assert float(completed.stdout) < 1e-5


def test_disagreement_detects_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, tau: float, v_threshold: float, with_rate: bool) -> Any:
        return training_lif.lif_torch(x * 1.5, tau, v_threshold)

    monkeypatch.setattr(training_lif, "_FusedLIF", SimpleNamespace(apply=wrong))
    assert training_lif.disagreement(torch.device("cpu")) > 0.1


def test_rate_carries_a_gradient_per_channel() -> None:
    x = (torch.randn(4, 2, 3, 5, 5) + 1).requires_grad_()
    node = training_lif.TrainingLIF(record_rate=True)
    spikes = node(x)
    torch.testing.assert_close(node.rate, spikes.mean(dim=(0, 1, 3, 4)))
    node.rate[1].backward()
    assert x.grad is not None
    assert x.grad[:, :, 1].abs().sum() > 0 and x.grad[:, :, [0, 2]].abs().sum() == 0


# Schedule, augmentation, penalties


def test_progress_takes_whichever_limit_is_ahead() -> None:
    elapsed_s = [0.0]
    progress = train.Progress(steps=100, seconds=50.0, start=0.5, clock=lambda: elapsed_s[0])
    assert progress.fraction(0) == 0.5
    assert progress.fraction(50) == 0.75
    elapsed_s[0] = 40.0
    assert progress.fraction(50) == pytest.approx(0.9)
    elapsed_s[0] = 60.0
    assert progress.fraction(50) == 1.0
    assert train.Progress(steps=10, seconds=0.0).fraction(5) == 0.5


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    rates = [train.learning_rate(f / 100, peak=0.2, warmup=0.1) for f in range(101)]
    assert max(rates) == pytest.approx(0.2) and rates.index(max(rates)) == 10
    assert rates[0] > 0 and rates[-1] == pytest.approx(0, abs=1e-12)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_augmentation_shifts_flips_and_erases() -> None:
    # Each pixel holds its own coordinates plus one, so that every output tells where it came from.
    rows = torch.arange(8.0).view(1, 1, 8, 1).expand(64, 1, 8, 8) + 1
    columns = torch.arange(8.0).view(1, 1, 1, 8).expand(64, 1, 8, 8) + 1
    x = torch.cat([rows, columns, torch.ones(64, 1, 8, 8)], 1)
    generator = torch.Generator().manual_seed(0)
    out = train.augment(x, pad=2, cutout=0, generator=generator)
    inside = out[:, 2] == 1
    assert inside.view(64, -1).sum(1).min() >= 36
    step_rows = (out[:, 0, 1:] - out[:, 0, :-1])[inside[:, 1:] & inside[:, :-1]]
    assert (step_rows == 1).all()
    step_columns = out[:, 1, 3, 4] - out[:, 1, 3, 3]
    assert set(step_columns.tolist()) == {1.0, -1.0}
    assert len({tuple(o[:2, 4, 4].tolist()) for o in out}) > 10
    erased = train.augment(torch.ones(64, 3, 8, 8), pad=0, cutout=4, generator=generator)[:, 0] == 0
    assert erased.sum((1, 2)).max() == 16 and erased.sum((1, 2)).min() >= 4


def test_penalty_spares_layers_below_the_target() -> None:
    rates = [torch.full((4,), 0.04), torch.full((8,), 0.25)]
    penalty = train.firing_penalty(rates, target=0.05, weight=2.0, channel_weight=0.0)
    assert penalty.item() == pytest.approx(2.0 * 0.2 / 2)
    more = train.firing_penalty(rates, target=0.05, weight=0.0, channel_weight=1.0)
    assert more.item() == pytest.approx((4 * 0.0401**0.5 + 8 * 0.2501**0.5) / 12)


# The whole way


@pytest.fixture(scope="module")
def finished(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    assert train.main(arguments(archive, out, "--epochs", "2")) == 0
    return out / "tiny"


def arguments(archive: Path, out: Path, *more: str) -> list[str]:
    # With a width of 4, the strided 1x1 convolution of oneDNN corrupts the heap on CPUs with AVX2 only.
    return [
        "--train", str(archive), "--test", str(archive), "--out", str(out), "--name", "tiny",
        "--device", "cpu", "--width", "8", "--time-steps", "2", "--batch", "16", "--bn-gain", "2",
        "--rate-weight", "1", "--channel-weight", "0.1", *more,
    ]  # fmt: skip


def test_run_writes_complete_files(finished: Path) -> None:
    log = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [1, 2]
    assert log[-1]["fraction"] == 1.0 and log[-1]["lr"] < 0.1
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["test_accuracy"] == metrics["correct"] / 40
    assert len(metrics["firing_rate"]) == 17 and len(metrics["conv_input_density"]) == 20
    assert len(metrics["channel_rate"]["layer4.1.sn2"]) == 64
    assert metrics["conv_input_density"]["conv1"] > 0.9
    assert not list(finished.glob(".*"))


def test_resume_goes_on_and_ends_annealed(archive: Path, tmp_path: Path) -> None:
    assert train.main(arguments(archive, tmp_path, "--epochs", "3", "--train-limit", "20")) == 0
    assert train.main(arguments(archive, tmp_path, "--epochs", "3", "--train-limit", "20", "--resume")) == 0
    log = (tmp_path / "tiny" / "log.jsonl").read_text().splitlines()
    assert len(log) == 3, "a finished run has nothing left to train"


def test_time_limit_ends_the_schedule(archive: Path, tmp_path: Path) -> None:
    assert train.main(arguments(archive, tmp_path, "--epochs", "100000", "--max-minutes", "0.001")) == 0
    last = json.loads((tmp_path / "tiny" / "log.jsonl").read_text().splitlines()[-1])
    assert last["fraction"] == 1.0 and last["epoch"] < 100000


def test_resume_refuses_another_network(archive: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    name = "tiny.checkpoint.safetensors"
    (folder / name).write_bytes((finished / name).read_bytes())
    assert train.main(arguments(archive, tmp_path, "--epochs", "3", "--resume", "--width", "16")) == 2


def test_bad_archive_exits_with_2(tmp_path: Path) -> None:
    assert train.main(arguments(tmp_path / "absent.tar.gz", tmp_path)) == 2


def test_packaged_run_is_what_the_zoo_loads(
    finished: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = package_network.package(finished, None, "tiny-net", tmp_path)
    assert [path.name for path in written] == ["tiny-net.safetensors", "tiny-net.json"]
    monkeypatch.setattr(pretrained, "_get_data_dir", lambda: tmp_path)
    data = cifar10.load_archive(archive)
    with torch.no_grad():
        logits = pretrained.load_network("tiny-net")(pretrained.normalize(data.images, "tiny-net"))
    card = pretrained.load_card("tiny-net")
    assert int((logits.argmax(1).numpy() == data.labels).sum()) == card["correct"]
    assert "--width 8" in card["command"] and str(archive) not in json.dumps(card)


def test_packaging_refuses_foreign_weights(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.json").write_bytes((finished / "metrics.json").read_bytes())
    (run / "weights.safetensors").write_bytes(b"other")
    with pytest.raises(FileFormatError, match="other weights"):
        package_network.package(run, None, "tiny-net", tmp_path)
    with pytest.raises(InputError, match="lower-case"):
        package_network.package(finished, None, "Tiny/net", tmp_path)


def test_pretrained_images_are_balanced_over_classes() -> None:
    test = cifar10.Images(
        images=np.arange(400, dtype=np.uint8).reshape(400, 1, 1, 1), labels=np.repeat(np.arange(10), 40)
    )
    selected = package_network.choose_images(test)
    counts = np.bincount(selected.labels)
    assert len(selected) == 256 and counts.max() - counts.min() <= 1
    assert (np.diff(selected.labels) < 0).any(), "not sorted by class"
