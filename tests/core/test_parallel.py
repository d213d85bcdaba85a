"""`map_unordered` in this process, in local processes, and on a fake Ray cluster."""

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


def square_and_pid(item: int) -> tuple[int, int]:
    return item * item, os.getpid()


def touch_file(item: Path) -> None:
    if item.name == "refused":
        raise FileNotFoundError(f"{item.name} is not there")
    time.sleep(0.05)
    item.touch()


def test_one_worker_runs_in_this_process_in_order() -> None:
    results = list(map_unordered(square_and_pid, [3, 1, 2]))
    assert results == [(0, (9, os.getpid())), (1, (1, os.getpid())), (2, (4, os.getpid()))]


def test_one_worker_is_lazy() -> None:
    arguments: list[int] = []
    results = map_unordered(arguments.append, [1, 2, 3])
    assert next(results) == (0, None) and arguments == [1]
    results.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert arguments == [1]


@pytest.mark.parametrize("workers", [1, 4])
def test_no_items_yield_nothing(workers: int) -> None:
    assert list(map_unordered(square_and_pid, [], workers=workers)) == []


def test_processes_yield_the_index_of_each_item() -> None:
    results = dict(map_unordered(square_and_pid, [5, 1, 4, 4], workers=2))
    assert {index: square for index, (square, _) in results.items()} == {0: 25, 1: 1, 2: 16, 3: 16}
    processes = {pid for _, pid in results.values()}
    assert os.getpid() not in processes and len(processes) <= 2


def test_processes_raise_the_error_and_cancel_pending_items(tmp_path: Path) -> None:
    items = [tmp_path / "refused", *(tmp_path / str(number) for number in range(100))]
    with pytest.raises(FileNotFoundError, match="refused is not there"):
        list(map_unordered(touch_file, items, workers=2))
    assert len(list(tmp_path.iterdir())) < 100


def test_one_worker_raises_the_error_after_earlier_results(tmp_path: Path) -> None:
    results = map_unordered(touch_file, [tmp_path / "first", tmp_path / "refused", tmp_path / "last"])
    assert next(results) == (0, None)
    with pytest.raises(FileNotFoundError, match="refused is not there"):
        next(results)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_below_1_raise(workers: int) -> None:
    with pytest.raises(InputError, match=rf"\(={workers}\)"):
        list(map_unordered(square_and_pid, [1], workers=workers))


def test_cluster_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"sparseflow\[distributed\]"):
        list(map_unordered(square_and_pid, [1], cluster="auto"))


class TaskError(Exception):
    """Like Ray's `RayTaskError`: `cause` is the exception of the remote call."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__("a task failed")
        self.cause = cause


class FakeRay:
    """The part of Ray that `map_unordered` uses, in this process; the last call completes first."""

    exceptions = SimpleNamespace(RayTaskError=TaskError)

    def __init__(self, *, running: bool = False, init_error: Exception | None = None) -> None:
        self.running, self.init_error = running, init_error
        self.address = ""
        self.options: dict[str, Any] = {}
        self.cancelled: list[Any] = []
        self.stopped = 0

    def is_initialized(self) -> bool:
        return self.running

    def init(self, *, address: str, **_: Any) -> None:
        if self.init_error:
            raise self.init_error
        self.address, self.running = address, True

    def shutdown(self) -> None:
        self.running, self.stopped = False, self.stopped + 1

    def remote(self, **options: Any) -> Callable[[Callable[[Any], Any]], Any]:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda item: FakeReference(function, item))

    def wait(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        return waiting[-1:], waiting[:-1]

    def get(self, call: FakeReference) -> Any:
        try:
            return call.function(call.item)
        except SystemError:
            raise
        except Exception as error:
            raise TaskError(error) from error

    def cancel(self, call: FakeReference) -> None:
        self.cancelled.append(call.item)


class FakeReference:
    def __init__(self, function: Callable[[Any], Any], item: Any) -> None:
        self.function, self.item = function, item


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(parallel, "require", lambda package, extra: fake)
    return fake


def test_cluster_yields_the_index_of_each_item_and_disconnects(ray: FakeRay) -> None:
    results = list(
        map_unordered(abs, [-1, 2, -3], cluster="10.0.0.1:6379", cpus_per_task=4.0, gpus_per_task=1.0)
    )
    assert results == [(2, 3), (1, 2), (0, 1)]
    assert ray.address == "10.0.0.1:6379"
    assert (ray.options["num_cpus"], ray.options["num_gpus"], ray.options["max_retries"]) == (4.0, 1.0, 0)
    assert ray.stopped == 1 and ray.cancelled == []


def test_cluster_keeps_an_existing_connection(ray: FakeRay) -> None:
    ray.running = True
    assert dict(map_unordered(abs, [-1, 2], cluster="auto")) == {0: 1, 1: 2}
    assert ray.stopped == 0


def test_cluster_ignores_workers(ray: FakeRay) -> None:
    assert list(map_unordered(abs, [-1], cluster="auto", workers=0)) == [(0, 1)]


def test_cluster_raises_the_original_error_and_cancels_the_rest(ray: FakeRay) -> None:
    results = map_unordered(len, ["abc", "ab", 5, "a"], cluster="auto")  # type: ignore[list-item]
    assert next(results) == (3, 1)
    with pytest.raises(TypeError, match="has no len"):
        next(results)
    assert ray.cancelled == ["abc", "ab"] and ray.stopped == 1


def test_cluster_cancels_the_rest_after_any_stop(ray: FakeRay) -> None:
    def fail_on_3(item: int) -> int:
        if item == 3:
            raise SystemError("the machine is gone")
        return item

    ray.running = True
    with pytest.raises(SystemError, match="the machine is gone"):
        list(map_unordered(fail_on_3, [1, 2, 3, 4], cluster="auto"))
    assert ray.cancelled == [1, 2]
    ray.cancelled.clear()
    results = map_unordered(fail_on_3, [1, 2, 4], cluster="auto")
    assert next(results) == (2, 4)
    results.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert ray.cancelled == [1, 2]


@pytest.mark.parametrize(
    "init_error", [ConnectionError("nobody"), ValueError("nobody"), RuntimeError("nobody")]
)
def test_cluster_at_a_wrong_address_raises(init_error: Exception, ray: FakeRay) -> None:
    ray.init_error = init_error
    with pytest.raises(DeviceError, match=r"10\.0\.0\.9:1.*nobody"):
        list(map_unordered(abs, [1], cluster="10.0.0.9:1"))
