"""Questions as a task: every plan's answers in files, for texts and images, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.questions.file import read_questions
from sparseflow.adaptive.questions.file_task import QuestionTask
from sparseflow.adaptive.questions.runner import QuestionRunner, normalize_text
from sparseflow.adaptive.questions.task import SampleCounts, Split
from sparseflow.adaptive.study.outcome_tables import build_study_tables, collect_outcomes
from sparseflow.core.training.distributed import DistributedContext
from sparseflow.errors import InputError, ModelError
from tests.adaptive import tiny
from tests.adaptive.questions import folders

EXACT = torch.float64
ALONE = DistributedContext(rank=0, world_size=1, device=torch.device("cpu"))
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class Made:
    """A model, questions to it, and these as a task."""

    def __init__(self, folder: Path, family: str, count: int = 30) -> None:
        self.folder = folder
        self.there = folders.opened(folders.model_folder(folder / "model", family, dtype=EXACT), EXACT)
        self.lines = folders.lines(self.there, folder, count, images=self.there.sight is not None)
        for at, line in enumerate(self.lines):
            line["split"] = SPLITS[at % 3]
            if at % 4 == 3 and "images" in line:
                del line["images"]
        self.space = folders.space_of(self.there)
        self.asker = QuestionRunner(self.there)
        self.task = self.task_of(self.lines)

    def task_of(self, lines: list[dict[str, Any]]) -> QuestionTask:
        return QuestionTask(
            self.asker, read_questions(folders.write(self.folder / "some.jsonl", lines)), "some.jsonl"
        )


@pytest.fixture(scope="module", params=["olmoe", "llava_siglip"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = Made(tmp_path_factory.mktemp(request.param), request.param)
    yield found
    found.asker.close()


def test_every_plan_and_question(made: Made) -> None:
    told: list[float] = []
    judged = made.task.evaluate_plans(
        made.space, split="val", first=2, count=8, progress=lambda _, share: told.append(share)
    )
    assert told == sorted(told) and told[-1] == 1.0
    lines = [line for line in made.lines if line["split"] == "val"][2:]
    tiers, positions = made.space.tiers, made.space.geometry.positions
    assert judged.correct.shape == (8, len(made.space)) and 0.02 < judged.correct.mean() < 0.98
    assert judged.tokens.shape == (8, len(tiers), len(positions), tiny.WIDTH)
    assert made.task.kinds == ("even", "odd")
    for row, line in enumerate(lines):
        inputs = folders.inputs_of(made.there, line, made.folder)
        images = "images" in line
        assert made.task.kinds[judged.kinds[row]] == line["kind"]
        assert judged.new_tokens[row] == min(len(line["answer"].split()) + 1, folders.NEW_TOKENS)
        assert judged.vision_tokens is not None
        assert judged.vision_tokens[row] == made.asker.adapter.count_vision_tokens(inputs)
        assert judged.text_tokens[row] + judged.vision_tokens[row] == inputs["input_ids"].shape[1]
        for at in range(0, len(made.space), 7):
            plan = made.space.plans[at]
            run = plan if images else replace(plan, tier=None)
            said = generate(
                made.asker.adapter, made.asker.runtime, inputs, run, max_new_tokens=folders.NEW_TOKENS
            )
            text = made.there.tokenizer.decode(said.new_tokens[0], skip_special_tokens=True)
            assert judged.correct[row, at] == float(normalize_text(text) == normalize_text(line["answer"]))
        ready = made.asker.prepare(made.task.splits["val"][2 + row])
        for at, tier in enumerate(tiers):
            alone = made.asker.compute_latency_tokens([ready], tier if images else None)[0]
            torch.testing.assert_close(judged.tokens[row, at], alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(judged.language[row], made.asker.compute_language([ready])[0])


def test_in_files_and_as_tables(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made.task, "chunk_size", 6)
    calls: list[tuple[str, int, int]] = []
    real = made.task.evaluate_plans

    def noted(*given: Any, split: Split, first: int, count: int, **how: Any) -> Any:
        calls.append((split, first, count))
        return real(*given, split=split, first=first, count=count, **how)

    def stop(what: str, share: float) -> None:
        if what.startswith("plans evaluated on 6 val"):
            raise KeyboardInterrupt

    monkeypatch.setattr(made.task, "evaluate_plans", noted)
    profile = folders.profile_of(made.there, made.space)
    counts = SampleCounts(train=6, validation=100, test=6)
    with pytest.raises(KeyboardInterrupt):
        build_study_tables(made.task, profile, tmp_path, counts=counts, context=ALONE, progress=stop)
    assert calls == [("train", 0, 6), ("val", 0, 6)]
    del calls[:]
    found = build_study_tables(made.task, profile, tmp_path, counts=counts, context=ALONE)
    assert calls == [("val", 6, 4), ("test", 0, 6)]
    assert [len(each) for each in (found.train, found.validation, found.test)] == [6, 10, 6]
    whole = real(made.space, split="val", first=0, count=10)
    assert torch.equal(found.validation.correct, whole.correct)
    torch.testing.assert_close(found.validation.tokens, whole.tokens, rtol=1e-5, atol=1e-6)
    assert set(found.kinds) == {"even", "odd"}
    # Texts take what texts take, whatever the tier.
    medians = found.test.latency_ms.median(2).values
    for row, line in enumerate([line for line in made.lines if line["split"] == "test"][:6]):
        if "images" not in line and made.there.sight is not None:
            of_tier = medians[row].reshape(3, -1)
            torch.testing.assert_close(of_tier[0], of_tier[2], rtol=0.1, atol=0.0)
    other = made.task_of([*made.lines[:-1], made.lines[-1] | {"answer": "w9"}])
    with pytest.raises(InputError, match=r"other task"):
        collect_outcomes(other, made.space, tmp_path / "outcomes", {"train": 4}, context=ALONE)


def test_scores_are_those_of_the_highest_tier(made: Made) -> None:
    score = made.task.make_scorer(15)
    assert made.task.make_scorer(14).digest != score.digest
    questions = [*made.task.splits["train"], *made.task.splits["val"]][:15]
    for blocks in ((0, 1, 2, 3), (0, 2)):
        wanted = []
        for question in questions:
            line = {"prompt": question.prompt, "images": [each.name for each in question.images]}
            tier = get_adapter(made.there.model).geometry.full_plan(images=bool(question.images)).tier
            said = generate(
                made.asker.adapter, made.asker.runtime, folders.inputs_of(made.there, line, made.folder),
                Plan(tier=tier, insertion_position=1, top_k=2, blocks=blocks),
                max_new_tokens=folders.NEW_TOKENS,
            )  # fmt: skip
            text = made.there.tokenizer.decode(said.new_tokens[0], skip_special_tokens=True)
            wanted.append(float(normalize_text(text) == normalize_text(question.answer)))
        np.testing.assert_array_equal(score(blocks), wanted)


def test_a_tier_that_leaves_no_room(tmp_path: Path) -> None:
    """Of a model whose context holds prompts with images at lower tiers only."""
    made = Made(tmp_path, "llava_siglip", 24)
    whole = made.task.evaluate_plans(made.space, split="train", first=0, count=8)
    made.asker.close()
    asker = QuestionRunner(
        replace(made.there, context=60)
    )  # 20 vision tokens at the medium tier, 56 at the high one
    small = QuestionTask(asker, read_questions(tmp_path / "some.jsonl"), "some.jsonl")
    found = small.evaluate_plans(made.space, split="train", first=0, count=8)
    seen = torch.tensor(["images" in line for line in made.lines if line["split"] == "train"])
    high = torch.tensor([plan.tier == "high" for plan in made.space.plans])
    assert not found.correct[seen][:, high].any() and whole.correct[seen][:, high].any()
    assert torch.equal(found.correct[:, ~high], whole.correct[:, ~high])
    assert torch.equal(found.correct[~seen], whole.correct[~seen])
    torch.testing.assert_close(found.tokens[seen][:, 2], whole.tokens[seen][:, 1], rtol=1e-5, atol=1e-6)
    score = small.make_scorer(8)
    full = made.space.plans.index(replace(made.space.geometry.full_plan(), tier="medium"))
    np.testing.assert_array_equal(score((0, 1, 2, 3)), whole.correct[:, full].numpy())
    asker.close()


def test_what_is_refused(made: Made, tmp_path: Path) -> None:
    few = made.task_of([line | {"split": "train"} for line in made.lines])
    with pytest.raises(InputError, match=r"0 questions for `val` .*30 of `train`, 0 of `val`"):
        few.select_samples(SampleCounts())
    with pytest.raises(InputError, match=r"7 questions for `train` and `val` together .*at least 8"):
        few.make_scorer(7)
    with pytest.raises(InputError, match=r"`val` has 10 questions; 4 from index 8"):
        made.task.evaluate_plans(made.space, split="val", first=8, count=4)
    many = [line | {"kind": f"k{at}"} for at, line in enumerate(made.lines * 3)]
    with pytest.raises(InputError, match=r"some.jsonl has 90 kinds of questions.*64"):
        made.task_of(many)
    alike = made.task_of([{**line, "kind": "sum"} for line in made.lines])
    assert alike.kinds == ()
    with pytest.raises(InputError, match=r"holds no model: there is no config.json"):
        QuestionTask.open(tmp_path, made.folder / "some.jsonl", device=ALONE.device)
    with pytest.raises(ModelError, match="plan runtime"):
        QuestionRunner(made.there)
