"""Placeholders in prompts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import placeholders
from sparseflow.adaptive.adapters.placeholders import PlaceholderSpans, find_spans


def test_spans_are_cached_until_prompt_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, searches = PlaceholderSpans(), []
    monkeypatch.setattr(placeholders, "find_spans", lambda *args: searches.append(1) or find_spans(*args))
    prompt_ids = torch.tensor([[1, 7, 7, 2, 7], [7, 7, 7, 1, 1]])
    other = prompt_ids[:1].clone()
    expected = [(0, 1, 2), (0, 4, 1), (1, 0, 3)]
    for _ in range(3):
        assert spans.find(prompt_ids, 7) == expected
        assert spans.find(other, 7) == expected[:2]
    assert len(searches) == 2
    spans.find(prompt_ids, 7).clear()
    assert spans.find(prompt_ids, 7) == expected, "the result is a copy"
    assert spans.find(prompt_ids, 1) == [(0, 0, 1), (1, 3, 2)]
    prompt_ids[0, 0] = 7
    assert spans.find(prompt_ids, 7)[0] == (0, 0, 3)
    with torch.inference_mode():
        inference_ids = torch.tensor([[7, 1]])
        assert spans.find(inference_ids, 7) == [(0, 0, 1)]
        inference_ids[0, 0] = 1
        assert spans.find(inference_ids, 7) == []
