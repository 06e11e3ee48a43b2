"""Bytes per second of each KV transfer backend, against a memcpy of the same size.

Two processes: one offers blocks, this one pulls them. In each round and for each size come, one
after another: a memcpy within this process, a transfer by shared memory, one by TCP. A transfer's
time is by the wall, from the sender's `offer` to the receiver's confirmed outcome: the ticket's way
through a pipe, threads, handshake, bytes, the checksums of both sides, confirmation. The sender's
checksums run beside the receiver's copy (shared memory) where there are two cores to do it.

    python -m benchmarks.worker.kv_transfer [--rounds 25] [--sizes 65536 ...] [--pin] [--json FILE]
    [--backends shm tcp nixl] [--check]

With `--pin` each process keeps to its half of the cores, as workers that are given theirs do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.servers import machine
from pigou.kv.block import KVLayout
from pigou.request import SECOND
from pigou.worker.kv_transfer.block_store import HostBlockStore, SharedMemory
from pigou.worker.kv_transfer.receiver import Receiver
from pigou.worker.kv_transfer.sender import Sender
from pigou.worker.kv_transfer.transfer_params import TransferConfig, TransferResult

SIZES = (64 << 10, 1 << 20, 16 << 20, 128 << 20)
GOAL_SIZE, GOAL = 16 << 20, 0.5
BACKENDS = ("shm", "tcp")
#: Seconds after which a thread must let others go on, as in a worker's process.
SWITCH_INTERVAL = 0.0005
#: Transfers in which every page is touched and every cache filled; not counted.
WARM_UP = 3


def layout(block_bytes: int) -> KVLayout:
    return KVLayout("benchmark", "0", "float32", 16, 4, 4, 32, block_bytes)


# The sender's process: answers each line "request blocks" with a ticket, and when it was made.


def serve(block_bytes: int, blocks: int, backends: Sequence[str]) -> None:
    memory = SharedMemory(block_bytes * blocks)
    rows = memory.buffer.reshape(blocks, block_bytes)
    rows[:] = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
    config = TransferConfig(lease=120 * SECOND, backends=tuple(backends))
    sender = Sender(HostBlockStore(layout(block_bytes), rows), lambda _: None, config, memory)
    print("ready", flush=True)
    for line in sys.stdin:
        request, count = line.split()
        began = time.monotonic()
        params = sender.offer(request, np.arange(int(count), dtype=np.int32), int(count) * 16)
        print(json.dumps([began, params]), flush=True)
    sender.close()
    memory.close()


@contextmanager
def sender_process(
    block_bytes: int, blocks: int, cores: Sequence[int], backends: Sequence[str]
) -> Iterator[Callable[[str, int], Any]]:
    command = [sys.executable, "-m", "benchmarks.worker.kv_transfer", "--serve", str(block_bytes)]
    process = subprocess.Popen(
        [*command, "--blocks", str(blocks), "--cores", *map(str, cores), "--backends", *backends],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the sender's process has no pipes")
    stdin, stdout = process.stdin, process.stdout

    def offer(request: str, count: int) -> Any:
        stdin.write(f"{request} {count}\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        if stdout.readline() != "ready\n":
            raise RuntimeError("the sender's process did not start")
        yield offer
    finally:
        stdin.close()
        process.wait(30)
        stdout.close()


# The receiver's process.


def pull(receiver: Receiver, params: Any, count: int) -> float:
    """Pull, and return when that was done."""
    done = threading.Event()
    outcomes: list[TransferResult] = []
    ended = [0.0]

    def finished(outcome: TransferResult) -> None:
        ended[0] = time.monotonic()
        outcomes.append(outcome)
        done.set()

    receiver.pull(params, 0, np.arange(count, dtype=np.int32), finished)
    done.wait()
    if outcomes[0].blocks != count:
        raise RuntimeError(f"a transfer failed: {outcomes[0]}")
    return ended[0]


def memcpy_seconds(target: Any, source: Any) -> float:
    began = time.monotonic()
    np.copyto(target, source)
    return time.monotonic() - began


def halves() -> tuple[list[int], list[int]]:
    """Cut this process's cores in two; both are all of them where there is but one."""
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return cores[:middle] or cores, cores[middle:]


def measure(
    sizes: Sequence[int],
    rounds: int,
    block_bytes: int,
    pinned: bool = False,
    backends: Sequence[str] = BACKENDS,
) -> dict[int, dict[str, Any]]:
    """Seconds of each measurement, by size and kind, each an array of shape (rounds,)."""
    blocks = max(sizes) // block_bytes
    theirs, ours = halves() if pinned else [sorted(os.sched_getaffinity(0))] * 2
    os.sched_setaffinity(0, ours)
    rows = np.zeros((blocks, block_bytes), dtype=np.uint8)
    source = np.ones_like(rows)
    store = HostBlockStore(layout(block_bytes), rows)
    receivers = {name: Receiver(store, TransferConfig(backends=(name,))) for name in backends}
    kinds = ("memcpy", *backends)
    seconds: dict[int, dict[str, Any]] = {size: {kind: [] for kind in kinds} for size in sizes}
    with sender_process(block_bytes, blocks, theirs, backends) as offer:
        for turn in range(-WARM_UP, rounds):
            for size in sizes:
                count = size // block_bytes
                took = {"memcpy": memcpy_seconds(rows[:count], source[:count])}
                for name, receiver in receivers.items():
                    offered, params = offer(f"{name}-{turn}-{size}", count)
                    took[name] = pull(receiver, params, count) - offered
                if turn >= 0:
                    for kind, value in took.items():
                        seconds[size][kind].append(value)
    for receiver in receivers.values():
        receiver.close()
    return {
        size: {kind: np.array(values) for kind, values in by_kind.items()}
        for size, by_kind in seconds.items()
    }


def report(seconds: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Print a table, and return its rows: rates in bytes/s, ratios to memcpy in the same round."""
    print(f"{'size':>9}  {'kind':<7}{'GB/s':>8}{'quartiles':>16}{'of memcpy':>11}{'quartiles':>14}")
    rows = []
    for size, by_kind in seconds.items():
        for kind in by_kind:
            rate = np.quantile(size / by_kind[kind], [0.25, 0.5, 0.75])
            ratio = np.quantile(by_kind["memcpy"] / by_kind[kind], [0.25, 0.5, 0.75])
            low, mid, high = rate / 1e9
            print(
                f"{size >> 10:>6} KB  {kind:<7}{mid:>8.2f}{f'{low:.2f} - {high:.2f}':>16}"
                f"{ratio[1]:>11.2f}{f'{ratio[0]:.2f} - {ratio[2]:.2f}':>14}"
            )
            row = {"size": size, "kind": kind, "bytes_per_second": rate.tolist()}
            if kind != "memcpy":
                row["of_memcpy"] = ratio.tolist()
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--block-bytes", type=int, default=64 << 10)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--pin", action="store_true", help="half of the cores for each process")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="shm, tcp, nixl")
    parser.add_argument("--check", action="store_true", help="fail when the goal is missed")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL)
    if args.serve:
        os.sched_setaffinity(0, args.cores)
        serve(args.serve, args.blocks, args.backends)
        return 0
    odd = [size for size in args.sizes if size < args.block_bytes or size % args.block_bytes]
    if odd or args.rounds < 1:
        parser.error(f"sizes {odd} are no multiples of --block-bytes, or --rounds is under 1")
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    rows = report(measure(args.sizes, args.rounds, args.block_bytes, args.pin, args.backends))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    goal = [r["of_memcpy"][1] for r in rows if (r["size"], r["kind"]) == (GOAL_SIZE, "shm")]
    reached = not goal or goal[0] >= GOAL
    for ratio in goal:
        print(f"shared memory at 16 MB, checksums counted in: {ratio:.2f} of memcpy, goal {GOAL}")
    return int(args.check and not reached)


if __name__ == "__main__":
    raise SystemExit(main())
