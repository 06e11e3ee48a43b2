"""Both ends of a side channel prove that they are of one fleet, before anything is read."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import numpy as np
import pytest
import transfer_stand as stand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples
from transfer_stand import ids, pull

from pigou.kv.hashing import chain
from pigou.request import SECOND
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import FleetSecret
from pigou.worker.kv_transfer.block_store import PREFIX, SHARED_DIR
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.side_channel_protocol import (
    REPLIES,
    REQUESTS,
    Challenge,
    Decline,
    Hello,
    Open,
    Proof,
    Refuse,
    SideChannelLink,
    transfer_key,
)
from pigou.worker.kv_transfer.transfer_params import (
    TransferReason,
    checked_transfer_params,
    hash_text,
    read_transfer_params,
    signed,
)

ONE, OTHER = (transfer_key(FleetSecret(character * 32)) for character in "ab")


@pytest.fixture
def fleet(closing: Any) -> Any:
    """Return a function from two keys to (sender, its store, a receiver, its store)."""

    def make(key: bytes, receivers: bytes, **changes: Any) -> Any:
        memory = stand.memory()
        closing.callback(memory.close)
        store, landing = stand.filled(memory), stand.empty_store()
        sender = Sender(store, lambda _: None, stand.config(**changes), memory, key=key)
        closing.callback(sender.close)
        receiver = Receiver(landing, stand.config(**changes), key=receivers)
        closing.callback(receiver.close)
        return sender, store, receiver, landing

    return make


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_two_who_know_one_secret_exchange_blocks(fleet: Any, backend: str) -> None:
    sender, store, receiver, landing = fleet(ONE, ONE, backends=(backend,))
    for turn in range(3):  # a connection that is kept need not prove anything again
        outcome = pull(receiver, sender.offer(str(turn), ids(1, 2), 32), ids(4, 5))
        assert (outcome.reason, outcome.blocks, outcome.backend) == (TransferReason.OK, 2, backend)
    assert (landing.as_bytes()[4:6] == store.as_bytes()[1:3]).all()


@pytest.mark.parametrize("keys", [(ONE, OTHER), (ONE, b""), (b"", ONE)])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_who_knows_no_secret_or_another_gets_nothing_and_frees_nothing(
    fleet: Any, keys: tuple[bytes, bytes], backend: str
) -> None:
    sender, _, receiver, landing = fleet(*keys, backends=(backend,))
    params = sender.offer("r", ids(1, 2), 32)
    if keys[1]:  # past the ticket's own signature
        params = signed(read_transfer_params(params), keys[1]).to_params()
    outcome = pull(receiver, params, ids(4, 5))
    assert outcome.blocks == 0
    assert outcome.reason in (TransferReason.UNPROVEN, TransferReason.CUT)
    assert not landing.as_bytes().any()
    assert sender.held == 1


def test_a_sender_without_the_secret_is_not_believed(fleet: Any) -> None:
    """It may listen where a ticket points to, and offer anything."""
    *_, receiver, landing = fleet(ONE, ONE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender, *_ = fleet(ONE, ONE)
        params = sender.offer("r", ids(1), 16) | {"remote_port": listener.getsockname()[1]}
        params["remote_mac"] = signed(read_transfer_params(params), ONE).remote_mac

        def lie() -> None:
            near, _ = listener.accept()
            link = SideChannelLink(near, SECOND)
            hello = link.receive(REQUESTS, 4096)
            assert isinstance(hello, Hello)
            link.send(Challenge(b"n" * 32, b"m" * 32))
            near.close()

        thread = threading.Thread(target=lie)
        thread.start()
        outcome = pull(receiver, params, ids(0))
        thread.join()
    assert outcome.reason is TransferReason.UNPROVEN
    assert not landing.as_bytes().any()


@pytest.mark.parametrize("first", ["open", "decline", "proof", "short", "replay"])
def test_whoever_begins_otherwise_is_refused_and_frees_nothing(fleet: Any, first: str) -> None:
    sender, *_ = fleet(ONE, ONE)
    params = sender.offer("r", ids(1), 16)
    named = (sender.engine_id, "r", params["remote_secret"])
    frames = {
        "open": Open(*named, params["remote_layout"], 0, 1, "tcp"),
        "decline": Decline(*named),
        "proof": Proof(b"x" * 32),
        "short": Hello(b"x"),
        "replay": Hello(b"x" * 32),
    }
    link = SideChannelLink(socket.create_connection(("127.0.0.1", sender.port), 5), 5 * SECOND)
    link.send(frames[first])
    told = link.receive(REPLIES, 4096)
    if first == "replay":
        assert isinstance(told, Challenge)
        link.send(Proof(told.mac))  # what the sender itself has just shown
        told = link.receive(REPLIES, 4096)
    assert isinstance(told, Refuse)
    assert told.reason == TransferReason.UNPROVEN
    link.close()
    assert sender.held == 1


def test_shared_memory_has_a_name_that_nobody_guesses_and_is_its_owners_alone(fleet: Any) -> None:
    before = set(SHARED_DIR.glob(f"{PREFIX}{os.getpid()}-*"))
    fleet(ONE, ONE)
    [path] = set(SHARED_DIR.glob(f"{PREFIX}{os.getpid()}-*")) - before
    assert len(path.name.rpartition("-")[2]) == 32
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_ticket_is_spent_once(fleet: Any) -> None:
    sender, _, receiver, _ = fleet(ONE, ONE)
    params = sender.offer("r", ids(1), 16)
    assert pull(receiver, params, ids(0)).reason is TransferReason.OK
    assert pull(receiver, params, ids(1)).reason is TransferReason.UNKNOWN


PROMPTS = [list(range(40)), list(range(7, 47)), [0] * 39, list(range(24)) + [5] * 16]
SEEDS = [b"tenant one", b"tenant two"]
MIXED = ("remote_request_id", "remote_secret", "remote_last_hash", "remote_num_tokens",
         "remote_mac")  # fmt: skip


@pytest.fixture
def offers(fleet: Any) -> Any:
    """Return, for a key, both stores, the receiver, and an offer of each prompt in each tenure."""

    def make(key: bytes) -> Any:
        sender, store, receiver, landing = fleet(key, key, max_hold=600 * SECOND,
                                                 lease=600 * SECOND)  # fmt: skip
        made = {}
        for p, tokens in enumerate(PROMPTS):
            for s, seed in enumerate(SEEDS):
                at = 2 * (len(SEEDS) * p + s)
                last = hash_text(chain(tokens, 16, seed)[1])
                made[p, s] = (ids(at, at + 1), last)
        return sender, store, receiver, landing, made

    return make


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("key", [ONE, b""], ids=["secret", "open"])
def test_no_mix_of_tickets_puts_a_block_under_a_wrong_hash(
    offers: Any, key: bytes, data: st.DataObject
) -> None:
    sender, store, receiver, landing, made = offers(key)
    names = st.sampled_from(sorted(made))
    params = {}
    for name in made:
        blocks, last = made[name]
        request = f"{name}"
        sender.release(request)
        params[name] = sender.offer(request, blocks, 32, last)
    ticket = dict(params[data.draw(names)])
    for field in MIXED:
        ticket[field] = params[data.draw(names)][field]
    if data.draw(st.booleans()):
        ticket["remote_num_tokens"] = data.draw(st.sampled_from([16, 32, 48]))
    asked = data.draw(names)
    tokens, seed = PROMPTS[asked[0]], SEEDS[asked[1]]
    try:
        good = checked_transfer_params(ticket, key, tokens, chain(tokens, 16, seed), seed)
    except APIError:
        good = None
    if good is None:
        return
    landing.as_bytes()[:] = 0
    outcome = pull(receiver, ticket, ids(40, 41)[: good.blocks])
    if not outcome.blocks:
        return
    own = made[asked][0]
    assert np.array_equal(landing.as_bytes()[40 : 40 + outcome.blocks],
                          store.as_bytes()[own[: outcome.blocks]])  # fmt: skip
    assert not key or ticket == params[asked]
