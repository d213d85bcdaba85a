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
        self.loaded: ModelFolder = folders.opened(
            folders.model_folder(folder / "model", family, dtype=EXACT), EXACT
        )
        images = self.loaded.image_processor is not None
        self.lines = folders.lines(self.loaded, folder, COUNT, images=images)
        if images:
            # Not all prompts have an image.
            del self.lines[1]["images"], self.lines[2]["images"]
        self.inputs = [folders.inputs_of(self.loaded, line, folder) for line in self.lines]
        self.questions = read_questions(folders.write(folder / "questions.jsonl", self.lines))


@pytest.fixture(scope="module", params=["olmoe", "mixtral", "llava_siglip", "qwen3_vl_moe"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def asker(setup: Asked) -> Any:
    actual = QuestionRunner(setup.loaded)
    yield actual
    actual.close()


def tiers_of(setup: Asked) -> tuple[Any, ...]:
    return (None, *get_adapter(setup.loaded.model).geometry.tiers)


def test_prepare_equals_served_prompt(setup: Asked, asker: QuestionRunner) -> None:
    for question, inputs in zip(setup.questions, setup.inputs, strict=True):
        ready = asker.prepare(question)
        assert ready.prompt.inputs.keys() == inputs.keys()
        for name, value in inputs.items():
            assert torch.equal(ready.prompt.inputs[name], value)
        assert ready.prompt.tokens == inputs["input_ids"].shape[1]
        assert ready.new_tokens == min(len(question.answer.split()) + 1, folders.NEW_TOKENS)


def test_check_answers_of_batch_equals_single(setup: Asked, asker: QuestionRunner) -> None:
    ready, adapter = [asker.prepare(question) for question in setup.questions], asker.adapter
    all_items, output = set(), []
    for tier in tiers_of(setup):
        for blocks, top_k in (((0, 1, 2, 3), 2), ((0, 1, 3), 1)):
            plan = Plan(tier=tier, insertion_position=1, top_k=top_k, blocks=blocks)
            for positions in group_into_batches(ready, tier):
                all_items |= set(positions)
                right = asker.check_answers([ready[index] for index in positions], plan)
                for index, actual in zip(positions, right, strict=True):
                    single = generate(
                        adapter, asker.runtime, setup.inputs[index], plan, max_new_tokens=folders.NEW_TOKENS
                    )
                    text = setup.loaded.tokenizer.decode(single.new_tokens[0], skip_special_tokens=True)
                    assert actual == (normalize_text(text) == normalize_text(setup.lines[index]["answer"]))
                    output.append(actual)
    assert all_items == set(range(COUNT)) and {True, False} == set(output), "a test of use has both"


def test_controller_features_equal_those_of_serving(setup: Asked, asker: QuestionRunner) -> None:
    """Both by an engine, which runs prompts in parts, and by the model's own forward."""
    ready, adapter = [asker.prepare(question) for question in setup.questions], asker.adapter
    words, full = CpuWordEmbeddings(adapter), adapter.geometry.full_plan()

    class Looks:
        """A decider that notes what it is shown."""

        def __init__(self, plan: Plan) -> None:
            self.plan, self.observed_token = plan, torch.empty(0)

        def choose_initial(self, request: GenerationRequest, remaining_ms: float) -> InitialDecision:
            return InitialDecision(tier=self.plan.tier, insertion_position=self.plan.insertion_position)

        def choose_plan(
            self, latency_token: torch.Tensor, request: GenerationRequest, remaining_ms: float
        ) -> Plan:
            self.observed_token = latency_token.float()
            return self.plan

    for tier in tiers_of(setup):
        for positions in group_into_batches(ready, tier):
            rows = [ready[index] for index in positions]
            language, tokens = asker.compute_language(rows), asker.compute_latency_tokens(rows, tier)
            assert tokens.shape == (len(rows), len(adapter.geometry.positions), tiny.WIDTH)
            plans = [
                Plan(tier=tier, insertion_position=index, top_k=full.top_k, blocks=full.blocks)
                for index in adapter.geometry.positions
            ]
            with Engine(
                adapter, asker.runtime, plans=plans, max_batch=1, max_tokens=256, prompts=(64, 256)
            ) as engine:
                for row, position in enumerate(positions):
                    appearance = words.compute_feature(setup.inputs[position]["input_ids"])
                    torch.testing.assert_close(
                        language[row], torch.from_numpy(appearance), rtol=1e-5, atol=1e-6
                    )
                    for index, plan in enumerate(plans):
                        for run in (by_engine, by_forward):
                            appearance_value = Looks(plan)
                            run(engine, asker, setup.inputs[position], appearance_value)
                            torch.testing.assert_close(
                                tokens[row, index], appearance_value.observed_token, rtol=1e-5, atol=1e-6
                            )


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
    return [
        asker.prepare(question) for question in read_questions(folders.write(folder / "some.jsonl", lines))
    ]


def test_check_answers_stops_when_all_are_known(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    existing = folders.opened(text / "model", EXACT)
    asker, steps = QuestionRunner(existing), []

    def noted(*args: Any, on_tokens: Any, **options: Any) -> Any:
        return generate(
            *args, on_tokens=lambda tokens: (steps.append(tokens), on_tokens(tokens))[1], **options
        )

    monkeypatch.setattr(runner, "generate", noted)
    plan = asker.adapter.geometry.full_plan()
    inputs = folders.inputs_of(existing, {"prompt": "w7 w8 w9"}, text)
    output = generate(asker.adapter, asker.runtime, inputs, plan, max_new_tokens=8).new_tokens[0]
    words = existing.tokenizer.decode(output, skip_special_tokens=True).split()
    other = next(word for word in folders.WORDS if word not in words)
    # Special tokens say nothing.
    received = [
        index
        for index, token in enumerate(output.tolist(), start=1)
        if token not in existing.tokenizer.all_special_ids
    ]
    for answer, tokens, right in (
        (" ".join(words).upper(), 8, True),
        (f"  {words[0]}   {words[1]} ", received[2], False),
        (f"{words[0]} {other} {words[2]}", received[1], False),
        (other, received[0], False),
    ):
        del steps[:]
        rows = ready_of(asker, text, {"prompt": "w7 w8 w9", "answer": answer, "max_new_tokens": 8})
        assert asker.check_answers(rows, plan) == [right] and len(steps) == tokens
    asker.close()


def test_check_answers_out_of_memory_halves_batch(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = QuestionRunner(folders.opened(text / "model", EXACT))
    rows = ready_of(
        asker, text, *({"prompt": f"w{index}", "answer": "w5", "max_new_tokens": 2} for index in range(6, 11))
    )
    plan, sizes = asker.adapter.geometry.full_plan(), []
    full = asker.check_answers(rows, plan)

    def small(adapter: Any, runtime: PlanRuntime, inputs: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        return generate(adapter, runtime, inputs, *args, **options)

    monkeypatch.setattr(runner, "generate", small)
    assert asker.check_answers(rows, plan) == full and sizes == [5, 2, 3, 1, 2]

    tokens, language = asker.compute_latency_tokens(rows, None), asker.compute_language(rows)
    for name in ("_compute_latency_tokens", "_compute_language"):
        inner = getattr(asker, name)

        def fail_on_large_batches(questions_batch: Any, *args: Any, inner: Any = inner) -> Any:
            if len(questions_batch) > 2:
                raise torch.OutOfMemoryError
            return inner(questions_batch, *args)

        monkeypatch.setattr(asker, name, fail_on_large_batches)
    torch.testing.assert_close(asker.compute_latency_tokens(rows, None), tokens)
    torch.testing.assert_close(asker.compute_language(rows), language)
    asker.close()


def test_prepare_respects_max_total_tokens(text: Path) -> None:
    line = {"prompt": "w7 w8 w9", "answer": "w5", "max_new_tokens": 4}
    existing = folders.opened(text / "model", EXACT)
    asker = QuestionRunner(existing)
    (row,) = ready_of(asker, text, line)
    messages = asker.identity([row])
    assert messages == asker.identity([row]) and messages["context"] == existing.context
    asker.close()
    tight = QuestionRunner(existing, row.prompt.tokens + 3)
    with pytest.raises(InputError, match=r"context.* 8"):
        ready_of(tight, text, line)
    assert tight.identity([row]) != messages
    tight.close()


def test_group_into_batches_limits_size_and_tokens(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = QuestionRunner(folders.opened(text / "model", EXACT))
    rows = ready_of(
        asker, text, *({"prompt": " ".join(["w7"] * index), "answer": "w5"} for index in (9, 1, 5, 2, 1))
    )
    monkeypatch.setattr(runner, "MAX_BATCH_SIZE", 3)
    assert group_into_batches(rows, None) == [[1, 4, 3], [2, 0]] and group_into_batches(rows, "low") == []
    monkeypatch.setattr(runner, "MAX_BATCH_TOKENS", 11)
    assert group_into_batches(rows, None) == [[1, 4], [3], [2], [0]]  # a prompt has two tokens besides
    asker.close()


def test_prepare_of_invalid_question_raises(text: Path, tmp_path: Path) -> None:
    existing = folders.opened(text / "model", EXACT)
    asker = QuestionRunner(existing)
    for line, messages in (
        ({"answer": "w5 w6 w7", "max_new_tokens": 2}, "line 1: .*3 tokens"),
        ({"answer": "w5", "prompt": "w7 " * 600}, "line 1: .*512"),
        ({"answer": "w5", "images": ["0.png"]}, "line 1: "),
    ):  # fmt: skip
        (text / "0.png").write_bytes(folders.picture(0))
        with pytest.raises(InputError, match=messages):
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
