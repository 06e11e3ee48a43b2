"""Laws of `PigouTier`, without pytest, so that a real vLLM's interpreter can run them.

`python -m tests.integrations.vllm_tier_laws` runs them with vLLM's types, and those of its tiering
manager. The fast tests run the former with fakes.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

CHUNKS, BYTES, TOKENS = 16, 8192, 32
SLOW, QUICK = 1.0, 1e15  # tokens of prefill in a second: always worth reading, and never


def config(**extra: Any) -> Any:
    """Return vLLM's `OffloadingConfig`, or a fake of it."""
    try:
        from vllm.v1.kv_offload import config as real  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        parallel = SimpleNamespace(
            data_parallel_index=0,
            **dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1),
        )
        return SimpleNamespace(
            groups=(SimpleNamespace(tokens_per_block=16),), model="m", parallel=parallel,
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2), kv_cache_layout="NHD",
            replicated_layout=False, canonical_layout=False,
        )  # fmt: skip
    return real.OffloadingConfig(
        groups=(real.OffloadingGroupConfig(16, ("a",), 0),), worker_kv_bytes_per_block=BYTES // 2,
        enable_kv_cache_events=False, extra_config=extra, engine_id=f"laws-{time.time_ns()}",
        model=real.OffloadingModelConfig("m", "float16"),
        cache=real.OffloadingCacheConfig(16, 2),
        parallel=real.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )  # fmt: skip


class Setting:
    """A tier on a folder, over a CPU tier of `CHUNKS` rows."""

    def __init__(self, folder: Path, **params: Any) -> None:
        from vllm.v1.kv_offload import base  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.kv_offload.tiering.base import (  # type: ignore[import-not-found,unused-ignore]
            TransferJob,
        )

        from pigou.integrations.vllm.tier import PigouTier

        self.base, self._job = base, TransferJob
        self.rows = np.zeros((CHUNKS, BYTES), dtype=np.int8)
        given = {"tiers": [f"disk=64MiB@{folder}"], **params}
        spec = SimpleNamespace(config=config())
        self.tier = PigouTier(spec, memoryview(self.rows), "PigouTier", None, **given)
        self._number = 0

    def context(self, chain: list[bytes], salt: str = "") -> Any:
        ctx = self.base.ReqContext("r", {"cache_salt": salt} if salt else None)
        for i, key in enumerate(chain):
            ctx.set_offload_key_position(key, (i + 1) * TOKENS)
        return ctx

    def job(self, keys: Iterable[bytes], slots: Any, ctx: Any, load: bool) -> Any:
        self._number += 1
        return self._job(self._number, keys, np.array(slots, np.int32), load, ctx)

    def store(self, chain: list[bytes], salt: str = "") -> Any:
        """Write random rows under these keys; return the result and the rows."""
        self.rows[: len(chain)] = np.random.default_rng(len(chain)).integers(
            -128, 128, (len(chain), BYTES)
        )
        ctx = self.context(chain, salt)
        shuffled = list(enumerate(chain))[::-1]  # vLLM gives a set
        self.tier.submit_store(
            self.job([key for _, key in shuffled], [i for i, _ in shuffled], ctx, False)
        )
        return self.finish(), self.rows[: len(chain)].copy()

    def load(self, chain: list[bytes], ctx: Any) -> Any:
        self.rows[:] = 0
        self.tier.submit_load(self.job(chain, range(len(chain)), ctx, True))
        return self.finish()

    def finish(self) -> Any:
        self.tier.drain_jobs()
        (done,) = self.tier.get_finished_jobs()
        return done

    def hits(self, chain: list[bytes], ctx: Any = None) -> int:
        ctx = self.context(chain) if ctx is None else ctx
        for count, key in enumerate(chain):
            if self.tier.lookup(key, ctx) is not self.base.LookupResult.HIT:
                return count
        return len(chain)

    def counts(self) -> dict[str, float]:
        stats = self.tier.get_stats()
        values = stats.values if hasattr(stats, "values") else stats.data["data"]
        if hasattr(stats, "values"):
            return {name[0].rsplit("_pigou_")[1]: v for name, v in values.items()}
        return {n.rsplit("_pigou_")[1]: v for n, by in values.items() for v in by.values()}


def keys(count: int, name: str = "k") -> list[bytes]:
    return [f"{name}{i:>07}".encode() + bytes(4) for i in range(count)]


def law_what_was_stored_comes_back(folder: Path) -> None:
    s = Setting(folder)
    chain = keys(6)
    assert s.hits(chain) == 0
    done, rows = s.store(chain[:4])
    assert done.success
    assert done.transfer_bytes == 4 * BYTES
    ctx = s.context(chain)
    assert s.hits(chain, ctx) == 4
    done = s.load(chain[:4], ctx)
    assert done.success
    assert (s.rows[:4] == rows).all()
    assert s.counts()["pages"] == 4
    s.tier.shutdown()


def law_another_salt_misses(folder: Path) -> None:
    s = Setting(folder)
    chain = keys(3)
    s.store(chain, "alice")
    assert s.hits(chain, s.context(chain, "alice")) == 3
    assert s.hits(chain, s.context(chain, "bob")) == s.hits(chain) == 0
    assert not s.load(chain, s.context(chain, "bob")).success
    s.tier.shutdown()


def law_an_expired_or_malformed_tenure_is_not_kept(folder: Path) -> None:
    s = Setting(folder)
    chain = keys(3)
    for salt in (f"tenure1:{7:064}:9", "tenure1:nonsense"):
        done, _ = s.store(chain, salt)
        assert not done.success
        assert s.hits(chain, s.context(chain, salt)) == 0
    s.tier.shutdown()


def law_an_altered_chunk_is_computed(folder: Path) -> None:
    s = Setting(folder)
    chain = keys(4)
    _, rows = s.store(chain)
    (segment,) = [
        path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > BYTES
    ]
    content = segment.read_bytes()
    at = content.index(rows[2].tobytes()) + 100
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes(64))
    ctx = s.context(chain)
    assert s.hits(chain, ctx) == 4
    done = s.load(chain, ctx)
    assert not done.success
    assert set(done.successful_keys) == {chain[0], chain[1], chain[3]}
    assert (s.rows[:2] == rows[:2]).all()
    assert s.hits(chain, ctx) == 2 == s.hits(chain)
    assert s.counts()["failed"] == 1
    s.tier.shutdown()


def law_a_store_survives_a_restart_and_other_layouts_miss(folder: Path) -> None:
    chain = keys(3)
    s = Setting(folder)
    _, rows = s.store(chain)
    s.tier.shutdown()
    s = Setting(folder)
    ctx = s.context(chain)
    assert s.hits(chain, ctx) == 3
    assert s.load(chain, ctx).success
    assert (s.rows[:3] == rows).all()
    s.tier.shutdown()
    s = Setting(folder, release="2")
    assert s.hits(chain) == 0
    s.tier.shutdown()


def law_a_chunk_is_read_only_where_that_is_quicker(folder: Path) -> None:
    chain = keys(8)
    for speed, hits in ((SLOW, 8), (QUICK, 0), (0.0, 8)):
        s = Setting(folder / str(speed), prefill_tokens_per_s=speed)
        s.store(chain)
        assert s.hits(chain) == hits
        counts = s.counts()
        assert counts.get("not_worth_reading", 0) == (hits == 0)
        s.tier.shutdown()


def law_a_gap_ends_the_prefix_and_what_follows_it_can_be_read(folder: Path) -> None:
    s = Setting(folder)
    chain = keys(6)
    ctx = s.context(chain)
    for part in (chain[:2], chain[4:]):
        s.tier.submit_store(s.job(part, range(2), ctx, False))
        s.finish()
    ctx = s.context(chain)
    assert s.hits(chain, ctx) == 2
    backwards = [s.tier.lookup(key, ctx).name for key in reversed(chain)]  # as sliding windows
    assert backwards == ["HIT", "HIT", "MISS", "MISS", "HIT", "HIT"]
    s.tier.shutdown()


def law_a_full_queue_refuses_and_never_waits(folder: Path) -> None:
    s = Setting(folder, queue_chunks=4)
    chain = keys(12)
    gate, put = threading.Event(), s.tier.store.put

    def slow(*args: Any) -> Any:
        gate.wait(30)
        return put(*args)

    s.tier.store.put = slow
    ctx = s.context(chain)
    for i in range(0, 12, 3):
        s.tier.submit_store(s.job(chain[i : i + 3], range(3), ctx, False))
    refused = list(s.tier.get_finished_jobs())
    assert [done.job_id for done in refused] == [2, 3, 4]
    assert not any(done.success for done in refused)
    assert s.counts()["refused"] == 9
    gate.set()
    assert s.finish().success
    s.tier.submit_store(s.job(chain[3:7], range(4), ctx, False))  # there is room again
    assert s.finish().success

    gate.clear()
    get = s.tier.store.get
    s.tier.store.get = lambda *args: (gate.wait(30), get(*args))[1]
    s.tier.submit_load(s.job(chain[:4], range(4), ctx, True))
    assert s.hits(chain[:4]) == 0  # the queue of reads is full
    gate.set()
    s.finish()
    assert s.hits(chain[:4]) == 4
    s.tier.shutdown()


def law_a_dead_medium_is_a_miss(folder: Path) -> None:
    s = Setting(folder)
    chain = keys(4)
    s.store(chain)

    def dead(*_: Any) -> Any:
        raise OSError("gone")

    ctx = s.context(chain)
    assert s.hits(chain, ctx) == 4
    s.tier.store.get = s.tier.store.put = dead
    assert not s.load(chain, ctx).success
    assert s.hits(chain, ctx) == 0  # of this request; it does not try again
    done, _ = s.store(keys(2, "n"))
    assert not done.success
    s.tier.shutdown()


def law_metrics_are_those_defined(folder: Path) -> None:
    s = Setting(folder, prefill_tokens_per_s=QUICK)
    s.store(keys(2))
    s.hits(keys(2))
    defined = {name.rsplit("_pigou_")[1] for name in type(s.tier).build_metric_definitions({})}
    counts = s.counts()
    assert {"pages", "used_bytes", "price", "up", "not_worth_reading"} <= set(counts) <= defined
    assert counts["used_bytes"] > 0 < counts["up"]
    s.tier.shutdown()


def law_wrong_parameters_are_named(folder: Path) -> None:
    from pigou.config import ConfigError

    cases = (
        ({"teirs": []}, "teirs"), ({"queue_chunks": -1}, "queue_chunks"),
        ({"tiers": ["x"]}, "NAME=SIZE"), ({"prefill_tokens_per_s": "x"}, "prefill_tokens_per_s"),
    )  # fmt: skip
    for wrong, word in cases:
        said = ""
        try:
            Setting(folder, **wrong)
        except ConfigError as error:
            said = str(error)
        assert word in said


class Engine:
    """vLLM's tiering manager over both plug-ins, loaded as its configuration does."""

    def __init__(self, folder: Path, num_chunks: int = CHUNKS) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering.spec import (  # type: ignore[import-not-found,unused-ignore]
            TieringOffloadingSpec,
        )

        package = "pigou.integrations.vllm"
        tier = {
            "type": "PigouTier",
            "module_path": f"{package}.tier",
            "tiers": [f"disk=64MiB@{folder}"],
        }
        given = config(
            cpu_bytes_to_use=num_chunks * BYTES, eviction_policy="PigouPolicy",
            cache_policy_module_path=f"{package}.policy", secondary_tiers=[tier],
        )  # fmt: skip
        TieringOffloadingSpec.build_metric_definitions(given.extra_config)
        self.base, self.manager = base, TieringOffloadingSpec(given).get_manager()
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def step(self) -> None:
        for tier in self.manager.secondary_tiers:
            tier.drain_jobs()
        self.manager.on_schedule_end(self.base.ScheduleEndContext((), ()))

    def ask(self, chain: list[bytes], salt: str = "") -> tuple[int, bool]:
        """Serve a prompt as the connector does; return the hits, and whether their bytes fit."""
        ctx = self.base.ReqContext(f"r{time.time_ns()}", {"cache_salt": salt})
        for i, key in enumerate(chain):
            ctx.set_offload_key_position(key, (i + 1) * TOKENS)
        result = self.base.LookupResult
        self.manager.on_new_request(ctx)
        for _ in range(5):
            found = []
            for key in chain:
                found.append(self.manager.lookup(key, ctx))
                if found[-1] is result.MISS:
                    break
            if not {result.HIT_PENDING, result.RETRY} & set(found):
                break
            self.step()
        hits = found.count(result.HIT)
        right = True
        if hits:
            spec = self.manager.prepare_load(chain[:hits], ctx)
            right = all(
                bool((self.rows[c] == _row(k)).all())
                for k, c in zip(chain, spec.chunk_ids, strict=False)
            )
            self.manager.complete_load(set(chain[:hits]), ctx)
        stored = self.manager.prepare_store(chain[hits:], ctx) if hits < len(chain) else None
        if stored is not None:
            for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
                self.rows[chunk] = _row(key)
            self.manager.complete_store(set(stored.keys_to_store), ctx)
        self.manager.on_request_finished(ctx)
        self.step()
        self.step()
        assert not self.manager.has_pending_work()
        return hits, right


def _row(key: bytes) -> Any:
    return np.random.default_rng(list(key)).integers(-128, 128, BYTES).astype(np.int8)


def engine_law_chunks_come_back_through_the_cpu_tier(folder: Path) -> None:
    engine = Engine(folder, 8)
    chains = [keys(4, f"c{i}") for i in range(6)]
    for chain in chains:
        assert engine.ask(chain) == (0, True)
    for chain in chains:  # the CPU tier holds two of them
        assert engine.ask(chain) == (4, True)
    stats = engine.manager.get_stats().reduce()
    assert any("pigou_pages" in name for name in stats), stats
    engine.manager.shutdown()


def engine_law_a_corrupted_or_killed_store_is_computed(folder: Path) -> None:
    engine = Engine(folder, 8)
    chains = [keys(4, f"c{i}") for i in range(6)]
    for chain in chains:
        engine.ask(chain)
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > BYTES:
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
    found = [engine.ask(chain) for chain in chains]
    assert all(right for _, right in found)
    assert sum(hits for hits, _ in found) <= 8  # of the CPU tier alone
    assert all(engine.ask(chain)[1] for chain in chains)
    engine.manager.shutdown()


def engine_law_another_salt_misses_in_the_store(folder: Path) -> None:
    engine = Engine(folder)
    engine.ask(keys(4), "alice")
    engine.manager.reset_cache()
    assert engine.ask(keys(4), "alice") == (4, True)
    engine.manager.reset_cache()
    assert engine.ask(keys(4), "bob") == (0, True)
    engine.manager.shutdown()


def engine_law_vllm_still_has_what_we_read_of_its_private_state(folder: Path) -> None:
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext(str(folder))
    context.set_offload_key_position(keys(1)[0], TOKENS)
    assert context._offload_key_positions == {keys(1)[0]: TOKENS}


LAWS = [law for name, law in list(globals().items()) if name.startswith("law_")]
ENGINE_LAWS = [law for name, law in list(globals().items()) if name.startswith("engine_law_")]

if __name__ == "__main__":
    for each in LAWS + ENGINE_LAWS:
        print(each.__name__, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as place:
            each(Path(place))
    print(f"{len(LAWS + ENGINE_LAWS)} laws hold")
