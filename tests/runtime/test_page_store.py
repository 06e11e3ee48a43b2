"""A page store: right bytes or a miss, within cap and quotas, whatever happens."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pigou.config import ConfigError
from pigou.kv.block import Bytes
from pigou.runtime.stores.page_store import Page, PageStore

SIZE = 512
LAYOUT = "llama/bf16/tp0"
RECORD = SIZE + 128
#: A disk with room for so many pages.
TENURES = ("", "alice", "bob", "tenure1:" + "a" * 64)


def page(number: int, tenure: str = "", chain: int = 4) -> Page:
    """Page `number`; groups of `chain` numbers are one sequence."""
    depth = number % chain
    parent = b"%d" % (number - 1) if depth else None
    return Page(b"%d" % number, parent, depth, tenure)


def content(pages: Sequence[Page]) -> Bytes:
    rows = [
        np.random.default_rng([*p.key, 255, *p.tenure.encode()]).integers(0, 256, SIZE, np.uint8)
        for p in pages
    ]
    return np.array(rows, dtype=np.uint8).reshape(len(pages), SIZE)


def rows_of(pages: Sequence[Page]) -> Any:
    return np.arange(len(pages), dtype=np.int32)


def put(store: PageStore, pages: Sequence[Page]) -> list[Page]:
    stored = store.put(pages, content(pages), rows_of(pages))
    return [p for p, there in zip(pages, stored.tolist(), strict=True) if there]


def get(store: PageStore, pages: Sequence[Page]) -> list[Page]:
    """Which pages the store returns; fails where one is wrong."""
    out = np.zeros((len(pages), SIZE), dtype=np.uint8)
    good = store.get(pages, out, rows_of(pages))
    assert (out[good] == content(pages)[good]).all()
    return [p for p, hit in zip(pages, good.tolist(), strict=True) if hit]


def disk(path: Path, pages: int, more: str = "") -> str:
    return f"disk={pages * RECORD + 4096}B@{path}{more}"


def open_store(tiers: Sequence[str], **options: Any) -> PageStore:
    return PageStore(list(tiers), LAYOUT, SIZE, **options)


def test_what_was_put_is_read_and_leading_pages_are_counted(tmp_path: Path) -> None:
    store = open_store([disk(tmp_path, 50)])
    pages = [page(i, chain=8) for i in range(8)]
    assert put(store, pages[:5]) == pages[:5]
    assert store.held(pages) == 5
    assert store.held(pages[6:]) == 0
    assert store.held([]) == 0
    assert get(store, pages) == pages[:5]
    assert store.drop([pages[4], pages[7]]) == 1
    assert store.held(pages) == 4
    store.close()
    assert get(store, pages) == []
    assert put(store, [page(99)]) == []


def test_a_key_of_another_tenure_or_layout_is_a_miss(tmp_path: Path) -> None:
    tiers = [disk(tmp_path, 50)]
    store = open_store(tiers)
    put(store, [page(0, "alice")])
    for tenure in ("", "bob", "alic", "alice "):
        assert store.held([page(0, tenure)]) == 0
        assert get(store, [page(0, tenure)]) == []
        assert store.drop([page(0, tenure)]) == 0
    assert get(store, [page(0, "alice")])
    store.close()
    other = PageStore(tiers, "llama/fp8/tp0", SIZE)
    assert other.held([page(0, "alice")]) == 0
    other.close()


def test_no_two_pairs_of_layout_tenure_and_key_share_a_page(tmp_path: Path) -> None:
    names = ["", "a", "ab", "b", "\0", "a\0", "é", "\ud800"]
    seen = set()
    for layout in names:
        store = PageStore([f"host={4 * SIZE}B"], layout, SIZE)
        for tenure in names:
            for key in (b"", b"k", b"\0", b"a"):
                seen.add(tuple(store._keys([Page(key, None, 0, tenure)])))
        store.close()
    assert len(seen) == len(names) ** 2 * 4


def test_a_tenure_over_its_quota_loses_its_own_least_recent_pages(tmp_path: Path) -> None:
    store = open_store([disk(tmp_path, 50)], quotas={"alice": 4 * SIZE + 7}, default_quota=6 * SIZE)
    others = put(store, [page(i, "bob") for i in range(6)])
    assert len(others) == 6
    put(store, [page(i, "alice", 1) for i in range(4)])
    get(store, [page(0, "alice", 1)])
    put(store, [page(i, "alice", 1) for i in range(10, 12)])
    assert store.stats()["tenures"]["alice"] == {"bytes": 4 * SIZE, "quota_bytes": 4 * SIZE + 7}
    assert get(store, [page(0, "alice", 1)])
    assert get(store, [page(1, "alice", 1)]) == []
    assert get(store, others) == others
    run = [page(i, "alice", 100) for i in range(20, 40)]
    assert put(store, run) == run[:4]  # the head of a sequence that exceeds the quota
    store.close()


def test_a_quota_counts_what_survived_a_restart_and_may_have_fallen(tmp_path: Path) -> None:
    store = open_store([disk(tmp_path, 50)])
    pages = [page(i, "alice", 10) for i in range(10)]
    put(store, pages)
    put(store, [page(0, "bob")])
    store.close()
    store = open_store([disk(tmp_path, 50)], quotas={"alice": 3 * SIZE})
    assert store.stats()["tenures"]["alice"]["bytes"] == 3 * SIZE
    assert store.held(pages) == 3
    assert get(store, [page(0, "bob")])
    assert store.stats()["bytes"] == 4 * SIZE
    assert len(put(store, [page(20, "alice")])) == 1
    assert store.stats()["tenures"]["alice"]["bytes"] == 3 * SIZE
    assert store.clear("alice") == 3
    assert store.clear() == 1
    assert store.stats()["tenures"] == {}
    store.close()


def test_evicted_pages_move_to_the_next_tier(tmp_path: Path) -> None:
    store = open_store([f"host={4 * SIZE}B,policy=lru", disk(tmp_path, 50, ",policy=lru")])
    pages = [page(i, chain=1) for i in range(12)]
    for p in pages:
        assert put(store, [p])
    near, far = store.stats()["tiers"]
    assert (near["pages"], far["pages"]) == (4, 8)
    assert get(store, pages) == pages
    assert store.stats()["bytes"] == 12 * SIZE
    store.close()
    store = open_store([f"host={4 * SIZE}B", disk(tmp_path, 50)])
    assert get(store, pages) == pages[:8]
    store.close()


def test_pages_slower_to_read_than_to_compute_are_not_worth_it(tmp_path: Path) -> None:
    store = open_store([disk(tmp_path, 50)])
    pages = [page(i, chain=8) for i in range(8)]
    put(store, pages[:6])
    assert store.worth_reading(pages) == 6  # nothing is known of the cost
    store.learn(1e-12)
    assert store.worth_reading(pages) == 0
    store.learn(10.0)
    assert store.worth_reading(pages) == 6
    store.learn(1e-12, 1.0)  # deep pages alone are worth it
    assert store.worth_reading(pages) == 6
    assert store.worth_reading([]) == 0
    store.close()


def test_an_expired_page_is_a_miss_and_its_room_is_free(tmp_path: Path) -> None:
    now = [time.time_ns()]  # a store on disk has its own clock
    store = open_store([disk(tmp_path, 50)], clock=lambda: now[0])
    tenure = f"tenure1:{'b' * 64}:{now[0] + 10**12}"
    assert put(store, [page(0, tenure)])
    now[0] += 10**12
    assert store.held([page(0, tenure)]) == 0
    assert get(store, [page(0, tenure)]) == []
    assert put(store, [page(1, tenure)]) == []
    put(store, [page(1)])
    assert store.stats()["bytes"] == SIZE
    with pytest.raises(ValueError, match="tenure1"):
        store.held([page(0, "tenure1:x")])
    store.close()


def test_a_flipped_bit_is_a_miss_and_the_page_can_be_put_again(tmp_path: Path) -> None:
    store = open_store([disk(tmp_path, 50)])
    pages = [page(i) for i in range(4)]
    put(store, pages)
    file = next(tmp_path.glob("*.pigou-kv"))
    raw = bytearray(file.read_bytes())
    at = raw.index(content(pages[2:3])[0].tobytes()) + 100
    with file.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([raw[at] ^ 8]))
    assert get(store, pages) == [pages[0], pages[1], pages[3]]
    assert store.held(pages) == 2
    assert store.stats()["tiers"][0]["corrupt"] == 1
    assert put(store, pages) == pages
    assert get(store, pages) == pages
    store.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: open_store([]), "no tier"),
        (lambda d: open_store([disk(d, 5), disk(d, 5)]), "name of its own"),
        (lambda d: open_store([f"disk=100B@{d}"]), "give it more"),
        (lambda d: open_store([f"disk=1MiB@{d},policy=nothing"]), "must be one of"),
        (lambda d: open_store([f"disk=1MiB@{d},color=red"]), "color"),
        (lambda d: open_store([f"disk=1MiB@{d},policy=lru,policy=lru"]), "twice"),
        (lambda d: open_store(["disk=1MiB"]), "no place"),
        (lambda d: open_store([f"disk=1XB@{d}"]), "no size"),
        (lambda d: open_store([f"tape=1MiB@{d}"]), "tape"),
        (lambda d: open_store([f"disk=1MiB@{d}"], default_quota=-1), "quota"),
        (lambda d: open_store([f"disk=1MiB@{d}"], quotas={"a": -1}), "'a'"),
        (lambda d: PageStore([f"disk=1MiB@{d}"], "x", 0), "page_bytes"),
        (lambda d: PageStore([f"disk=1MiB@{d}"], "x", 8, page_tokens=-1), "page_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    make: Callable[[Path], PageStore], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_a_folder_in_use_is_refused_and_parameters_of_a_policy_are_read(tmp_path: Path) -> None:
    first = open_store([disk(tmp_path, 5, ",params.eta=0.25")])
    assert first._levels[0].tier.policy.params.eta == 0.25  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="in use"):
        open_store([disk(tmp_path, 5)])
    first.close()


# --- against a model --------------------------------------------------------------------------


def check_limits(store: PageStore, quotas: dict[str, int], default: int | None) -> None:
    """Physical bytes stay under caps, and what tiers hold of a tenure under its quota."""
    with store._writing:
        held = dict.fromkeys(store._tenures, 0)
        counted = {digest: len(t.pages) * SIZE for digest, t in store._tenures.items()}
        assert sum(t["bytes"] for t in store.stats()["tenures"].values()) == sum(counted.values())
        for level in store._levels:
            level.tier.check()
            assert level.store.used_bytes <= level.store.cap_bytes
            records = level.store.entries()
            assert len(records) == len(level.tier)
            for digest in map(bytes, records.tenures):
                held[digest] += SIZE
        assert sum(held.values()) == store.stats()["bytes"]
    for tenure, digest in ((t, store._seeds(t).digest) for t in TENURES):
        quota = quotas.get(tenure, default)
        assert quota is None or held.get(digest, 0) <= quota
    assert counted == held


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "get", "drop", "clear", "reopen", "flip"]),
        st.sampled_from(TENURES),
        st.integers(0, 40),
        st.integers(1, 6),
    ),
    max_size=30,
)


@settings(max_examples=20, deadline=None)
@given(OPERATIONS, st.sampled_from(["lru", "price"]), st.booleans(), st.integers(0, 2**32 - 1))
def test_never_a_wrong_byte_nor_a_byte_over_a_limit(
    tmp_path_factory: pytest.TempPathFactory, operations: Any, policy: str, near: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    quotas, default = {"alice": 5 * SIZE + 1, "bob": 0}, 9 * SIZE
    tiers = [disk(folder, 16, f",policy={policy}")]
    tiers = [f"host={6 * SIZE}B,policy={policy}", *tiers] if near else tiers
    now = [1]
    chance = random.Random(seed)

    def start() -> PageStore:
        return open_store(tiers, quotas=quotas, default_quota=default, clock=lambda: now[0])

    store = start()
    put_before: set[Page] = set()
    flipped = False
    for what, tenure, first, count in operations:
        now[0] += chance.randrange(10**10)
        pages = [page(i, tenure) for i in range(first, first + count)]
        if what == "put":
            stored = put(store, pages)
            put_before.update(stored)
            assert tenure != "bob" or not stored
            assert get(store, stored) == stored
        elif what == "get":
            found = get(store, pages)
            assert put_before.issuperset(found)
            assert found[: store.held(pages)] == pages[: store.held(pages)]
        elif what == "drop":
            store.drop(pages)
            put_before.difference_update(pages)
            assert get(store, pages) == []
        elif what == "clear":
            store.clear(tenure)
            put_before = {p for p in put_before if p.tenure != tenure}
        elif what == "reopen":
            before = [p for p in put_before if store.held([p])]
            near_pages = {p for p in before if store._where([p], store._keys([p]))[0] == 0 and near}
            store.close()
            store = start()
            after = {p for p in before if store.held([p])}
            kept = set(before) - near_pages
            assert after <= kept
            assert after == kept or flipped  # a record whose header was hit is gone
        else:
            files = sorted(folder.glob("*.pigou-kv"))
            if files:
                flip(chance.choice(files), chance)
                flipped = True
                get(store, list(put_before))  # whatever was hit, is a miss
        check_limits(store, quotas, default)
    store.close()


def flip(file: Path, chance: random.Random) -> None:
    with file.open("r+b") as handle:
        size = os.fstat(handle.fileno()).st_size
        at = chance.randrange(size // 2, size)
        handle.seek(at)
        byte = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte[0] ^ (1 << chance.randrange(8))]))


@pytest.mark.parametrize("near", [False, True])
def test_threads_never_see_wrong_bytes_nor_exceed_a_quota(tmp_path: Path, near: bool) -> None:
    quotas, default = {"alice": 7 * SIZE, "": 11 * SIZE - 1}, 5 * SIZE
    tiers = [disk(tmp_path, 24, ",policy=lru")]
    tiers = [f"host={8 * SIZE}B,policy=lru", *tiers] if near else tiers
    store = open_store(tiers, quotas=quotas, default_quota=default)
    errors: list[BaseException] = []
    end = threading.Event()

    def guarded(work: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(120):
                work(chance)
        except BaseException as error:
            errors.append(error)

    def write(chance: random.Random) -> None:
        first, tenure = chance.randrange(60), chance.choice(TENURES)
        put(store, [page(i, tenure) for i in range(first, first + chance.randrange(1, 9))])

    def read(chance: random.Random) -> None:
        first, tenure = chance.randrange(60), chance.choice(TENURES)
        pages = [page(i, tenure) for i in range(first, first + 6)]
        get(store, pages[: store.held(pages)] or pages)

    def remove(chance: random.Random) -> None:
        store.drop([page(chance.randrange(60), chance.choice(TENURES))])

    def watch() -> None:
        try:
            while not end.is_set():
                check_limits(store, quotas, default)
        except BaseException as error:
            errors.append(error)

    watcher = threading.Thread(target=watch)
    works = [write, write, write, read, read, remove]
    threads = [threading.Thread(target=guarded, args=(w, i)) for i, w in enumerate(works)]
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    end.set()
    watcher.join()
    assert not errors, errors[0]
    assert store.stats()["pages"] > 0
    check_limits(store, quotas, default)
    store.close()


KILLED = """
import sys, numpy as np
sys.path.insert(0, sys.argv[1])
from test_page_store import *
store = open_store([disk(Path(sys.argv[2]), 40)], quotas={"alice": 9 * SIZE})
i = 0
while True:
    i == 30 and print("ready", flush=True)
    put(store, [page(i + j, TENURES[i % 3], 5) for j in range(5)])
    store.drop([page(i - 9, TENURES[i % 3], 5)])
    i += 1
"""


def test_a_killed_store_comes_back_with_tenures_and_quotas(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    for delay in (0.3, 0.5):
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            threading.Event().wait(delay)
            process.send_signal(signal.SIGKILL)
        store = open_store([disk(tmp_path, 40)], quotas={"alice": 9 * SIZE})
        survived = store.stats()
        assert survived["pages"] > 5
        check_limits(store, {"alice": 9 * SIZE}, None)
        found = [page(i, t, 5) for t in TENURES[:3] for i in range(5000)]
        assert len(get(store, [p for p in found if store.held([p])])) <= survived["pages"]
        assert survived["tiers"][0]["corrupt"] == 0
        store.close()


def test_a_medium_that_fails_is_a_miss_and_is_tried_again(tmp_path: Path) -> None:
    now = [1]
    store = open_store([disk(tmp_path / "d", 50)], clock=lambda: now[0])
    put(store, [page(0)])
    level = store._levels[0]
    kept = level.store.put

    def broken(*_: object) -> Any:
        from pigou.runtime.stores.store import StoreError

        raise StoreError("disk full")

    level.store.put = broken  # type: ignore[method-assign]
    assert put(store, [page(4)]) == []
    assert not store.stats()["tiers"][0]["up"]
    assert store.held([page(0)]) == 0
    level.store.put = kept  # type: ignore[method-assign]
    assert put(store, [page(8)]) == []  # not before the pause is over
    now[0] += 10**10
    assert put(store, [page(8)])
    assert get(store, [page(0), page(8)]) == [page(0), page(8)]
    store.close()


def test_the_page_store_imports_neither_torch_nor_servers() -> None:
    code = (
        "import sys, pigou.runtime.stores.page_store; "
        "print(*{'torch', 'aiohttp', 'obstore'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == ""
