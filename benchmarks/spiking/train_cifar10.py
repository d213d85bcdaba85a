"""Train a spiking ResNet on CIFAR-10 and write the files that :mod:`package_network` ships.

::

    PYTHONPATH=src python benchmarks/spiking/train_cifar10.py --train cifar10-train.tar.gz \\
        --test cifar10-test.tar.gz --out runs/train --name spiking_resnet18_w32 --width 32 --max-minutes 8

The learning rate follows the *fraction of the run that is over*, the larger of steps done over steps planned
and seconds gone over seconds allowed; so a run always ends annealed, whichever limit it meets, also after
``--resume``. The score reported is that of the weights as they ship (rounded to fp16), evaluated in float32
by the plain spikingjelly network on every test image.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from cifar10 import Images, load_archive
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from training_lif import TrainingLIF, disagreement

from sparseflow.errors import FileFormatError, InputError, RunError, SparseFlowError
from sparseflow.spiking.models.spiking_resnet import SpikingResNet, lif_neuron, spiking_resnet

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on; stored in its ``metrics.json``."""

    train: str
    test: str
    out: str
    name: str
    checkpoints: str
    device: str
    lif: str
    depth: int
    width: int
    time_steps: int
    residual: str
    epochs: int
    max_minutes: float
    batch: int
    lr: float
    weight_decay: float
    momentum: float
    warmup: float
    label_smoothing: float
    loss: str
    bn_gain: float
    cutout: int
    rate_target: float
    rate_weight: float
    channel_weight: float
    seed: int
    train_limit: int
    test_limit: int
    resume: bool


def parse(argv: list[str] | None = None) -> Config:
    """The command line, as a :class:`Config`."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = p.add_argument
    add("--train", required=True, help="archive of training images (.tar.gz)")
    add("--test", required=True, help="archive of test images (.tar.gz)")
    add("--out", default="runs/train", help="results go to OUT/NAME/")
    add("--name", required=True)
    add("--checkpoints", default="", help="folder for checkpoints; default OUT/NAME")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--lif", choices=["auto", "triton", "torch"], default="auto",
        help="neuron to train with; auto: Triton on a GPU if it agrees with torch")  # fmt: skip
    add("--depth", type=int, default=18)
    add("--width", type=int, default=32)
    add("--time-steps", type=int, default=4)
    add("--residual", choices=["spiking", "sew_add"], default="spiking")
    add("--epochs", type=int, default=60)
    add("--max-minutes", type=float, default=0.0, help="wall-clock limit of this process; 0: none")
    add("--batch", type=int, default=256)
    add("--lr", type=float, default=0.1, help="peak learning rate")
    add("--weight-decay", type=float, default=5e-4)
    add("--momentum", type=float, default=0.9)
    add("--warmup", type=float, default=0.1, help="fraction of the run spent raising the learning rate")
    add("--label-smoothing", type=float, default=0.1)
    add("--loss", choices=["tet", "mean"], default="tet",
        help="tet: cross-entropy of each step's logits, averaged; mean: of the averaged logits")  # fmt: skip
    add("--bn-gain", type=float, default=2.0, help="initial weight of every BatchNorm")
    add("--cutout", type=int, default=8, help="side of the erased square, in pixels; 0: none")
    add("--rate-target", type=float, default=0.05, help="firing rate above which a layer is penalised")
    add("--rate-weight", type=float, default=0.0,
        help="weight of the mean over layers of max(0, firing rate - target)")  # fmt: skip
    add("--channel-weight", type=float, default=0.0,
        help="weight of the mean over channels of sqrt(firing rate); silences weak ones")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--train-limit", type=int, default=0, help="train on this many images only; 0: all")
    add("--test-limit", type=int, default=0, help="test on this many images only; 0: all")
    add("--resume", action="store_true", help="go on from the checkpoint if there is one")
    return Config(**vars(p.parse_args(argv)))


class Progress:
    """The fraction of a run that is over, from its steps and its wall clock, whichever is ahead.

    Args:
        steps: Steps left to do if time allows.
        seconds: Seconds left; 0 means no limit.
        start: Fraction that earlier processes of this run had reached.
    """

    def __init__(
        self, *, steps: int, seconds: float, start: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps, self._seconds, self._start, self._clock = max(1, steps), seconds, start, clock
        self._start_s = clock()

    def fraction(self, steps_done: int) -> float:
        """0 at the start, 1 when the run has to end."""
        part = steps_done / self._steps
        if self._seconds > 0:
            part = max(part, (self._clock() - self._start_s) / self._seconds)
        return min(1.0, self._start + (1.0 - self._start) * part)


def learning_rate(fraction: float, *, peak: float, warmup: float) -> float:
    """Linear warm-up to ``peak``, then a half cosine to 0 at ``fraction == 1``."""
    if fraction < warmup:
        return peak * (0.05 + 0.95 * fraction / warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))


def normalize(images: Tensor) -> Tensor:
    """``uint8 [N, 3, H, W]`` to standardised ``float32`` of the same shape, channels last."""
    mean = torch.tensor(MEAN, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=images.device).view(1, 3, 1, 1)
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def augment(images: Tensor, *, pad: int, cutout: int, generator: torch.Generator) -> Tensor:
    """Random crop after zero padding, random flip, cutout; a different one for each image, on its device.

    Args:
        images: Standardised ``float32 [N, 3, H, W]``.
        pad: Pixels of padding on each side.
        cutout: Side of the erased square; 0 erases nothing.
        generator: On the images' device.
    """
    n, _, height, width = images.shape
    device = images.device

    def draw(high: int) -> Tensor:
        return torch.randint(high, (n, 1), device=device, generator=generator)

    rows = torch.arange(height, device=device) + draw(2 * pad + 1)
    columns = torch.arange(width, device=device)
    columns = torch.where(draw(2).bool(), columns, columns.flip(0)) + draw(2 * pad + 1)
    padded = F.pad(images, (pad,) * 4).permute(0, 2, 3, 1)
    which = torch.arange(n, device=device)[:, None, None]
    out = padded[which, rows[:, :, None], columns[:, None, :]]
    if cutout:
        in_rows = (torch.arange(height, device=device) - draw(height)).add(cutout // 2)
        in_columns = (torch.arange(width, device=device) - draw(width)).add(cutout // 2)
        erased = ((in_rows >= 0) & (in_rows < cutout))[:, :, None] & (
            (in_columns >= 0) & (in_columns < cutout)
        )[:, None, :]
        out = out.masked_fill(erased[..., None], 0.0)
    return out.permute(0, 3, 1, 2)


def neurons(net: nn.Module) -> dict[str, TrainingLIF]:
    """The training neurons of a network, by module name."""
    return {name: m for name, m in net.named_modules() if isinstance(m, TrainingLIF)}


def firing_penalty(rates: list[Tensor], *, target: float, weight: float, channel_weight: float) -> Tensor:
    """Both penalties on firing; ``rates`` holds each layer's rate per channel."""
    means = torch.stack([rate.mean() for rate in rates])
    penalty = weight * F.relu(means - target).mean()
    if channel_weight:
        # The square root is steep near 0: it pulls a channel that hardly fires all the way to silence.
        penalty = penalty + channel_weight * (torch.cat(rates) + 1e-4).sqrt().mean()
    return penalty


def step_loss(logits: Tensor, labels: Tensor, config: Config) -> Tensor:
    """Cross-entropy of ``[T, N, classes]`` logits by the configured rule."""
    if config.loss == "mean":
        return F.cross_entropy(logits.float().mean(0), labels, label_smoothing=config.label_smoothing)
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.repeat(len(logits)), label_smoothing=config.label_smoothing
    )


def choose_lif(config: Config, device: torch.device) -> str:
    """The training neuron's backend; Triton only after it agreed with torch on this device."""
    if config.lif == "torch" or (config.lif == "auto" and device.type != "cuda"):
        return "torch"
    try:
        worst = disagreement(device)
    except Exception as error:
        if config.lif == "triton":
            raise RunError(f"the Triton neuron fails on {device}: {error}") from error
        print(f"training with the torch neuron: Triton's fails on {device}: {error}", file=sys.stderr)
        return "torch"
    if worst <= 1e-4:
        return "triton"
    if config.lif == "triton":
        raise RunError(f"the Triton neuron is {worst:g} away from torch's on {device}; at most 1e-4 allowed")
    print(f"training with the torch neuron: Triton's is {worst:g} away", file=sys.stderr)
    return "torch"


def build(config: Config, neuron: Callable[[], nn.Module], *, stem_once: bool) -> SpikingResNet:
    """The network that ``config`` names, with ``neuron`` in its neuron slots."""
    if config.residual not in ("spiking", "sew_add"):
        raise InputError(f"`residual` (={config.residual!r}) must be 'spiking' or 'sew_add'")
    return spiking_resnet(
        config.depth,
        width=config.width,
        T=config.time_steps,
        residual=config.residual,
        neuron=neuron,
        stem_once=stem_once,
    )


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Run ``write`` on a temporary name beside ``path``, then rename, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Trainer:
    """One run: owns the network, the optimiser, the data on the device and the run's files."""

    def __init__(self, config: Config, *, started: float) -> None:
        self.config = config
        self.started = started
        self.device = torch.device(config.device)
        self.folder = Path(config.out) / config.name
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints = Path(config.checkpoints) if config.checkpoints else self.folder
        checkpoints.mkdir(parents=True, exist_ok=True)
        self.checkpoint = checkpoints / f"{config.name}.checkpoint.safetensors"
        self.train_images, self.train_labels = self._to_device(config.train, config.train_limit)
        self.test_images, self.test_labels = self._to_device(config.test, config.test_limit)
        self.backend = choose_lif(config, self.device)
        penalised = bool(config.rate_weight or config.channel_weight)
        torch.manual_seed(config.seed)

        def neuron() -> TrainingLIF:
            return TrainingLIF(
                backend="triton" if self.backend == "triton" else "torch", record_rate=penalised
            )

        self.net = build(config, neuron, stem_once=True)
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, config.bn_gain)
        self.net.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        other_parameters = [p for p in self.net.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.SGD(
            [{"params": weights, "weight_decay": config.weight_decay}, {"params": other_parameters}],
            lr=config.lr,
            momentum=config.momentum,
            nesterov=True,
        )
        self.epoch, self.fraction = 0, 0.0
        if config.resume and self.checkpoint.exists():
            self._load_checkpoint()
        else:
            (self.folder / "log.jsonl").unlink(missing_ok=True)

    def _to_device(self, path: str, limit: int) -> tuple[Tensor, Tensor]:
        data: Images = load_archive(path, limit=limit or None)
        return torch.from_numpy(data.images).to(self.device), torch.from_numpy(data.labels).to(self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        order = torch.randperm(len(self.train_labels), device=self.device, generator=generator)
        size = min(self.config.batch, len(order))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]

    def train(self) -> None:
        """Train until the epochs or the minutes are used up; a log line and a checkpoint each epoch."""
        config = self.config
        per_epoch = max(1, len(self.train_labels) // min(config.batch, len(self.train_labels)))
        seconds = 0.0
        if config.max_minutes > 0:
            budget = config.max_minutes * 60
            # The last evaluation and the start so far come out of the same minutes.
            seconds = max(1.0, budget - min(20.0, 0.1 * budget) - (time.monotonic() - self.started))
        progress = Progress(
            steps=(config.epochs - self.epoch) * per_epoch, seconds=seconds, start=self.fraction
        )
        completed = 0
        while self.epoch < config.epochs and self.fraction < 1.0:
            generator = torch.Generator(self.device).manual_seed(config.seed * 100_003 + self.epoch)
            start_s = time.monotonic()
            total = torch.zeros((), device=self.device)
            penalty_total = torch.zeros((), device=self.device)
            steps = 0
            self.net.train()
            for index in self._batches(generator):
                self.fraction = progress.fraction(completed)
                if self.fraction >= 1.0:
                    break
                loss, penalty = self._step(index, generator)
                total += loss
                penalty_total += penalty
                completed += 1
                steps += 1
            self.fraction = progress.fraction(completed)
            mean_loss = (total / max(1, steps)).item()
            train_seconds = time.monotonic() - start_s
            if not math.isfinite(mean_loss):
                raise RunError(f"the loss became {mean_loss} in epoch {self.epoch}; try a lower --lr")
            self.epoch += 1
            accuracy, rates = self._evaluate()
            record = {
                "epoch": self.epoch,
                "fraction": round(self.fraction, 4),
                "steps": steps,
                "lr": self.optimizer.param_groups[0]["lr"],
                "loss": mean_loss,
                "penalty": (penalty_total / max(1, steps)).item(),
                "test_accuracy": accuracy,
                "firing_rate": rates,
                "train_s": round(train_seconds, 3),
                "epoch_s": round(time.monotonic() - start_s, 3),
            }
            with (self.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            mean_rate = sum(rates.values()) / len(rates)
            print(
                f"{config.name} epoch {self.epoch} ({self.fraction:.0%}) loss {mean_loss:.4f} "
                f"test {accuracy:.2%} firing {mean_rate:.2%} {record['epoch_s']:.1f} s",
                flush=True,
            )
            self._save_checkpoint()

    def _step(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        config = self.config
        rate = learning_rate(self.fraction, peak=config.lr, warmup=config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        images = augment(
            normalize(self.train_images[index]), pad=4, cutout=config.cutout, generator=generator
        )
        with self._autocast():
            logits = self.net.forward_steps(images)
        loss = step_loss(logits, self.train_labels[index], config)
        penalty = torch.zeros((), device=self.device)
        rates = [m.rate for m in neurons(self.net).values() if m.rate is not None]
        if rates:
            # A network that has not learnt to fire yet must not be taught silence first.
            ramp = min(1.0, self.fraction / 0.2)
            penalty = ramp * firing_penalty(
                rates,
                target=config.rate_target,
                weight=config.rate_weight,
                channel_weight=config.channel_weight,
            )
        self.optimizer.zero_grad(set_to_none=True)
        (loss + penalty).backward()
        self.optimizer.step()
        return loss.detach(), penalty.detach()

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, dict[str, float]]:
        """Test accuracy in [0, 1] and each layer's firing rate, in the training precision."""
        self.net.eval()
        spiking = neurons(self.net)
        recorded = {name: m.record_rate for name, m in spiking.items()}
        sums = {name: torch.zeros((), device=self.device) for name in spiking}
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        for m in spiking.values():
            m.record_rate = True
        for start in range(0, len(self.test_labels), 1000):
            images = normalize(self.test_images[start : start + 1000])
            with self._autocast():
                logits = self.net(images)
            correct += (logits.argmax(1) == self.test_labels[start : start + 1000]).sum()
            for name, m in spiking.items():
                assert m.rate is not None
                sums[name] += m.rate.mean() * len(images)
        for name, m in spiking.items():
            m.record_rate = recorded[name]
            m.rate = None
        total = len(self.test_labels)
        return correct.item() / total, {name: round(s.item() / total, 6) for name, s in sums.items()}

    def _save_checkpoint(self) -> None:
        tensors = {f"model.{k}": v.detach().cpu().contiguous() for k, v in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            buffer = self.optimizer.state[parameter].get("momentum_buffer")
            if buffer is not None:
                tensors[f"momentum.{name}"] = buffer.detach().cpu().contiguous()
        meta = {"state": json.dumps({"epoch": self.epoch, "fraction": self.fraction})}
        write_atomically(self.checkpoint, lambda path: save_file(tensors, path, metadata=meta))

    def _load_checkpoint(self) -> None:
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                state = json.loads((file.metadata() or {})["state"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            self.net.load_state_dict(
                {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
            )
            for name, parameter in self.net.named_parameters():
                buffer = tensors.get(f"momentum.{name}")
                if buffer is not None:
                    # Same strides as the parameter, or each optimiser step would pay for the difference.
                    expected_config = torch.empty_like(parameter).copy_(buffer)
                    self.optimizer.state[parameter]["momentum_buffer"] = expected_config
            self.epoch, self.fraction = int(state["epoch"]), float(state["fraction"])
        except FileNotFoundError:
            raise
        except Exception as error:
            raise FileFormatError(
                f"{self.checkpoint}: not a checkpoint of this network ({error}); "
                "run without --resume to start afresh"
            ) from error

    def finish(self) -> dict[str, object]:
        """Write the weights as they ship, score them, write ``metrics.json`` and return its content."""
        tensors = {
            # Convolutions and the classifier ship in fp16; BN statistics are few and stay in fp32.
            key: value.detach().cpu().contiguous().to(torch.float16 if value.dim() > 1 else value.dtype)
            for key, value in self.net.state_dict().items()
        }
        weights = self.folder / "weights.safetensors"
        write_atomically(weights, lambda path: save_file(tensors, path))
        score = score_weights(self.config, tensors, self.test_images, self.test_labels)
        metrics: dict[str, object] = {
            "name": self.config.name,
            "network": {
                "depth": self.config.depth,
                "width": self.config.width,
                "T": self.config.time_steps,
                "residual": self.config.residual,
                "stem": "cifar",
                "num_classes": 10,
                "tau": 2.0,
                "v_threshold": 1.0,
            },
            "normalization": {"mean": MEAN, "std": STD},
            **score,
            "epochs": self.epoch,
            "train_images": len(self.train_labels),
            "training_lif": self.backend,
            "seconds": round(time.monotonic() - self.started, 1),
            "seed": self.config.seed,
            "weights_bytes": weights.stat().st_size,
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "command": shlex.join(["python", *sys.argv]),
            "config": asdict(self.config),
            "environment": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(self.device)
                if self.device.type == "cuda"
                else platform.machine(),
            },
        }
        text = json.dumps(metrics, indent=1)
        write_atomically(self.folder / "metrics.json", lambda path: path.write_text(text + "\n"))
        return metrics


@torch.no_grad()
def score_weights(
    config: Config, tensors: dict[str, Tensor], images: Tensor, labels: Tensor, *, batch: int = 500
) -> dict[str, object]:
    """Accuracy and activity of the shipped weights, in float32 (no TF32), by the plain spikingjelly network.

    Returns:
        ``correct``, ``test_images``, ``test_accuracy``; ``firing_rate`` by neuron; ``channel_rate`` by neuron
        and channel; ``conv_input_density``, the fraction of non-zeros that each convolution is fed.
    """
    from spikingjelly.activation_based import functional, neuron

    net = build(config, lif_neuron, stem_once=False)
    net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
    net.to(images.device).eval()
    sums: dict[str, Tensor] = {}
    handles = []

    def add(key: str, value: Tensor) -> None:
        sums[key] = sums.get(key, torch.zeros_like(value)) + value

    def fired(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], spikes: Tensor) -> None:
            add(f"neuron.{name}", spikes.mean(dim=(0, 3, 4)).sum(0).double())

        return hook

    def fed(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            add(f"conv.{name}", (inputs[0] != 0).float().mean().double() * inputs[0].shape[1])

        return hook

    for name, module in net.named_modules():
        if isinstance(module, neuron.BaseNode):
            handles.append(module.register_forward_hook(fired(name)))
        elif isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_pre_hook(fed(name)))
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    correct = 0
    try:
        for start in range(0, len(labels), batch):
            functional.reset_net(net)
            logits = net(normalize(images[start : start + batch]).contiguous())
            correct += int((logits.argmax(1) == labels[start : start + batch]).sum())
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        for handle in handles:
            handle.remove()
    total = len(labels)
    per_channel = {
        key.removeprefix("neuron."): (value / total).tolist()
        for key, value in sums.items()
        if key.startswith("neuron.")
    }
    return {
        "correct": correct,
        "test_images": total,
        "test_accuracy": correct / total,
        "firing_rate": {name: round(sum(r) / len(r), 6) for name, r in per_channel.items()},
        "channel_rate": {name: [round(v, 5) for v in r] for name, r in per_channel.items()},
        "conv_input_density": {
            key.removeprefix("conv."): round((value / total).item(), 6)
            for key, value in sums.items()
            if key.startswith("conv.")
        },
    }


def main(argv: list[str] | None = None) -> int:
    """Train, score, write; returns the exit code (0 done, 1 failed run, 2 bad input)."""
    started = time.monotonic()
    config = parse(argv)
    # Everything heavy is on the GPU; several runs may share the machine.
    if config.device.startswith("cuda"):
        torch.set_num_threads(2)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    try:
        trainer = Trainer(config, started=started)
        print(
            f"{config.name}: {sum(p.numel() for p in trainer.net.parameters()):,} parameters, "
            f"{len(trainer.train_labels)} training images, {trainer.backend} neuron, "
            f"ready after {time.monotonic() - started:.1f} s",
            flush=True,
        )
        trainer.train()
        metrics = trainer.finish()
    except SparseFlowError as error:
        print(f"train_cifar10: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    print(
        f"{config.name}: {metrics['correct']}/{metrics['test_images']} correct "
        f"({metrics['test_accuracy']:.2%}) with the shipped fp16 weights, {metrics['seconds']} s in all"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
