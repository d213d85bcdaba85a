"""A folder for each class, with video files or directories of frames."""

from __future__ import annotations

import os
from pathlib import Path

from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.decoding.image_directory import IMAGE_CODECS
from sparseflow.pruning.data.lists.lines import LabeledVideo
from sparseflow.pruning.data.video import VIDEO_SUFFIXES, is_video_name


def read_class_folders(root: Path) -> list[LabeledVideo]:
    """List the videos in the folders of `root`, which are named after their classes.

    Hidden files and files of other types are ignored; folders within a class are searched, too.

    Raises:
        FileFormatError: There is no folder, or a folder has no videos.
    """
    videos = []
    for folder in _list_folders(root):
        paths = _list_videos(folder)
        if not paths:
            raise FileFormatError(
                f"{folder} has no videos; expected files such as {', '.join(VIDEO_SUFFIXES[:4])}, or "
                "directories of frames"
            )
        videos += [LabeledVideo(path=path, label=folder.name, location=str(path)) for path in paths]
    return videos


def _list_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _list_videos(folder: Path) -> list[Path]:
    videos = []
    for name, folders, files in os.walk(folder, followlinks=True):
        directory, visible = Path(name), [file for file in files if not file.startswith(".")]
        videos += [directory / file for file in visible if is_video_name(file)]
        if directory != folder and any(Path(file).suffix.lower() in IMAGE_CODECS for file in visible):
            videos.append(directory)
        folders[:] = [child for child in folders if not child.startswith(".")]
    return sorted(videos)
