"""Tests of load readings, metric names and sources."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.telemetry import dcgm, schema
from sparseflow.core.telemetry.readers import open_reader
from sparseflow.core.telemetry.schema import METRICS, LoadReading
from sparseflow.errors import DeviceError, InputError


def make_reading(**shares: float) -> LoadReading:
    return LoadReading(timestamp_s=5.0, interval_s=1.0, source="host", device="cpu", shares=shares)


def test_reading_orders_and_selects_shares() -> None:
    reading = make_reading(queue=0.25, busy=0.5)
    assert reading["busy"] == 0.5
    assert list(reading.shares) == ["busy", "queue"]
    assert reading.select(("queue", "busy")) == {"queue": 0.25, "busy": 0.5}


def test_reading_missing_metric_raises() -> None:
    with pytest.raises(DeviceError, match=r"`tensor`.*host \(cpu\).*busy"):
        make_reading(busy=0.5)["tensor"]
    with pytest.raises(DeviceError, match="tensor"):
        make_reading(busy=0.5).select(("busy", "tensor"))


def test_reading_unknown_metric_raises() -> None:
    with pytest.raises(InputError, match="'busyness'"):
        make_reading(busy=0.5)["busyness"]
    with pytest.raises(InputError, match="'busyness'"):
        make_reading(busyness=0.5)


@pytest.mark.parametrize("value", [-0.01, 1.01, 55.0, math.nan, math.inf])
def test_reading_share_outside_range_raises(value: float) -> None:
    with pytest.raises(InputError, match="`busy`"):
        make_reading(busy=value)


def test_reading_without_shares_or_invalid_time_raises() -> None:
    with pytest.raises(InputError, match="share"):
        make_reading()
    with pytest.raises(InputError, match="timestamp_s"):
        LoadReading(timestamp_s=math.nan, interval_s=1.0, source="host", device="cpu", shares={"busy": 0.5})


@given(st.dictionaries(st.sampled_from(METRICS), st.floats(0.0, 1.0), min_size=1))
def test_reading_survives_row_and_pickle(shares: dict[str, float]) -> None:
    reading = make_reading(**shares)
    row = reading.to_row("")
    fields = {name: row.pop(name) for name in ("timestamp_s", "interval_s", "source", "device")}
    assert LoadReading(**fields, shares=row) == reading  # pyright: ignore[reportArgumentType]
    assert pickle.loads(pickle.dumps(reading)) == reading


def test_normalize_share_clips_rounding_and_raises_beyond() -> None:
    assert schema.normalize_share(100.5, 100.0, "busy of cpu") == 1.0
    for value in (102.0, -1.0, math.nan, math.inf, 9223372036854775794.0):
        with pytest.raises(DeviceError, match="busy of cpu"):
            schema.normalize_share(value, 100.0, "busy of cpu")


@pytest.mark.parametrize("window_s", [0.0, 0.05, -1.0, math.nan, math.inf])
def test_check_window_invalid_raises(window_s: float) -> None:
    with pytest.raises(InputError, match="window_s"):
        schema.check_window(window_s)


def test_series_cover_all_metrics_uniquely() -> None:
    assert {series.metric for series in dcgm.SERIES} == set(METRICS)
    assert len(dcgm.SERIES_BY_NAME) == len(dcgm.SERIES)
    assert [series.name for series in dcgm.list_series("active")] == [
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_DEV_GPU_UTIL",
    ]


def test_open_reader_by_source() -> None:
    assert open_reader("prometheus", url="http://127.0.0.1:9", metrics=("busy",)).metrics == ("busy",)
    with pytest.raises(InputError, match="url"):
        open_reader("prometheus")
    with pytest.raises(InputError, match="`source` \\(='dcgm'\\)"):
        open_reader("dcgm")
