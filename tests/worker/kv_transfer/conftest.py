"""Every transfer test leaves no thread, file descriptor or shared-memory file behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transfer_stand as stand

from pigou.worker.kv_transfer.block_store import PREFIX, SHARED_DIR
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.sender import Sender

Make = Callable[..., Any]


def _mine() -> tuple[set[str], int, set[str]]:
    gc.collect()
    threads = {t.name for t in threading.enumerate()}
    files = {p.name for p in SHARED_DIR.glob(f"{PREFIX}{os.getpid()}-*")}
    return threads, len(os.listdir("/proc/self/fd")), files


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    before = _mine()
    yield
    with contextlib.suppress(AssertionError):  # what a proxy closes may take a moment
        stand.eventually(lambda: _mine() == before, 3)
    assert _mine() == before


@pytest.fixture
def closing() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def make_sender(_nothing_leaks: None, closing: contextlib.ExitStack) -> Make:
    """`make_sender(**config)` returns (sender, its store, list of released requests)."""

    def make(block_bytes: int = stand.BLOCK_BYTES, **changes: Any) -> Any:
        memory = stand.memory(block_bytes)
        closing.callback(memory.close)
        store = stand.filled(memory, block_bytes)
        released: list[str] = []
        sender = Sender(store, released.append, stand.config(**changes), memory)
        closing.callback(sender.close)
        return sender, store, released

    return make


@pytest.fixture
def make_receiver(_nothing_leaks: None, closing: contextlib.ExitStack) -> Make:
    """`make_receiver(store, **config)`."""

    def make(store: Any, **changes: Any) -> Receiver:
        receiver = Receiver(store, stand.config(**changes))
        closing.callback(receiver.close)
        return receiver

    return make
