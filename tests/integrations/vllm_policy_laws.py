"""Laws of `PigouPolicy` under vLLM's manager, after vLLM's own scenarios for its policies.

Without pytest, so that a real vLLM's interpreter can run them: `python -m
tests.integrations.vllm_policy_laws`. The fast tests run them with fakes.
"""

from __future__ import annotations

import heapq
from typing import Any
from unittest import mock

from pigou.kv.tenure import Tenure
from pigou.request import SECOND

MODULE = "pigou.integrations.vllm.policy"
TOKENS = 16


class Setting:
    """A manager with the policy, its clock, and the types of the engine."""

    def __init__(self, num_chunks: int, real: bool, policy: str = "PigouPolicy") -> None:
        self.now = 1_000 * SECOND
        from vllm.v1.kv_offload import base  # type: ignore[import-not-found,unused-ignore]

        self.base: Any = base
        if real:
            from vllm.v1.kv_offload.cpu.manager import (  # type: ignore[import-not-found,unused-ignore]
                CPUOffloadingManager,
            )

            self.manager: Any = CPUOffloadingManager(num_chunks, policy, MODULE)
        else:
            from tests.integrations.vllm_fakes import CPUOffloadingManager as Fake

            from pigou.integrations.vllm import policy as module

            self.manager = Fake(num_chunks, getattr(module, policy)(num_chunks))
        self.policy = self.manager._policy
        self.policy.clock = lambda: self.now

    def context(self, chain: list[bytes] = [], salt: str = "") -> Any:  # noqa: B006
        params = {"cache_salt": salt} if salt else None
        ctx = self.base.ReqContext(req_id="r", kv_transfer_params=params)
        for i, key in enumerate(chain):
            ctx.set_offload_key_position(key, (i + 1) * TOKENS)
        self.manager.on_new_request(ctx)
        return ctx

    def ask(self, chain: list[bytes], salt: str = "", after: float = 1.0) -> int:
        """Serve a prompt: load what is held, store the rest; return the chunks loaded."""
        self.now += int(after * SECOND)
        ctx = self.context(chain, salt)
        hit = 0
        while hit < len(chain) and self.held(chain[hit]):
            hit += 1
        if hit:
            self.manager.prepare_load(chain[:hit], ctx)
            self.manager.complete_load(chain[:hit], ctx)
        if hit < len(chain) and (stored := self.manager.prepare_store(chain[hit:], ctx)):
            self.manager.complete_store(stored.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        return hit

    def held(self, key: bytes) -> bool:
        return bool(
            self.manager.lookup(key, self.base.ReqContext(req_id="l")) is self.base.LookupResult.HIT
        )


def keys(*names: int | str, group: int = 0) -> list[bytes]:
    return [f"{name:>08}".encode() + group.to_bytes(4, "big") for name in names]


def law_a_stored_chunk_is_not_evicted_for_its_own_batch(real: bool) -> None:
    s = Setting(4, real)
    ctx = s.context()
    s.manager.complete_store(s.manager.prepare_store(keys(1, 2), ctx).keys_to_store, ctx)
    s.policy.touch(keys(1), ctx)  # leaves 2 as the next to go
    stored = s.manager.prepare_store(keys(2, 3, 4, 5), ctx)
    assert stored.keys_to_store == keys(3, 4, 5)
    assert stored.evicted_keys == keys(1)
    s.manager.complete_store(keys(2, 3, 4, 5), ctx)
    assert s.held(keys(2)[0])


def law_chunks_in_transfer_are_not_evicted(real: bool) -> None:
    s = Setting(4, real)
    ctx = s.context()
    s.manager.prepare_store(keys(1, 2, 3, 4), ctx)
    assert s.manager.prepare_store(keys(5), s.context()) is None  # all are being written
    s.manager.complete_store(keys(1, 2, 3, 4), ctx)
    s.manager.prepare_load(keys(2, 3), ctx)
    assert s.manager.prepare_store(keys(5, 6, 7), s.context()) is None
    assert all(map(s.held, keys(1, 2, 3, 4)))
    s.manager.complete_load(keys(2, 3), ctx)
    stored = s.manager.prepare_store(keys(5, 6, 7), s.context())
    assert len(stored.evicted_keys) == 3


def law_a_chunk_loaded_twice_is_pinned_until_both_end(real: bool) -> None:
    s = Setting(1, real)
    s.ask(keys(1))
    first, second = s.context(), s.context()
    s.manager.prepare_load(keys(1), first)
    s.manager.prepare_load(keys(1), second)
    s.manager.complete_load(keys(1), first)
    assert s.manager.prepare_store(keys(2), s.context()) is None
    s.manager.complete_load(keys(1), second)
    assert s.manager.prepare_store(keys(2), s.context()) is not None


def law_a_failed_store_leaves_nothing(real: bool) -> None:
    s = Setting(4, real)
    s.ask(keys(1, 2, 3, 4))
    ctx = s.context()
    stored = s.manager.prepare_store(keys(5), ctx)
    assert len(stored.evicted_keys) == 1
    s.manager.complete_store(keys(5), ctx, success=False)
    assert not s.held(keys(5)[0])
    assert not s.held(stored.evicted_keys[0])
    assert s.policy.get(keys(5)[0]) is None
    assert s.manager.prepare_store(keys(6), s.context()).evicted_keys == []


def law_slots_are_given_in_the_order_of_the_keys(real: bool) -> None:
    s = Setting(4, real)
    s.ask(keys(0, 1, 2))
    slot = {key: s.policy.get(key).chunk_id for key in keys(0, 1, 2)}
    ctx = s.context()
    loaded = s.manager.prepare_load(keys(1, 2, 0), ctx)
    ids = loaded.chunk_ids.tolist() if real else loaded
    assert ids == [slot[key] for key in keys(1, 2, 0)]


def law_a_reset_forgets_all(real: bool) -> None:
    s = Setting(4, real)
    s.ask(keys(1, 2, 3))
    s.manager.prepare_load(keys(1), s.context())
    s.manager.reset_cache()
    assert not any(map(s.held, keys(1, 2, 3)))
    if real:
        s.ask(keys(4, 5, 6, 7))
        assert all(map(s.held, keys(4, 5, 6, 7)))


def law_the_end_of_a_prompt_goes_before_its_beginning(real: bool) -> None:
    s = Setting(6, real)
    s.ask(keys(*range(6)))
    for left in (5, 4, 3, 2, 1):
        assert s.policy.evict(1, set())[0][0] == keys(left)[0]
    s = Setting(6, real)
    s.ask(keys(0, 1, 2))
    s.ask(keys(0, 1, 2, 3, 4, 5))  # stored behind what was loaded
    assert [key for key, _ in s.policy.evict(4, set())] == keys(5, 4, 3, 2)


def law_a_pinned_end_keeps_its_beginning(real: bool) -> None:
    s = Setting(3, real)
    s.ask(keys(0, 1, 2))
    assert s.policy.evict(2, set(keys(2))) is None
    s.manager.prepare_load(keys(2), s.context())
    assert s.policy.evict(1, set()) is None


def law_a_refused_eviction_changes_nothing(real: bool) -> None:
    a, b = Setting(6, real), Setting(6, real)
    for s in (a, b):
        s.ask(keys("a", "b", "c"))
        s.ask(keys("d", "e", "f"))
    assert a.policy.evict(6, set(keys("a"))) is None
    assert all(map(a.held, keys(*"abcdef")))
    assert [k for k, _ in a.policy.evict(5, set())] == [k for k, _ in b.policy.evict(5, set())]


def law_what_is_used_again_outlives_a_scan(real: bool) -> None:
    s = Setting(40, real)
    for turn in range(60):
        s.ask(keys("a", "b", "c", "d"))
        s.ask([*keys(*(f"s{turn}.{i}" for i in range(12)))])
    assert all(map(s.held, keys("a", "b", "c", "d")))


def law_an_expired_tenure_goes_first(real: bool) -> None:
    s = Setting(8, real)
    salt = Tenure(tenant="t", expiry=s.now + 30 * SECOND).salt()
    s.ask(keys(*"abcd"))
    for _ in range(3):
        s.ask(keys(*"efgh"), salt)
    s.now += 60 * SECOND
    assert {key for key, _ in s.policy.evict(4, set())} == set(keys(*"efgh"))
    s.ask(keys(*"ijkl"), "tenure1:malformed")  # expired, and no error
    assert {key for key, _ in s.policy.evict(4, set())} == set(keys(*"ijkl"))


def law_groups_of_a_hybrid_model_are_chains_of_their_own(real: bool) -> None:
    s = Setting(6, real)
    chain = [
        key for pair in zip(keys(0, 1, 2), keys(0, 1, 2, group=1), strict=True) for key in pair
    ]
    ctx = s.context()
    for i, key in enumerate(chain):
        ctx.set_offload_key_position(key, (i // 2 + 1) * TOKENS)
    s.manager.complete_store(s.manager.prepare_store(chain, ctx).keys_to_store, ctx)
    s.manager.on_request_finished(ctx)
    gone = [key for key, _ in s.policy.evict(6, set())]
    for group in (0, 1):
        assert [key for key in gone if key[-1] == group] == keys(2, 1, 0, group=group)


def law_an_eviction_does_a_bounded_share_of_work(real: bool) -> None:
    """Heap operations per evicted chunk do not grow with the capacity, nor does their worst."""
    small, large = _heap_operations(1_000, real), _heap_operations(8_000, real)
    assert len(small) == len(large) == 200
    assert sum(small) / 200 < 12 > sum(large) / 200, (small, large)
    assert max(small) < 60 > max(large), (small, large)


def _heap_operations(capacity: int, real: bool) -> list[float]:
    """Return the heap operations per chunk of each eviction, in a cache long in use."""
    s = Setting(capacity, real)
    for turn in range(capacity // 20):
        s.ask(keys(*(f"{turn}.{i}" for i in range(40))), after=3.0)
    evict, done, shares = s.policy.evict, [0], []

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            done[0] += 1
            return function(*args)

        return call

    def watched(n: int, protected: set[bytes]) -> Any:
        done[0] = 0
        result = evict(n, protected)
        shares.append(done[0] / n)
        return result

    s.policy.evict = watched
    push, pop = counted(heapq.heappush), counted(heapq.heappop)
    with mock.patch.multiple(heapq, heappush=push, heappop=pop):
        for turn in range(200):
            s.ask(keys(*(f"x{turn}.{i}" for i in range(40))), after=3.0)
    return shares


def law_memory_of_absent_chunks_is_bounded(real: bool) -> None:
    s = Setting(4, real)
    for turn in range(1_000):
        s.ask(keys(*(f"{turn}.{i}" for i in range(4))))
    assert len(s.policy._absent) <= 16 * 4
    assert len(s.policy._heap) <= 4 * 4 + 64 + 8


LAWS = [law for name, law in list(globals().items()) if name.startswith("law_")]

if __name__ == "__main__":
    for each in LAWS:
        each(True)
    print(f"{len(LAWS)} laws hold")
