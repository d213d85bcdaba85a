"""The cache: it holds what decoding gives, survives its builder, and says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparseflow.core.journal import JsonLinesWriter
from sparseflow.errors import FileFormatError, InputError, RunError
from sparseflow.pruning.data.cache import INDEX, VideoCache, build_cache
from sparseflow.pruning.data.video import decode
from tests.pruning.data.tree import Tree, numbers_of, write_video


@pytest.fixture
def videos(tree: Tree) -> list[tuple[str, Path]]:
    return [(name, tree.videos / f"{name}.avi") for name in list(tree.frames)[:4]]


@pytest.mark.parametrize(("size", "workers"), [(None, 1), (25, 1), (96, 2)])
def test_a_cache_holds_what_decoding_gives(
    tmp_path: Path, videos: list[tuple[str, Path]], size: int | None, workers: int
) -> None:
    seen: list[tuple[int, int]] = []
    built = build_cache(videos, tmp_path, size=size, workers=workers, progress=lambda *at: seen.append(at))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    opened = VideoCache.open(tmp_path)
    assert opened.size == size and opened.videos == built.videos and not opened.skipped
    for name, path in videos:
        expected = decode(path, size=size)
        assert opened[name].frames == len(expected)
        np.testing.assert_array_equal(opened[name].read(range(len(expected))), expected)
        last = len(expected) - 1
        np.testing.assert_array_equal(opened[name].read([last, 0, 0]), expected[[last, 0, 0]])
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_is_plain_npy(tmp_path: Path, videos: list[tuple[str, Path]], tree: Tree) -> None:
    build_cache(videos[:1], tmp_path, size=None)
    name = videos[0][0]
    assert numbers_of(np.load(tmp_path / f"{name}.npy")) == list(range(tree.frames[name]))


def test_a_build_that_was_killed_goes_on(tmp_path: Path, own_tree: Tree) -> None:
    names = list(own_tree.frames)[:4]
    sources = [(name, own_tree.videos / f"{name}.avi") for name in names]
    folder = tmp_path / "cache"
    whole = build_cache(sources, folder, size=24)
    # As if killed: the line of the second video torn, that of the third not begun, the fourth half written.
    lines = (folder / INDEX).read_text().splitlines(keepends=True)
    (folder / INDEX).write_text("".join(lines[:2]) + lines[2][:9])
    fourth = folder / f"{names[3]}.npy"
    fourth.rename(fourth.with_name(f".{fourth.name}.tmp"))
    for _, path in sources[:3]:
        path.unlink()
    seen: list[tuple[int, int]] = []
    again = build_cache(sources, folder, size=24, progress=lambda *at: seen.append(at))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert again.videos == whole.videos
    assert not list(folder.rglob("*.tmp"))
    sources[3][1].unlink()
    assert build_cache(sources, folder, size=24).videos == whole.videos


def test_a_file_that_vanished_or_was_cut_is_made_again(
    tmp_path: Path, videos: list[tuple[str, Path]]
) -> None:
    cache = build_cache(videos, tmp_path, size=None)
    expected = [cache[name].read([0]) for name, _ in videos]
    first, second = (cache[name].path for name, _ in videos[:2])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    for name, _ in videos[:2]:
        with pytest.raises(FileFormatError, match="is missing or damaged"):
            cache[name].read([0])
    cache = build_cache(videos, tmp_path, size=None)
    np.testing.assert_array_equal([cache[name].read([0]) for name, _ in videos], expected)


def test_a_video_that_does_not_decode_is_raised_or_left_out(
    tmp_path: Path, videos: list[tuple[str, Path]]
) -> None:
    bad = tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    folder = tmp_path / "cache"
    some = [videos[0], ("A/bad", bad), ("A/absent", tmp_path / "absent.avi"), videos[1]]
    with pytest.raises(FileFormatError, match=r"bad\.avi does not decode"):
        build_cache(some, folder, size=None)
    cache = build_cache(some, folder, size=None, on_error="skip")
    assert set(cache.videos) == {videos[0][0], videos[1][0]}
    assert "does not decode" in cache.skipped["A/bad"] and "there is no video" in cache.skipped["A/absent"]
    with pytest.raises(InputError, match=r"does not hold the video A/bad: .*does not decode"):
        cache["A/bad"]
    with pytest.raises(InputError, match="never asked for"):
        cache["A/other"]
    write_video(bad, 3)
    mended = build_cache(some, folder, size=None, on_error="skip")
    assert mended["A/bad"].frames == 3 and set(mended.skipped) == {"A/absent"}


def test_a_cache_keeps_its_size(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    build_cache(videos[:1], tmp_path, size=24)
    with pytest.raises(InputError, match="holds frames of size 24 and 32 was asked for"):
        build_cache(videos, tmp_path, size=32)
    assert len(build_cache(videos[1:2], tmp_path, size=24).videos) == 2


@pytest.mark.usefixtures("refused_at_once")
def test_two_builds_do_not_mix(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    other = JsonLinesWriter(tmp_path / INDEX)
    with pytest.raises(RunError, match="another process"):
        build_cache(videos, tmp_path, size=24)
    other.close()


@pytest.mark.parametrize("name", ["", ".", "/v", "../v", "a/../../v", "a/"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="must be a path below the cache"):
        build_cache([(name, tmp_path / "video.avi")], tmp_path, size=None)


def test_wrong_arguments_are_refused(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    with pytest.raises(InputError, match="`size`"):
        build_cache(videos, tmp_path, size=0)
    with pytest.raises(InputError, match="`on_error`"):
        build_cache(videos, tmp_path, size=None, on_error="ignore")
    with pytest.raises(InputError, match="named twice"):
        build_cache([*videos, videos[0]], tmp_path, size=None)
    with pytest.raises(InputError, match="holds no cache of videos"):
        VideoCache.open(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"format": "other"}], "is not of a cache of videos"),
        ([{"format": "sparseflow.frames", "version": 2, "size": 9}], "another version"),
        ([{"format": "sparseflow.frames", "version": 1}], "lacks something"),
        ([{"format": "sparseflow.frames", "version": 1, "size": None}, {"name": "a"}], "lacks something"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, lines: list[dict[str, object]], message: str) -> None:
    (tmp_path / INDEX).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FileFormatError, match=message):
        VideoCache.open(tmp_path)
