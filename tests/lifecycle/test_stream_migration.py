"""Laws of what goes on elsewhere of a stream."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pigou.lifecycle.migration import Continuation, ReplyHead, StreamState, can_migrate


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 500), st.data())
def test_a_continuation_has_as_many_tokens_in_all_as_the_request(
    prompt_tokens: int, max_tokens: int, min_tokens: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(0, max_tokens))
    left = Continuation.after(tokens, prompt_tokens, max_tokens, min_tokens)
    assert left.prompt_tokens + left.max_tokens == prompt_tokens + max_tokens
    assert left.prompt_tokens - prompt_tokens == tokens
    assert left.min_tokens == max(0, min_tokens - tokens)


@given(st.lists(st.integers(0, 99)), st.integers(0, 50))
def test_dropping_keeps_just_what_was_shown(tokens: list[int], shown: int) -> None:
    shown = min(shown, len(tokens))
    state = StreamState(tokens=list(tokens), shown=shown)
    assert state.drop_unshown() == len(tokens) - shown
    assert state.tokens == tokens[:shown]
    assert state.drop_unshown() == 0


@given(st.lists(st.integers(0, 2**31), min_size=1))
def test_the_prompt_is_as_long_as_its_ids(ids: list[int]) -> None:
    state = StreamState(prompt=json.dumps(ids).encode())
    assert (state.prompt_tokens, state.prompt_ids()) == (len(ids), ids)


@given(st.booleans(), st.booleans(), st.booleans())
def test_a_stream_that_nobody_saw_can_always_go_elsewhere(
    single: bool, portable: bool, stock: bool
) -> None:
    assert can_migrate(StreamState(), single=single, portable=portable, stock=stock)


def test_a_stream_that_has_begun_needs_its_prompt_and_on_stock_workers_to_be_portable() -> None:
    head = ReplyHead("id", 1, "m")
    begun = StreamState(head=head, prompt=b"[1,2]", tokens=[3])
    nameless = StreamState(head=head, tokens=[3])
    silent = StreamState(head=head)
    table = {
        (single, portable, stock): (
            can_migrate(begun, single=single, portable=portable, stock=stock),
            can_migrate(nameless, single=single, portable=portable, stock=stock),
            can_migrate(silent, single=single, portable=portable, stock=stock),
        )
        for single in (False, True)
        for portable in (False, True)
        for stock in (False, True)
    }
    assert all(row == (False, False, False) for key, row in table.items() if not key[0])
    assert table[True, False, True] == (False, False, True)
    assert table[True, True, True] == table[True, False, False] == (True, False, True)


def test_a_stream_that_reasoned_goes_on_where_tokens_are_resumed_alone() -> None:
    state = StreamState(head=ReplyHead("a"), prompt=b"[1]", tokens=[2], reasoned=True)
    assert can_migrate(state, single=True, portable=True, stock=False)
    assert not can_migrate(state, single=True, portable=True, stock=True)
