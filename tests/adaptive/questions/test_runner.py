"""Asking: batches give what each question gets alone, and controllers see here what they see in serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from sparseflow.adaptive.adapters import get_adapter
from sparseflow.adaptive.controllers.cpu_policy import CpuWordEmbeddings
from sparseflow.adaptive.engine.engine import Engine
from sparseflow.adaptive.engine.generate import generate
from sparseflow.adaptive.engine.requests.request import GenerationRequest, InitialDecision
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import Plan
from sparseflow.adaptive.prompts.model_folder import ModelFolder
from sparseflow.adaptive.questions import runner
from sparseflow.adaptive.questions.file import read_questions
from sparseflow.adaptive.questions.runner import (
    PreparedQuestion,
    QuestionRunner,
    group_into_batches,
    normalize_text,
)
from sparseflow.errors import InputError
from tests.adaptive import tiny
from tests.adaptive.questions import folders

EXACT = torch.float64
COUNT = 6


class Asked:
    """A model of a family, questions to it, and the inputs that a server makes of them."""

    def __init__(self, folder: Path, family: str) -> None:
        self.there: ModelFolder = folders.opened(
            folders.model_folder(folder / "model", family, dtype=EXACT), EXACT
        )
        images = self.there.sight is not None
        self.lines = folders.lines(self.there, folder, COUNT, images=images)
        if images:
            # Not all prompts have an image.
            del self.lines[1]["images"], self.lines[2]["images"]
        self.inputs = [folders.inputs_of(self.there, line, folder) for line in self.lines]
        self.questions = read_questions(folders.write(folder / "questions.jsonl", self.lines))


@pytest.fixture(scope="module", params=["olmoe", "mixtral", "llava_siglip", "qwen3_vl_moe"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def asker(asked: Asked) -> Any:
    found = QuestionRunner(asked.there)
    yield found
    found.close()


def tiers_of(asked: Asked) -> tuple[Any, ...]:
    return (None, *get_adapter(asked.there.model).geometry.tiers)


def test_questions_become_what_a_server_makes_of_them(asked: Asked, asker: QuestionRunner) -> None:
    for question, inputs in zip(asked.questions, asked.inputs, strict=True):
        ready = asker.prepare(question)
        assert ready.prompt.inputs.keys() == inputs.keys()
        for name, each in inputs.items():
            assert torch.equal(ready.prompt.inputs[name], each)
        assert ready.prompt.tokens == inputs["input_ids"].shape[1]
        assert ready.new_tokens == min(len(question.answer.split()) + 1, folders.NEW_TOKENS)


def test_together_as_alone(asked: Asked, asker: QuestionRunner) -> None:
    ready, adapter = [asker.prepare(each) for each in asked.questions], asker.adapter
    every, said = set(), []
    for tier in tiers_of(asked):
        for blocks, top_k in (((0, 1, 2, 3), 2), ((0, 1, 3), 1)):
            plan = Plan(tier=tier, insertion_position=1, top_k=top_k, blocks=blocks)
            for places in group_into_batches(ready, tier):
                every |= set(places)
                right = asker.check_answers([ready[at] for at in places], plan)
                for at, found in zip(places, right, strict=True):
                    alone = generate(
                        adapter, asker.runtime, asked.inputs[at], plan, max_new_tokens=folders.NEW_TOKENS
                    )
                    text = asked.there.tokenizer.decode(alone.new_tokens[0], skip_special_tokens=True)
                    assert found == (normalize_text(text) == normalize_text(asked.lines[at]["answer"]))
                    said.append(found)
    assert every == set(range(COUNT)) and {True, False} == set(said), "a test of use has both"


def test_controllers_learn_from_what_serving_shows_them(asked: Asked, asker: QuestionRunner) -> None:
    """Both by an engine, which runs prompts in parts, and by the model's own forward."""
    ready, adapter = [asker.prepare(each) for each in asked.questions], asker.adapter
    words, full = CpuWordEmbeddings(adapter), adapter.geometry.full_plan()

    class Looks:
        """A decider that notes what it is shown."""

        def __init__(self, plan: Plan) -> None:
            self.plan, self.seen = plan, torch.empty(0)

        def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
            return InitialDecision(tier=self.plan.tier, insertion_position=self.plan.insertion_position)

        def choose_plan(
            self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
        ) -> Plan:
            self.seen = latency_token.float()
            return self.plan

    for tier in tiers_of(asked):
        for places in group_into_batches(ready, tier):
            rows = [ready[at] for at in places]
            language, tokens = asker.compute_language(rows), asker.compute_latency_tokens(rows, tier)
            assert tokens.shape == (len(rows), len(adapter.geometry.positions), tiny.WIDTH)
            plans = [
                Plan(tier=tier, insertion_position=at, top_k=full.top_k, blocks=full.blocks)
                for at in adapter.geometry.positions
            ]
            with Engine(
                adapter, asker.runtime, plans=plans, max_batch=1, max_tokens=256, prompts=(64, 256)
            ) as engine:
                for row, place in enumerate(places):
                    shown = words.compute_feature(asked.inputs[place]["input_ids"])
                    torch.testing.assert_close(language[row], torch.from_numpy(shown), rtol=1e-5, atol=1e-6)
                    for at, plan in enumerate(plans):
                        for run in (by_engine, by_forward):
                            looks = Looks(plan)
                            run(engine, asker, asked.inputs[place], looks)
                            torch.testing.assert_close(tokens[row, at], looks.seen, rtol=1e-5, atol=1e-6)


def by_engine(engine: Engine, asker: QuestionRunner, inputs: Any, decide: Any) -> None:
    engine.submit(GenerationRequest(inputs=inputs, decide=decide, max_new_tokens=1)).result()


def by_forward(engine: Engine, asker: QuestionRunner, inputs: Any, decide: Any) -> None:
    generate(asker.adapter, asker.runtime, inputs, decide, max_new_tokens=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    folders.model_folder(folder / "model", "olmoe", dtype=EXACT)
    return folder


def ready_of(asker: QuestionRunner, folder: Path, *lines: dict[str, Any]) -> list[PreparedQuestion]:
    return [asker.prepare(each) for each in read_questions(folders.write(folder / "some.jsonl", lines))]


def test_it_ends_as_soon_as_no_answer_can_be_right(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = folders.opened(text / "model", EXACT)
    asker, steps = QuestionRunner(there), []

    def noted(*given: Any, on_tokens: Any, **how: Any) -> Any:
        return generate(*given, on_tokens=lambda tokens: (steps.append(tokens), on_tokens(tokens))[1], **how)

    monkeypatch.setattr(runner, "generate", noted)
    plan = asker.adapter.geometry.full_plan()
    inputs = folders.inputs_of(there, {"prompt": "w7 w8 w9"}, text)
    said = generate(asker.adapter, asker.runtime, inputs, plan, max_new_tokens=8).new_tokens[0]
    words = there.tokenizer.decode(said, skip_special_tokens=True).split()
    other = next(word for word in folders.WORDS if word not in words)
    # Special tokens say nothing.
    heard = [
        at for at, token in enumerate(said.tolist(), start=1) if token not in there.tokenizer.all_special_ids
    ]
    for answer, tokens, right in (
        (" ".join(words).upper(), 8, True),
        (f"  {words[0]}   {words[1]} ", heard[2], False),
        (f"{words[0]} {other} {words[2]}", heard[1], False),
        (other, heard[0], False),
    ):
        del steps[:]
        rows = ready_of(asker, text, {"prompt": "w7 w8 w9", "answer": answer, "max_new_tokens": 8})
        assert asker.check_answers(rows, plan) == [right] and len(steps) == tokens
    asker.close()


def test_without_memory_it_goes_by_halves(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = QuestionRunner(folders.opened(text / "model", EXACT))
    rows = ready_of(
        asker, text, *({"prompt": f"w{at}", "answer": "w5", "max_new_tokens": 2} for at in range(6, 11))
    )
    plan, sizes = asker.adapter.geometry.full_plan(), []
    whole = asker.check_answers(rows, plan)

    def small(adapter: Any, runtime: PlanRuntime, inputs: Any, *given: Any, **how: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return generate(adapter, runtime, inputs, *given, **how)

    monkeypatch.setattr(runner, "generate", small)
    assert asker.check_answers(rows, plan) == whole and sizes == [5, 2, 3, 1, 2]

    tokens, language = asker.compute_latency_tokens(rows, None), asker.compute_language(rows)
    for name in ("_compute_latency_tokens", "_compute_language"):
        inner = getattr(asker, name)

        def fail_on_large_batches(some: Any, *given: Any, inner: Any = inner) -> Any:
            if len(some) > 2:
                raise torch.OutOfMemoryError
            return inner(some, *given)

        monkeypatch.setattr(asker, name, fail_on_large_batches)
    torch.testing.assert_close(asker.compute_latency_tokens(rows, None), tokens)
    torch.testing.assert_close(asker.compute_language(rows), language)
    asker.close()


def test_room_is_that_of_where_it_is_served(text: Path) -> None:
    line = {"prompt": "w7 w8 w9", "answer": "w5", "max_new_tokens": 4}
    there = folders.opened(text / "model", EXACT)
    asker = QuestionRunner(there)
    (row,) = ready_of(asker, text, line)
    told = asker.identity([row])
    assert told == asker.identity([row]) and told["context"] == there.context
    asker.close()
    tight = QuestionRunner(there, row.prompt.tokens + 3)
    with pytest.raises(InputError, match="context is"):
        ready_of(tight, text, line)
    assert tight.identity([row]) != told
    tight.close()


def test_batches_have_a_bound(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = QuestionRunner(folders.opened(text / "model", EXACT))
    rows = ready_of(
        asker, text, *({"prompt": " ".join(["w7"] * at), "answer": "w5"} for at in (9, 1, 5, 2, 1))
    )
    monkeypatch.setattr(runner, "MAX_BATCH_SIZE", 3)
    assert group_into_batches(rows, None) == [[1, 4, 3], [2, 0]] and group_into_batches(rows, "low") == []
    monkeypatch.setattr(runner, "MAX_BATCH_TOKENS", 11)
    assert group_into_batches(rows, None) == [[1, 4], [3], [2], [0]]  # a prompt has two tokens besides
    asker.close()


def test_what_cannot_be_asked(text: Path, tmp_path: Path) -> None:
    there = folders.opened(text / "model", EXACT)
    asker = QuestionRunner(there)
    for line, told in (
        ({"answer": "w5 w6 w7", "max_new_tokens": 2}, "line 1: .*3 tokens"),
        ({"answer": "w5", "prompt": "w7 " * 600}, "line 1: .*512"),
        ({"answer": "w5", "images": ["0.png"]}, "line 1: "),
    ):  # fmt: skip
        (text / "0.png").write_bytes(folders.picture(0))
        with pytest.raises(InputError, match=told):
            ready_of(asker, text, {"prompt": "w7", **line})
    asker.close()
    seeing = QuestionRunner(folders.opened(folders.model_folder(tmp_path / "model", "llava_clip")))
    (tmp_path / "bad.png").write_bytes(folders.picture(0)[:60])
    with pytest.raises(InputError, match=r"line 1: .*bad.png"):
        ready_of(seeing, tmp_path, {"prompt": "w7", "answer": "w5", "images": ["bad.png"]})
    (tmp_path / "0.png").write_bytes(folders.picture(0))
    with pytest.raises(InputError, match=r"line 1: .*<image>"):
        ready_of(seeing, tmp_path, {"prompt": "w7 <image>", "answer": "w5", "images": ["0.png"]})
    seeing.close()
