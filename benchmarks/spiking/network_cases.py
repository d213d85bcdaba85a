"""Which whole networks are measured: cases written as text, the grid of them, and trained networks.

A case is ``model:T:batch`` or ``model:T:batch:image``, where model is a name of the model zoo with random
weights, and then any of ``,classes=100``, ``,width=32``, ``,firing=0.3`` (mean firing rate) and
``,silent=0.5`` (share of silent channels, see ``silenced.py``).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparseflow.spiking.models import model_zoo

DEPTHS = (18, 50, 34, 101, 152)
"""The first two are made of all the layers that there are; the others hold more of the same."""
STEPS = (4, 16)
BATCHES = (32, 1, 8)
CLASSES = {"quick": (10,), "full": (10, 100)}
FIRING = 0.3

_CASE = re.compile(
    r"(?P<model>[\w.]+):(?P<steps>\d+):(?P<batch>\d+)(:(?P<image>\d+))?(?P<rest>(,\w+=[^,]+)*)"
)
_OPTIONS = {
    "classes": ("num_classes", int),
    "width": ("width", int),
    "firing": ("firing_rate", float),
    "silent": ("silent", float),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One network and one batch.

    Attributes:
        model: A catalog name; for a trained network the name of its run.
        settings: How to build it.
        batch: Images.
        silent: Share of channels to silence.
        grid: Part of the grid: measured against fewer dense forms.
        trained: Folder that ``train_cifar10.py`` wrote, with `test` and `images` to judge it by.
    """

    model: str
    settings: model_zoo.NetworkConfig
    batch: int
    silent: float = 0.0
    grid: bool = False
    trained: Path | None = None
    test: Path | None = None
    images: int = 0

    @property
    def name(self) -> str:
        """The case as text; equal cases have equal names."""
        s, usual = self.settings, model_zoo.NetworkConfig()
        if self.trained is not None:
            batch = "" if self.batch == 32 else f":{self.batch}"
            steps = "" if s.time_steps == usual.time_steps else f",steps={s.time_steps}"
            return self.model + batch + steps + (f",silent={self.silent:g}" if self.silent else "")
        image = "" if s.image_size == usual.image_size else f":{s.image_size}"
        options = [] if s.num_classes == usual.num_classes else [f"classes={s.num_classes}"]
        options += [] if s.width == usual.width else [f"width={s.width}"]
        options += [] if s.firing_rate is None else [f"firing={s.firing_rate:g}"]
        options += [f"silent={self.silent:g}"] if self.silent else []
        return ",".join([f"{self.model}:{s.time_steps}:{self.batch}{image}", *options])

    def facts(self) -> dict[str, Any]:
        """The case as plain data for its row."""
        return {
            "case": self.name,
            "model": self.model,
            "settings": {
                "steps": self.settings.time_steps,
                "classes": self.settings.num_classes,
                "image": self.settings.image_size,
                "width": self.settings.width,
                "firing": self.settings.firing_rate,
                "seed": self.settings.seed,
            },
            "batch": self.batch,
            "silent_target": self.silent,
            "grid": self.grid,
            "trained": self.trained is not None,
        }

    def build(self, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
        """The network, its images (more than a batch where it is trained), and their labels."""
        if self.trained is not None:
            assert self.test is not None
            network = load_trained(
                self.trained, self.test, max(self.images, self.batch), device, self.settings.time_steps
            )
            if self.silent:
                from silenced import silence_channels

                silence_channels(network[0], self.silent, seed=self.settings.seed)
            return network
        case = model_zoo.BenchCase(model=self.model, config=self.settings, batch_size=self.batch)
        model, (x,), labels = case.build(device=device)
        if self.silent:
            from silenced import silence_channels

            silence_channels(model, self.silent, seed=self.settings.seed)
            model_zoo.calibrate_batchnorm(model, model_zoo.sample_images(self.settings, 4).to(device))
        return model, x, labels


def parse(text: str) -> Job:
    """The case that `text` stands for.

    Raises:
        argparse.ArgumentTypeError: It stands for none.
    """
    match = _CASE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not model:T:batch[:image][,key=value…]")
    options: dict[str, Any] = {}
    for part in filter(None, match["rest"].split(",")):
        key, _, value = part.partition("=")
        if key not in _OPTIONS:
            raise argparse.ArgumentTypeError(f"{key!r} in {text!r} is none of {', '.join(_OPTIONS)}")
        try:
            field, convert = _OPTIONS[key]
            options[field] = convert(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}: {error}") from None
    silent = options.pop("silent", 0.0)
    image = int(match["image"] or model_zoo.NetworkConfig().image_size)
    settings = model_zoo.NetworkConfig(time_steps=int(match["steps"]), image_size=image, **options)
    return Job(model=match["model"], settings=settings, batch=int(match["batch"]), silent=silent)


def grid(which: str) -> list[Job]:
    """Every depth, number of classes, T and batch, and every depth at 30 % firing.

    What teaches most for its time comes first. The number of classes changes one layer, the last.

    Args:
        which: "quick" for 10 classes, "full" for 10 and 100.
    """
    jobs: list[Job] = []
    for classes in CLASSES[which]:
        for depth in DEPTHS:
            of_depth: list[tuple[int, int, float | None]]
            of_depth = [(steps, batch, None) for steps in STEPS for batch in BATCHES]
            if classes == 10:
                of_depth[1:1] = [(steps, 32, FIRING) for steps in STEPS]
            for steps, batch, firing in of_depth:
                settings = model_zoo.NetworkConfig(time_steps=steps, num_classes=classes, firing_rate=firing)
                jobs.append(Job(model=f"spiking_resnet{depth}", settings=settings, batch=batch, grid=True))
    return jobs


def kernels_of(job: Job) -> tuple[Any, ...]:
    """What decides which kernels a case needs: networks of the same layers share them."""
    depth = re.fullmatch(r"(\w+_resnet)(\d+)", job.model)
    kind = (depth[1], int(depth[2]) >= 50) if depth else job.model
    s = job.settings
    return kind, s.time_steps, s.image_size, s.width, job.batch, bool(job.silent)


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """The first case of each that need the same kernels."""
    jobs_by_key: dict[Any, Job] = {}
    for job in jobs:
        jobs_by_key.setdefault(kernels_of(job), job)
    return list(jobs_by_key.values())


def load_trained(
    run: Path, test: Path, images: int, device: torch.device, steps: int
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A trained network that runs for `steps` time steps, test images in random order, and their labels."""
    from cifar10 import load_archive
    from safetensors.torch import load_file
    from train_cifar10 import MEAN, STD

    from sparseflow.spiking.models.spiking_resnet import spiking_resnet

    network = json.loads((run / "metrics.json").read_text())["network"]
    net = spiking_resnet(network["depth"], width=network["width"], T=steps, residual=network["residual"])
    net.load_state_dict(load_file(run / "weights.safetensors"))
    archive = load_archive(test)
    # The archive is sorted by class.
    indices = torch.randperm(len(archive.labels), generator=torch.Generator().manual_seed(0))[:images].numpy()
    pixels = torch.from_numpy(archive.images[indices]).float() / 255
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    labels = torch.from_numpy(archive.labels[indices]).long()
    return net.eval().to(device), ((pixels - mean) / std).to(device), labels.to(device)


def trained_job(text: str, test: Path, batch: int, images: int) -> Job:
    """The case of a network that ``train_cifar10.py`` wrote.

    Args:
        text: The run's folder, and then any of ``,steps=16`` (T; else as it was trained) and ``,silent=0.5``.
        test: Archive of test images.
        batch: Images of a batch.
        images: Test images to judge it by.

    Raises:
        argparse.ArgumentTypeError: An option is unknown.
    """
    folder, *parts = text.split(",")
    options = {key: value for key, _, value in (part.partition("=") for part in parts)}
    if unknown := set(options) - {"steps", "silent"}:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} in {text!r} are none of steps, silent")
    run = Path(folder)
    network = json.loads((run / "metrics.json").read_text())["network"]
    settings = model_zoo.NetworkConfig(
        time_steps=int(options.get("steps") or network["T"]), width=network["width"]
    )
    return Job(
        model=run.name, settings=settings, batch=batch, silent=float(options.get("silent") or 0), trained=run,
        test=test, images=images,
    )  # fmt: skip
