"""Build hook: stores the git revision in wheels and source distributions."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Adds `sparseflow/REVISION`; one that a source distribution contains is kept."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root) / "src" / "sparseflow"
        if (
            version == "editable"
            or (package / "REVISION").exists()
            or not (Path(self.root) / ".git").exists()
        ):
            return
        command = ["git", "-C", self.root, "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            return
        self._directory = tempfile.TemporaryDirectory()
        file = Path(self._directory.name) / "REVISION"
        file.write_text(process.stdout.strip() + "\n")
        target = "sparseflow" if self.target_name == "wheel" else "src/sparseflow"
        build_data["force_include"][str(file)] = f"{target}/REVISION"
