"""Word-level vocabulary of questions and answers, and its transformers tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import InputError

PAD, BOS, EOS, UNKNOWN, IMAGE, ANSWER = SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "<answer>")
"""`<image>` stands for a vision token, `<answer>` ends a question."""

CHAT_TEMPLATE = """\
{{- '<bos>' -}}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}{{- '<answer> ' -}}{%- endif -%}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>' -}}{%- endfor -%}
    {%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
  {%- endif -%}
  {%- if message['role'] == 'assistant' -%}{{- '<eos>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<answer>' -}}{%- endif -%}
"""
"""Images precede the text of their message; each `<image>` is expanded to its vision tokens."""


class Vocabulary:
    """Words and their ids.

    Args:
        words: Lower-case words and single signs in any order; duplicates are ignored.

    Raises:
        InputError: An entry is not a single word or sign, or is a special token.
    """

    def __init__(self, words: Iterable[str]) -> None:
        ordinary = sorted(set(words))
        for word in ordinary:
            if (
                word in SPECIALS
                or word != word.lower()
                or not (word.isalnum() or (len(word) == 1 and word.strip()))
            ):
                raise InputError(f"{word!r} must be a lower-case word or a single sign")
        self.words: tuple[str, ...] = (*SPECIALS, *ordinary)
        self._ids = {word: index for index, word in enumerate(self.words)}
        self.pad, self.bos, self.eos, self.unknown, self.image, self.answer = range(len(SPECIALS))

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, text: str | Sequence[str]) -> np.ndarray:
        """Ids of words, given as a list or separated by spaces, int64.

        Raises:
            InputError: A word is unknown.
        """
        words = text.split() if isinstance(text, str) else text
        unknown = [word for word in words if word not in self._ids]
        if unknown:
            raise InputError(f"{unknown[0]!r} is not one of the {len(self)} words")
        return np.array([self._ids[word] for word in words], np.int64)

    def text(self, ids: Iterable[int]) -> str:
        """Words separated by spaces, without special tokens."""
        return " ".join(self.words[index] for index in ids if index >= len(SPECIALS))

    @cached_property
    def tokenizer(self) -> Any:
        """The vocabulary as a `PreTrainedTokenizerFast` with a chat template.

        Raises:
            MissingExtraError: transformers is missing.
        """
        transformers, tokenizers = require("transformers", "adaptive"), require("tokenizers", "adaptive")
        model = tokenizers.models.WordLevel(dict(self._ids), unk_token=UNKNOWN)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN,
            extra_special_tokens={"image_token": IMAGE, "answer_token": ANSWER},
            chat_template=CHAT_TEMPLATE, padding_side="left", clean_up_tokenization_spaces=False,
        )  # fmt: skip
