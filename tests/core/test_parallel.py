"""One function over many items: here, in processes, and on a pretended Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparseflow.core import extras, parallel
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import DeviceError, InputError, MissingExtraError


def square_and_process(item: int) -> tuple[int, int]:
    return item * item, os.getpid()


def leave_a_trace(item: Path) -> None:
    if item.name == "refused":
        raise FileNotFoundError(f"{item.name} is not there")
    time.sleep(0.05)
    item.touch()


def test_one_worker_calls_here_and_in_order() -> None:
    found = list(map_unordered(square_and_process, [3, 1, 2]))
    assert found == [(0, (9, os.getpid())), (1, (1, os.getpid())), (2, (4, os.getpid()))]


def test_one_worker_calls_only_when_asked_for_the_next() -> None:
    called: list[int] = []
    results = map_unordered(called.append, [1, 2, 3])
    assert next(results) == (0, None) and called == [1]
    results.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert called == [1]


@pytest.mark.parametrize("workers", [1, 4])
def test_no_items_give_no_results(workers: int) -> None:
    assert list(map_unordered(square_and_process, [], workers=workers)) == []


def test_processes_give_each_result_with_the_place_of_its_item() -> None:
    found = dict(map_unordered(square_and_process, [5, 1, 4, 4], workers=2))
    assert {place: square for place, (square, _) in found.items()} == {0: 25, 1: 1, 2: 16, 3: 16}
    processes = {process for _, process in found.values()}
    assert os.getpid() not in processes and len(processes) <= 2


def test_an_error_comes_out_and_what_has_not_begun_is_dropped(tmp_path: Path) -> None:
    items = [tmp_path / "refused", *(tmp_path / str(number) for number in range(100))]
    with pytest.raises(FileNotFoundError, match="refused is not there"):
        list(map_unordered(leave_a_trace, items, workers=2))
    assert len(list(tmp_path.iterdir())) < 100


def test_an_error_of_the_only_worker_comes_out_after_what_came_before(tmp_path: Path) -> None:
    results = map_unordered(leave_a_trace, [tmp_path / "first", tmp_path / "refused", tmp_path / "last"])
    assert next(results) == (0, None)
    with pytest.raises(FileNotFoundError, match="refused is not there"):
        next(results)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_must_be_positive(workers: int) -> None:
    with pytest.raises(InputError, match=rf"`workers` \(={workers}\) must be at least 1"):
        list(map_unordered(square_and_process, [1], workers=workers))


def test_a_cluster_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"`ray`.*pip install 'sparseflow\[distributed\]'"):
        list(map_unordered(square_and_process, [1], cluster="auto"))


class TaskError(Exception):
    """As Ray's: what a remote call raised is its cause."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__("a task failed")
        self.cause = cause


class PretendedRay:
    """What `map_unordered` uses of Ray, in this process; the call made last ends first."""

    exceptions = SimpleNamespace(RayTaskError=TaskError)

    def __init__(self, *, running: bool = False, refusal: Exception | None = None) -> None:
        self.running, self.refusal = running, refusal
        self.address = ""
        self.options: dict[str, Any] = {}
        self.cancelled: list[Any] = []
        self.stopped = 0

    def is_initialized(self) -> bool:
        return self.running

    def init(self, *, address: str, **_: Any) -> None:
        if self.refusal:
            raise self.refusal
        self.address, self.running = address, True

    def shutdown(self) -> None:
        self.running, self.stopped = False, self.stopped + 1

    def remote(self, **options: Any) -> Callable[[Callable[[Any], Any]], Any]:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda item: Call(function, item))

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[-1:], waiting[:-1]

    def get(self, call: Call) -> Any:
        try:
            return call.function(call.item)
        except SystemError:
            raise
        except Exception as error:
            raise TaskError(error) from error

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call.item)


class Call:
    def __init__(self, function: Callable[[Any], Any], item: Any) -> None:
        self.function, self.item = function, item


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PretendedRay:
    found = PretendedRay()
    monkeypatch.setattr(parallel, "require", lambda package, extra: found)
    return found


def test_a_cluster_gives_each_result_with_its_place_and_is_left(ray: PretendedRay) -> None:
    found = list(
        map_unordered(abs, [-1, 2, -3], cluster="10.0.0.1:6379", cpus_per_task=4.0, gpus_per_task=1.0)
    )
    assert found == [(2, 3), (1, 2), (0, 1)]
    assert ray.address == "10.0.0.1:6379"
    assert (ray.options["num_cpus"], ray.options["num_gpus"], ray.options["max_retries"]) == (4.0, 1.0, 0)
    assert ray.stopped == 1 and ray.cancelled == []


def test_a_cluster_that_was_joined_before_is_not_left(ray: PretendedRay) -> None:
    ray.running = True
    assert dict(map_unordered(abs, [-1, 2], cluster="auto")) == {0: 1, 1: 2}
    assert ray.stopped == 0


def test_workers_are_not_looked_at_with_a_cluster(ray: PretendedRay) -> None:
    assert list(map_unordered(abs, [-1], cluster="auto", workers=0)) == [(0, 1)]


def test_an_error_on_a_cluster_comes_out_as_itself_and_the_rest_is_cancelled(ray: PretendedRay) -> None:
    results = map_unordered(len, ["abc", "ab", 5, "a"], cluster="auto")  # type: ignore[list-item]
    assert next(results) == (3, 1)
    with pytest.raises(TypeError, match="has no len"):
        next(results)
    assert ray.cancelled == ["abc", "ab"] and ray.stopped == 1


def test_whatever_ends_it_on_a_cluster_the_rest_is_cancelled(ray: PretendedRay) -> None:
    def lost(item: int) -> int:
        if item == 3:
            raise SystemError("the machine is gone")
        return item

    ray.running = True
    with pytest.raises(SystemError, match="the machine is gone"):
        list(map_unordered(lost, [1, 2, 3, 4], cluster="auto"))
    assert ray.cancelled == [1, 2]
    ray.cancelled.clear()
    results = map_unordered(lost, [1, 2, 4], cluster="auto")
    assert next(results) == (2, 4)
    results.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert ray.cancelled == [1, 2]


@pytest.mark.parametrize("refusal", [ConnectionError("nobody"), ValueError("nobody"), RuntimeError("nobody")])
def test_no_cluster_at_the_address_is_told(refusal: Exception, ray: PretendedRay) -> None:
    ray.refusal = refusal
    with pytest.raises(DeviceError, match=r"no Ray cluster at '10\.0\.0\.9:1': nobody"):
        list(map_unordered(abs, [1], cluster="10.0.0.9:1"))
