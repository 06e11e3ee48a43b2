"""Pigou's side of `benchmarks.routing.throughput`: index, hashing and decisions, over the same
inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.routing.throughput_data import BLOCK_SIZE, LONG, SHORT, WORKERS, Tokens, Workload
from pigou.config import ControlConfig
from pigou.control.messages import CacheChanged, Ended, Route, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.control.prefix_index import PrefixIndex
from pigou.control.prefix_index.block_keys import chain
from pigou.request import (
    SECOND,
    BlockRemoved,
    BlockStored,
    FinishReason,
    KVEvent,
    Request,
    Worker,
    no_hashes,
)
from pigou.wire.kv_event_decoding import (
    Removed,
    Stored,
    WireEvent,
    encode_batch,
    event_map,
    event_slices,
)

IDS = tuple(f"worker-{i}" for i in range(WORKERS))
Call = Callable[[int], Any]


class Side:
    """A control plane that holds the workload; each measure is a function of a call's number."""

    def __init__(self, load: Workload, policy: str) -> None:
        self.load = load
        self.lists = {
            size: [each.tolist() for each in load.prompts(size)] for size in (SHORT, LONG)
        }
        config = ControlConfig(policy=policy)
        self.plane = ControlPlane(config)
        for i, name in enumerate(IDS):
            worker = Worker(name, f"http://w{i}", block_size=BLOCK_SIZE, events=True)
            self.plane.observe(WorkerUp(worker), 0)
        self.index: PrefixIndex = self.plane.index
        for i, (tokens, holders) in enumerate(load.held()):
            hashes = np.arange(len(tokens) // BLOCK_SIZE, dtype=np.uint64) + np.uint64(
                2**20 * i + 1
            )
            event = Stored(hashes, None, tokens, BLOCK_SIZE)
            for holder in holders:
                self.plane.observe(CacheChanged(IDS[holder], (event,)), 0)
        self.keys = {
            size: [chain(each, BLOCK_SIZE) for each in load.prompts(size)] for size in (SHORT, LONG)
        }
        self.unknown = {size: chain(each, BLOCK_SIZE) for size, each in load.strange.items()}
        self._now = SECOND
        self.events: dict[str, Sequence[tuple[KVEvent | WireEvent, ...]]] = {
            "core": [_core(each) for each in load.passing],
            "arrays": [_wire(each, i, lists=False) for i, each in enumerate(load.passing)],
            "lists": [_wire(each, i, lists=True) for i, each in enumerate(load.passing)],
            "one": [_core(each[:BLOCK_SIZE]) for each in load.passing],
        }
        self.payloads = [_payload(each) for each in load.passing]

    def hash(self, size: int) -> Call:
        """Hash a prompt from an array."""
        prompts = self.load.prompts(size)
        return lambda i: chain(prompts[i % len(prompts)], BLOCK_SIZE)

    def hash_list(self, size: int) -> Call:
        """Hash a prompt from a list."""
        prompts = self.lists[size]
        return lambda i: chain(prompts[i % len(prompts)], BLOCK_SIZE)

    def lookup(self, size: int) -> Call:
        """Ask for the overlap of a held prompt with every worker."""
        keys, index = self.keys[size], self.index
        return lambda i: index.overlaps(IDS, keys[i % len(keys)])

    def miss(self, size: int) -> Call:
        """Ask for that of a prompt that nobody holds."""
        keys, index = self.unknown[size], self.index
        return lambda _: index.overlaps(IDS, keys)

    def ingest(self, kind: str) -> Call:
        """Store a sequence, and remove it again."""
        events, index = self.events[kind], self.index

        def call(i: int) -> None:
            worker = IDS[i % WORKERS]
            for event in events[i % len(events)]:
                index.apply(worker, (event,))

        return call

    def decode(self, _: int) -> Call:
        """Decode a message of one event."""
        return lambda i: list(event_slices(self.payloads[i % len(self.payloads)]))

    def decide(self, size: int) -> Call:
        """Hash a prompt and route it, from an array of its tokens; it ends outside the clock."""
        prompts = self.load.prompts(size)

        def call(i: int) -> None:
            tokens = prompts[i % len(prompts)]
            keys = {BLOCK_SIZE: chain(tokens, BLOCK_SIZE)}
            request = Request(str(i), len(tokens), 64, arrival=self._now, keys=keys)
            decision = self.plane.submit(request, self._now)
            assert isinstance(decision, Route)

        return call

    def settle(self, i: int) -> None:
        """End the request that call `i` routed, and let 10 ms pass."""
        self.plane.observe(Ended(str(i), FinishReason.LENGTH), self._now)
        self._now += SECOND // 100


def timed(call: Call, count: int, after: Call | None = None) -> list[float]:
    """Seconds of each of `count` calls; `after` follows each, outside the clock."""
    seconds = []
    for i in range(count):
        begin = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - begin)
        if after is not None:
            after(i)
    return seconds


def _core(tokens: Tokens) -> tuple[BlockStored, BlockRemoved]:
    keys = chain(tokens, BLOCK_SIZE)
    hashes = np.stack([keys, keys], axis=1)
    return BlockStored("r", 0, hashes, no_hashes()), BlockRemoved(hashes)


def _wire(tokens: Tokens, i: int, *, lists: bool) -> tuple[Stored, Removed]:
    names = np.arange(len(tokens) // BLOCK_SIZE, dtype=np.uint64) + np.uint64(2**40 + 2**20 * i)
    if lists:
        hashes = tuple(names.tolist())
        return Stored(hashes, None, tuple(tokens.tolist()), BLOCK_SIZE), Removed(hashes)
    return Stored(names, None, tokens, BLOCK_SIZE), Removed(names)


def _payload(tokens: Tokens) -> bytes:
    stored, _ = _core(tokens)
    return encode_batch(0.0, [event_map(stored, BLOCK_SIZE, tokens.tolist())])
