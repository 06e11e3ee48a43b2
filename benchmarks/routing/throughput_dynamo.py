"""The peer of `benchmarks.routing.throughput`: Dynamo's Python bindings, run by the peer's own
Python.

The tree and the selection service run in processes of their own: once a service has been busy in
a process, calls of its tree take four times as long. With the argument `service` there is one.

Reads one command a line, `NAME BLOCKS COUNT`, and answers with the seconds that each of COUNT
calls took, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

import msgspec
import zmq
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

from benchmarks.routing.throughput_data import BLOCK_SIZE, LONG, SHORT, WORKERS, Workload, workload

MODEL = "m"


def stored(number: int, hashes: list[int]) -> bytes:
    blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
    event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    return json.dumps(event).encode()


def removed(number: int, hashes: list[int]) -> bytes:
    return json.dumps({"event_id": number, "data": {"removed": {"block_hashes": hashes}}}).encode()


class Peer:
    """The tree, the service and the inputs, all made before anything is timed."""

    def __init__(self, load: Workload) -> None:
        self.load = load
        self.lists = {
            blocks: [each.tolist() for each in load.prompts(blocks)] for blocks in (SHORT, LONG)
        }
        self.strange = {blocks: each.tolist() for blocks, each in load.strange.items()}
        self.tree = RadixTree()
        self.hashes: dict[int, list[list[int]]] = {SHORT: [], LONG: []}
        for tokens, holders in load.held():
            hashes = self.hash(tokens.tolist())
            self.hashes[len(hashes)].append(hashes)
            event = stored(0, hashes)
            for worker in holders:
                self.tree.apply_event(worker, event)
        self.unknown = {blocks: self.hash(each) for blocks, each in self.strange.items()}
        passing = [self.hash(each.tolist()) for each in load.passing]
        self.store = [stored(1, each) for each in passing]
        self.remove = [removed(2, each) for each in passing]
        self.store_one = [stored(1, each[:1]) for each in passing]
        self.remove_one = [removed(2, each[:1]) for each in passing]
        self.service: Any = None
        self.publishers: list[Any] = []

    def hash(self, tokens: list[int]) -> list[int]:
        """Hashes of the blocks."""
        found: list[int] = compute_block_hash_for_seq(tokens, BLOCK_SIZE)
        return found

    async def serve(self) -> None:
        """Start the selection service, and fill it over its event sockets."""
        context = zmq.Context()
        self.service = SelectionService()
        for worker in range(WORKERS):
            publisher = context.socket(zmq.PUB)
            publisher.set_hwm(0)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            self.publishers.append(publisher)
            await self.service.upsert_worker({
                "worker_id": worker, "model_name": MODEL, "block_size": BLOCK_SIZE,
                "endpoint": "http://127.0.0.1:1",
                "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
            })  # fmt: skip
        await asyncio.sleep(2)
        sent, encoder = [0] * WORKERS, msgspec.msgpack.Encoder()
        for i, (tokens, holders) in enumerate(self.load.held()):
            hashes = [(i + 1) * 2**20 + k for k in range(len(tokens) // BLOCK_SIZE)]
            event = {
                "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None,
                "token_ids": tokens.tolist(), "block_size": BLOCK_SIZE, "lora_id": None,
                "medium": "GPU", "lora_name": None,
            }  # fmt: skip
            payload = encoder.encode([time.time(), [event], 0])
            for worker in holders:
                frames = [b"", sent[worker].to_bytes(8, "big"), payload]
                self.publishers[worker].send_multipart(frames)
                sent[worker] += 1
        for _ in range(600):
            if await self.complete():
                return
            await asyncio.sleep(0.1)
        raise SystemExit("the selection service did not take in all events")

    async def complete(self) -> bool:
        """Whether the service knows of every sequence at all its holders."""
        for tokens, holders in self.load.held():
            request = {"model_name": MODEL, "token_ids": tokens.tolist()}
            told = (await self.service.overlap_scores(request))["workers"]
            have = {each["worker_id"]: each["device_blocks"] for each in told}
            if any(have.get(worker) != len(tokens) // BLOCK_SIZE for worker in holders):
                return False
        return True

    async def run(self, name: str, blocks: int, count: int) -> list[float]:
        """Seconds of each of `count` calls."""
        if name == "decide":
            return await self.decide(blocks, count)
        return timed(self.call(name, blocks), count)

    def call(self, name: str, blocks: int) -> Callable[[int], Any]:
        """The function to time, of the number of the call."""
        lists, hashes = self.lists.get(blocks, []), self.hashes.get(blocks, [])
        if name == "hash":
            return lambda i: compute_block_hash_for_seq(lists[i % len(lists)], BLOCK_SIZE)
        if name == "hash-array":
            arrays = self.load.prompts(blocks)
            return lambda i: compute_block_hash_for_seq(arrays[i % len(arrays)], BLOCK_SIZE)
        if name == "lookup":
            return lambda i: self.tree.find_matches(hashes[i % len(hashes)])
        if name == "miss":
            return lambda _: self.tree.find_matches(self.unknown[blocks])
        store, remove = (
            (self.store, self.remove) if blocks > 1 else (self.store_one, self.remove_one)
        )

        def ingest(i: int) -> None:
            worker, which = i % WORKERS, i % len(store)
            self.tree.apply_event(worker, store[which])
            self.tree.apply_event(worker, remove[which])

        return ingest

    async def decide(self, blocks: int, count: int) -> list[float]:
        """Seconds of each of `count` selections."""
        lists, seconds = self.lists[blocks], []
        for i in range(count):
            request = {"model_name": MODEL, "token_ids": lists[i % len(lists)]}
            begin = time.perf_counter()
            await self.service.select(request)
            seconds.append(time.perf_counter() - begin)
        return seconds


def timed(call: Callable[[int], Any], count: int) -> list[float]:
    seconds = []
    for i in range(count):
        begin = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - begin)
    return seconds


async def main() -> None:
    peer = Peer(workload())
    if "service" in sys.argv[1:]:
        await peer.serve()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, blocks, count = line.split()
        answer = await peer.run(name, int(blocks), int(count))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
