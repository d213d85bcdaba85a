"""The text of an answer while its tokens come in."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.adaptive.serve.answer import StreamingText
from tests.adaptive.serve.fake import Bytes

TEXTS = st.text(st.sampled_from("ab 😀é€ß\ufffd \n"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("ab 😀é"), min_size=1, max_size=4), max_size=4)


def streamed(tokenizer: Any, groups: list[list[int]], stops: list[str]) -> tuple[list[str], StreamingText]:
    text = StreamingText(tokenizer, stops)
    return [*(text.push(group) for group in groups), text.close()], text


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def cut(text: str, stops: list[str]) -> str:
    """By brute force: up to the first stop string that ends."""
    for end in range(len(text) + 1):
        for start in range(end):
            if text[start:end] in stops:
                return text[:start]
    return text


@settings(deadline=None)
@given(TEXTS, STOPS, st.lists(st.integers(0, 99)))
def test_pieces_are_the_text_up_to_the_first_stop_string(
    said: str, stops: list[str], cuts: list[int]
) -> None:
    pieces, text = streamed(Bytes(), grouped(list(said.encode()), cuts), stops)
    assert "".join(pieces) == cut(said, stops)
    assert text.stopped == (cut(said, stops) != said)


@settings(deadline=None)
@given(st.binary(max_size=12), st.lists(st.integers(0, 99)))
def test_broken_bytes_lose_nothing_and_hurt_nobody(said: bytes, cuts: list[int]) -> None:
    pieces, _ = streamed(Bytes(), grouped(list(said), cuts), [])
    assert "".join(pieces) == said.decode(errors="replace")


@settings(deadline=None)
@given(TEXTS)
def test_no_piece_holds_half_a_character(said: str) -> None:
    pieces, _ = streamed(Bytes(), [[byte] for byte in said.encode()], [])
    # Sent one by one, each piece is a whole character; the sign for a broken one is only there if it was
    # said.
    assert sum(piece.count("\ufffd") for piece in pieces) == said.count("\ufffd")


def test_what_may_become_a_stop_string_is_held_back() -> None:
    text = StreamingText(Bytes(), ["END", "stop here"])
    assert [text.push([byte]) for byte in b"an EN stop"] == ["a", "n", " ", "", "", "EN ", "", "", "", ""]
    assert text.push(b" sign") == "stop sign"
    assert text.push(b" EN") == " "
    assert text.close() == "EN"
    assert text.tokens == 18


def test_nothing_comes_after_a_stop_string() -> None:
    text = StreamingText(Bytes(), ["."])
    assert text.push(b"Yes. And") == "Yes"
    assert text.stopped
    assert text.tokens == 8
    assert (text.push(b"more"), text.close(), text.tokens) == ("", "", 8)


@cache
def words() -> Any:
    """Whole words, as of Grid-VQA."""
    return Vocabulary(["cat", "dog", *(chr(97 + at) + "x" for at in range(26))]).tokenizer


@cache
def byte_level() -> Any:
    """A byte-level BPE, as of GPT-2, OLMoE and Qwen."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"], show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["the cat and the other cat 😀 😀 é"] * 4, trainer)
    return made


@cache
def sentence_piece() -> Any:
    """Pieces with a sign for blanks and bytes for what is not there, as of Llama and Mixtral."""
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
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<eos>"])
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@settings(deadline=None)
@given(st.lists(st.integers(0, 261), max_size=12), st.lists(st.integers(0, 99), max_size=6))
def test_tokens_of_real_kinds_of_tokenizers_make_the_same_text_one_by_one(
    ids: list[int], cuts: list[int]
) -> None:
    for tokenizer, known in ((byte_level(), 262), (words(), 34)):
        kept = [token % known for token in ids]
        pieces, _ = streamed(tokenizer, grouped(kept, cuts), [])
        assert "".join(pieces) == tokenizer.decode(kept, skip_special_tokens=True)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁the", "▁cat", "a", "s", "<eos>", "😀", "é"]), max_size=12))
def test_blanks_before_words_are_kept(pieces: list[str]) -> None:
    tokenizer = sentence_piece()
    ids: list[int] = []
    for piece in pieces:
        known = tokenizer.token_to_id(piece)
        ids += [known] if known is not None else [byte + 2 for byte in piece.encode()]
    found, _ = streamed(tokenizer, [[token] for token in ids], [])
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=True)
