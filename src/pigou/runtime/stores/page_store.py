"""PageStore: KV pages of another engine in Pigou's tiers, with eviction, quotas and tenures."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from pigou.config import ConfigError, check_bounds
from pigou.kv.block import ROOT, Block, Bytes, hashes_of
from pigou.kv.offload import RecomputeCost, TierSpeed, blocks_worth_loading
from pigou.kv.tenure import salt_expiry
from pigou.kv.tier import Tier
from pigou.kv.tier_config import HOST, STORES, StoreTier, check_names, read_tier
from pigou.kv.tier_eviction.policy import TierSetting, load
from pigou.registry import named
from pigou.request import SECOND, Ints
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.store import BlockRecords, Bools, OpenStore, Store, StoreError
from pigou.runtime.stores.transfer_queue import TransferRate

log = logging.getLogger(__name__)

_PERSON = b"pigou-page-1"
#: Guesses until measured: seconds to compute a token, read latency, bytes read in a second.
_TOKEN, _LATENCY, _RATE = 1e-4, 1e-4, 1e9
#: Relative change of the recompute cost before policies value pages again.
_CHANGED = 0.25
#: Pause of a tier whose medium failed, ns.
_PAUSE = 10 * SECOND


class Page(NamedTuple):
    """One page of KV, by the engine's own key."""

    key: bytes  # any length
    parent: bytes | None = None  # key of the page before it in its sequence; None for the first
    depth: int = 0  # pages before it
    tenure: str = ""  # the request's `cache_salt`; pages are shared within a tenure only


@dataclass(slots=True)
class _Tenure:
    name: str  # hexadecimal digest until the tenure is seen again after a restart
    quota: int | None
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # least recent use first


@dataclass(slots=True)
class _Level:
    """One tier: what it holds, its bytes, and how its medium does."""

    name: str
    tier: Tier
    store: Store
    rate: TransferRate
    resume: int = 0  # end of its pause, ns; its medium failed before
    evicted: int = 0


class PageStore:
    """Pages of one layout in tiers, nearest first; a page is in one tier at a time. Thread-safe.

    Evicted pages move to the next tier where its policy admits them. A tenure over its quota loses
    its own least recently used pages. With a page dropped go the later ones of its sequence.

    Example:
        store = PageStore(["disk=100GiB@/DIR"], layout="llama/bf16/tp0", page_bytes=2**21)
        stored = store.put(pages, data, rows)
        n = store.worth_reading(pages)
        good = store.get(pages[:n], out, rows[:n])
    """

    def __init__(
        self, tiers: Sequence[str | StoreTier], layout: str, page_bytes: int, *,
        page_tokens: int = 0, quotas: Mapping[str, int] | None = None,
        default_quota: int | None = None, clock: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        """Open tiers as in `NAME=SIZE[@PLACE],policy=NAME`; raises ConfigError.

        `layout` names all that decides a page's bytes (model, dtype, shape, rank). Quotas are in
        bytes of pages, by tenure; without one the tiers' sizes are the only limit.
        """
        for name, value in (("page_bytes", page_bytes), ("page_tokens", page_tokens + 1)):
            check_bounds(name, value, ge=1)
        for tenure, quota in {**(quotas or {}), "*": default_quota or 0}.items():
            check_bounds(f"quota of {tenure!r}", quota, ge=0)
        self.page_bytes, self.page_tokens = page_bytes, page_tokens
        self._layout, self._clock, self._default_quota = layout, clock, default_quota
        self._quotas = {_digest(name): (name, n) for name, n in (quotas or {}).items()}
        self._seeds = lru_cache(4096)(partial(_seed, layout))
        self._lock = threading.Lock()
        self._writing = threading.RLock()  # taken before the other
        self._tenures: dict[bytes, _Tenure] = {}  # by digest
        self._owners: dict[bytes, bytes] = {}  # tenure digest by page
        self._cost: RecomputeCost | None = None
        self._hits = self._misses = 0
        options = [read_tier(tier) if isinstance(tier, str) else tier for tier in tiers]
        check_names(options)
        if not options:
            raise ConfigError("a page store has no tier; give one, as disk=100GiB@/DIR")
        self._levels: list[_Level] = []
        try:
            for option in options:
                self._levels.append(self._open(option))
            with self._writing:
                for level in self._levels:
                    self._recover(level)
        except BaseException:
            self.close()
            raise

    def _open(self, option: StoreTier) -> _Level:
        size = self.page_bytes
        namespace = _digest(str(size), self._layout)[:16]
        try:
            if option.name == HOST:
                arena = np.empty((option.size_bytes // size, size), np.uint8)
                store: Store = HostStore(arena, len(arena), clock=self._clock)
            else:
                kind: OpenStore = named(STORES, option.name, "tier")
                store = kind(option.uri, namespace, size, option.size_bytes)
        except (StoreError, ValueError) as error:
            raise ConfigError(f"tier {option.name} cannot be used: {error}") from None
        if store.capacity < 1:
            store.close()
            raise ConfigError(
                f"tier {option.name} has {option.size_bytes} bytes, room for no page of {size}; "
                "give it more"
            )
        cap = store.capacity * size
        cost = RecomputeCost(base=max(1, self.page_tokens) * _TOKEN)
        policy = load(option.policy, TierSetting(cap, cost), option.params)
        tier = Tier(cap, policy, rooted=False)
        return _Level(option.name, tier, store, TransferRate(_LATENCY, size / _RATE))

    def _recover(self, level: _Level) -> None:
        """Register the pages that survived in a tier; delete those beyond cap or quota."""
        try:
            records = level.store.entries()
        except StoreError as error:
            self._failed(level, error)
            return
        records = records.take(np.argsort(records.depths, kind="stable"))
        gone, now = [], self._clock()
        survivors = zip(records.blocks(self.page_bytes), map(bytes, records.tenures), strict=True)
        for block, digest in survivors:
            owner = self._tenure(digest)
            fits = block.key not in self._owners and self._room(owner) > 0
            if fits and level.tier.admit([block], now).admitted:
                self._own(digest, owner, [block])
            else:
                gone.append(block.key)
        for owner in self._tenures.values():  # the deepest is the least recent
            owner.pages = OrderedDict(reversed(owner.pages.items()))
        self._erase(level, gone)

    def held(self, pages: Sequence[Page]) -> int:
        """Return how many leading pages can be read, without I/O."""
        return len(self._readable_tiers(pages))

    def worth_reading(self, pages: Sequence[Page]) -> int:
        """Return how many leading pages are read sooner than computed (`learn`), without I/O."""
        with self._lock:
            speeds = [TierSpeed(*level.rate.law()) for level in self._levels]
        first = pages[0].depth if pages else 0
        return blocks_worth_loading(self._readable_tiers(pages), first, speeds, self._cost)

    def learn(self, seconds_per_page: float, seconds_per_depth: float = 0.0) -> None:
        """Set the seconds to compute a page: of the first, and more for each page before it."""
        with self._lock:
            before = self._cost.base if self._cost is not None else 0.0
            self._cost = RecomputeCost(seconds_per_page, seconds_per_depth)
            if abs(seconds_per_page - before) > _CHANGED * before:
                for level in self._levels:
                    read = level.rate.law()[1] / self.page_bytes
                    level.tier.policy.learn(replace(self._cost, restore=read))

    def get(self, pages: Sequence[Page], out: Bytes, rows: Ints) -> Bools:
        """Read pages into `rows` of C-contiguous `out`, (any, page_bytes); return which are right.

        Rows of other pages are undefined. Torn and altered pages are misses, and dropped.
        """
        good: Bools = np.zeros(len(pages), dtype=np.bool_)
        keys = self._keys(pages)
        where = self._where(pages, keys)
        for number, level in enumerate(self._levels):
            index = np.flatnonzero(where == number)
            if not len(index):
                continue
            begin = time.perf_counter()
            try:
                good[index] = level.store.get(hashes_of([keys[i] for i in index]), out, rows[index])
            except StoreError as error:
                self._failed(level, error)
                continue
            with self._lock:
                if good[index].any():
                    level.rate.observe(int(good[index].sum()), time.perf_counter() - begin)
        self._use(pages, keys, where, good)
        if bad := [keys[i] for i in np.flatnonzero((where >= 0) & ~good)]:
            with self._writing:  # no put is under way, so what no store has is lost
                self._delete([key for key in bad if not self._stored(key)])
        return good

    def _readable_tiers(self, pages: Sequence[Page]) -> list[int]:
        tiers: list[int] = self._where(pages, self._keys(pages)).tolist()
        return tiers[: tiers.index(-1)] if -1 in tiers else tiers

    def _where(self, pages: Sequence[Page], keys: Sequence[bytes]) -> Ints:
        """Return the tier that each page can be read from, -1 if none, shape (n,)."""
        where = np.full(len(keys), -1, dtype=np.int32)
        now = self._clock()
        for number in reversed(range(len(self._levels))):
            if keys and self._up(self._levels[number]):
                where[self._levels[number].store.has(hashes_of(keys))] = number
        where[[self._seeds(page.tenure).expiry <= now for page in pages]] = -1
        return where

    def _use(
        self, pages: Sequence[Page], keys: Sequence[bytes], where: Ints, good: Bools
    ) -> None:  # fmt: skip
        now = self._clock()
        with self._lock:
            self._hits += int(good.sum())
            self._misses += int((~good).sum())
            for run in _runs(pages):
                read = [i for i in run if good[i] and keys[i] in self._owners]
                for number, level in enumerate(self._levels):
                    in_tier = [keys[i] for i in read if where[i] == number]
                    level.tier.hit([key for key in in_tier if key in level.tier], now)
                for i in reversed(read):
                    self._tenures[self._owners[keys[i]]].pages.move_to_end(keys[i])

    def _stored(self, key: bytes) -> bool:
        return any(level.store.has(hashes_of([key]))[0] for level in self._levels)

    def put(self, pages: Sequence[Page], data: Bytes, rows: Ints) -> Bools:
        """Store pages from `rows` of C-contiguous `data`, (any, page_bytes); return which are held.

        Not held: those without room in the quota, not worth their room, expired, and all while the
        medium fails.
        """
        keys = self._keys(pages)
        with self._writing:
            now = self._clock()
            with self._lock:
                expired = [key for level in self._levels for key in level.tier.expire(now)]
            self._delete(expired)
            for run in _runs(pages):
                row_of = {keys[i]: int(rows[i]) for i in run}
                self._put_run([pages[i] for i in run], [keys[i] for i in run], data, row_of, now)
            return np.array([key in self._owners for key in keys], dtype=np.bool_)

    def _put_run(
        self, run: Sequence[Page], keys: Sequence[bytes], data: Bytes,
        row_of: Mapping[bytes, int], now: int,
    ) -> None:  # fmt: skip
        seed, number = self._seeds(run[0].tenure), self._next_up(-1)
        new = {
            key: Block(
                key, ROOT if page.parent is None else _key(seed.key, page.parent), page.depth,
                self.page_bytes, seed.expiry,
            )
            for page, key in zip(run, keys, strict=True)
            if key not in self._owners
        }  # fmt: skip
        if number is None or not new or seed.expiry <= now:
            return
        owner = self._tenure(seed.digest, run[0].tenure)
        if (excess := len(new) - self._room(owner)) > 0:
            oldest = (key for key in owner.pages if key not in row_of)
            self._delete(list(islice(oldest, excess)))
        candidates = list(new.values())[: self._room(owner)]
        admitted = set(self._admit(number, candidates, now)) if candidates else set()
        blocks = [block for block in candidates if block.key in admitted]
        self._own(seed.digest, owner, blocks)
        self._write(number, blocks, data, np.array([row_of[block.key] for block in blocks], int))

    def _admit(self, number: int, blocks: Sequence[Block], now: int) -> list[bytes]:
        """Admit blocks of one chain to a tier; move what they evict to the next, or delete it."""
        level, below = self._levels[number], self._next_up(number)
        with self._lock:
            admitted, evicted = level.tier.admit(blocks, now)
            level.evicted += len(evicted)
        if below is None:
            self._delete([block.key for block in evicted])
            return admitted
        for block in sorted(evicted, key=lambda block: block.depth):
            self._move(level, below, block, now)
        return admitted

    def _move(self, level: _Level, below: int, block: Block, now: int) -> None:
        """Move a page to another tier; it is never in both, so that no quota is exceeded."""
        data, row = np.empty((1, self.page_bytes), dtype=np.uint8), np.zeros(1, dtype=np.int32)
        read = False
        try:
            read = bool(level.store.get(hashes_of([block.key]), data, row)[0])
        except StoreError as error:
            self._failed(level, error)
        self._erase(level, [block.key])
        if read and self._admit(below, [block], now):
            self._write(below, [block], data, row)
        else:
            self._delete([block.key])

    def _write(self, number: int, blocks: Sequence[Block], data: Bytes, rows: Ints) -> None:
        """Write admitted pages; those that the store refuses are deleted."""
        if not blocks:
            return
        level, keys = self._levels[number], [block.key for block in blocks]
        records = BlockRecords.of(blocks)
        owners = b"".join(self._owners[key] for key in keys)
        records.tenures[:] = np.frombuffer(owners, np.uint8).reshape(records.tenures.shape)
        try:
            level.store.put(records, data, rows)
        except StoreError as error:
            self._failed(level, error)
        stored = level.store.has(records.keys)
        self._delete([key for key, held in zip(keys, stored, strict=True) if not held])

    def drop(self, pages: Sequence[Page]) -> int:
        """Drop pages, and later pages of their sequences; return how many of `pages` were held."""
        with self._writing:
            held = [key for key in set(self._keys(pages)) if key in self._owners]
            self._delete(held)
        return len(held)

    def clear(self, tenure: str | None = None) -> int:
        """Drop the pages of a tenure, or all; return how many."""
        with self._writing:
            only = None if tenure is None else self._seeds(tenure).digest
            keys = [key for key, digest in self._owners.items() if only in (None, digest)]
            self._delete(keys)
        return len(keys)

    def _delete(self, keys: Collection[bytes]) -> None:
        """Delete pages everywhere, with those after them in the same tier."""
        pending, gone, now = list(keys), set(), self._clock()
        with self._lock:
            while pending:
                if (key := pending.pop()) not in gone:
                    gone.add(key)
                    pending += (k for level in self._levels for k in level.tier.drop([key], now))
                    self._disown(key)
        for level in self._levels:
            self._erase(level, gone)

    def _erase(self, level: _Level, keys: Iterable[bytes]) -> None:
        names = list(keys)
        try:
            if names and (held := level.store.has(hashes_of(names))).any():
                level.store.delete(hashes_of(names)[held])
        except StoreError as error:
            self._failed(level, error)

    def _tenure(self, digest: bytes, name: str | None = None) -> _Tenure:
        known = self._quotas.get(digest, (digest.hex(), self._default_quota))
        owner = self._tenures.get(digest) or _Tenure(*known)
        owner.name = name or owner.name
        return owner

    def _room(self, owner: _Tenure) -> int:
        """Return how many more pages a tenure may hold."""
        quota = sys.maxsize if owner.quota is None else owner.quota
        return quota // self.page_bytes - len(owner.pages)

    def _own(self, digest: bytes, owner: _Tenure, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in reversed(blocks):  # the deepest is the least recent
                self._tenures[digest] = owner
                self._owners[block.key] = digest
                owner.pages[block.key] = None

    def _disown(self, key: bytes) -> None:
        if (digest := self._owners.pop(key, None)) is not None:
            owner = self._tenures[digest]
            del owner.pages[key]
            if not owner.pages:
                del self._tenures[digest]

    def stats(self) -> dict[str, Any]:
        """Return pages, bytes and prices by tier (in seconds of prefill), and bytes by tenure."""
        size, tiers = self.page_bytes, []
        with self._lock:
            for level in self._levels:
                latency, read = level.rate.law()
                tiers.append({
                    "name": level.name, "pages": len(level.tier), "price": level.tier.price,
                    "cap_bytes": level.store.cap_bytes, "used_bytes": level.store.used_bytes,
                    "evicted": level.evicted, "up": self._up(level),
                    "read_latency_s": latency, "read_page_s": read, **asdict(level.store.counts),
                })  # fmt: skip
            tenures = {
                owner.name: {"bytes": len(owner.pages) * size, "quota_bytes": owner.quota}
                for owner in self._tenures.values()
            }
            return {
                "pages": len(self._owners), "bytes": len(self._owners) * size, "tiers": tiers,
                "hit_pages": self._hits, "missed_pages": self._misses,
                "hit_tokens": self._hits * self.page_tokens, "tenures": tenures,
            }  # fmt: skip

    def close(self) -> None:
        """Close the tiers; later reads miss, and later puts store nothing."""
        with self._writing:
            for level in self._levels:
                level.store.close()

    def _up(self, level: _Level) -> bool:
        return self._clock() >= level.resume

    def _next_up(self, after: int) -> int | None:
        """Return the first tier beyond `after` whose medium works."""
        further = range(after + 1, len(self._levels))
        return next((number for number in further if self._up(self._levels[number])), None)

    def _failed(self, level: _Level, error: StoreError) -> None:
        level.resume = self._clock() + _PAUSE
        log.warning("tier %s pauses: %s", level.name, error)

    def _keys(self, pages: Iterable[Page]) -> list[bytes]:
        return [_key(self._seeds(page.tenure).key, page.key) for page in pages]


class _Seed(NamedTuple):
    key: bytes  # hash key of a tenure's pages
    digest: bytes  # identifies the tenure in records
    expiry: int  # nanoseconds since 1970


def _digest(tenure: str, layout: str = "") -> bytes:
    """Return 32 bytes by tenure and layout, without collisions of their texts."""
    parts = [text.encode("utf-8", "surrogatepass") for text in (layout, tenure)]
    return blake2b(
        len(parts[0]).to_bytes(8) + b"".join(parts), digest_size=32, person=_PERSON
    ).digest()


def _seed(layout: str, tenure: str) -> _Seed:
    return _Seed(_digest(tenure, layout), _digest(tenure), salt_expiry(tenure))


def _key(seed: bytes, key: bytes) -> bytes:
    return blake2b(key, digest_size=16, key=seed, person=_PERSON).digest()


def _runs(pages: Sequence[Page]) -> list[list[int]]:
    """Split pages into runs of one sequence each, by index."""
    runs: list[list[int]] = []
    for i, page in enumerate(pages):
        before = pages[i - 1]
        if i and page.parent == before.key and page.tenure == before.tenure:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


class ValueStore:
    """Values of any size as sequences of pages, by name and tenure. Thread-safe.

    A value's first bytes are the last page of its sequence, so that they are evicted first: if
    they are held, all is. They hold its size and a nonce, which is in the names of the others.
    """

    HEAD_BYTES = 16

    def __init__(self, store: PageStore, max_bytes: int) -> None:
        check_bounds("max_bytes", max_bytes, ge=1, lt=2**40)
        self.store, self.max_bytes = store, max_bytes

    @classmethod
    def open(
        cls, tiers: Sequence[str | StoreTier], page: int, max_bytes: int, *,
        quotas: Mapping[str, int] | None = None, default_quota: int | None = None,
    ) -> ValueStore:  # fmt: skip
        """Open tiers of pages that take `page` bytes of a value; raises ConfigError."""
        size = page + cls.HEAD_BYTES
        pages = PageStore(tiers, "values", size, quotas=quotas, default_quota=default_quota)
        return cls(pages, max_bytes)

    def frame(self) -> Bytes:
        """Return a buffer for one value."""
        return np.empty((self._count(self.max_bytes), self.store.page_bytes), dtype=np.uint8)

    @classmethod
    def body(cls, frame: Bytes, size: int) -> memoryview:
        """Return a view of the value in a frame, `size` bytes."""
        return frame.reshape(-1).data[cls.HEAD_BYTES : cls.HEAD_BYTES + size]

    def put(self, name: bytes, tenure: str, frame: Bytes, size: int) -> bool:
        """Store the value in a frame in place of the one of this name; True if it is held."""
        self.delete(name, tenure)
        nonce = os.urandom(8)
        frame.reshape(-1).data[: self.HEAD_BYTES] = size.to_bytes(8) + nonce
        pages = self._pages(name, tenure, self._count(size), nonce)
        rows = np.arange(len(pages) - 1, -1, -1, dtype=np.int32)
        held = bool(self.store.put(pages, frame, rows).all())
        if not held:
            self.store.drop(pages)
        return held

    def get(self, name: bytes, tenure: str, frame: Bytes) -> int:
        """Read a value into a frame; return its size, -1 if it is not held or not whole."""
        size, pages = self._head(name, tenure, frame)
        if len(pages) > 1:
            rows = np.arange(len(pages) - 1, 0, -1, dtype=np.int32)
            if not self.store.get(pages[:-1], frame, rows).all():
                self.store.drop(pages)
                return -1
        return size

    def has(self, name: bytes, tenure: str) -> bool:
        """Return whether a value is held, without I/O."""
        return self.store.held(self._pages(name, tenure, 1, b"")) == 1

    def delete(self, name: bytes, tenure: str) -> bool:
        """Delete a value; return whether it was held."""
        if not self.has(name, tenure):
            return False
        head = np.empty((1, self.store.page_bytes), dtype=np.uint8)
        return self.store.drop(self._head(name, tenure, head)[1]) > 0

    def _head(self, name: bytes, tenure: str, frame: Bytes) -> tuple[int, list[Page]]:
        """Read a value's first page; return its size and pages."""
        head = self._pages(name, tenure, 1, b"")
        if not self.store.get(head, frame, np.zeros(1, dtype=np.int32))[0]:
            return -1, []
        raw = bytes(frame.reshape(-1).data[: self.HEAD_BYTES])
        size = int.from_bytes(raw[:8])
        if size > self.max_bytes:
            return -1, head
        return size, self._pages(name, tenure, self._count(size), raw[8:])

    def _count(self, size: int) -> int:
        return -(-(size + self.HEAD_BYTES) // self.store.page_bytes)

    @staticmethod
    def _pages(name: bytes, tenure: str, count: int, nonce: bytes) -> list[Page]:
        """Return a value's pages, the one with its head last."""
        keys = [name + i.to_bytes(4) + nonce for i in range(count - 1, 0, -1)]
        keys.append(name + bytes(12))
        parents = [None, *keys[:-1]]
        return [Page(k, p, i, tenure) for i, (k, p) in enumerate(zip(keys, parents, strict=True))]
