"""A profile that is open for more visits."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from sparseflow.adaptive.profile.about import About
from sparseflow.adaptive.profile.saved import Profile, journal
from sparseflow.adaptive.profile.visits import Visit
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import JsonLinesWriter
from sparseflow.errors import InputError, RunError


class Appending:
    """A profile's file, open for more. Use it as a context manager.

    Opening it takes up what an earlier writer left. Its folder is locked meanwhile: one writer at a time.
    Only when it is left without an error does the journal become Parquet.

    Args:
        path: The Parquet file. Its folder must exist.
        about: What is going to be measured.
        device: Where, as torch names it.
        seed: What randomness is drawn from, for the record.

    Raises:
        InputError: The file is of something else.
        FileFormatError: It holds no profile.
        RunError: Another process writes into its folder.
    """

    def __init__(self, path: Path, about: About, device: str, seed: int) -> None:
        self._path, self._device, self._seed = path, device, seed
        self._lines = JsonLinesWriter(journal(path))
        self._begun = False
        try:
            if path.exists() or journal(path).stat().st_size:
                self.held = Profile.read(path)
                _check_same(path, self.held.about, about)
            else:
                self._lines.write({"about": about.to_dict()})
                self.held = Profile(about=about)
        except BaseException:
            self._lines.close()
            raise
        self.session = len(self.held.environments)

    def add(self, visit: Visit) -> None:
        """Append a visit of this session; it survives the death of this process.

        Raises:
            RunError: The disk takes no more.
        """
        if not self._begun:
            here = collect_environment(self._device, seed=self._seed)
            self._lines.write({"environment": here, "session": self.session})
            self._begun = True
        self._lines.write({"visit": visit.to_dict()})

    def __enter__(self) -> Appending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._lines.sync()
                self._write()
                # Last, so that the visits are always in one of the two files.
                journal(self._path).unlink()
        finally:
            self._lines.close()

    def _write(self) -> None:
        try:
            Profile.read(self._path).write(self._path)
        except OSError as error:
            raise RunError(
                f"{self._path} could not be written: {error.strerror}; what was measured is in "
                f"{journal(self._path).name}: free some space and give the same command again"
            ) from error


def _check_same(path: Path, held: About, asked: About) -> None:
    there, here = (json.loads(json.dumps(about.to_dict())) for about in (held, asked))
    for name in here:
        if here[name] != there[name]:
            raise InputError(
                f"{path} has another `{name}`: {_short(there[name])}, and yours is {_short(here[name])}; "
                "name another file"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
