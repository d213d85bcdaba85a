"""What to do after a command: the next command after a result, the page that helps after an error."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata
from itertools import pairwise

from sparseflow.errors import DeviceError, MissingExtraError

NEXT_COMMANDS = {
    "adaptive demo": "sparseflow adaptive serve MODEL --profile PROFILE",
    "adaptive grid-vqa": "sparseflow adaptive profile {out}/model --out profile.parquet",
    "adaptive importance": "sparseflow adaptive profile MODEL --importance {out} --out profile.parquet",
    "adaptive profile": "sparseflow adaptive train MODEL --profile {out} --out controllers",
    "adaptive train": "sparseflow adaptive serve MODEL --profile PROFILE --controller {out}",
    "codesign profile": "sparseflow codesign plan --config version_c --out plan",
    "codesign plan": "sparseflow codesign verify {out}",
    "codesign train": "sparseflow codesign verify {out}",
    "demo": "sparseflow spiking check MODULE:FACTORY --input FILE",
    "latency calibrate": "sparseflow latency predict MODEL.onnx",
    "latency collect": "sparseflow latency train {out} --out predictor.json",
    "latency export": "sparseflow latency extract {out} --out kernels",
    "latency extract": "sparseflow latency collect --config FILE --out measured",
    "latency quickstart": "sparseflow latency predict MODEL.onnx --predictor {out}/predictor.json",
    "latency train": "sparseflow latency evaluate MODEL.onnx --predictor {out}",
    "pruning compact": "sparseflow pruning profile {out}",
    "pruning train": "sparseflow pruning compact {out}/model --out compact",
    "spiking bench": "sparseflow spiking check MODULE:FACTORY --input FILE",
    "spiking optimize": "sparseflow spiking check MODULE:FACTORY --input FILE",
    "tuning collect": "sparseflow tuning train {out} --out net",
    "tuning import": "sparseflow tuning train {out} --out net",
    "tuning train": "sparseflow tune spmm A.mtx --net {out}",
}
"""The command that usually follows a command; `{out}` is its output."""

HELP_PAGES = {
    "adaptive": "how-to/serve-a-model",
    "codesign": "how-to/plan-a-partition",
    "demo": "how-to/optimize-a-spiking-network",
    "latency": "how-to/train-a-latency-predictor",
    "pruning": "how-to/prune-your-vit",
    "report": "how-to/share-results",
    "spiking": "how-to/optimize-a-spiking-network",
    "tune": "how-to/prepare-matrices",
    "tuning": "how-to/prepare-matrices",
}
"""The page of the site about the inputs of a wing's commands."""
INSTALL_PAGE = "install"
"""The page about extras and devices."""


def find_next_command(arguments: Sequence[str]) -> str | None:
    """Return the command that usually follows a finished one; None if there is none.

    Args:
        arguments: Arguments of the finished command.
    """
    template = next(
        (NEXT_COMMANDS[path] for path in (" ".join(arguments[:2]), arguments[0]) if path in NEXT_COMMANDS), ""
    )
    out = next((after for option, after in pairwise(arguments) if option == "--out"), "")
    if not template or ("{out}" in template and not out):
        return None
    return template.format(out=out)


def find_help_page(arguments: Sequence[str], error: BaseException) -> str | None:
    """Return the address of the page that helps with an error; None if no page does.

    Args:
        arguments: Arguments of the failed command.
        error: The error.
    """
    is_installation = isinstance(error, MissingExtraError | DeviceError)
    page = INSTALL_PAGE if is_installation else HELP_PAGES.get(arguments[0] if arguments else "")
    try:
        urls = dict(entry.split(", ", 1) for entry in metadata("sparseflow").get_all("Project-URL") or ())
    except PackageNotFoundError:
        return None
    site = urls.get("Documentation")
    return None if page is None or site is None else f"{site}{page}.html"
