"""Specifications of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparseflow.codesign.chips import read_library
from sparseflow.codesign.proxy import DeviceSpec
from sparseflow.core.ceilings import Ceilings
from sparseflow.errors import FileFormatError, InputError
from tests.codesign.proxy.made_up import GPU


def test_a_chip_of_the_library_is_a_device() -> None:
    chip = read_library().chip("h200")
    found = DeviceSpec.of(chip, cores=132)
    assert (found.name, found.peak_flops, found.tdp_w, found.cores) == ("h200", chip.peak_flops, 700, 132)
    assert found.rate("float32") == found.rate("bfloat16") == chip.peak_flops
    assert DeviceSpec.of(found) is found


def test_measured_ceilings_say_the_rate_of_each_precision() -> None:
    ceilings = Ceilings(flops_per_s={"float32": 5e13, "tf32": 3e14, "bfloat16": 7e14}, bytes_per_s=4e12)
    found = DeviceSpec.measured(ceilings, name="here", mem_gb=141.0, tdp_w=700.0)
    assert (found.peak_flops, found.peak_bw) == (7e14, 4e12)
    assert found.rate("float32") == 5e13 and found.rate("float16") == 7e14


def test_a_device_survives_json() -> None:
    assert DeviceSpec.from_dict(GPU.to_dict()) == GPU
    with pytest.raises(FileFormatError, match="cannot be read"):
        DeviceSpec.from_dict({"name": "half a device"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""}, {"peak_flops": 0.0}, {"peak_bw": float("nan")}, {"tdp_w": -1.0}, {"idle_w": 501.0},
        {"cores": 0}, {"rates": (("int8", 1e15),)}, {"rates": (("float32", 0.0),)},
    ],
)  # fmt: skip
def test_figures_that_make_no_sense_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        replace(GPU, **wrong)
