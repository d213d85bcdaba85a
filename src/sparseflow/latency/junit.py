"""JUnit report of a check, the format of test results that CI systems display."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from sparseflow.core.files import write_atomic
from sparseflow.latency.check import ERROR, FAILED, CheckResult, ModelCheck

_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 excludes."""


def write_junit(result: CheckResult, path: Path | str) -> Path:
    """Write a report with one test case for each model; its time is the predicted mean latency.

    Raises:
        OutputError: The file cannot be written.
    """
    counts = result.counts
    suites = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        name="sparseflow latency check",
        tests=str(len(result.models)),
        failures=str(counts[FAILED]),
        errors=str(counts[ERROR]),
    )
    for model in result.models:
        _add_case(suite, model)
    ElementTree.indent(suites)
    file = Path(path)
    write_atomic(file, ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")
    return file


def _add_case(suite: ElementTree.Element, model: ModelCheck) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="latency", name=_clean(model.name))
    if model.prediction is not None:
        case.set("time", f"{model.prediction.mean_ms / 1e3:.9f}")
    for problem in model.problems:
        tag = "error" if model.status == ERROR else "failure"
        ElementTree.SubElement(case, tag, message=_clean(problem)).text = _clean(problem)


def _clean(text: str) -> str:
    return _INVALID.sub("\ufffd", text)
