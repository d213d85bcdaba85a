"""Running requests as they are served: by an engine, with its recordings, kernels, slots and thread.

What is timed is what a client waits for, from receipt to each token: the way to the engine's thread, the turn
that it is in, moving inputs, the vision encoder, both parts of the prompt, every step, and others' turns in
between. Only deciding is left out: the plan is given.

Others are requests of random plans, lengths and numbers of tokens in the same engine, and both ways to have
some are what a server tells of itself when it asks a predictor:

- `batch`: with so many a request runs when its turn comes, itself included (a server's `beside` + 1);
- `load`: the share of time that the engine works for those that come and go, which is how likely more of them
  come while it runs. A measured request is not in it. A server counts how many of its requests met others
  (`Engine.load`), which at random arrivals is the same.

With load 0 nobody comes, and those beside it leave one by one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.handle import RequestHandle
from sparseflow.adaptive.engine.requests.request import GenerationRequest, RequestFailed, RequestOutOfMemory
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan, PlanSpace, Tier
from sparseflow.adaptive.profile.background_traffic import (
    BackgroundTraffic,
    FixedPlanPolicy,
    RequestMix,
    whole,
)
from sparseflow.adaptive.profile.collect import Progress, collect_profile
from sparseflow.adaptive.profile.identity import model_id
from sparseflow.adaptive.profile.memory import check_memory
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.adaptive.profile.runner import RequestTimes, computed
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.errors import InputError, RunError

_SHARE = 0.6
"""Of the memory that is free, for caches and recordings; prompts that run whole need some, too."""


class EngineRunner:
    """Runs plans on engines. It is a `ProfileRunner`, and a context manager; `busy` is its `Background`.

    An engine keeps keys, values and recordings of each of its plans, so of many plans not all fit at a time:
    they are run in groups, each by an engine of its own, which is made when one of its plans is asked for.
    Measure group by group.

    Args:
        knobs: On the model, which is in evaluation mode.
        plans: Those that can be asked for. Others run any plan of the same group.
        example: Inputs of a request with one image at the highest tier, batch 1, as the model's processor
            makes them; None measures requests without image only.
        max_batch: As of the engine that will serve.
        max_tokens: As of that engine: sizes of recordings depend on it.
        mix: What other requests ask for.
        group: Plans of one engine; by default what memory allows, on a CPU all.
        graphs: As of the engine.
        settle_s: How long other requests come before their load is believed.
        seed: What words and others are drawn from.
        progress: Called with (done, in all) while an engine is made ready.

    Raises:
        InputError: The model trains, there is no plan, the example is not one request with an image, or the
            device has no memory for the keys and values of one plan.
    """

    def __init__(
        self,
        knobs: PlanRuntime,
        plans: Sequence[Plan],
        *,
        example: Inputs | None = None,
        max_batch: int = 8,
        max_tokens: int = 2048,
        mix: RequestMix | None = None,
        group: int | None = None,
        graphs: bool = True,
        settle_s: float = 8.0,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._knobs, self._adapter, self._example = knobs, knobs.adapter, example
        if self._adapter.model.training:
            raise InputError("the model is in training mode; call `model.eval()` first")
        if not plans or (group is not None and group < 1):
            raise InputError(f"`plans` must hold some, and `group` (={group}) be at least 1")
        self._device = next(self._adapter.decoder.parameters()).device
        self._max_batch, self._max_tokens, self._graphs = max_batch, max_tokens, graphs
        self._mix, self._settle_s, self._seed, self._progress = mix or RequestMix(), settle_s, seed, progress
        self._prompts = RandomPrompts(self._adapter, example, device="cpu", seed=seed)
        self._id = model_id(self._adapter.model)
        self._plans = tuple(dict.fromkeys(plans))
        self._engine: Engine | None = None
        self._others: BackgroundTraffic | None = None
        self._how: Mapping[str, Any] | None = None
        self._load = 0.0
        self._stream, self._streaming = ExitStack(), False
        self.groups = self._grouped(group)
        """The plans, by engine."""

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def model_id(self) -> str:
        return self._id

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def vision_tokens(self) -> Mapping[Tier, int]:
        return self._prompts.vision

    @property
    def how(self) -> Mapping[str, Any]:
        """As of `ProfileRunner`. Sizes are those of an engine that is neither started nor warmed."""
        if self._how is None:
            self._how = self._told(self._engine or self._new(self.groups[0], start=False))
        return self._how

    def _told(self, engine: Engine) -> Mapping[str, Any]:
        return {
            "runner": "engine", **computed(self._adapter.model),
            "graphs": engine.graphs.enabled, "max_batch": self._max_batch, "max_tokens": self._max_tokens,
            "prompts": list(engine.prompts), "contexts": list(engine.contexts),
        }  # fmt: skip

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a request beside `batch` - 1 others, and those that come within `busy`; see
        `ProfileRunner.run`.

        Raises:
            InputError: A number is out of range, a plan was not named before, or it has a tier and there is
                no example.
            RunError: So many others could not be had.
        """
        if text_tokens < 1 or steps < 0 or not 1 <= batch <= self._max_batch:
            raise InputError(
                f"`text_tokens` (={text_tokens}) must be at least 1, `steps` (={steps}) not negative, and "
                f"`batch` (={batch}) 1 to {self._max_batch}"
            )
        engine, others = self._of(plan)
        inputs = whole(self._prompts, plan, text_tokens)
        moments: list[float] = []

        def look(handle: RequestHandle) -> None:
            moments.extend([time.perf_counter()] * (len(handle.tokens) - len(moments)))

        others.stand(batch - 1)
        request = GenerationRequest(
            inputs=inputs, decide=FixedPlanPolicy(plan=plan), max_new_tokens=steps + 1
        )
        try:
            engine.submit(request, look).result()
        except (RequestOutOfMemory, RequestFailed) as error:
            raise RuntimeError(str(error)) from error
        finally:
            if not self._load:
                others.clear()
        times = [1e3 * (moment - request.received_s) for moment in moments]
        return RequestTimes(
            prefill_ms=times[0], steps_ms=tuple(later - sooner for sooner, later in pairwise(times))
        )

    @contextmanager
    def busy(self, level: float) -> Iterator[None]:
        """Within, other requests come and keep the engine busy for this share of the time.

        Raises:
            InputError: They come already.
            RunError: They stopped coming.
        """
        if self._load:
            raise InputError(f"others make a load of {self._load:g} already; end that first")
        self._load = level
        try:
            yield
        except BaseException:
            with suppress(RunError):  # what went wrong first is told
                self._still()
            raise
        else:
            self._still()
        finally:
            self._load = 0.0

    def close(self) -> None:
        """End the engine, and give its memory back."""
        try:
            self._still()
        finally:
            if self._engine is not None:
                self._engine.shutdown(drain=False)
            self._engine = self._others = None
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()

    def _of(self, plan: Plan) -> tuple[Engine, BackgroundTraffic]:
        """The engine of a plan, and the others in it, who come where a load is asked for."""
        if self._engine is None or plan not in self._engine.plans:
            mine = next((group for group in self.groups if plan in group), None)
            if mine is None:
                raise InputError(f"{plan.id} is not among the {len(self._plans)} plans of this runner")
            self._made(mine)
        assert self._engine is not None and self._others is not None
        if self._load and not self._streaming:
            self._stream.enter_context(self._others.stream(self._load))
            self._streaming = True
        return self._engine, self._others

    def _still(self) -> None:
        """Nobody comes any more."""
        self._streaming = False
        self._stream.close()

    def _made(self, plans: Sequence[Plan]) -> None:
        """Make the engine of these plans, in place of the one that was."""
        self.close()
        self._engine = self._new(plans)
        try:
            if self._engine.graphs.enabled:
                self._engine.warm(self._example, progress=self._progress)
            prompts = RandomPrompts(self._adapter, self._example, device="cpu", seed=self._seed + 1)
            self._others = BackgroundTraffic(
                self._engine, plans, prompts, self._mix, settle_s=self._settle_s, seed=self._seed
            )
        except BaseException:
            self.close()
            raise

    def _new(self, plans: Sequence[Plan], *, start: bool = True) -> Engine:
        return Engine(
            self._adapter, self._knobs, plans=plans, max_batch=self._max_batch, max_tokens=self._max_tokens,
            graphs=self._graphs, start=start,
        )  # fmt: skip

    def _grouped(self, size: int | None) -> tuple[tuple[Plan, ...], ...]:
        free = _free_bytes(self._device)
        if free is not None:
            dearest = max(self._plans, key=lambda plan: len(plan.blocks))
            check_memory(self._adapter, dearest, slots=self._max_batch, tokens=self._max_tokens, free=free)
            size = size or self._fitting(dearest, free)
        size = size or len(self._plans)
        plans = list(self._plans)
        if size < len(plans):
            # Others of every group shall be as all are.
            plans = [plans[at] for at in np.random.default_rng(self._seed).permutation(len(plans))]
        return tuple(tuple(plans[at : at + size]) for at in range(0, len(plans), size))

    def _fitting(self, dearest: Plan, free: int) -> int:
        """How many plans fit, by what the dearest one takes of the bytes that are free."""
        self._made([dearest])
        left, _ = torch.cuda.mem_get_info(self._device)
        self.close()
        return max(1, int(_SHARE * free / max(free - left, 1)))


def _free_bytes(device: torch.device) -> int | None:
    """What a GPU has left; None for a CPU, whose memory is shared with all else."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def by_group(
    runner: EngineRunner, space: PlanSpace, out: Path | str, *, progress: Progress | None = None, **how: Any
) -> PlanProfile:
    """`profile` of all plans of a runner, group by group, under loads of its own making.

    Args:
        runner: The runner.
        space: As of `profile`.
        out: As of `profile`.
        progress: As of `profile`.
        **how: The other arguments of `profile`, but `plans` and `load`.

    Returns:
        All that the file holds.
    """
    count = len(runner.groups)
    for at, plans in enumerate(runner.groups):
        tell = None if progress is None else partial(_part, progress, at, count)
        collect_profile(runner, space, out, plans=plans, load=runner.busy, progress=tell, **how)
    return PlanProfile.read(out)


def _part(progress: Progress, at: int, count: int, what: str, done: float) -> None:
    progress(what if count == 1 else f"group {at + 1}/{count}, {what}", (at + done) / count)
