"""Runs of placeholders in prompts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from sparseflow.adaptive.adapters import placeholders
from sparseflow.adaptive.adapters.placeholders import PlaceholderSpans, find_spans


def test_runs_are_found_once_and_anew_when_a_prompt_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, looked = PlaceholderSpans(), []
    monkeypatch.setattr(placeholders, "find_spans", lambda *args: looked.append(1) or find_spans(*args))
    prompt_ids = torch.tensor([[1, 7, 7, 2, 7], [7, 7, 7, 1, 1]])
    other = prompt_ids[:1].clone()
    expected = [(0, 1, 2), (0, 4, 1), (1, 0, 3)]
    for _ in range(3):
        assert runs.find(prompt_ids, 7) == expected
        assert runs.find(other, 7) == expected[:2]
    assert len(looked) == 2
    runs.find(prompt_ids, 7).clear()
    assert runs.find(prompt_ids, 7) == expected, "what is given is the caller's"
    assert runs.find(prompt_ids, 1) == [(0, 0, 1), (1, 3, 2)]
    prompt_ids[0, 0] = 7
    assert runs.find(prompt_ids, 7)[0] == (0, 0, 3)
    with torch.inference_mode():
        unseen = torch.tensor([[7, 1]])
        assert runs.find(unseen, 7) == [(0, 0, 1)]
        unseen[0, 0] = 1
        assert runs.find(unseen, 7) == []
