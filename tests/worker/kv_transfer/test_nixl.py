"""NIXL: blocks are read out of the sender's memory, verified, and nothing is left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transfer_stand as stand
from transfer_stand import BLOCK_SIZE, ids, pull

from pigou.config import ConfigError
from pigou.worker.kv_transfer.block_store import HostBlockStore
from pigou.worker.kv_transfer.nixl import load_nixl, merged
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.transfer_params import TransferReason

_installed = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))
nixl = [
    pytest.mark.nixl,
    pytest.mark.skipif(not _installed, reason="NIXL is not installed: pip install '.[nixl]'"),
]
with_nixl = pytest.mark.parametrize("installed", [pytest.param(True, marks=nixl)])


def test_blocks_that_follow_one_another_at_both_ends_are_one_piece() -> None:
    local = np.array([100, 110, 120, 200, 210], dtype=np.uint64)
    remote = np.array([900, 910, 500, 510, 520], dtype=np.uint64)
    ours, theirs = merged(local, remote, 10)
    assert ours.tolist() == [[100, 20, 0], [120, 10, 0], [200, 20, 0]]
    assert theirs.tolist() == [[900, 20, 0], [500, 10, 0], [510, 20, 0]]


def test_without_nixl_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(
        ConfigError, match=r"pip install '.\[nixl\]' in a checkout of Pigou, or leave nixl out"
    ):
        load_nixl()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """As in other tests, but for file descriptors: UCX keeps some of its own."""
    before = {thread.name for thread in threading.enumerate()}
    yield
    stand.eventually(lambda: {thread.name for thread in threading.enumerate()} == before, 5)


@pytest.fixture
def pair(closing: contextlib.ExitStack) -> Any:
    """`pair(sender's store, receiver's)` returns both ends; NIXL moves the blocks."""

    def make(source: Any, target: Any) -> tuple[Sender, Receiver]:
        sender = Sender(source, lambda _request: None, stand.config(backends=("nixl",)))
        closing.callback(sender.close)
        receiver = Receiver(target, stand.config(backends=("nixl", "tcp")))
        closing.callback(receiver.close)
        return sender, receiver

    return make


def filled(kind: type[HostBlockStore], block_bytes: int = stand.BLOCK_BYTES) -> Any:
    shape = (stand.BLOCKS, block_bytes)
    rows = np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)
    return kind(stand.layout(block_bytes), rows)


@with_nixl
@pytest.mark.parametrize("block_bytes", [stand.BLOCK_BYTES, 3 << 20])
@pytest.mark.parametrize("kind", [HostBlockStore, stand.StagedStore])
def test_the_blocks_asked_for_arrive_in_order_and_no_other_is_touched(
    kind: type[HostBlockStore], block_bytes: int, installed: bool, pair: Any
) -> None:
    source, target = filled(kind, block_bytes), stand.empty_store(kind, block_bytes)
    sender, receiver = pair(source, target)
    for number, (src, dest) in enumerate(
        [(ids(9, 3, 40, 41, 42, 5, 6, 7), ids(0, 5, 2, 3, 4, 63, 62, 61)), (ids(8), ids(1))]
    ):
        tokens = len(src) * BLOCK_SIZE
        outcome = pull(receiver, sender.offer(f"r{number}", src, tokens), dest)
        assert (outcome.reason, outcome.backend) == (TransferReason.OK, "nixl"), outcome.detail
        assert outcome.blocks == len(src)
        assert (target._data[dest] == source._data[src]).all()
    others = np.setdiff1d(np.arange(stand.BLOCKS), [0, 1, 2, 3, 4, 5, 61, 62, 63])
    assert not target._data[others].any()


@with_nixl
def test_a_block_that_changed_meanwhile_does_not_count(installed: bool, pair: Any) -> None:
    source, target = filled(HostBlockStore), stand.empty_store()
    sender, receiver = pair(source, target)
    offer = sender.offer("r", ids(1, 2, 3), 3 * BLOCK_SIZE)
    stand.eventually(lambda: sender._book._offers["r"].ready.is_set())
    source._data[3, 17] ^= 1
    outcome = pull(receiver, offer, ids(1, 2, 3))
    assert outcome.reason is TransferReason.CORRUPT
    assert outcome.blocks == 2


@with_nixl
def test_what_the_sender_did_not_register_is_not_read_and_tcp_takes_over(
    installed: bool, closing: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = filled(HostBlockStore), stand.empty_store()
    sender = Sender(source, lambda _request: None, stand.config(backends=("nixl", "tcp")))
    closing.callback(sender.close)
    receiver = Receiver(target, stand.config(backends=("nixl", "tcp")))
    closing.callback(receiver.close)
    export = sender._exports["nixl"]
    details = export.details

    def elsewhere(blocks: Any) -> dict[str, bytes | int]:
        return details(blocks) | {"address": 4096}

    monkeypatch.setattr(export, "details", elsewhere)
    outcome = pull(receiver, sender.offer("r", ids(1, 2), 2 * BLOCK_SIZE), ids(1, 2))
    assert (outcome.reason, outcome.backend, outcome.blocks) == (TransferReason.OK, "tcp", 2)
