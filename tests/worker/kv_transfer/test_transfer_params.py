"""A ticket is for one prompt under one tenure, and is refused for any other."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.kv.hashing import chain
from pigou.request import no_hashes
from pigou.wire.errors import APIError
from pigou.worker.kv_transfer.transfer_params import (
    TransferParams,
    checked_transfer_params,
    hash_text,
    signed,
)

KEY = b"k" * 32
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
SEEDS = st.sampled_from([b"one", b"two", b"three"])


def _ticket(tokens: list[int], seed: bytes, blocks: int, size: int = 4) -> TransferParams:
    return TransferParams(
        remote_engine_id="e", remote_request_id="r", remote_host="127.0.0.1", remote_port=1,
        remote_host_id="h", remote_num_tokens=blocks * size, remote_block_size=size,
        remote_layout="l", remote_secret="s", remote_backends=["tcp"], remote_lease_seconds=1.0,
        remote_last_hash=hash_text(chain(tokens, size, seed)[blocks - 1]),
    )  # fmt: skip


@settings(max_examples=examples(300))
@given(made=TOKENS, asked=TOKENS, by=SEEDS, under=SEEDS, known=st.booleans(), data=st.data())
def test_a_ticket_is_taken_for_its_own_prompt_and_tenure_alone(
    made: list[int], asked: list[int], by: bytes, under: bytes, known: bool, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        asked = made[: data.draw(st.integers(0, len(made)))] + asked
    blocks = len(made) // 4
    if not blocks:
        return
    count = data.draw(st.integers(1, blocks))
    params = signed(_ticket(made, by, count), KEY).to_params()
    hashes = chain(asked, 4, under) if known else no_hashes()
    own = by == under and asked[: count * 4] == made[: count * 4]
    assert (checked_transfer_params(params, KEY, asked, hashes, under) is not None) == own


SIGNED = ("remote_host", "remote_port", "remote_secret", "remote_num_tokens", "remote_last_hash",
          "remote_engine_id", "remote_layout", "remote_mac")  # fmt: skip


@pytest.mark.parametrize("field", SIGNED)
def test_a_ticket_that_was_altered_is_refused_with_a_log(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = list(range(16))
    params = signed(_ticket(tokens, b"one", 2), KEY).to_params()
    assert checked_transfer_params(params, KEY, tokens, no_hashes(), b"one") is not None
    other = {"remote_port": 2, "remote_num_tokens": 4, "remote_mac": "0" * 64,
             "remote_last_hash": "0" * 32}  # fmt: skip
    with caplog.at_level(logging.WARNING):
        altered = params | {field: other.get(field, "other")}
        assert checked_transfer_params(altered, KEY, tokens, no_hashes(), b"one") is None
    assert "is not signed by this fleet" in caplog.text


@pytest.mark.parametrize("key", [b"", b"other"])
def test_a_ticket_of_another_fleet_or_of_none_is_refused(key: bytes) -> None:
    tokens = list(range(16))
    params = signed(_ticket(tokens, b"one", 2), key).to_params()
    assert checked_transfer_params(params, KEY, tokens, no_hashes(), b"one") is None


def test_the_flag_that_the_gateway_sets_leaves_a_ticket_good() -> None:
    tokens = list(range(16))
    params = signed(_ticket(tokens, b"one", 2), KEY).to_params() | {"do_remote_decode": True}
    assert checked_transfer_params(params, KEY, tokens, no_hashes(), b"one") is not None


def test_what_is_no_ticket_is_a_bad_request() -> None:
    with pytest.raises(APIError) as bad:
        checked_transfer_params({"do_remote_prefill": True}, KEY, [1], no_hashes(), b"one")
    assert (bad.value.status, bad.value.param) == (400, "kv_transfer_params")
