"""Readings: what they may hold, and what asking them for something absent does."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.telemetry import dcgm, schema
from sparseflow.core.telemetry.readers import open_reader
from sparseflow.core.telemetry.schema import METRICS, LoadReading
from sparseflow.errors import DeviceError, InputError


def load(**shares: float) -> LoadReading:
    return LoadReading(timestamp_s=5.0, interval_s=1.0, source="host", device="cpu", shares=shares)


def test_a_reading_gives_what_it_holds_in_one_order() -> None:
    found = load(queue=0.25, busy=0.5)
    assert found["busy"] == 0.5
    assert list(found.shares) == ["busy", "queue"]
    assert found.select(("queue", "busy")) == {"queue": 0.25, "busy": 0.5}


def test_an_absent_metric_is_an_error_and_never_zero() -> None:
    with pytest.raises(DeviceError, match=r"`tensor` was not read from host \(cpu\), which tells: busy"):
        load(busy=0.5)["tensor"]
    with pytest.raises(DeviceError, match="tensor"):
        load(busy=0.5).select(("busy", "tensor"))


def test_an_unknown_metric_is_bad_input() -> None:
    with pytest.raises(InputError, match="'busyness' is no metric"):
        load(busy=0.5)["busyness"]
    with pytest.raises(InputError, match="'busyness'"):
        load(busyness=0.5)


@pytest.mark.parametrize("value", [-0.01, 1.01, 55.0, math.nan, math.inf])
def test_a_share_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="`busy`"):
        load(busy=value)


def test_a_reading_without_shares_or_with_odd_times_is_refused() -> None:
    with pytest.raises(InputError, match="at least one share"):
        load()
    with pytest.raises(InputError, match="timestamp_s"):
        LoadReading(timestamp_s=math.nan, interval_s=1.0, source="host", device="cpu", shares={"busy": 0.5})


@given(st.dictionaries(st.sampled_from(METRICS), st.floats(0.0, 1.0), min_size=1))
def test_a_reading_survives_a_row_json_and_another_process(shares: dict[str, float]) -> None:
    found = load(**shares)
    row = json.loads(json.dumps({"kernel": "Conv_1", **found.to_row()}))
    assert LoadReading.from_row(row) == found
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_row_with_an_empty_column_has_no_such_metric() -> None:
    row = {**load(busy=0.5).to_row(), "load_tensor": None}
    assert "tensor" not in LoadReading.from_row(row).shares


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"load_device": None}, "load_device"),
        ({"load_busy": "0.5"}, "load_busy"),
        ({"load_busy": True}, "load_busy"),
        ({"load_timestamp_s": "now"}, "load_timestamp_s"),
        ({"load_speed": 0.5}, "'speed'"),
    ],
)
def test_a_row_of_another_form_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        LoadReading.from_row({**load(busy=0.5).to_row(), **change})


def test_rounding_past_one_is_cut_and_more_is_a_lie() -> None:
    assert schema.normalize_share(100.5, 100.0, "it") == 1.0
    for value in (102.0, -1.0, math.nan, math.inf, 9223372036854775794.0):
        with pytest.raises(DeviceError, match="it is"):
            schema.normalize_share(value, 100.0, "it")


@pytest.mark.parametrize("window_s", [0.0, 0.05, -1.0, math.nan, math.inf])
def test_a_window_that_means_nothing_is_refused(window_s: float) -> None:
    with pytest.raises(InputError, match="window_s"):
        schema.check_window(window_s)


def test_every_metric_has_a_name_in_prometheus_and_none_has_two_meanings() -> None:
    assert {series.metric for series in dcgm.SERIES} == set(METRICS)
    assert len(dcgm.SERIES_BY_NAME) == len(dcgm.SERIES)
    assert [series.name for series in dcgm.list_series("active")] == [
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_DEV_GPU_UTIL",
    ]


def test_a_source_is_opened_by_its_name() -> None:
    assert open_reader("prometheus", url="http://127.0.0.1:9", metrics=("busy",)).metrics == ("busy",)
    with pytest.raises(InputError, match="url"):
        open_reader("prometheus")
    with pytest.raises(InputError, match="`source` \\(='dcgm'\\)"):
        open_reader("dcgm")
