"""Text grows by whole characters, and does not depend on how tokens were cut into calls."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.text.detokenizer import Detokenizer
from pigou.text.tokenizer import Tokenizer
from pigou.text.vocabulary import Vocabulary, VocabularyError, vocabulary

tokens = st.lists(st.integers(0, 399), max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=6)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def pieces(ids: list[int], at: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in at), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@given(ids=tokens, at=cuts, skip=st.booleans())
@settings(max_examples=examples(400))
def test_concatenated_text_is_the_decoding_of_all_tokens(
    tokenizer: Tokenizer, ids: list[int], at: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(tokenizer.vocabulary, skip)
    shown = [detokenizer.feed(piece) for piece in pieces(ids, at)]
    text = "".join(shown) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip)
    assert text == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@given(ids=tokens, at=st.integers(0, 40))
@settings(max_examples=examples(200))
def test_a_stream_continued_elsewhere_loses_and_doubles_nothing(
    tokenizer: Tokenizer, ids: list[int], at: int
) -> None:
    first, second = Detokenizer(tokenizer.vocabulary), Detokenizer(tokenizer.vocabulary)
    shown = first.feed(ids[:at])
    second.feed(ids[:at])
    assert shown + second.feed(ids[at:]) + second.flush() == tokenizer.decode(ids)


@given(text=st.text(max_size=30))
@settings(max_examples=examples(200))
def test_text_survives_encoding_and_never_shows_half_a_character(
    tokenizer: Tokenizer, text: str
) -> None:
    detokenizer = Detokenizer(tokenizer.vocabulary, skip_special=False)
    shown = [detokenizer.next(token) for token in tokenizer.encode(text, special=False)]
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in shown)


def test_sentencepiece_spaces_and_bytes_are_understood() -> None:
    names = {"<unk>": 0, "</s>": 1, "▁Hello": 2, "▁": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    words = vocabulary(names, {0, 1}, decoder)
    detokenizer = Detokenizer(words)
    assert [detokenizer.next(i) for i in (2, 4, 5, 6, 3, 1)] == [" Hello", "", "", "€", " ", ""]


def test_an_unknown_decoder_is_refused_by_name() -> None:
    with pytest.raises(VocabularyError, match="Strange"):
        vocabulary({"a": 0}, set(), {"type": "Strange"})


def test_an_id_without_a_token_has_no_text() -> None:
    detokenizer = Detokenizer(Vocabulary((b"a", None), frozenset()))
    assert detokenizer.feed([0, 1, 7, 0]) == "aa"
