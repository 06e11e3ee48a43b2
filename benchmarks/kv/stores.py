"""How fast stores take blocks and give them back, beside a memcpy of the same size.

    python -m benchmarks.kv.stores [--path DIR] [--bytes 128MiB] [--rounds 5] [--block-kib 64 1024]

Each round copies the same blocks once by memcpy, into and out of a host store, and into and out of
a disk store (a fresh folder under `--path`), interleaved. "cold" reads follow after the files were
written out and dropped from the page cache; on a virtual disk that says little about the device.
Printed: GB/s, medians of the rounds, and milliseconds for one block and for opening the folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.lib.block_records import chain_records

from benchmarks.lib.servers import machine
from pigou.kv import checksum
from pigou.kv.block import Bytes
from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.host_store import HostStore
from pigou.runtime.stores.store import BlockRecords, Store

NAMESPACE = bytes(16)
Times = dict[str, list[float]]


@contextmanager
def timed(times: Times, what: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times[what].append(time.perf_counter() - begin)


def keys(first: int, count: int) -> BlockRecords:
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return chain_records(np.stack([numbers + 1, numbers], axis=1), bytes(32))


def cool(path: Path) -> None:
    """Write files out, and drop them from the page cache."""
    for file in path.glob("*.pigou-kv"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def through(times: Times, name: str, store: Store, data: Bytes, out: Bytes, first: int) -> None:
    """Put all blocks, and get them back."""
    entries, rows = keys(first, len(data)), np.arange(len(data), dtype=np.int32)
    with timed(times, f"{name} put"):
        assert store.put(entries, data, rows).all()
    with timed(times, f"{name} get"):
        assert store.get(entries.keys, out, rows).all()
    one = np.zeros(1, dtype=np.int32)
    with timed(times, f"{name} one"):
        assert store.get(entries.keys[:1], out, one).all()


def measure(path: Path, block: int, total: int, rounds: int) -> Times:
    times: Times = defaultdict(list)
    count = total // block
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (count, block), dtype=np.uint8)
    out, arena = np.zeros_like(data), np.zeros_like(data)
    rows = np.arange(count, dtype=np.int32)
    for i in range(rounds + 1):  # the first round touches memory for the first time
        with timed(times, "memcpy"):
            np.copyto(out, data)
        host = HostStore(arena, count)
        through(times, "host", host, data, out, i * count)
        cap = 2 * total + (1 << 20)
        with tempfile.TemporaryDirectory(dir=path) as folder:
            disk = DiskStore(Path(folder), NAMESPACE, block, cap)
            through(times, "disk", disk, data, out, i * count)
            disk.close()
            cool(Path(folder))
            with timed(times, "disk open"):
                disk = DiskStore(Path(folder), NAMESPACE, block, cap)
            with timed(times, "disk cold get"):
                assert disk.get(keys(i * count, count).keys, out, rows).all()
            disk.close()
        if not i:
            times.clear()
    return times


def table(found: dict[int, Times], total: int) -> Table:
    shown = Table("", *(f"{block >> 10} KiB" for block in found))
    speeds = ("memcpy", "host put", "host get", "disk put", "disk get", "disk cold get")
    for what in speeds:
        cells = [f"{total / 1e9 / statistics.median(t[what]):.2f} GB/s" for t in found.values()]
        shown.add_row(what, *cells)
    for what in ("host one", "disk one", "disk open"):
        cells = [f"{1e3 * statistics.median(t[what]):.3f} ms" for t in found.values()]
        shown.add_row(what, *cells)
    return shown


def main() -> None:
    size: Callable[[str], int] = lambda text: int(text.removesuffix("MiB")) << 20  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--bytes", type=size, default="128MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 1024])
    options = parser.parse_args()
    checksum.warm_up()
    found = {}
    for kib in options.block_kib:
        total = options.bytes // (kib << 10) * (kib << 10)
        found[kib << 10] = measure(options.path, kib << 10, total, options.rounds)
    console = Console()
    console.print(machine())
    console.print(table(found, options.bytes))


if __name__ == "__main__":
    main()
