"""One model and profile for all tests of studies."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.adaptive.study import small


@pytest.fixture(scope="session")
def study_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` and `profile.parquet`; not to be written into."""
    folder = tmp_path_factory.mktemp("made")
    small.write_model_and_profile(folder)
    return folder
