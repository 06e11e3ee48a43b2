"""Runs in a Dynamo venv: prints, a JSON line each, what its selector saw and whom it chose.

python dynamo_selections.py SEED STEPS
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys

import msgspec
import zmq
from dynamo._core import SelectionService

WORKERS, SIZE, BLOCKS, MODEL = 4, 16, 80, "m"


async def main(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    service, context = SelectionService(), zmq.Context()
    publishers = []
    for worker in range(WORKERS):
        publisher = context.socket(zmq.PUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        publishers.append(publisher)
        await service.upsert_worker(
            {
                "worker_id": worker,
                "model_name": MODEL,
                "block_size": SIZE,
                "endpoint": f"http://127.0.0.1:{9000 + worker}",
                "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
            }
        )
    families = [[1000 * (family + 1) + at for at in range(SIZE * BLOCKS)] for family in range(3)]
    held = [[draw.randrange(BLOCKS) for _ in range(WORKERS)] for _ in families]
    await published(service, publishers, families, held)
    await decided(service, draw, families, steps)
    service.shutdown()
    context.destroy(linger=0)


async def published(service, publishers, families, held) -> None:
    """Tell which leading blocks of each family each worker holds, until that is known."""
    await asyncio.sleep(0.3)  # a subscriber that is not there yet would miss the first
    for worker, publisher in enumerate(publishers):
        for family, tokens in enumerate(families):
            count = held[family][worker]
            hashes = [1 + family * 10_000 + at for at in range(count)]
            stored = ["BlockStored", hashes, None, tokens[: SIZE * count], SIZE, None, "GPU"]
            batch = msgspec.msgpack.encode([0.0, [stored] if count else [], 0])
            publisher.send_multipart([b"kv-events", struct.pack(">q", family), batch])
    for _ in range(100):
        known = [
            [row["device_blocks"] for row in await overlap(service, each)] for each in families
        ]
        if known == held:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"the index holds {known}, not {held}")


async def overlap(service, tokens):
    found = await service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
    return sorted(found["workers"], key=lambda row: row["worker_id"])


async def decided(service, draw, families, steps) -> None:
    """Between the selections, book prompts that nobody shares, advance them and free them."""
    waiting, running = [], []
    for step in range(steps):
        for _ in range(draw.randrange(3)):
            name, length = f"b{step}-{len(waiting)}", draw.randrange(1, 2000)
            unique = [draw.randrange(100_000, 2**31) for _ in range(length)]
            asked = {"model_name": MODEL, "token_ids": unique, "selection_id": name}
            await service.select_and_reserve(asked)
            waiting.append(name)
        while len(waiting) > 3 or (waiting and draw.random() < 0.3):
            running.append(waiting.pop(draw.randrange(len(waiting))))
            await service.prefill_complete(running[-1])
        while len(running) > 6:
            await service.free_reservation(running.pop(draw.randrange(len(running))))
        tokens = draw.choice(families)[: draw.randrange(1, SIZE * BLOCKS)]
        loads = sorted(service.loads()[0]["loads"], key=lambda row: row["worker_id"])
        line = {
            "prompt": len(tokens),
            "overlap": [row["device_blocks"] for row in await overlap(service, tokens)],
            "queued": [row["potential_prefill_tokens"] for row in loads],
            "blocks": [row["potential_decode_blocks"] for row in loads],
            "requests": [row["active_requests"] for row in loads],
        }
        chosen = await service.select({"model_name": MODEL, "token_ids": tokens})
        print(json.dumps(line | {"chosen": chosen["worker_id"]}))


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
