"""Tests of incremental detokenization and stop strings."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.adaptive.serve.answer import StreamingText
from tests.adaptive.serve.fake import ByteTokenizer

TEXTS = st.text(st.sampled_from("ab 😀é€ß\ufffd \n"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("ab 😀é"), min_size=1, max_size=4), max_size=4)


def stream_groups(
    tokenizer: Any, groups: list[list[int]], stops: list[str]
) -> tuple[list[str], StreamingText]:
    text = StreamingText(tokenizer, stops)
    return [*(text.push(group) for group in groups), text.close()], text


def split_into_groups(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def truncate_at_stop(text: str, stops: list[str]) -> str:
    """Return the text before the stop string that ends first, by exhaustive search."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start]
    return text


@settings(deadline=None, max_examples=60)
@given(TEXTS, STOPS, st.lists(st.integers(0, 99)))
def test_push_any_grouping_returns_text_before_stop(
    full_text: str, stops: list[str], cuts: list[int]
) -> None:
    pieces, text = stream_groups(ByteTokenizer(), split_into_groups(list(full_text.encode()), cuts), stops)
    assert "".join(pieces) == truncate_at_stop(full_text, stops)
    assert text.stopped == (truncate_at_stop(full_text, stops) != full_text)


@settings(deadline=None)
@given(st.binary(max_size=12), st.lists(st.integers(0, 99)))
def test_push_invalid_utf8_decodes_with_replacement(full_text: bytes, cuts: list[int]) -> None:
    pieces, _ = stream_groups(ByteTokenizer(), split_into_groups(list(full_text), cuts), [])
    assert "".join(pieces) == full_text.decode(errors="replace")


@settings(deadline=None)
@given(TEXTS)
def test_push_partial_character_is_held_back(full_text: str) -> None:
    pieces, _ = stream_groups(ByteTokenizer(), [[byte] for byte in full_text.encode()], [])
    # A replacement character is returned only if the text contains one.
    assert sum(piece.count("\ufffd") for piece in pieces) == full_text.count("\ufffd")


def test_push_prefix_of_stop_is_held_back() -> None:
    text = StreamingText(ByteTokenizer(), ["END", "stop here"])
    assert [text.push([byte]) for byte in b"an EN stop"] == ["a", "n", " ", "", "", "EN ", "", "", "", ""]
    assert text.push(b" sign") == "stop sign"
    assert text.push(b" EN") == " "
    assert text.close() == "EN"
    assert text.num_tokens == 18


def test_push_after_stop_returns_nothing() -> None:
    text = StreamingText(ByteTokenizer(), ["."])
    assert text.push(b"Yes. And") == "Yes"
    assert text.stopped
    assert text.num_tokens == 8
    assert (text.push(b"more"), text.close(), text.num_tokens) == ("", "", 8)


@cache
def make_word_tokenizer() -> Any:
    """Word tokenizer, like that of Grid-VQA."""
    return Vocabulary(["cat", "dog", *(chr(97 + index) + "x" for index in range(26))]).tokenizer


@cache
def make_byte_level_bpe() -> Any:
    """Byte-level BPE, like those of GPT-2, OLMoE and Qwen."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"], show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat and the other cat 😀 😀 é"] * 4, trainer)
    return tokenizer


@cache
def make_sentencepiece() -> Any:
    """SentencePiece-like BPE with byte fallback, like those of Llama and Mixtral."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [
        "<unk>",
        "<eos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁cat",
        "a",
        "b",
        "s",
    ]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<eos>"])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 261), max_size=12), st.lists(st.integers(0, 99), max_size=6))
def test_push_real_tokenizers_matches_full_decode(ids: list[int], cuts: list[int]) -> None:
    for tokenizer, vocab_size in ((make_byte_level_bpe(), 262), (make_word_tokenizer(), 34)):
        token_ids = [token % vocab_size for token in ids]
        pieces, _ = stream_groups(tokenizer, split_into_groups(token_ids, cuts), [])
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["▁", "▁the", "▁cat", "a", "s", "<eos>", "😀", "é"]), max_size=12))
def test_push_sentencepiece_keeps_spaces(pieces: list[str]) -> None:
    tokenizer = make_sentencepiece()
    ids: list[int] = []
    for piece in pieces:
        token = tokenizer.token_to_id(piece)
        ids += [token] if token is not None else [byte + 2 for byte in piece.encode()]
    texts, _ = stream_groups(tokenizer, [[token] for token in ids], [])
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True)
