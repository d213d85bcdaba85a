"""Tests of `codesign.hardware.chips`."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st
from pydantic import ValidationError

pytest.importorskip("yaml")

from sparseflow.codesign.hardware.chips import ChipLibrary, ChipType, LinkType, parse_library, read_library
from sparseflow.core.config import read_config_file
from sparseflow.errors import FileFormatError, InputError

CHIP: dict[str, Any] = {
    "name": "npu", "peak_flops": {"float32": 2.0e13}, "peak_bw": 4.0e11, "mem_gb": 8, "area_mm2": 100,
    "tdp_w": 30,
}  # fmt: skip
LINK: dict[str, Any] = {"name": "ucie", "bandwidth": 6.4e10, "latency_us": 0.1}
MORE_THAN_ZERO = {"chips": ("peak_bw", "mem_gb", "area_mm2", "tdp_w"), "links": ("bandwidth",)}
NOT_BELOW_ZERO = {
    "chips": ("idle_w",), "links": ("latency_us", "latency_us_per_mm", "pj_per_bit", "pj_per_bit_mm"),
}  # fmt: skip
FIGURES = [
    (kind, name) for names in (MORE_THAN_ZERO, NOT_BELOW_ZERO) for kind in names for name in names[kind]
]


def content(kind: str = "chips", index: int = 1, /, **changes: Any) -> dict[str, Any]:
    """A library of two chips and two links, with an entry changed; None takes a field away."""
    result = {
        "chips": [CHIP | {"name": "small"}, dict(CHIP)], "links": [LINK | {"name": "slow"}, dict(LINK)],
    }  # fmt: skip
    for name, value in changes.items():
        result[kind][index][name] = value
        if value is None:
            del result[kind][index][name]
    return result


def test_shipped_library_is_consistent() -> None:
    library = read_library()
    assert {chip.name for chip in library.chips} >= {"npu-s", "npu-m", "npu-l", "memory-m", "a100", "h200"}
    for chip in library.chips:
        width, height = chip.size_mm
        assert width * height == pytest.approx(chip.area_mm2, rel=0.01)
        # No die is larger than a reticle, 26 x 33 mm, or hotter than 1.5 W/mm2.
        assert chip.area_mm2 <= 858.0 and max(width, height) <= 33.0
        assert 0.0 < chip.idle_w < chip.tdp_w < 1.5 * chip.area_mm2
        # FLOP for a byte, and FLOP for a joule, of any accelerator since 2015.
        for peak_flops in chip.peak_flops.values():
            assert 1.0 < peak_flops / chip.peak_bw < 1000.0
            assert 4e10 < peak_flops / chip.tdp_w < 1e13
        assert chip.source
    for link in library.links:
        assert 0.1 <= link.pj_per_bit <= 50.0 and 1e9 <= link.bandwidth <= 1e12
        # A memory is faster than a wire to another chip.
        assert link.bandwidth < max(chip.peak_bw for chip in library.chips)
        # Nothing is faster than light, 3.3 ps a mm.
        assert link.latency_us_per_mm == 0.0 or link.latency_us_per_mm >= 3.3e-6


def test_shipped_chips_match_data_sheets() -> None:
    library = read_library()
    a100, h200 = library.get_chip("a100"), library.get_chip("h200")
    a100_flops = {"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12}
    h200_flops = {"float64": 67e12, "float32": 67e12, "bfloat16": 989e12, "float16": 989e12}
    assert (a100.peak_flops, a100.peak_bw, a100.mem_gb, a100.tdp_w) == (a100_flops, 2039e9, 80.0, 400.0)
    assert (h200.peak_flops, h200.peak_bw, h200.mem_gb, h200.tdp_w) == (h200_flops, 4.8e12, 141.0, 700.0)
    assert (a100.area_mm2, h200.area_mm2) == (826.0, 814.0)
    assert library.get_link("nvlink4").bandwidth == 450e9  # 900 GB/s, both ways together
    assert all("data sheet" in chip.source for chip in (a100, h200))


def test_larger_shipped_chips_are_faster() -> None:
    library = read_library()
    sizes = [library.get_chip(f"npu-{size}") for size in "sml"]
    for name in (*MORE_THAN_ZERO["chips"], "idle_w"):
        figures = [getattr(chip, name) for chip in sizes]
        assert figures == sorted(set(figures)), name
    for precision in ("float32", "bfloat16", "float16"):
        figures = [chip.peak_flops[precision] for chip in sizes]
        assert figures == sorted(set(figures)), precision
    memory, npu = library.get_chip("memory-m"), library.get_chip("npu-m")
    assert memory.peak_bw > npu.peak_bw and memory.peak_flops["float32"] < npu.peak_flops["float32"]


def test_shipped_config_uses_shipped_library() -> None:
    hardware = read_config_file("version_c", package="sparseflow.codesign", extra="codesign")["hardware"]
    library = read_library()
    assert [library.get_chip(name).name for name in hardware["chips"]] == hardware["chips"]
    assert library.get_chip(hardware["initial_chip"]).name in hardware["chips"]
    assert library.get_link(hardware["link"]).name == hardware["link"]


def test_library_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "chips:\n"
        "  - {name: npu, peak_flops: {float32: 2e13}, peak_bw: 4.0e11, mem_gb: 8, area_mm2: 100, tdp_w: 30}\n"
        "  - {name: long, peak_flops: {float16: 1}, peak_bw: 2, mem_gb: 3, area_mm2: 50, tdp_w: 5,\n"
        "     idle_w: 5, size: [5, 10], source: measured}\n"
        "links:\n"
        "  - {name: ucie, bandwidth: 6.4e10, latency_us: 0}\n"
    )
    library = read_library(file)
    npu, long = library.chips
    assert npu.model_dump() == CHIP | {"idle_w": 0.0, "size": None, "source": "illustrative"}
    assert npu.size_mm == (10.0, 10.0) and long.size_mm == (5.0, 10.0)
    assert (long.idle_w, long.tdp_w, long.source) == (5.0, 5.0, "measured")
    assert library.links[0].model_dump() == {
        "name": "ucie", "bandwidth": 6.4e10, "latency_us": 0.0, "latency_us_per_mm": 0.0, "pj_per_bit": 0.0,
        "pj_per_bit_mm": 0.0, "source": "illustrative",
    }  # fmt: skip
    assert read_library(str(file)) == library
    assert parse_library(json.loads(library.model_dump_json())) == library


def test_library_is_immutable() -> None:
    library = parse_library(content())
    for entry, name in ((library.chips[0], "tdp_w"), (library.links[0], "bandwidth"), (library, "chips")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(entry, name, 1.0)


def test_unknown_name_lists_available_names() -> None:
    library = parse_library(content())
    assert library.get_chip("npu").name == "npu" and library.get_link("slow").name == "slow"
    with pytest.raises(InputError, match="'ucie'"):
        library.get_chip("ucie")
    with pytest.raises(InputError):
        library.get_link("")


def test_read_library_error_names_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(content(tdp_w=0)))
    with pytest.raises(FileFormatError, match=r"chips\.1\.tdp_w"):
        read_library(file)
    with pytest.raises(InputError, match=r".*gone\.yaml"):
        read_library(tmp_path / "gone.yaml")
    file.write_text("[1, 2]")
    with pytest.raises(FileFormatError, match=r"mine\.yaml"):
        read_library(file)
    with pytest.raises(FileFormatError, match="chips"):
        read_library("version_c")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            2e13,
            r"chips\.1\.peak_flops: must give FLOP/s for each precision, .*, got 2\d+\.0 \(chips: npu",
        ),
        ({}, r"chips\.1\.peak_flops"),
        ([1e13], r"chips\.1\.peak_flops"),
        ({"int8": 1e15}, r"unknown precision 'int8'; expected float64, float32, bfloat16, float16"),
        ({3: 1e15}, r"unknown precision 3"),
        ({"float32": 0.0}, r"chips\.1\.peak_flops\.float32"),
        ({"float32": math.nan}, r"chips\.1\.peak_flops\.float32"),
        ({"float32": 1e13, "float16": "fast"}, r"chips\.1\.peak_flops\.float16"),
    ],
)
def test_invalid_rates_are_refused(value: Any, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        parse_library(content(peak_flops=value))


@pytest.mark.parametrize("name", ["name", "peak_flops", *MORE_THAN_ZERO["chips"]])
def test_chip_without_field_is_refused(name: str) -> None:
    with pytest.raises(FileFormatError, match=rf"chips\.1\.{name}"):
        parse_library(content(**{name: None}))


@pytest.mark.parametrize("name", ["name", "bandwidth", "latency_us"])
def test_link_without_field_is_refused(name: str) -> None:
    with pytest.raises(FileFormatError, match=rf"links\.0\.{name}"):
        parse_library(content("links", 0, **{name: None}))


@pytest.mark.parametrize(
    ("kind", "name"), [("chips", "peak_flop"), ("links", "bandwith"), ("chips", "size_mm")]
)
def test_unknown_field_is_refused(kind: str, name: str) -> None:
    with pytest.raises(FileFormatError, match=rf"{kind}\.1\.{name}"):
        parse_library(content(kind, **{name: 1.0}))


def test_unknown_section_is_refused() -> None:
    with pytest.raises(FileFormatError, match="routers"):
        parse_library(content() | {"routers": []})


@pytest.mark.parametrize(("kind", "name"), FIGURES)
@pytest.mark.parametrize(
    "value", [-1.0, -1e-300, math.nan, math.inf, -math.inf, "nan", "fast", [1.0], {}, 10**400]
)
def test_invalid_number_is_refused(kind: str, name: str, value: Any) -> None:
    with pytest.raises(FileFormatError, match=rf"{kind}\.1\.{name}"):
        parse_library(content(kind, **{name: value}))


@pytest.mark.parametrize(("kind", "name"), FIGURES)
def test_zero_divisor_is_refused(kind: str, name: str) -> None:
    changed = content(kind, **{name: 0.0})
    if name in MORE_THAN_ZERO[kind]:
        with pytest.raises(FileFormatError, match=rf"{kind}\.1\.{name}"):
            parse_library(changed)
    else:
        assert getattr(getattr(parse_library(changed), kind)[1], name) == 0.0


@pytest.mark.parametrize("kind", ["chips", "links"])
@pytest.mark.parametrize("name", ["", 3, ["npu"], True])
def test_invalid_name_is_refused(kind: str, name: Any) -> None:
    with pytest.raises(FileFormatError, match=rf"{kind}\.1\.name"):
        parse_library(content(kind, name=name))


@pytest.mark.parametrize(("kind", "name"), [("chips", "small"), ("links", "slow")])
def test_duplicate_name_is_refused(kind: str, name: str) -> None:
    with pytest.raises(FileFormatError, match=rf"{kind}"):
        parse_library(content(kind, name=name))


def test_chip_and_link_may_share_a_name() -> None:
    library = parse_library(content("links", name="npu"))
    assert isinstance(library.get_chip("npu"), ChipType) and isinstance(library.get_link("npu"), LinkType)


def test_idle_power_above_tdp_is_refused() -> None:
    with pytest.raises(FileFormatError, match=r"chips\.1: .*idle_w \(=31.0\)"):
        parse_library(content(idle_w=31))
    assert parse_library(content(idle_w=30)).chips[1].idle_w == 30.0


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([-10, -10], "must be two positive numbers"),
        ([0, 10], "must be two positive numbers"),
        ([10, 11], "covers 110 mm2, but area_mm2 is 100"),
        ([1e200, 1e200], "covers inf mm2"),
        ([10], "Field required"),
        ([10, 10, 1], "at most 2"),
        ([math.nan, 10], "finite"),
        ("10x10", "tuple"),
    ],
)
def test_size_unlike_area_is_refused(size: Any, message: str) -> None:
    with pytest.raises(FileFormatError, match=rf"chips\.1.*{message}"):
        parse_library(content(size=size))


def test_size_may_be_rounded() -> None:
    assert parse_library(content(size=[12.5, 8.05])).chips[1].size_mm == (12.5, 8.05)


@pytest.mark.parametrize("part", ["chips", "links"])
@pytest.mark.parametrize("value", [[], {}, "npu", None, 3, [3], [None]])
def test_empty_section_is_refused(part: str, value: Any) -> None:
    with pytest.raises(FileFormatError, match=rf"{part}"):
        parse_library(content() | {part: value})


def test_recursive_library_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "round.yaml"
    file.write_text("&all\nchips: *all\nlinks: *all\n")
    with pytest.raises(FileFormatError):
        read_library(file)
    file.write_text("chips: &all [*all]\nlinks: *all\n")
    with pytest.raises(FileFormatError):
        read_library(file)


def usable(library: ChipLibrary) -> None:
    """What all that stands on a library takes for granted."""
    for kind, names in MORE_THAN_ZERO.items():
        entries = getattr(library, kind)
        assert entries and len({entry.name for entry in entries}) == len(entries)
        for entry in entries:
            assert all(0.0 < getattr(entry, name) < math.inf for name in names)
            assert all(0.0 <= getattr(entry, name) < math.inf for name in NOT_BELOW_ZERO[kind])
    for chip in library.chips:
        assert all(0.0 < side < math.inf for side in chip.size_mm)
        assert chip.idle_w <= chip.tdp_w


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(),
        st.binary(max_size=5), st.sampled_from(["npu", "1e12", "nan", 0, 1, [10, 10], {}]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["chips", "links", *CHIP, 3]), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip
FIELDS = {
    "chips": [*CHIP, "idle_w", "size", "source", "other", 3],
    "links": [*LINK, "latency_us_per_mm", "pj_per_bit", "source", "other", 3],
}


@st.composite
def nearly(draw: st.DrawFn) -> Any:
    """A library in which a few fields or parts hold anything."""
    result: Any = copy.deepcopy(content())
    for _ in range(draw(st.integers(0, 3))):
        kind, index = draw(st.sampled_from(["chips", "links"])), draw(st.integers(0, 1))
        if (
            draw(st.booleans())
            and isinstance(result.get(kind), list)
            and isinstance(result[kind][index], dict)
        ):
            result[kind][index][draw(st.sampled_from(FIELDS[kind]))] = draw(ANYTHING)
        else:
            result[draw(st.sampled_from(["chips", "links", "other", 3]))] = draw(ANYTHING)
            break
    return result


@given(st.one_of(nearly(), ANYTHING))
@budget(max_examples=75, deadline=None)
def test_any_content_is_read_or_refused(result: Any) -> None:
    try:
        library = parse_library(result)
    except FileFormatError as error:
        assert str(error)
    else:
        usable(library)


@given(
    nearly(),
    st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from("[]{}:,-#&*!|>'\"%@` \n\té0e.")), max_size=3),
)
@budget(max_examples=50, deadline=None)
def test_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, result: Any, damage: list[tuple[int, str]]
) -> None:
    import yaml

    text = yaml.safe_dump(result, sort_keys=False, allow_unicode=True)
    for index, character in damage:
        position = index % (len(text) + 1)
        text = text[:position] + character + text[position + 1 :]
    file = tmp_path_factory.getbasetemp() / "damaged.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        library = read_library(file)
    except InputError as error:
        assert "damaged.yaml" in str(error)
    else:
        usable(library)


def test_error_names_the_entry() -> None:
    content = read_library().model_dump(mode="json")
    content["chips"][2]["tdp_w"] = -1.0
    with pytest.raises(FileFormatError, match=r"chips\.2\.tdp_w"):
        parse_library(content)
    content = read_library().model_dump(mode="json")
    del content["links"][1]["bandwidth"]
    with pytest.raises(FileFormatError, match=r"links\.1\.bandwidth"):
        parse_library(content)
    content["links"][1] = 3
    with pytest.raises(FileFormatError, match=r"links\.1"):
        parse_library(content)
