"""Chats that grow are encoded message by message, exactly as if they were encoded as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

import pigou.models
from pigou.text.tokenizer import SegmentCache
from pigou.text.tokenizer import Tokenizer as ModelTokenizer

TINY = ModelTokenizer.load(Path(pigou.models.__file__).parent / "tiny")
SPECIAL = [t.content for t in TINY.backend.get_added_tokens_decoder().values()]
PIECES = st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(max_size=30)), max_size=12)


@settings(deadline=None, max_examples=300)
@given(chats=st.lists(PIECES, min_size=1, max_size=4), scope=st.sampled_from(["a", "b"]))
def test_segments_make_the_tokens_of_the_whole(chats: list[list[str]], scope: str) -> None:
    assert TINY.segments is not None
    for chat in chats:
        for end in range(len(chat) + 1):
            text = "".join(chat[:end])
            assert TINY.encode(text, False, scope) == TINY.encode(text, False)


def test_a_message_is_encoded_once_in_its_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SegmentCache(TINY.backend)
    encoded: list[list[str]] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> object:
            encoded.append(texts)
            return TINY.backend.encode_batch_fast(texts, **options)

    monkeypatch.setattr(cache, "_backend", Counting())
    one, two = f"{SPECIAL[3]}hello{SPECIAL[1]}", f"{SPECIAL[4]}world"
    cache.encode(one, "a")
    cache.encode(one + two, "a")
    cache.encode(one + two, "a")
    assert encoded == [["hello"], ["world"]]
    cache.encode(one, "b")
    assert encoded[2:] == [["hello"]], "scopes share nothing"


def test_the_cache_stays_within_its_bound_and_drops_what_was_used_longest_ago() -> None:
    cache = SegmentCache(TINY.backend, max_characters=20)
    for text in ("a" * 9, "b" * 9, "a" * 9, "c" * 9):
        cache.encode(text, "")
    assert [text[0] for _, text in cache._known] == ["a", "c"]
    assert cache.encode("d" * 50, "") == TINY.backend.encode("d" * 50).ids
    assert not cache._known


@pytest.mark.parametrize("odd", ["lstrip", "rstrip", "single_word", "normalized", "first"])
def test_a_tokenizer_whose_segments_depend_on_their_neighbours_has_none(odd: str) -> None:
    backend = Tokenizer(models.BPE())
    flags = {odd: True} if odd != "first" else {}
    backend.add_special_tokens([AddedToken("<s>", **{"normalized": False, **flags})])
    before = {"prepend_scheme": "first"} if odd == "first" else {}
    assert SegmentCache.of(backend, {"pre_tokenizer": before}) is None
    nested = {"pre_tokenizer": {"pretokenizers": [before]}}
    assert SegmentCache.of(backend, nested) is None


def test_a_tokenizer_without_added_tokens_has_none() -> None:
    assert SegmentCache.of(Tokenizer(models.BPE()), {}) is None
