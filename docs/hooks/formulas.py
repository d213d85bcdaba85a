"""Formulas as MathML, which browsers show without a script."""

from __future__ import annotations

import html
import re
from typing import Any

import latex2mathml.converter

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **_: Any) -> str:
    """Convert the formulas that the extension `arithmatex` has marked."""

    def convert(match: re.Match[str]) -> str:
        display = "block" if match["tag"] == "div" else "inline"
        latex = html.unescape(match["latex"]).strip()
        formula = latex2mathml.converter.convert(latex, display=display)
        return f'<div class="formula" tabindex="0">{formula}</div>' if display == "block" else formula

    return _FORMULA.sub(convert, content)
