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
        self.loaded = folders.opened(folders.model_folder(folder / "model", family, dtype=EXACT), EXACT)
        self.lines = folders.lines(self.loaded, folder, count, images=self.loaded.image_processor is not None)
        for index, line in enumerate(self.lines):
            line["split"] = SPLITS[index % 3]
            if index % 4 == 3 and "images" in line:
                del line["images"]
        self.space = folders.space_of(self.loaded)
        self.asker = QuestionRunner(self.loaded)
        self.task = self.task_of(self.lines)

    def task_of(self, lines: list[dict[str, Any]]) -> QuestionTask:
        return QuestionTask(
            self.asker, read_questions(folders.write(self.folder / "some.jsonl", lines)), "some.jsonl"
        )


@pytest.fixture(scope="module", params=["olmoe", "llava_siglip"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    setup = Made(tmp_path_factory.mktemp(request.param), request.param)
    yield setup
    setup.asker.close()


def test_evaluate_plans_matches_generation(setup: Made) -> None:
    messages: list[float] = []
    outcomes = setup.task.evaluate_plans(
        setup.space, split="val", first=2, count=8, progress=lambda _, share: messages.append(share)
    )
    assert messages == sorted(messages) and messages[-1] == 1.0
    lines = [line for line in setup.lines if line["split"] == "val"][2:]
    tiers, positions = setup.space.tiers, setup.space.geometry.positions
    assert outcomes.correct.shape == (8, len(setup.space)) and 0.02 < outcomes.correct.mean() < 0.98
    assert outcomes.tokens.shape == (8, len(tiers), len(positions), tiny.WIDTH)
    assert setup.task.kinds == ("even", "odd")
    for row, line in enumerate(lines):
        inputs = folders.inputs_of(setup.loaded, line, setup.folder)
        images = "images" in line
        assert setup.task.kinds[outcomes.kinds[row]] == line["kind"]
        assert outcomes.new_tokens[row] == min(len(line["answer"].split()) + 1, folders.NEW_TOKENS)
        assert outcomes.vision_tokens is not None
        assert outcomes.vision_tokens[row] == setup.asker.adapter.count_vision_tokens(inputs)
        assert outcomes.text_tokens[row] + outcomes.vision_tokens[row] == inputs["input_ids"].shape[1]
        for index in range(0, len(setup.space), 7):
            plan = setup.space.plans[index]
            run = plan if images else replace(plan, tier=None)
            output = generate(
                setup.asker.adapter, setup.asker.runtime, inputs, run, max_new_tokens=folders.NEW_TOKENS
            )
            text = setup.loaded.tokenizer.decode(output.new_tokens[0], skip_special_tokens=True)
            assert outcomes.correct[row, index] == float(
                normalize_text(text) == normalize_text(line["answer"])
            )
        ready = setup.asker.prepare(setup.task.splits["val"][2 + row])
        for index, tier in enumerate(tiers):
            single = setup.asker.compute_latency_tokens([ready], tier if images else None)[0]
            torch.testing.assert_close(outcomes.tokens[row, index], single, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(outcomes.language[row], setup.asker.compute_language([ready])[0])


def test_build_study_tables_of_questions_resumes(
    setup: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.task, "chunk_size", 6)
    calls: list[tuple[str, int, int]] = []
    real = setup.task.evaluate_plans

    def noted(*args: Any, split: Split, first: int, count: int, **options: Any) -> Any:
        calls.append((split, first, count))
        return real(*args, split=split, first=first, count=count, **options)

    def stop(message: str, share: float) -> None:
        if message.startswith("plans evaluated on 6 val"):
            raise KeyboardInterrupt

    monkeypatch.setattr(setup.task, "evaluate_plans", noted)
    profile = folders.profile_of(setup.loaded, setup.space)
    counts = SampleCounts(train=6, validation=100, test=6)
    with pytest.raises(KeyboardInterrupt):
        build_study_tables(setup.task, profile, tmp_path, counts=counts, context=ALONE, progress=stop)
    assert calls == [("train", 0, 6), ("val", 0, 6)]
    del calls[:]
    tables = build_study_tables(setup.task, profile, tmp_path, counts=counts, context=ALONE)
    assert calls == [("val", 6, 4), ("test", 0, 6)]
    assert [len(table) for table in (tables.train, tables.validation, tables.test)] == [6, 10, 6]
    expected = real(setup.space, split="val", first=0, count=10)
    assert torch.equal(tables.validation.correct, expected.correct)
    torch.testing.assert_close(tables.validation.tokens, expected.tokens, rtol=1e-5, atol=1e-6)
    assert set(tables.kinds) == {"even", "odd"}
    # Texts take what texts take, whatever the tier.
    medians = tables.test.latency_ms.median(2).values
    for row, line in enumerate([line for line in setup.lines if line["split"] == "test"][:6]):
        if "images" not in line and setup.loaded.image_processor is not None:
            of_tier = medians[row].reshape(3, -1)
            torch.testing.assert_close(of_tier[0], of_tier[2], rtol=0.1, atol=0.0)
    other = setup.task_of([*setup.lines[:-1], setup.lines[-1] | {"answer": "w9"}])
    with pytest.raises(InputError, match=r"other task"):
        collect_outcomes(other, setup.space, tmp_path / "outcomes", {"train": 4}, context=ALONE)


def test_scorer_uses_highest_tier(setup: Made) -> None:
    score = setup.task.make_scorer(15)
    assert setup.task.make_scorer(14).digest != score.digest
    questions = [*setup.task.splits["train"], *setup.task.splits["val"]][:15]
    for blocks in ((0, 1, 2, 3), (0, 2)):
        expected = []
        for question in questions:
            line = {"prompt": question.prompt, "images": [path.name for path in question.images]}
            tier = get_adapter(setup.loaded.model).geometry.full_plan(images=bool(question.images)).tier
            output = generate(
                setup.asker.adapter, setup.asker.runtime, folders.inputs_of(setup.loaded, line, setup.folder),
                Plan(tier=tier, insertion_position=1, top_k=2, blocks=blocks),
                max_new_tokens=folders.NEW_TOKENS,
            )  # fmt: skip
            text = setup.loaded.tokenizer.decode(output.new_tokens[0], skip_special_tokens=True)
            expected.append(float(normalize_text(text) == normalize_text(question.answer)))
        np.testing.assert_array_equal(score(blocks), expected)


def test_evaluate_plans_of_tier_without_space_are_wrong(tmp_path: Path) -> None:
    """Of a model whose context holds prompts with images at lower tiers only."""
    created = Made(tmp_path, "llava_siglip", 24)
    full_value = created.task.evaluate_plans(created.space, split="train", first=0, count=8)
    created.asker.close()
    asker = QuestionRunner(
        replace(created.loaded, context=60)
    )  # 20 vision tokens at the medium tier, 56 at the high one
    small = QuestionTask(asker, read_questions(tmp_path / "some.jsonl"), "some.jsonl")
    outcomes = small.evaluate_plans(created.space, split="train", first=0, count=8)
    features = torch.tensor(["images" in line for line in created.lines if line["split"] == "train"])
    high = torch.tensor([plan.tier == "high" for plan in created.space.plans])
    assert not outcomes.correct[features][:, high].any() and full_value.correct[features][:, high].any()
    assert torch.equal(outcomes.correct[:, ~high], full_value.correct[:, ~high])
    assert torch.equal(outcomes.correct[~features], full_value.correct[~features])
    torch.testing.assert_close(
        outcomes.tokens[features][:, 2], full_value.tokens[features][:, 1], rtol=1e-5, atol=1e-6
    )
    score = small.make_scorer(8)
    plan_index = created.space.plans.index(replace(created.space.geometry.full_plan(), tier="medium"))
    np.testing.assert_array_equal(score((0, 1, 2, 3)), full_value.correct[:, plan_index].numpy())
    asker.close()


def test_task_with_too_few_questions_raises(setup: Made, tmp_path: Path) -> None:
    train_task = setup.task_of([line | {"split": "train"} for line in setup.lines])
    with pytest.raises(InputError, match=r"0 questions for `val` .*30 of `train`, 0 of `val`"):
        train_task.select_samples(SampleCounts())
    with pytest.raises(InputError, match=r"7 questions for `train` and `val` together .*at least 8"):
        train_task.make_scorer(7)
    with pytest.raises(InputError, match=r"`val` has 10 questions; 4 from index 8"):
        setup.task.evaluate_plans(setup.space, split="val", first=8, count=4)
    num_items = [line | {"kind": f"k{index}"} for index, line in enumerate(setup.lines * 3)]
    with pytest.raises(InputError, match=r"some.jsonl has 90 kinds of questions.*64"):
        setup.task_of(num_items)
    equal = setup.task_of([{**line, "kind": "sum"} for line in setup.lines])
    assert equal.kinds == ()
    with pytest.raises(InputError, match=r"config\.json"):
        QuestionTask.open(tmp_path, setup.folder / "some.jsonl", device=ALONE.device)
    with pytest.raises(ModelError, match="plan runtime"):
        QuestionRunner(setup.loaded)
