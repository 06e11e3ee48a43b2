"""Laws of leases: one end each, no life after expiry, none beyond max_hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lib.examples import examples

from pigou.request import NEVER, SECOND
from pigou.worker.kv_transfer.lease import LeaseClock, LeaseTable
from pigou.worker.kv_transfer.transfer_params import TransferError

TERM, MAX_HOLD = 10, 35
steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "renew", "end", "expire"]), st.integers(0, 3), st.integers(0, 12)
    ),
    max_size=60,
)


@given(steps)
def test_a_lease_ends_exactly_once_and_is_never_revived(steps: list[tuple[str, int, int]]) -> None:
    table = LeaseClock(TERM, MAX_HOLD)
    now = 0
    granted: dict[int, int] = {}
    expiry: dict[int, int] = {}
    for step, key, pause in steps:
        now += pause
        if step == "grant" and key not in granted:
            granted[key] = now
            expiry[key] = table.begin(key, now)
        elif step == "grant":
            with pytest.raises(ValueError, match="held already"):
                table.begin(key, now)
        elif step == "renew":
            alive = key in granted and now < expiry[key]
            assert table.renew(key, now) is alive
            if alive:
                expiry[key] = max(expiry[key], min(now + TERM, granted[key] + MAX_HOLD))
        elif step == "end":
            assert table.end(key) is (key in granted)
            granted.pop(key, None)
        else:
            past = {k for k in granted if now >= expiry[k]}
            assert set(table.expire(now)) == past
            for k in past:
                del granted[k]
        assert len(table) == len(granted)
        assert table.next_expiry() == min((expiry[k] for k in granted), default=NEVER)
    assert set(table.expire(now + MAX_HOLD)) == set(granted)


def _book(lease: int, released: list[str]) -> tuple[LeaseTable, threading.Thread]:
    book = LeaseTable(lease, 10 * lease, released.append)
    reaper = threading.Thread(target=book.reap)
    reaper.start()
    return book, reaper


@settings(max_examples=examples(30))
@given(st.lists(st.sampled_from(["release", "finish", "leave"]), min_size=1, max_size=20))
def test_every_offer_is_released_exactly_once(ends: list[str]) -> None:
    released: list[str] = []
    book, reaper = _book(60 * SECOND, released)
    offers = [book.add(str(i), np.arange(2, dtype=np.int32), 20) for i in range(len(ends))]
    for offer, end in zip(offers, ends, strict=True):
        if end == "release":
            assert book.release(offer.request)
            assert not book.release(offer.request)
        elif end == "finish":
            assert book.finish(offer)
            assert not book.finish(offer)
    assert len(book) == ends.count("leave")
    book.close()
    reaper.join(10)
    assert sorted(released) == sorted(o.request for o in offers)
    assert len(book) == 0


@pytest.mark.parametrize("end", ["added", "not expected", "closed", "late"])
def test_an_expected_offer_is_waited_for(end: str) -> None:
    book, reaper = _book(60 * SECOND, [])
    book.expect("r")
    blocks = np.arange(2, dtype=np.int32)
    acts: dict[str, Callable[[], object]] = {
        "added": lambda: book.add("r", blocks, 20, secret="s"),
        "not expected": lambda: book.expect("r", expected=False),
        "closed": book.close,
        "late": lambda: None,
    }
    timer = threading.Timer(0.1, acts[end])
    timer.start()
    began = time.monotonic()
    if end == "added":
        assert book.find("r", "s", wait_s=100).request == "r"
        with pytest.raises(TransferError):
            book.find("r", "other", wait_s=100)
    else:
        with pytest.raises(TransferError):
            book.find("r", "s", wait_s=0.3 if end == "late" else 100)
    assert time.monotonic() - began < 60
    timer.join()
    book.close()
    reaper.join(10)


def test_threads_that_race_to_release_do_it_once() -> None:
    released: list[str] = []
    book, reaper = _book(SECOND // 50, released)
    offers = [book.add(str(i), np.arange(1, dtype=np.int32), 16) for i in range(200)]

    def race() -> None:
        for offer in offers:
            book.finish(offer)
            book.release(offer.request)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book.close()
    reaper.join(10)
    assert sorted(released, key=int) == [str(i) for i in range(200)]


def test_an_expired_offer_can_neither_be_found_nor_confirmed() -> None:
    released: list[str] = []
    book, reaper = _book(SECOND // 20, released)
    offer = book.add("r", np.arange(1, dtype=np.int32), 16)
    while not released:
        threading.Event().wait(0.01)
    assert not book.keep(offer)
    assert not book.finish(offer)
    with pytest.raises(TransferError, match="unknown_request"):
        book.find("r", offer.secret)
    book.close()
    reaper.join(10)
    assert released == ["r"]


def test_a_new_offer_of_the_same_request_does_not_revive_the_old_one() -> None:
    released: list[str] = []
    book, reaper = _book(60 * SECOND, released)
    old = book.add("r", np.arange(1, dtype=np.int32), 16)
    book.release("r")
    new = book.add("r", np.arange(1, dtype=np.int32), 16)
    assert not book.keep(old)
    assert not book.finish(old)
    assert book.keep(new)
    with pytest.raises(TransferError, match="unknown_request"):
        book.find("r", old.secret)
    book.close()
    reaper.join(10)
    assert released == ["r", "r"]
