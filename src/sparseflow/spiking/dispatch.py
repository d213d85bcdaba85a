"""Decide how each group runs: measured on this device, or by the fixed block rule.

`measured` (the default) times every way that a group can run, on its real input, and keeps the fastest.
Sparse or folded ways must beat the network's own modules with the whole interval of the paired ratio above 1;
otherwise the modules stay. Decisions are remembered on disk by device, shape, dtype and firing rate.

`static` is the rule of thumb by feature-map height: blocks of 16, 8 or 4 pixels, nothing below 8.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sparseflow.core import device as devices
from sparseflow.core import timing
from sparseflow.core.files import get_cache_dir, write_atomic

Policy = Literal["measured", "static"]
CACHE_VERSION = 1


def static_block(height: int) -> int | None:
    """Block edge in pixels for a feature map of `height` rows, or None where blocks do not pay."""
    for least, block in ((32, 16), (16, 8), (8, 4)):
        if height >= least:
            return block
    return None


class Decision(BaseModel):
    """How one group (or layer) runs, and why.

    Attributes:
        way: The chosen candidate.
        why: A sentence for people.
        ms: Median milliseconds of every candidate that was timed.
        remembered: The decision came from the disk.
    """

    model_config = ConfigDict(extra="forbid")

    way: str
    why: str
    ms: dict[str, float] = {}
    remembered: bool = False


class _CacheFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = CACHE_VERSION
    decisions: dict[str, Decision] = {}


class DecisionCache:
    """Decisions on disk, one JSON file; rebuilt with a warning when it cannot be read.

    Args:
        path: The file; by default `decisions.json` under `$SPARSEFLOW_CACHE`, else under
            `$XDG_CACHE_HOME/sparseflow`, else under `~/.cache/sparseflow`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_cache_path()
        self._learned: dict[str, Decision] = {}
        self._content, problem = self._read()
        if problem is not None:
            warnings.warn(
                f"the decision cache {self.path} cannot be used ({problem}); it is rebuilt", stacklevel=3
            )

    def _read(self) -> tuple[_CacheFile, str | None]:
        """What the file holds, and what is wrong with it."""
        try:
            return _CacheFile.model_validate_json(self.path.read_bytes()), None
        except FileNotFoundError:
            return _CacheFile(), None
        except (OSError, ValidationError, ValueError) as error:
            return _CacheFile(), str(error).splitlines()[0]

    def get(self, key: str) -> Decision | None:
        found = self._content.decisions.get(key)
        return None if found is None else found.model_copy(update={"remembered": True})

    def put(self, key: str, decision: Decision) -> None:
        self._content.decisions[key] = self._learned[key] = decision

    def save(self) -> None:
        """Write what was learned, merged with what other processes have written since.

        A place that cannot be written to costs the memory, not the work: it is a warning.
        """
        merged = {**self._read()[0].decisions, **self._learned}
        content = _CacheFile(decisions=merged).model_dump(mode="json")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(content, indent=1, sort_keys=True).encode())
        except OSError as error:
            warnings.warn(
                f"decisions cannot be remembered in {self.path} ({error}); set SPARSEFLOW_CACHE to a folder "
                "that can be written",
                stacklevel=2,
            )


def default_cache_path() -> Path:
    """Where decisions are remembered unless the caller says otherwise."""
    return get_cache_dir() / "decisions.json"


def rate_bucket(rate: float) -> int:
    """Firing rates within a factor of 1.25 share a decision."""
    return -99 if rate <= 0 else round(math.log(rate) / math.log(1.25))


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Measures candidates and keeps the fastest.

    Attributes:
        device: Where the candidates run ("cpu", "cuda:0").
        rounds, warmup: Interleaved timing rounds that count, and that do not.
        cache: Remembers decisions; None measures every time.
        seed: Orders the candidates within each round.
        calls_per_sample: Calls timed as one; more than 1 hides what it costs to start work on an idle GPU.
    """

    device: str
    rounds: int = 7
    warmup: int = 2
    cache: DecisionCache | None = None
    seed: int = 0
    calls_per_sample: int = 1

    def choose(self, key: str, candidates: Mapping[str, Callable[[], object]], baseline: str) -> Decision:
        """Time `candidates` and keep the fastest; `baseline` stays unless another is surely faster.

        Args:
            key: What the decision depends on, without the device.
            candidates: Name to a call that runs it once.
            baseline: The candidate that is always safe.
        """
        known = self.recall(key, candidates)
        if known is not None:
            return known
        if len(candidates) == 1:
            return Decision(way=baseline, why="nothing else can run this group")
        result = timing.compare(
            candidates,
            baseline=baseline,
            rounds=self.rounds,
            warmup=self.warmup,
            device=self.device,
            seed=self.seed,
            calls_per_sample=self.calls_per_sample,
        )
        ms = {name: result.samples(name).median_ms for name in candidates}
        best = min((n for n in candidates if n != baseline), key=ms.__getitem__)
        ratio = result.speedup(best)
        if ratio.low > 1.0:
            way = best
            why = f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f}) over the network's own modules"
        else:
            way = baseline
            why = f"nothing surely beat the network's own modules (best: {best}, {ratio.median:.2f}x)"
        decision = Decision(way=way, why=why, ms=ms)
        if self.cache:
            self.cache.put(self._full(key), decision)
        return decision

    def recall(self, key: str, candidates: Container[str]) -> Decision | None:
        """What was decided before, if that is still among the candidates."""
        known = self.cache.get(self._full(key)) if self.cache else None
        return known if known is not None and known.way in candidates else None

    def _full(self, key: str) -> str:
        return f"{devices.describe_device(self.device).key()}|{key}"
