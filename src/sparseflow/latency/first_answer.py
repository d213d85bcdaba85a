"""The predictor that answers when none is named: of this directory, calibrated, shipped, or from peaks.

Shipped predictors are `data/*.json` of this package, each for one kind of device. On another device, the
shipped predictor of the same device type is transferred by the peaks of both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from sparseflow.core.files import get_cache_dir, parse_json
from sparseflow.errors import DeviceError, FileFormatError, InputError
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.peaks import Peaks, measure_peaks
from sparseflow.latency.model.predictor import SHIPPED, Predictor
from sparseflow.latency.model.transfer import transfer

DEFAULT_FILE = Path("predictor.json")
"""Predictor of the current directory, which is used before any other."""

logger = logging.getLogger(__name__)


def find_predictor(
    file: Path | str | None = None, *, provider: str = "cpu", gpu: int = 0, peaks: Peaks | None = None
) -> Predictor:
    """Return the predictor to use.

    Without a file it is the first of: `predictor.json` in the current directory, the calibrated predictor in
    the cache directory, a shipped predictor of this kind of device, and a transferred one, whose peaks are
    measured once and cached.

    Args:
        file: File of a predictor.
        provider: Without a file, `"cpu"`, `"cuda"` or onnxruntime's name.
        gpu: Index of the GPU.
        peaks: Transfer a shipped predictor to these peaks, even if another predictor exists.

    Raises:
        InputError: The file does not exist, `file` and `peaks` are both passed, or no predictor is shipped
            for the device type.
        FileFormatError: The file is not a predictor.
        DeviceError: The device is not available.
    """
    if file is not None and peaks is not None:
        raise InputError(f"a predictor ({file}) and peaks exclude each other; pass one of them")
    if peaks is None and (file is not None or DEFAULT_FILE.is_file()):
        return Predictor.load(DEFAULT_FILE if file is None else file)
    fingerprint = DeviceFingerprint.from_local_device(provider, gpu=gpu)
    if peaks is not None:
        return _transfer(_list_candidates(fingerprint), fingerprint, peaks)
    calibrated = _load_cached(get_calibrated_path(fingerprint), gpu)
    return calibrated or make_first_answer(fingerprint, gpu=gpu)


def make_first_answer(fingerprint: DeviceFingerprint, *, gpu: int = 0) -> Predictor:
    """Return the shipped predictor of a device, or a transferred one, whose peaks are measured once.

    Args:
        fingerprint: This machine.
        gpu: Index of the GPU.

    Raises:
        InputError: No predictor is shipped for the device type.
        DeviceError: The device is not available.
    """
    for predictor in load_shipped(fingerprint.kind):
        if predictor.fingerprint.is_same_kind(fingerprint):
            return predictor.model_copy(update={"fingerprint": fingerprint, "origin": SHIPPED})
    path = get_cache_dir() / "latency" / f"peaks-{fingerprint.kind}.json"
    cached = _load_cached(path, gpu)
    if cached is not None:
        return cached
    candidates = _list_candidates(fingerprint)
    logger.warning("measuring the peaks of this device for a first answer, which takes about 5 s")
    result = _transfer(
        candidates, fingerprint, measure_peaks(fingerprint.provider, threads=fingerprint.threads, gpu=gpu)
    )
    result.save(path)
    return result


def get_calibrated_path(fingerprint: DeviceFingerprint) -> Path:
    """Return the file of the calibrated predictor of a device type in the cache directory."""
    return get_cache_dir() / "latency" / f"calibrated-{fingerprint.kind}.json"


@cache
def load_shipped(kind: str) -> tuple[Predictor, ...]:
    """Load the shipped predictors of a device type, once in a process.

    Args:
        kind: `"cpu"` or `"cuda"`, with which the names of the files begin.

    Raises:
        FileFormatError: The package data is damaged.
    """
    folder = files("sparseflow.latency") / "data"
    entries = sorted(
        (entry for entry in folder.iterdir() if re.fullmatch(f"{kind}-.*\\.json", entry.name)),
        key=lambda entry: entry.name,
    )
    return tuple(Predictor.from_dict(parse_json(entry.read_bytes()), entry.name) for entry in entries)


def _list_candidates(fingerprint: DeviceFingerprint) -> list[Predictor]:
    """List the shipped predictors that can be transferred to a device.

    Raises:
        InputError: There is none.
    """
    candidates = [
        predictor
        for predictor in load_shipped(fingerprint.kind)
        if predictor.fingerprint.provider == fingerprint.provider and predictor.peaks is not None
    ]
    if not candidates:
        raise InputError(
            f"no predictor is shipped for {fingerprint.provider}; train one with `sparseflow latency "
            "quickstart`, or with `collect` and `train`"
        )
    return candidates


def _transfer(candidates: Sequence[Predictor], fingerprint: DeviceFingerprint, peaks: Peaks) -> Predictor:
    """Transfer the predictor that has the most similar balance."""

    def compare_balance(predictor: Predictor) -> float:
        assert predictor.peaks is not None
        ratio = predictor.peaks.flops_per_s / predictor.peaks.bytes_per_s
        ratio *= peaks.bytes_per_s / peaks.flops_per_s
        return max(ratio, 1.0 / ratio)

    return transfer(min(candidates, key=compare_balance), fingerprint, peaks)


def _load_cached(path: Path, gpu: int) -> Predictor | None:
    """Load a predictor of the cache directory; None if it is missing, outdated or of another device."""
    try:
        predictor = Predictor.load(path)
        predictor.fingerprint.check_local_device(gpu)
    except (InputError, FileFormatError, DeviceError):
        return None
    return predictor
