"""Failures of one request, which do not affect others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters import Adapter
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.requests.request import (
    EngineStopped,
    RequestFailed,
    RequestOutOfMemory,
)
from sparseflow.adaptive.plan.runtime import PlanRuntime
from tests.adaptive.engine.serving import (
    PLANS,
    generate_alone,
    make_idle_engine,
    request,
    run_until_idle,
)


@contextmanager
def failing(adapter: Adapter, fails: Any) -> Iterator[None]:
    """Make forwards raise the error that `fails` returns for their tokens and positions."""

    def hook(module: Any, args: Any, named: dict[str, Any]) -> None:
        ids = named.get("input_ids")
        if ids is not None and (error := fails(ids, named["position_ids"])) is not None:
            raise error

    handle = adapter.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class TestFailures:
    def test_failing_prompt_ends_only_its_request(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        bad = request(7, max_new_tokens=4)
        good = [request(5, seed=seed, max_new_tokens=4) for seed in range(2)]

        def fails(ids: torch.Tensor, positions: torch.Tensor) -> Exception | None:
            return ValueError("no such prompt") if ids.shape[1] == 7 else None

        with failing(olmoe[0], fails):
            handles = [engine.submit(queued) for queued in (good[0], bad, good[1])]
            run_until_idle(engine)
        with pytest.raises(RequestFailed, match=f"{bad.id} failed: ValueError: no such prompt"):
            handles[1].result()
        assert [handles[index].result().tokens for index in (0, 2)] == [
            generate_alone(*olmoe, queued) for queued in good
        ]
        assert engine.snapshot().ended == {"finished": 2, "failed": 1}

    def test_failing_prompt_of_group_ends_only_its_request(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        requests = [request(5, seed=seed, max_new_tokens=4) for seed in range(3)]
        wrong = requests[1].inputs["input_ids"]

        def fails(ids: torch.Tensor, positions: torch.Tensor) -> Exception | None:
            matches_row = ids.shape[1] == 5 and any(torch.equal(row, wrong[0]) for row in ids)
            return ValueError("failing row") if matches_row else None

        with failing(olmoe[0], fails):
            handles = [engine.submit(queued) for queued in requests]
            run_until_idle(engine)
        with pytest.raises(RequestFailed):
            handles[1].result()
        for index in (0, 2):
            assert handles[index].result().tokens == generate_alone(*olmoe, requests[index])

    @pytest.mark.parametrize("error", [ValueError("bad row"), torch.OutOfMemoryError("no memory")])
    def test_failing_row_of_step_ends_only_its_request(
        self, olmoe: tuple[Adapter, PlanRuntime], error: Exception
    ) -> None:
        engine = make_idle_engine(olmoe)
        requests = [request(5 + 2 * seed, seed=seed, max_new_tokens=9) for seed in range(4)]
        expected = [generate_alone(*olmoe, queued) for queued in requests]
        handles = [engine.submit(queued) for queued in requests]
        for _ in range(4):
            engine.step()
        # The row of the second request fails at its next step in any batch.
        position = 7 + len(handles[1].tokens) - 1
        assert len({len(handle.tokens) + 5 + 2 * index for index, handle in enumerate(handles)}) == 4

        def fails(ids: torch.Tensor, positions: torch.Tensor) -> Exception | None:
            return error if ids.shape[1] == 1 and bool((positions == position).any()) else None

        with failing(olmoe[0], fails):
            engine.step()
        run_until_idle(engine)
        with pytest.raises(
            RequestOutOfMemory if isinstance(error, torch.OutOfMemoryError) else RequestFailed
        ):
            handles[1].result()
        assert handles[1].tokens == expected[1][: len(handles[1].tokens)]
        for index in (0, 2, 3):
            assert handles[index].result().tokens == expected[index]

    def test_batch_out_of_memory_is_retried_in_halves(
        self, olmoe: tuple[Adapter, PlanRuntime], caplog: pytest.LogCaptureFixture
    ) -> None:
        # Halves of three rows, which is not a padded size.
        engine = make_idle_engine(olmoe, max_batch=6)
        requests = [request(5, seed=seed, max_new_tokens=6) for seed in range(6)]

        def fails(ids: torch.Tensor, positions: torch.Tensor) -> Exception | None:
            return torch.OutOfMemoryError("too many") if len(ids) > 1 else None

        with failing(olmoe[0], fails), caplog.at_level(logging.WARNING):
            handles = [engine.submit(queued) for queued in requests]
            run_until_idle(engine)
        assert "6 requests failed" in caplog.text
        for handle in handles:
            assert handle.result().tokens == generate_alone(*olmoe, handle.request)

    def test_prompt_out_of_memory_is_retried_once(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine, tries = make_idle_engine(olmoe), []

        def fails(ids: torch.Tensor, positions: torch.Tensor) -> Exception | None:
            if ids.shape[1] == 7:
                tries.append(1)
                return RuntimeError("CUDA error: out of memory")
            return None

        with failing(olmoe[0], fails):
            bad, good = engine.submit(request(7)), engine.submit(request(5, max_new_tokens=3))
            run_until_idle(engine)
        with pytest.raises(RequestOutOfMemory):
            bad.result()
        assert len(tries) == 2 and good.result().tokens == generate_alone(*olmoe, good.request)

    def test_nan_logits_end_only_their_request(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = make_idle_engine(olmoe)
        handles = [engine.submit(request(5, seed=seed, max_new_tokens=6)) for seed in range(3)]
        engine.step()
        head: Any = olmoe[0].model.get_output_embeddings()

        def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            output[1] = float("nan")
            return output

        hook = head.register_forward_hook(poison)
        engine.step()
        hook.remove()
        run_until_idle(engine)
        with pytest.raises(RequestFailed):
            handles[1].result()
        for index in (0, 2):
            assert handles[index].result().tokens == generate_alone(*olmoe, handles[index].request)

    def test_unusable_device_stops_engine(self, olmoe: tuple[Adapter, PlanRuntime]) -> None:
        engine = Engine(*olmoe, plans=PLANS, max_batch=2, max_tokens=48)
        started = threading.Event()

        def fails(ids: torch.Tensor, positions: torch.Tensor) -> Exception | None:
            started.wait(10)
            return RuntimeError("CUDA error: device-side assert triggered") if ids.shape[1] == 1 else None

        with failing(olmoe[0], fails):
            handles = [engine.submit(request(5 + index)) for index in range(3)]
            started.set()
            for handle in handles:
                with pytest.raises(EngineStopped):
                    handle.result(30)
        assert not engine.snapshot().healthy
        for call in (lambda: engine.submit(request()), engine.warm_up):
            with pytest.raises(EngineStopped):
                call()
        assert not engine.shutdown()
