"""SGLang's L3 on Pigou's tiers beside its own file backend, both by SGLang's own interface.

    PYTHONPATH=src:. VENV/bin/python -m benchmarks.integrations.hicache [--path DIR] [--rounds 5]

VENV imports SGLang and what Pigou needs. Pages are moved as SGLang's controller does: the file
backend by `batch_set` and `batch_get` of tensors, Pigou by v1. Both take turns in each round.
Printed: CPU and wall milliseconds a page; then, over sessions that come back, the share of pages
restored, pages kept that no prefix leads to, and the most bytes held, at a limit below the need.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from tests.integrations.sglang_fakes import HostPool, chain

from pigou.integrations.sglang import PigouStorage

NAMES = {"backend_name": "pigou", "module_path": "pigou.integrations.sglang",
         "class_name": "PigouStorage", "interface_v1": 1}  # fmt: skip
_PAGE_TOKENS = 64


def config(**extra: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="org/model", extra_config=extra,
    )  # fmt: skip


class Backend:
    """A backend, moved as SGLang's `cache_controller.py` moves it."""

    def __init__(self, name: str, folder: Path, pool: HostPool, limit: int) -> None:
        self.name, self.folder, self.pool, self.limit = name, folder, pool, limit
        if name == "file":
            self.backend: Any = HiCacheFile(config(max_size=str(limit)), str(folder))
        else:
            policy = name.partition(" ")[2] or "price"
            tier = f"disk={limit}@{folder},policy={policy}"
            self.backend = PigouStorage(config(**NAMES, tiers=[tier]), {})
        self.backend.register_mem_pool_host(pool)
        self.now_s = 0.0  # time of the sessions: one comes each second
        if name != "file":
            self.backend._pools["kv"].store._clock = lambda: int(1e9 * (1e9 + self.now_s))

    def exists(self, keys: list[str]) -> int:
        """Return how many leading pages are held."""
        held: int = self.backend.batch_exists(keys)
        return held

    def write(self, keys: list[str], rows: list[int], before: list[str]) -> bool:
        """Store pages; return whether all are held: the controller stops otherwise."""
        if self.name == "file":
            pages = [self.pool.get_data_page(row) for row in rows]
            return bool(self.backend.batch_set(keys, pages))
        info = HiCacheStorageExtraInfo(prefix_keys=before)
        return all(self.backend.batch_set_v1(keys, indices(rows), info))

    def read(self, keys: list[str], rows: list[int]) -> int:
        """Read pages into the host pool; return how many came."""
        if self.name != "file":
            return sum(self.backend.batch_get_v1(keys, indices(rows)))
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = self.backend.batch_get(keys, targets)
        for row, page in zip(rows, pages, strict=True):
            if page is not None:
                self.pool.set_from_flat_data_page(row, page)
        return sum(page is not None for page in pages)

    def held_bytes(self) -> int:
        """Return the bytes that the folder takes on its disk."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        """Close the backend, and delete its folder."""
        if self.name != "file":
            self.backend.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def indices(rows: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(row, row + _PAGE_TOKENS) for row in rows])


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def speeds(path: Path, pages: int, rounds: int) -> None:
    """Print milliseconds a page of each backend, and the ratio of Pigou's to the file backend's."""
    pool = HostPool(tokens=pages * _PAGE_TOKENS, page_size=_PAGE_TOKENS, layer_num=8, head_num=4,
                    head_dim=128)  # fmt: skip
    size = pool.get_dummy_flat_data_page().nbytes
    rows = [page * _PAGE_TOKENS for page in range(pages)]
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # the first one compiles and warms up
        keys = chain(pages, seed=number)
        for name in (("file", "pigou"), ("pigou", "file"))[number % 2]:
            with tempfile.TemporaryDirectory(dir=path) as folder:
                backend = Backend(name, Path(folder) / "store", pool, 4 * pages * size)
                works: dict[str, Callable[[], Any]] = {
                    "set": partial(backend.write, keys, rows, []),
                    "exists": partial(backend.exists, keys),
                    "get": partial(backend.read, keys, rows),
                }
                for what, work in works.items():
                    for unit, spent in zip(("wall", "cpu"), timed(work), strict=True):
                        if number >= 0:
                            times[what, unit, name].append(1e3 * spent / pages)
                assert backend.read(keys, rows) == pages
                backend.close()
    print(f"{pages} pages of {size / 2**20:g} MiB, medians of {rounds} rounds, ms a page")
    for what in ("set", "exists", "get"):
        for unit in ("wall", "cpu"):
            mine, theirs = (statistics.median(times[what, unit, name]) for name in
                            ("pigou", "file"))  # fmt: skip
            print(f"{what:6} {unit:4}  pigou {mine:8.4f}  file {theirs:8.4f}  "
                  f"ratio {mine / theirs:.2f}")  # fmt: skip


def full(path: Path, seeds: range, share: float) -> None:
    """Print what each backend restores of sessions that grow and come back, when it is full."""
    pool = HostPool(tokens=64 * _PAGE_TOKENS, page_size=_PAGE_TOKENS, layer_num=1, head_num=1,
                    head_dim=16)  # fmt: skip
    size = pool.get_dummy_flat_data_page().nbytes
    for name in ("file", "pigou lru", "pigou price"):
        restored = asked = stranded = 0
        most = 0.0
        for seed in seeds:
            draw = random.Random(seed)
            lengths = [draw.randint(2, 8) for _ in range(60)]
            limit = int(share * 60 * 16 * (size + 128))
            folder = Path(tempfile.mkdtemp(dir=path)) / "store"
            backend = Backend(name, folder, pool, limit)
            for step in range(600):
                backend.now_s = float(step)
                session = min(int(draw.paretovariate(0.8)) - 1, 59)
                keys = chain(lengths[session], seed=1000 * seed + session)
                held = backend.exists(keys)
                rows = [i % 64 * _PAGE_TOKENS for i in range(len(keys))]
                got = backend.read(keys[:held], rows[:held]) if held else 0
                restored, asked = restored + got, asked + len(keys)
                for first in range(got, len(keys), 8):
                    part = slice(first, first + 8)
                    if not backend.write(keys[part], rows[part], keys[:first]):
                        break
                lengths[session] = min(64, lengths[session] + draw.randint(0, 2))
            most = max(most, backend.held_bytes() / limit)
            for session, length in enumerate(lengths):
                keys = chain(length, seed=1000 * seed + session)
                held = backend.exists(keys)
                stranded += sum(backend.backend.exists(key) for key in keys[held:])
            backend.close()
        print(f"{name:12} restored {restored / asked:.3f} of pages, {stranded} pages stranded, "
              f"at most {most:.2f} of its limit on disk")  # fmt: skip


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.3, help="limit, by the pages of all")
    args = parser.parse_args()
    speeds(args.path, args.pages, args.rounds)
    full(args.path, range(3), args.share)


if __name__ == "__main__":
    main()
