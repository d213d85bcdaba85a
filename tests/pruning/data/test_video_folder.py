"""Layouts of labeled videos, how they are recognized, and errors of damaged lists."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.clips import VideoClips
from sparseflow.pruning.data.splits import DatasetSplit, VideoEntry
from sparseflow.pruning.data.video_folder import read_video_folder
from tests.pruning.data.tree import write_frames, write_video


def make_files(root: Path, *names: str) -> Path:
    """Create files; those with a suffix that is not a video's need content from the test."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"video")
    return root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def labels_of(entries: tuple[VideoEntry, ...]) -> dict[str, int]:
    return {entry.video: entry.label for entry in entries}


def read(train: Path, test: Path | None = None, **options: Any) -> DatasetSplit:
    return read_video_folder(train, test, **options)[0]


def test_class_folders_with_subsets(tmp_path: Path) -> None:
    make_files(tmp_path, "train/run/a.AVI", "train/run/deep/b.m4v", "train/jump high/c.mp4", "val/run/d.MPG")
    make_files(tmp_path, "train/.hidden/e.mp4", "train/run/._a.mp4", "train/run/notes.txt", "readme.md")
    split, root = read_video_folder(tmp_path)
    assert (split.classes, root) == (("jump high", "run"), tmp_path)
    assert labels_of(split.train) == {
        "train/jump high/c.mp4": 0, "train/run/a.AVI": 1, "train/run/deep/b.m4v": 1
    }  # fmt: skip
    assert labels_of(split.test) == {"val/run/d.MPG": 1}
    assert read(tmp_path / "train", tmp_path / "val") == split


def test_class_folders_are_split_by_class(tmp_path: Path) -> None:
    make_files(tmp_path, *(f"{label}/{number}.mp4" for label in "abc" for number in range(10)), "d/0.mp4")
    split = read(tmp_path)
    assert (len(split.train), len(split.test)) == (25, 6)
    assert [sum(entry.label == label for entry in split.test) for label in range(4)] == [2, 2, 2, 0]
    assert not {entry.video for entry in split.train} & {entry.video for entry in split.test}
    assert read(tmp_path) == split != read(tmp_path, split_seed=1)
    assert len(read(tmp_path, test_fraction=0.5).test) == 15


def test_directories_of_frames_are_videos(tmp_path: Path) -> None:
    for name in ("a/one", "a/two", "b/one", "b/two"):
        write_frames(tmp_path / name, 2, suffix=".jpg")
    assert {entry.video for entry in (*read(tmp_path).train, *read(tmp_path).test)} == {
        "a/one", "a/two", "b/one", "b/two"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("train", "classes"),
    [
        ("a b/x.mp4 0\ny.mp4 2\n", ("0", "1", "2")),
        ("\ufeffa b\\x.mp4 0\r\ny.mp4 2\r\n", ("0", "1", "2")),
        ("a b/x.mp4,0\ny.mp4,2\n", ("0", "1", "2")),
        ('path,label\n"a b/x.mp4",jump, high\n'.replace("jump, high", '"jump, high"') + "y.mp4,run", ()),
        ("a b/x.mp4 jump high\ny.mp4 run\n", ("jump high", "run")),
        ("a b/x.mp4\tjump\ny.mp4\trun\n", ("jump", "run")),
    ],
)
def test_lists_of_paths(tmp_path: Path, train: str, classes: tuple[str, ...]) -> None:
    path = write(tmp_path / "kinetics_train_list_videos.txt", train)
    label = train.split()[-1].rpartition(",")[2]
    write(tmp_path / "kinetics_val_list_videos.txt", f"z.mp4 {label}\n")
    split, root = read_video_folder(tmp_path)
    assert [entry.video for entry in split.train] == ["a b/x.mp4", "y.mp4"]
    assert split.classes == (classes or ("jump, high", "run"))
    assert (split.test[0].label, root) == (len(split.classes) - 1, tmp_path)
    videos = tmp_path / "videos"
    assert read_video_folder(path, videos_dir=videos, test=path.with_name("kinetics_val_list_videos.txt"))[
        1
    ] == (videos)


def test_lists_of_frame_directories(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", "frames/one 120 0\nframes/two 30 1\n")
    split = read(path, write(tmp_path / "val.txt", "frames/three 0\n"))
    assert labels_of(split.train) == {"frames/one": 0, "frames/two": 1}
    assert labels_of(split.test) == {"frames/three": 0}


@pytest.mark.parametrize(
    "classes",
    ["run\njump high\n", "0 run\n1 jump high\n", "1,run\n2,jump high\n", "id,name\n0,run\n1,jump high"],
)
def test_class_names_come_from_a_file(tmp_path: Path, classes: str) -> None:
    first = classes.strip().splitlines()[0].startswith("1")
    path = write(tmp_path / "list.csv", f"a.mp4 {1 + first}\nb.mp4 {0 + first}\nc.mp4 run\nd.mp4 jump high\n")
    names = write(tmp_path / "names.txt", classes)
    split = read(path, classes_path=names)
    assert split.classes == ("run", "jump high")
    assert labels_of((*split.train, *split.test)) == {"a.mp4": 1, "b.mp4": 0, "c.mp4": 0, "d.mp4": 1}


def test_official_list_of_kinetics(tmp_path: Path) -> None:
    header = "label,youtube_id,time_start,time_end,split\n"
    train = write(tmp_path / "train.csv", f"{header}jump high,-a_B,5,15,train\nrun,cccc,100,110,train\n")
    test = write(tmp_path / "validate.csv", f"{header}run,dddd,0,10,validate\n")
    make_files(tmp_path, "train/-a_B_000005_000015.mp4", "val/run/dddd_000000_000010.mkv")
    split = read(tmp_path / "train.csv", test)
    assert split.classes == ("jump high", "run")
    assert [entry.video for entry in split.train] == [
        "train/-a_B_000005_000015.mp4", "run/cccc_000100_000110"
    ]  # fmt: skip
    both = write(tmp_path / "all.csv", train.read_text() + test.read_text().removeprefix(header))
    split = read(both, videos_dir=tmp_path / "val")
    assert labels_of(split.test) == {"run/dddd_000000_000010.mkv": 1}
    unlabeled = write(tmp_path / "test.csv", "youtube_id,time_start,time_end,split\nx,1,2,test\n")
    with pytest.raises(FileFormatError, match=r"test\.csv, line 2: .*label"):
        read(both, unlabeled)


def test_lists_of_something_something(tmp_path: Path) -> None:
    videos = [{"id": str(number), "template": f"{verb} [something]"} for number, verb in enumerate("xyxy")]
    lists = tmp_path / "lists"
    labels = {"y something": "0", "x something": "1"}
    write(lists / "something-something-v2-labels.json", json.dumps(labels))
    train = write(lists / "something-something-v2-train.json", json.dumps(videos[:2]))
    write(lists / "something-something-v2-validation.json", json.dumps(videos[2:]))
    test = write(lists / "something-something-v2-test.json", json.dumps([{"id": "9"}]))
    split, root = read_video_folder(lists, videos_dir=tmp_path)
    assert (split.classes, root) == (tuple(labels), tmp_path)
    assert (labels_of(split.train), labels_of(split.test)) == ({"0": 1, "1": 0}, {"2": 1, "3": 0})
    with pytest.raises(FileFormatError, match=r"v2-test\.json: expected .*template"):
        read(train, test)


def test_split_files_of_hmdb51(tmp_path: Path) -> None:
    for label in ("brush_hair", "run"):
        write(
            tmp_path / f"{label}_test_split1.txt", f"{label}_1.avi 1 \n{label}_2.avi 2 \n{label}_3.avi 0 \n"
        )
        write(tmp_path / f"{label}_test_split2.txt", f"{label}_3.avi 1\n{label}_1.avi 2\n")
    split = read(tmp_path, videos_dir=tmp_path / "videos")
    assert split.classes == ("brush_hair", "run")
    assert labels_of(split.train) == {"brush_hair/brush_hair_1.avi": 0, "run/run_1.avi": 1}
    assert labels_of(split.test) == {"brush_hair/brush_hair_2.avi": 0, "run/run_2.avi": 1}
    split = read(tmp_path, videos_dir=tmp_path / "videos", split=2)
    assert labels_of(split.test) == {"brush_hair/brush_hair_1.avi": 0, "run/run_1.avi": 1}


def test_tar_files_of_webdataset(tmp_path: Path) -> None:
    samples = {"a.mp4": b"video", "a.cls": b"1\n", "b.MKV": b"video", "b.json": b'{"label": 0, "x": 2}'}
    write_tar(tmp_path / "clips-train-000.tar", samples)
    write_tar(tmp_path / "clips-train-001.tar", {"./d/c.avi": b"video", "d/c.txt": b"1"})
    write_tar(tmp_path / "clips-val-000.tar", {"e.x.mp4": b"video", "e.cls": b"0"})
    split, root = read_video_folder(tmp_path)
    assert (split.classes, root) == (("0", "1"), tmp_path)
    assert labels_of(split.train) == {
        "clips-train-000.tar/a.mp4": 1, "clips-train-000.tar/b.MKV": 0, "clips-train-001.tar/d/c.avi": 1
    }  # fmt: skip
    assert labels_of(split.test) == {"clips-val-000.tar/e.x.mp4": 0}
    assert len(read(tmp_path / "clips-train-000.tar", tmp_path / "clips-val-000.tar").train) == 2
    for content in ({}, {"f.cls": b""}, {"f.json": b"[1]"}, {"f.json": b"{"}):
        path = write_tar(tmp_path / "bad" / "shard.tar", {"f.mp4": b"video", **content})
        with pytest.raises(FileFormatError, match=r"shard\.tar.* label"):
            read(path)


def test_clips_of_folders_and_tar_files_are_equal(tmp_path: Path) -> None:
    files = {}
    for label in "ab":
        for number in range(2):
            path = write_video(tmp_path / "folders" / label / f"{number}.mp4", 20, tint=number)
            files |= {f"{label}{number}.mp4": path.read_bytes(), f"{label}{number}.cls": label.encode()}
    write_tar(tmp_path / "shards" / "all.tar", files)
    items = []
    for source in (tmp_path / "folders", tmp_path / "shards"):
        split, root = read_video_folder(source, test_fraction=0.5)
        clips = VideoClips(
            split=split, train=False, videos_dir=root, size=32, counts_path=source / "counts.json"
        )
        items.append([clips[index] for index in range(len(clips))])
        assert {item["label"] for item in items[-1]} == {0, 1}
    assert len(items[0]) == len(items[1])
    assert all((folder["clip"] == shard["clip"]).all() for folder, shard in zip(*items, strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no videos"),
        ("path,label\n", "has no videos"),
        ("a.mp4\n", "line 1: expected a path and one label"),
        ("a.mp4 0\nb.mp4 0 1 2\n", "line 2: expected a path and one label"),
        ("a.mp4,0,1\n", "line 1: expected a path and one label"),
        ("a.mp4 0\nb.mp4 0\na.mp4 1\n", r"duplicate video a\.mp4"),
        ("label,youtube_id\nrun,x\n", "line 2: expected label, youtube_id, time_start"),
    ],
)
def test_damaged_lists_raise(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read(write(tmp_path / "list.csv", text))


def test_unknown_classes_raise(tmp_path: Path) -> None:
    train = write(tmp_path / "train.csv", "a.mp4 run\nb.mp4 jump\n")
    with pytest.raises(FileFormatError, match=r"test\.csv, line 1: unknown class 'swim'.* jump, run"):
        read(train, write(tmp_path / "test.csv", "c.mp4 swim\n"))
    with pytest.raises(FileFormatError, match=r"unknown class 'run'"):
        read(train, classes_path=write(tmp_path / "names.txt", "walk\njump\n"))
    with pytest.raises(FileFormatError, match=r"duplicate class 'walk'"):
        read(train, classes_path=write(tmp_path / "names.txt", "walk\nwalk\n"))


def test_unknown_layouts_raise(tmp_path: Path) -> None:
    make_files(
        tmp_path, "flat/a.mp4", "flat/b.mp4", "empty_class/run/notes.txt", "video.mp4", "one/run/a.mp4"
    )
    write(tmp_path / "lists" / "train_1.txt", "a 0")
    write(tmp_path / "lists" / "train_2.txt", "a 0")
    write(tmp_path / "lists" / "val.txt", "a 0")
    for name, message in (
        ("absent", r"absent does not exist"),
        ("flat", r"flat contains a\.mp4, b\.mp4; expected folders"),
        ("empty_class", r"run has no videos"),
        ("video.mp4", r"video\.mp4 has no known suffix; expected folders"),
        ("lists", r"several parts: train_1\.txt, train_2\.txt"),
        ("one", r"every class has one video"),
    ):
        with pytest.raises(InputError, match=message):
            read(tmp_path / name)
    with pytest.raises(InputError, match="`test_fraction`"):
        read(tmp_path / "one", test_fraction=1.0)
    with pytest.raises(InputError, match="`split_seed`"):
        read(tmp_path / "one", split_seed=-1)
