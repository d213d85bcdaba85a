"""Video cache: content, resume and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparseflow.core import files
from sparseflow.core.journal import Journal
from sparseflow.errors import FileFormatError, InputError, RunError
from sparseflow.pruning.data import cache
from sparseflow.pruning.data.cache import INDEX_FILE, VideoCache, VideoCacheHeader, build_cache
from tests.conformance import check_journal_file
from tests.pruning.data.tree import Tree, decode, numbers_of, write_video


@pytest.fixture
def videos(tree: Tree) -> list[tuple[str, Path]]:
    return [(name, tree.videos / f"{name}.avi") for name in list(tree.frames)[:4]]


@pytest.mark.parametrize(("size", "workers"), [(None, 1), (25, 1), (96, 2)])
def test_cache_equals_decoded_videos(
    tmp_path: Path, videos: list[tuple[str, Path]], size: int | None, workers: int
) -> None:
    updates: list[float] = []
    built = build_cache(
        videos, tmp_path, size=size, workers=workers, progress=lambda _, fraction: updates.append(fraction)
    )
    assert updates == [0.25, 0.5, 0.75, 1.0]
    opened = VideoCache.open(tmp_path)
    assert opened.size == size and opened.videos == built.videos and not opened.skipped
    for name, path in videos:
        expected = decode(path, size=size)
        assert opened[name].frames == len(expected)
        np.testing.assert_array_equal(opened[name].read(range(len(expected))), expected)
        last = len(expected) - 1
        np.testing.assert_array_equal(opened[name].read([last, 0, 0]), expected[[last, 0, 0]])
    assert not list(tmp_path.rglob("*.tmp"))


def test_cached_file_is_npy(tmp_path: Path, videos: list[tuple[str, Path]], tree: Tree) -> None:
    build_cache(videos[:1], tmp_path, size=None)
    name = videos[0][0]
    assert numbers_of(np.load(tmp_path / f"{name}.npy")) == list(range(tree.frames[name]))


def test_killed_build_resumes(tmp_path: Path, own_tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(own_tree.frames)[:4]
    sources = [(name, own_tree.videos / f"{name}.avi") for name in names]
    folder = tmp_path / "cache"
    complete = build_cache(sources, folder, size=24)
    # State after a kill: the second row is torn, the third is missing, the fourth video is half written.
    lines = (folder / INDEX_FILE).read_text().splitlines(keepends=True)
    (folder / INDEX_FILE).write_text("".join(lines[:2]) + lines[2][:9])
    fourth = folder / f"{names[3]}.npy"
    abandoned = fourth.rename(fourth.with_name(f"{files._TEMPORARY_PREFIX}0"))
    monkeypatch.setattr(files, "_cleaned_directories", set())  # as in a new process
    for _, path in sources[:3]:
        path.unlink()
    updates: list[float] = []
    resumed = build_cache(sources, folder, size=24, progress=lambda _, fraction: updates.append(fraction))
    assert updates == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert resumed.videos == complete.videos
    assert not abandoned.exists() and not list(folder.rglob("*tmp*"))
    sources[3][1].unlink()
    assert build_cache(sources, folder, size=24).videos == complete.videos


def test_missing_or_truncated_file_is_rebuilt(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    cache = build_cache(videos, tmp_path, size=None)
    expected = [cache[name].read([0]) for name, _ in videos]
    first, second = (cache[name].path for name, _ in videos[:2])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    for name, _ in videos[:2]:
        with pytest.raises(FileFormatError, match=r"\.npy"):
            cache[name].read([0])
    cache = build_cache(videos, tmp_path, size=None)
    np.testing.assert_array_equal([cache[name].read([0]) for name, _ in videos], expected)


def test_undecodable_video_raises_or_is_skipped(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    bad = tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    folder = tmp_path / "cache"
    sources = [videos[0], ("A/bad", bad), ("A/absent", tmp_path / "absent.avi"), videos[1]]
    with pytest.raises(FileFormatError, match=r"bad\.avi"):
        build_cache(sources, folder, size=None)
    cache = build_cache(sources, folder, size=None, on_error="skip")
    assert set(cache.videos) == {videos[0][0], videos[1][0]}
    assert "does not decode" in cache.skipped["A/bad"] and "absent.avi" in cache.skipped["A/absent"]
    with pytest.raises(InputError, match=r"A/bad: .*does not decode"):
        cache["A/bad"]
    with pytest.raises(InputError, match="A/other"):
        cache["A/other"]
    write_video(bad, 3)
    repaired = build_cache(sources, folder, size=None, on_error="skip")
    assert repaired["A/bad"].frames == 3 and set(repaired.skipped) == {"A/absent"}


def test_cache_of_another_size_raises(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    build_cache(videos[:1], tmp_path, size=24)
    with pytest.raises(InputError, match=r"size.*32"):
        build_cache(videos, tmp_path, size=32)
    assert len(build_cache(videos[1:2], tmp_path, size=24).videos) == 2


@pytest.mark.usefixtures("refused_at_once")
def test_concurrent_build_raises(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    other = Journal(tmp_path / INDEX_FILE, dict)
    with pytest.raises(RunError, match=str(tmp_path)):
        build_cache(videos, tmp_path, size=24)
    other.close()


@pytest.mark.parametrize("name", ["", ".", "/v", "../v", "a/../../v", "a/"])
def test_unsafe_names_raise(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=repr(name)):
        build_cache([(name, tmp_path / "video.avi")], tmp_path, size=None)


def test_invalid_arguments_raise(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    with pytest.raises(InputError, match="`size`"):
        build_cache(videos, tmp_path, size=0)
    with pytest.raises(InputError, match="`on_error`"):
        build_cache(videos, tmp_path, size=None, on_error="ignore")
    with pytest.raises(InputError, match=videos[0][0]):
        build_cache([*videos, videos[0]], tmp_path, size=None)
    with pytest.raises(InputError, match=INDEX_FILE):
        VideoCache.open(tmp_path)


@pytest.mark.usefixtures("refused_at_once")
def test_index_conforms_to_journals(tmp_path: Path, videos: list[tuple[str, Path]]) -> None:
    build_cache(videos[:2], tmp_path, size=None)

    def open_rows() -> list[object]:
        with Journal(tmp_path / INDEX_FILE, cache._ROW_TYPE, header=VideoCacheHeader(size=None)) as journal:
            return list(journal.rows)

    check_journal_file(open_rows, tmp_path / INDEX_FILE)
