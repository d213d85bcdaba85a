"""Frame counts: saved once, and counted again for replaced videos."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data import frame_counts
from sparseflow.pruning.data.frame_counts import FrameCountsFile, count_frames
from tests.conformance import check_artifact_file
from tests.pruning.data.tree import Tree, write_frames, write_video


def test_count_frames_counts_all_videos(tree: Tree) -> None:
    videos = [(name, tree.videos / f"{name}.avi") for name in tree.frames]
    assert count_frames(videos).frames == tree.frames


def test_counted_videos_are_not_counted_again(tmp_path: Path) -> None:
    videos = [(str(frames), write_video(tmp_path / f"{frames}.avi", frames)) for frames in (3, 6)]
    updates: list[float] = []

    def count(selection: list[tuple[str, Path]]) -> dict[str, int]:
        updates.clear()
        file = tmp_path / "new" / "counts.json"
        return count_frames(
            selection, counts_path=file, progress=lambda _, fraction: updates.append(fraction)
        ).frames

    assert (count(videos[:1]), updates) == ({"3": 3}, [1.0])
    assert (count(videos), updates) == ({"3": 3, "6": 6}, [1.0])
    assert (count(videos[1:]), updates) == ({"6": 6}, [])
    write_video(videos[0][1], 9)
    assert (count(videos), updates) == ({"3": 9, "6": 6}, [1.0])


def test_counts_before_a_failure_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = write_video(tmp_path / "good.avi", 3), tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    for interval in (1, 200):
        monkeypatch.setattr(frame_counts, "_SAVE_INTERVAL", interval)
        file = tmp_path / f"counts{interval}.json"
        with pytest.raises(FileFormatError, match=r"bad\.avi"):
            count_frames([("good", good), ("bad", bad)], counts_path=file)
        assert '"good": [3,' in file.read_text()


def test_undecodable_video_is_skipped(tmp_path: Path) -> None:
    good, bad = write_frames(tmp_path / "good", 3), tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    file = tmp_path / "counts.json"
    for _ in range(2):
        counts = count_frames([("good", good), ("bad", bad)], counts_path=file, on_error="skip")
        assert counts.frames == {"good": 3}
        assert list(counts.skipped) == ["bad"] and "bad.avi does not decode" in counts.skipped["bad"]


def test_missing_video_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent"):
        count_frames([("absent", tmp_path / "absent.avi")])


def test_file_conforms_to_artifacts(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    count_frames([("good", write_frames(tmp_path / "good", 3))], counts_path=path)
    check_artifact_file(FrameCountsFile.load, path, FrameCountsFile.HINT)
