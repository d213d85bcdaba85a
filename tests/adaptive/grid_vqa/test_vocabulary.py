"""Words: numbers and back, and the same in the tokenizer that servers use."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from sparseflow.adaptive.grid_vqa.question_generator import QuestionDomain
from sparseflow.adaptive.grid_vqa.vocabulary import SPECIALS, Vocabulary
from sparseflow.errors import InputError

WORLD = QuestionDomain(names=("cat", "one", "two", "dog"), question_names=("cat", "one", "two"), grid=3)
TEXT = "what is at row 2 column 3 ?"


def test_ids_do_not_depend_on_word_order() -> None:
    first, two = Vocabulary(["b", "a", "?", "a"]), Vocabulary(["?", "a", "b"])
    assert first.words == two.words == (*SPECIALS, "?", "a", "b")
    assert first.ids("b ?").tolist() == [8, 6] and first.text([1, 8, 6, 0]) == "b ?"
    with pytest.raises(InputError, match=r"'c'.* 9 words"):
        first.ids("a c")


@pytest.mark.parametrize("word", ["two words", "Big", "", " ", "<pad>", "a-b", "??"])
def test_vocabulary_with_invalid_word_raises(word: str) -> None:
    with pytest.raises(InputError, match="lower-case word"):
        Vocabulary(["fine", word])


def test_tokenizer_equals_vocabulary_after_reload(tmp_path: Path) -> None:
    vocabulary = WORLD.vocabulary
    vocabulary.tokenizer.save_pretrained(tmp_path)
    for tokenizer in (vocabulary.tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        assert len(tokenizer) == len(vocabulary)
        assert tokenizer(TEXT).input_ids == vocabulary.ids(TEXT).tolist()
        assert tokenizer("What is at row 2, column 3?").input_ids[-1] == vocabulary.ids("?")[0]
        assert tokenizer("unheard").input_ids == [vocabulary.unknown]
        assert tokenizer.decode(vocabulary.ids(TEXT)) == TEXT
        ends = (
            tokenizer.pad_token_id,
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.unk_token_id,
        )
        assert ends == (vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.unknown)
        assert tokenizer.convert_tokens_to_ids("<image>") == vocabulary.image
        assert tokenizer.image_token == "<image>"


def test_chat_template_matches_training_prompt() -> None:
    vocabulary = WORLD.vocabulary
    content = [{"type": "text", "text": "what is at row 2 column 3?"}, {"type": "image"}]
    messages = vocabulary.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=True
    )
    expected = [vocabulary.bos, vocabulary.image, *vocabulary.ids(TEXT), vocabulary.answer]
    assert messages["input_ids"] == expected
    messages = vocabulary.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}, {"role": "assistant", "content": "cat"}], return_dict=True
    )
    assert messages["input_ids"] == [*expected, *vocabulary.ids("cat"), vocabulary.eos]
