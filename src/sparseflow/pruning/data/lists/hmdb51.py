"""Split files of HMDB51: one for each class and split, with 1 for training, 2 for the test, 0 for neither.

::

    brush_hair_test_split1.txt    `April_09_brush_hair_u_nm_np1_ba_goo_0.avi 1`
"""

from __future__ import annotations

from pathlib import Path

from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.lists.lines import LabeledVideo, Subset, read_lines

_SUBSETS: dict[str, Subset | None] = {"0": None, "1": "train", "2": "test"}


def list_split_files(lists_dir: Path, split: int) -> dict[str, Path]:
    """List the files of a split, class -> file."""
    suffix = f"_test_split{split}.txt"
    return {path.name.removesuffix(suffix): path for path in sorted(lists_dir.glob(f"*{suffix}"))}


def read_split_files(lists_dir: Path, split: int, videos_dir: Path) -> list[LabeledVideo]:
    """Read the training and test videos of a split.

    Raises:
        FileFormatError: A line is malformed.
    """
    videos = []
    for label, path in list_split_files(lists_dir, split).items():
        for location, line in read_lines(path):
            name, _, number = line.rpartition(" ")
            if not name or number not in _SUBSETS:
                raise FileFormatError(f"{location}: expected a video and 0, 1 or 2, got {line!r:.100}")
            subset = _SUBSETS[number]
            if subset is not None:
                video = videos_dir / label / name.strip()
                videos.append(LabeledVideo(path=video, label=label, location=location, subset=subset))
    return videos
