"""From conversations to prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseflow.adaptive.adapters.crops import make_nested_crops
from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.adaptive.plan.adapter import get_adapter
from sparseflow.adaptive.plan.space import TIERS
from sparseflow.adaptive.prompts.chat import PromptBuilder
from sparseflow.adaptive.prompts.messages import ApiError, Message
from sparseflow.adaptive.prompts.processors import CropProcessor, PatchProcessor
from sparseflow.errors import InputError
from tests.adaptive import tiny
from tests.adaptive.serve.fake import IMAGE, ByteTokenizer, FakeImageProcessor

RED = torch.tensor([255, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 5, 7)
URL = {"type": "image_url", "image_url": {"url": "data:"}}


def message(role: str, *parts: Any) -> Message:
    return Message.model_validate(
        {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}
    )


def prompts(**options: Any) -> PromptBuilder:
    return PromptBuilder(
        ByteTokenizer(), **{"context": 400, "image_processor": FakeImageProcessor(), **options}
    )


def text_of(ids: torch.Tensor) -> str:
    return "".join(chr(token) if token < 256 else f"[{token}]" for token in ids[0].tolist())


def test_a_conversation_becomes_tokens() -> None:
    prompt = prompts().prompt(
        [message("developer", "Be brief."), message("user", "Hi"), message("assistant", "Yes?")], []
    )
    assert text_of(prompt.inputs["input_ids"]) == "system: Be brief.\nuser: Hi\nassistant: Yes?\nassistant:"
    assert prompt.inputs["input_ids"].dtype == torch.int64
    assert (prompt.tokens, prompt.text_tokens, prompt.images) == (53, 53, 0)
    assert prompt.inputs["attention_mask"].tolist() == [[1] * 53]


def test_images_stand_where_they_were_put() -> None:
    prompt = prompts().prompt([message("user", "left ", URL, " right ", URL)], [RED, RED])
    four = "[256]" * 4
    assert text_of(prompt.inputs["input_ids"]) == f"user: left {four} right {four}\nassistant:"
    assert prompt.inputs["pixel_values"].tolist() == [[255, 0, 0]] * 2
    assert (prompt.tokens, prompt.images) == (prompt.text_tokens + 8, 2)


def test_a_model_without_images_gets_plain_text() -> None:
    prompt = prompts(image_processor=None).prompt([message("user", "one", "two")], [])
    assert text_of(prompt.inputs["input_ids"]) == "user: one\ntwo\nassistant:"
    assert not prompts(image_processor=None).takes_images
    with pytest.raises(ApiError, match="takes no images") as caught:
        prompts(image_processor=None).prompt([message("user", "one", URL)], [RED])
    assert (caught.value.code, caught.value.param) == ("unsupported_content", "messages.0.content.1")


def test_text_cannot_pass_for_an_image() -> None:
    with pytest.raises(ApiError, match=IMAGE) as caught:
        prompts().prompt([message("user", "see ", f"a {IMAGE} b")], [])
    assert caught.value.param == "messages.0.content.1"
    # Where there are no images, it is a word like any other.
    prompts(image_processor=None).prompt([message("user", "a <image> b")], [])


def test_a_prompt_over_the_context_is_refused() -> None:
    roomy = prompts(context=30)
    text = "x" * (30 - len("user: \nassistant:") - 5)
    assert roomy.prompt([message("user", text)], [], 5).tokens == 25
    with pytest.raises(ApiError) as caught:
        roomy.prompt([message("user", text)], [], 6)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.body["error"]["prompt_tokens"] == 25
    assert "30" in caught.value.message


def test_images_count_at_the_lowest_tier_where_a_prompt_is_measured() -> None:
    conversation = [message("user", "abc", URL)], [RED]
    # 20 tokens of text, and 1, 2 or 4 of the image.
    with pytest.raises(ApiError, match=r"21 tokens .* 'low'") as caught:
        prompts(context=21).prompt(*conversation)
    assert caught.value.body["error"]["prompt_tokens"] == 21
    fitting = prompts(context=22)
    prompt = fitting.prompt(*conversation)
    assert (prompt.tokens, prompt.text_tokens, prompt.vision_tokens) == (24, 20, 4)
    assert [prompt.count_tokens(tier) for tier in (None, *TIERS)] == [20, 21, 22, 24]
    assert fitting.answer_capacity(prompt) == 1
    # Where no plan is of the lowest tier, the next one counts.
    with pytest.raises(ApiError, match=r"22 tokens .* 'medium'"):
        prompts(context=22, lowest="medium").prompt(*conversation)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        PromptBuilder(tokenizer, context=5)


@pytest.fixture(scope="module")
def words() -> Any:
    return Vocabulary(["what", "is", "at", "row", "1", "cat", "?"]).tokenizer


def crops(words: Any) -> CropProcessor:
    return CropProcessor(words, image_token=4, size=8, tokens_per_crop=3, mean=[0.5] * 3, std=[0.25] * 3)


def test_crops_of_the_highest_tier(words: Any) -> None:
    prompt = PromptBuilder(words, context=100, image_processor=crops(words)).prompt(
        [message("user", "What is at row 1?", URL)], [RED]
    )
    ids = prompt.inputs["input_ids"][0]
    assert (ids == 4).sum() == 14 * 3
    assert words.decode(ids[ids != 4]) == "<bos> what is at row 1 ? <answer>"
    assert torch.equal(
        prompt.inputs["pixel_values"], make_nested_crops(RED, 8, mean=[0.5] * 3, std=[0.25] * 3)
    )
    assert prompt.inputs["attention_mask"].shape == prompt.inputs["input_ids"].shape
    assert (prompt.tokens, prompt.text_tokens) == (50, 8)
    assert prompt.vision == {"low": 3, "medium": 15, "high": 42}


def test_images_of_unlike_sizes(words: Any) -> None:
    image_processor = crops(words)
    actual = image_processor.inputs("<image> cat <image> ?", [RED, RED[:, :2]])
    assert actual["pixel_values"].shape == (28, 3, 8, 8)
    assert actual["input_ids"].shape == (1, 2 + 2 * 42)


def test_a_template_that_loses_an_image(words: Any) -> None:
    with pytest.raises(InputError, match=r"1 placeholders .* 2 images"):
        crops(words).inputs("<image> cat", [RED, RED])


def test_images_side_by_side_are_refused(words: Any) -> None:
    with pytest.raises(ApiError, match="placeholders") as caught:
        PromptBuilder(words, context=200, image_processor=crops(words)).prompt(
            [message("user", "cat", URL, URL)], [RED, RED]
        )
    assert caught.value.status == 400


def test_a_template_that_refuses_a_conversation(words: Any) -> None:
    template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}<bos>"
    )
    original_template, words.chat_template = words.chat_template, template
    try:
        builder = PromptBuilder(words, context=9)
        assert builder.prompt([message("user", "cat")], []).tokens == 1
        with pytest.raises(ApiError, match="begin with the user"):
            builder.prompt([message("system", "cat")], [])
    finally:
        words.chat_template = original_template


def test_an_empty_prompt_is_refused(words: Any) -> None:
    template, words.chat_template = words.chat_template, "{{ '' }}"
    try:
        with pytest.raises(ApiError, match="the conversation is empty"):
            PromptBuilder(words, context=9).prompt([message("user", "cat")], [])
    finally:
        words.chat_template = template


def test_patches_of_a_processor_of_transformers() -> None:
    processors = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = processors.Qwen2VLImageProcessorPil(
        patch_size=tiny.PATCH, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 4096},
    )  # fmt: skip
    words = Vocabulary(["what", "?"]).tokenizer
    image_processor = PatchProcessor(words, processor, image_token=4, merge=2)
    pictures = [torch.zeros(3, 24, 32, dtype=torch.uint8), torch.zeros(3, 16, 16, dtype=torch.uint8)]
    turns = [message("user", "what?", URL), message("user", "what?", URL)]
    prompt = PromptBuilder(words, context=60, image_processor=image_processor).prompt(turns, pictures)
    assert prompt.inputs["image_grid_thw"].tolist() == [[1, 6, 8], [1, 4, 4]]
    assert (prompt.inputs["input_ids"] == 4).sum() == 12 + 4
    assert prompt.inputs["mm_token_type_ids"].sum() == 16
    assert (prompt.tokens, prompt.text_tokens, prompt.images) == (22, 6, 2)

    # And the adapter knows them: the prompt of tiny models has another number for images.
    adapter = get_adapter(tiny.build_qwen3_vl_moe())
    ids = prompt.inputs["input_ids"]
    inputs = {**prompt.inputs, "input_ids": torch.where(ids == 4, tiny.IMAGE, ids)}
    for tier in TIERS:
        assert adapter.count_vision_tokens(adapter.reduce_to_tier(inputs, tier)) == prompt.vision[tier]
    assert (prompt.vision["low"], prompt.vision["high"]) == (5, 16)
