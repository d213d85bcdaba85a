"""Profile runner that serves requests by an engine, with its CUDA graphs, kernels, slots and thread.

The measured times are those of a client, from receipt to each token: the queue of the engine's thread, moving
inputs, the vision encoder, both parts of the prompt, every step, and the turns of other requests in between.
Only the selection of the plan is excluded, because the plan is given.

Background requests have random plans, lengths and numbers of tokens. The two conditions are those that a
server passes to a predictor:

- `batch`: concurrent requests when a request starts to run, including itself
- `load`: share of the time in which the engine is busy with requests that come and go, without the measured
  one. It is the probability that other requests arrive while one runs. A server counts how many of its
  requests met others (`Engine.load`), which is the same for random arrivals.

At load 0 no requests arrive, and the concurrent ones finish one by one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from sparseflow.adaptive.plan.space import Plan, PlanSpace
from sparseflow.adaptive.profile.background_traffic import (
    BackgroundTraffic,
    FixedPlanPolicy,
    RequestMix,
    make_full_prompt,
)
from sparseflow.adaptive.profile.collect import collect_profile
from sparseflow.adaptive.profile.identity import compute_model_id
from sparseflow.adaptive.profile.memory import check_cache_memory
from sparseflow.adaptive.profile.random_prompts import RandomPrompts
from sparseflow.adaptive.profile.runner import RequestTimes, describe_computation
from sparseflow.adaptive.profile.storage import PlanProfile
from sparseflow.core.checks import check_at_least, check_between
from sparseflow.core.progress import Progress, subrange
from sparseflow.errors import InputError, RunError

_MEMORY_FRACTION = 0.6
"""Fraction of the free memory for caches and CUDA graphs; the rest is for unpadded prefills."""


class EngineRunner:
    """Runs plans on engines. Implements `ProfileRunner`; `apply_load` is its `BackgroundLoad`.

    An engine keeps the KV cache and CUDA graphs of all its plans, so many plans do not fit at once. Plans are
    divided into groups with one engine each, which is created when one of its plans is run. Measure group by
    group (`collect_profile_by_group`). A context manager.

    Args:
        runtime: Runtime of the model, which is in evaluation mode.
        plans: Plans that can be run. Background requests use plans of the same group.
        example: Inputs of a request with one image at the highest tier, batch size 1, as the model's
            processor makes them; None measures requests without images only.
        max_batch: `max_batch` of the engine that will serve.
        max_tokens: `max_tokens` of that engine; the sizes of its CUDA graphs depend on it.
        mix: Distribution of background requests.
        plans_per_group: Plans of one engine; by default as many as fit into memory, all on a CPU.
        graphs: Whether the engine uses CUDA graphs.
        settle_s: How long the load of an arrival rate is measured.
        seed: Seed of prompts and background requests.
        progress: Called with (message, fraction done) while an engine is warmed up.

    Raises:
        InputError: The model is in training mode, there is no plan, the example is not one request with an
            image, or the KV cache of one plan does not fit into memory.
    """

    def __init__(
        self,
        runtime: PlanRuntime,
        plans: Sequence[Plan],
        *,
        example: Inputs | None = None,
        max_batch: int = 8,
        max_tokens: int = 2048,
        mix: RequestMix | None = None,
        plans_per_group: int | None = None,
        graphs: bool = True,
        settle_s: float = 8.0,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._runtime, self._adapter, self._example = runtime, runtime.adapter, example
        if self._adapter.model.training:
            raise InputError("the model is in training mode; call `model.eval()` first")
        if not plans or (plans_per_group is not None and plans_per_group < 1):
            raise InputError(
                f"`plans` must not be empty, got {len(plans)}, and `plans_per_group` "
                f"(={plans_per_group}) must be at least 1"
            )
        self._device = next(self._adapter.decoder.parameters()).device
        self._max_batch, self._max_tokens, self._graphs = max_batch, max_tokens, graphs
        self._mix, self._settle_s, self._seed, self._progress = mix or RequestMix(), settle_s, seed, progress
        self._prompts = RandomPrompts(self._adapter, example, device="cpu", seed=seed)
        self.model_id, self.device = compute_model_id(self._adapter.model), str(self._device)
        self.vision_tokens = self._prompts.vision_tokens
        self._plans = tuple(dict.fromkeys(plans))
        self._engine: Engine | None = None
        self._traffic: BackgroundTraffic | None = None
        self._config: Mapping[str, Any] | None = None
        self._load = 0.0
        self._stream, self._is_streaming = ExitStack(), False
        self.groups = self._group_plans(plans_per_group)
        """Plans of each engine."""

    def __enter__(self) -> EngineRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def config(self) -> Mapping[str, Any]:
        """`ProfileRunner.config`; does not start or warm up an engine."""
        if self._config is None:
            engine = self._engine or self._create_engine(self.groups[0], start=False)
            self._config = {
                "runner": "engine", **describe_computation(self._adapter.model),
                "graphs": engine.graphs.enabled, "max_batch": self._max_batch,
                "max_tokens": self._max_tokens, "prompts": list(engine.prompts),
                "contexts": list(engine.contexts),
            }  # fmt: skip
        return self._config

    def run(self, plan: Plan, text_tokens: int, *, steps: int, batch: int = 1) -> RequestTimes:
        """Run a request next to `batch` - 1 others, and those of `apply_load`; see `ProfileRunner.run`.

        Raises:
            InputError: A number is out of range, the plan is not one of the runner's, or it has a tier and
                there is no example.
            RunError: The background requests failed.
        """
        check_at_least(1, text_tokens=text_tokens)
        check_at_least(0, steps=steps)
        check_between(1, self._max_batch, batch=batch)
        engine, traffic = self._get_engine(plan)
        inputs = make_full_prompt(self._prompts, plan, text_tokens)
        token_times_s: list[float] = []

        def record_times(handle: RequestHandle) -> None:
            token_times_s.extend([time.perf_counter()] * (len(handle.tokens) - len(token_times_s)))

        traffic.hold_concurrency(batch - 1)
        request = GenerationRequest(
            inputs=inputs, decide=FixedPlanPolicy(plan=plan), max_new_tokens=steps + 1
        )
        try:
            engine.submit(request, record_times).result()
        except (RequestOutOfMemory, RequestFailed) as error:
            raise RuntimeError(str(error)) from error
        finally:
            if not self._load:
                traffic.cancel_all()
        times_ms = [1e3 * (time_s - request.received_s) for time_s in token_times_s]
        steps_ms = tuple(later - earlier for earlier, later in pairwise(times_ms))
        return RequestTimes(prefill_ms=times_ms[0], steps_ms=steps_ms)

    @contextmanager
    def apply_load(self, load: float) -> Iterator[None]:
        """Keep the engine busy with background requests for this share of the time.

        Raises:
            InputError: A load is applied already.
            RunError: The background requests failed.
        """
        if self._load:
            raise InputError(f"a load of {self._load:g} is applied already; leave that context first")
        self._load = load
        try:
            yield
        except BaseException:
            with suppress(RunError):  # the first error is raised
                self._stop_stream()
            raise
        else:
            self._stop_stream()
        finally:
            self._load = 0.0

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        try:
            self._stop_stream()
        finally:
            if self._engine is not None:
                self._engine.shutdown(drain=False)
            self._engine = self._traffic = None
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()

    def _get_engine(self, plan: Plan) -> tuple[Engine, BackgroundTraffic]:
        """The engine of a plan and its traffic; starts both, and the stream of the applied load."""
        if self._engine is None or plan not in self._engine.plans:
            group = next((group for group in self.groups if plan in group), None)
            if group is None:
                raise InputError(f"{plan.id} is not one of the {len(self._plans)} plans of this runner")
            self._switch_engine(group)
        assert self._engine is not None and self._traffic is not None
        if self._load and not self._is_streaming:
            self._stream.enter_context(self._traffic.run_stream(self._load))
            self._is_streaming = True
        return self._engine, self._traffic

    def _stop_stream(self) -> None:
        self._is_streaming = False
        self._stream.close()

    def _switch_engine(self, plans: Sequence[Plan]) -> None:
        """Replace the engine by one of these plans."""
        self.close()
        self._engine = self._create_engine(plans)
        try:
            if self._engine.graphs.enabled:
                self._engine.warm_up(self._example, progress=self._progress)
            prompts = RandomPrompts(self._adapter, self._example, device="cpu", seed=self._seed + 1)
            self._traffic = BackgroundTraffic(
                self._engine, plans, prompts, self._mix, settle_s=self._settle_s, seed=self._seed
            )
        except BaseException:
            self.close()
            raise

    def _create_engine(self, plans: Sequence[Plan], *, start: bool = True) -> Engine:
        return Engine(
            self._adapter, self._runtime, plans=plans, max_batch=self._max_batch, max_tokens=self._max_tokens,
            graphs=self._graphs, start=start,
        )  # fmt: skip

    def _group_plans(self, size: int | None) -> tuple[tuple[Plan, ...], ...]:
        free_bytes = _get_free_bytes(self._device)
        if free_bytes is not None:
            largest = max(self._plans, key=lambda plan: len(plan.blocks))
            check_cache_memory(
                self._adapter, largest, slots=self._max_batch, tokens=self._max_tokens, free_bytes=free_bytes
            )
            size = size or self._count_fitting_plans(largest, free_bytes)
        size = size or len(self._plans)
        plans = list(self._plans)
        if size < len(plans):
            # Shuffled, so that the background requests of every group are representative.
            plans = [plans[index] for index in np.random.default_rng(self._seed).permutation(len(plans))]
        return tuple(tuple(plans[start : start + size]) for start in range(0, len(plans), size))

    def _count_fitting_plans(self, largest: Plan, free_bytes: int) -> int:
        """Number of plans that fit into memory, from the memory of the largest plan."""
        self._switch_engine([largest])
        remaining_bytes, _ = torch.cuda.mem_get_info(self._device)
        self.close()
        return max(1, int(_MEMORY_FRACTION * free_bytes / max(free_bytes - remaining_bytes, 1)))


def _get_free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; None for a CPU, whose memory is shared."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def collect_profile_by_group(
    runner: EngineRunner,
    space: PlanSpace,
    out_path: Path | str,
    *,
    text_tokens: Sequence[int],
    batch_sizes: Sequence[int] = (1,),
    loads: Sequence[float] = (0.0,),
    rounds: int = 5,
    warmup_runs: int = 1,
    decode_steps: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> PlanProfile:
    """Measure all plans of a runner, group by group, with background requests as the load.

    The arguments, results and errors are those of `collect_profile`.
    """
    num_groups = len(runner.groups)
    for index, plans in enumerate(runner.groups):
        prefix = "" if num_groups == 1 else f"group {index + 1}/{num_groups}, "
        collect_profile(
            runner, space, out_path, text_tokens=text_tokens, plans=plans, batch_sizes=batch_sizes,
            loads=loads, rounds=rounds, warmup_runs=warmup_runs, decode_steps=decode_steps,
            background=runner.apply_load, seed=seed,
            progress=subrange(progress, index / num_groups, (index + 1) / num_groups, prefix),
        )  # fmt: skip
    return PlanProfile.load(out_path)
