"""Frames that are counted once: the file remembers, and notices what was replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data import frame_counts
from sparseflow.pruning.data.frame_counts import count_frames
from tests.pruning.data.tree import Tree, write_frames, write_video


def paths_of(tree: Tree) -> list[tuple[str, Path]]:
    return [(name, tree.videos / f"{name}.avi") for name in tree.frames]


def test_every_video_is_counted_by_any_number_of_workers(tree: Tree) -> None:
    assert count_frames(paths_of(tree)).frames == tree.frames
    some = paths_of(tree)[:4]
    assert count_frames(some, workers=2).frames == {name: tree.frames[name] for name, _ in some}


def test_what_the_file_knows_is_not_counted_again(tmp_path: Path) -> None:
    videos = [(str(frames), write_video(tmp_path / f"{frames}.avi", frames)) for frames in (3, 6)]
    seen: list[tuple[int, int]] = []

    def count(some: list[tuple[str, Path]]) -> dict[str, int]:
        seen.clear()
        file = tmp_path / "kept" / "counts.json"
        return count_frames(some, file=file, progress=lambda *at: seen.append(at)).frames

    assert (count(videos[:1]), seen) == ({"3": 3}, [(1, 1)])
    assert (count(videos), seen) == ({"3": 3, "6": 6}, [(1, 1)])
    assert (count(videos[1:]), seen) == ({"6": 6}, [])
    write_video(videos[0][1], 9)
    assert (count(videos), seen) == ({"3": 9, "6": 6}, [(1, 1)])


def test_what_was_counted_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = write_video(tmp_path / "good.avi", 3), tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    for every in (1, 200):
        monkeypatch.setattr(frame_counts, "_SAVE_EVERY", every)
        file = tmp_path / f"counts{every}.json"
        with pytest.raises(FileFormatError, match=r"bad\.avi"):
            count_frames([("good", good), ("bad", bad)], file=file)
        assert '"good":[3,' in file.read_text()


def test_a_video_that_does_not_decode_can_be_left_out(tmp_path: Path) -> None:
    good, bad = write_frames(tmp_path / "good", 3), tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    file = tmp_path / "counts.json"
    for _ in range(2):
        found = count_frames([("good", good), ("bad", bad)], file=file, on_error="skip")
        assert found.frames == {"good": 3}
        assert list(found.skipped) == ["bad"] and "bad.avi does not decode" in found.skipped["bad"]


def test_a_missing_video_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no video at"):
        count_frames([("absent", tmp_path / "absent.avi")])


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format":"other","version":1,"frames":{}}', '{"frames":{"a":[0,1]}}']
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "counts.json"
    file.write_text(content)
    with pytest.raises(FileFormatError, match=r"counts\.json does not hold counts of frames"):
        count_frames([], file=file)


def test_a_wrong_way_with_errors_is_refused() -> None:
    with pytest.raises(InputError, match="'raise' or 'skip'"):
        count_frames([], on_error="ignore")
