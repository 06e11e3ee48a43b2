"""Laws of the live caching game: what lies where, against where it would lie at best."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pigou.config import ControlConfig
from pigou.control.cache_monitor import BEAT, MIN_PROMPTS
from pigou.control.caching_game import CachingFleet, Placement, Prefixes, Prompt, caching_game
from pigou.control.latency_model.estimates import Estimates
from pigou.control.messages import CacheChanged, Ended, LoadReport, WorkerUp
from pigou.control.plane import ControlPlane
from pigou.request import (
    SECOND,
    BlockRemoved,
    BlockStored,
    FinishReason,
    Medium,
    Request,
    Worker,
    no_hashes,
)

SIZE = 16


def chain(first: int, blocks: int) -> np.ndarray:
    return np.arange(first, first + blocks, dtype=np.uint64)


def fleet(workers: int, blocks: float, link: float = math.inf) -> CachingFleet:
    ids = [f"w{row}" for row in range(workers)]
    known = Estimates.prior(workers)
    return CachingFleet(ids, SIZE, np.full(workers, blocks), known, np.full(workers, link))


def prompt(worker: int, keys: np.ndarray, cached: int, known: int | None = None) -> Prompt:
    known = cached if known is None else known
    return Prompt(f"w{worker}", SIZE * len(keys) + 1, keys, cached, known, 1.0)


def holding(held: dict[int, list[int]], workers: int, tier: int = 0):  # type: ignore[no-untyped-def]
    """Who holds which keys, all in one tier."""

    def look(keys: np.ndarray) -> np.ndarray:
        rows = np.zeros((4, workers), dtype=np.int64)
        for worker in range(workers):
            mine = set(held.get(worker, ()))
            run = next((i for i, key in enumerate(keys.tolist()) if key not in mine), len(keys))
            rows[tier, worker] = rows[3, worker] = run
        return rows

    return look


def judged(
    window: list[Prompt], members: CachingFleet, held: dict[int, list[int]], tier: int = 0
) -> Placement:
    found = caching_game(window, members, holding(held, len(members.workers), tier))
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("link", [math.inf, 2e-5])
def test_the_price_is_at_least_one(seed: int, link: float) -> None:
    rng = np.random.default_rng(seed)
    chains = [chain(100 * k + 1, int(rng.integers(1, 12))) for k in range(6)]
    window = [
        prompt(int(rng.integers(3)), chains[int(rng.integers(6))], 0, known=1) for _ in range(60)
    ]
    held = {w: [int(k) for c in chains if rng.random() < 0.5 for k in c[:5]] for w in range(3)}
    found = judged(window, fleet(3, float(rng.integers(4, 40)), link), held)
    assert found.poa >= 1.0
    assert found.cost == pytest.approx(found.poa * found.best)
    assert found.best >= found.unavoidable - 1e-12


def test_the_best_placement_has_a_price_of_one() -> None:
    often, seldom = chain(1, 10), chain(101, 10)
    window = [prompt(0, often, 10)] * 9 + [prompt(0, seldom, 0, known=10)]
    assert judged(window, fleet(1, 10), {0: often.tolist()}).poa == 1.0


def test_room_for_what_is_seldom_wanted_has_a_price() -> None:
    often, seldom = chain(1, 10), chain(101, 10)
    window = [prompt(0, often, 10)] * 9 + [prompt(0, seldom, 10)]
    found = judged(window, fleet(1, 10), {0: seldom.tolist()})
    token, bare = 1e-4, 0.005 + 1e-4
    assert found.best == pytest.approx(10 * bare + SIZE * 10 * token)
    assert found.cost == pytest.approx(10 * bare + 9 * SIZE * 10 * token)


def test_with_room_for_all_that_is_wanted_again_nothing_is_lost() -> None:
    chains = [chain(100 * k + 1, 8) for k in range(4)]
    window = [prompt(0, each, 0, known=0) for each in chains for _ in range(3)]
    found = judged(window, fleet(1, 32), {0: [k for each in chains for k in each.tolist()]})
    assert found.poa == 1.0
    assert found.cost == found.unavoidable
    assert found.met > found.best


def test_what_comes_for_the_first_time_is_nobodys_fault() -> None:
    window = [prompt(0, chain(100 * k + 1, 8), 0) for k in range(5)]
    found = judged(window, fleet(1, 8), {})
    assert (found.poa, found.objects) == (1.0, 0)
    assert found.cost == found.unavoidable == pytest.approx(found.met)


def test_a_copy_elsewhere_helps_by_the_price_of_the_link() -> None:
    keys = chain(1, 10)
    window = [prompt(0, keys, 10), prompt(1, keys, 0, known=10)]
    apart = judged(window, fleet(2, 10), {0: keys.tolist()})
    linked = judged(window, fleet(2, 10, link=2e-5), {0: keys.tolist()})
    tokens = SIZE * 10
    assert apart.cost - apart.best == pytest.approx(1e-4 * tokens)
    assert linked.cost - linked.best == pytest.approx(2e-5 * tokens)


def test_a_copy_in_host_memory_costs_part_of_computing_it() -> None:
    keys = chain(1, 10)
    window = [prompt(0, keys, 10)]
    device = judged(window, fleet(1, 10), {0: keys.tolist()})
    host = judged(window, fleet(1, 10), {0: keys.tolist()}, tier=1)
    assert host.cost - device.cost == pytest.approx(0.25 * 1e-4 * SIZE * 10)


def test_speeds_without_a_slope_do_not_make_blocks_worthless() -> None:
    often, seldom = chain(1, 10), chain(101, 10)
    window = [prompt(0, often, 0, known=10)] * 9 + [prompt(0, seldom, 0, known=10)]
    members = fleet(1, 10)
    members.estimates.prefill_token[:] = 0.0
    found = judged(window, members, {0: seldom.tolist()})
    assert found.met == pytest.approx(10 * 0.005)  # as many seconds as were learned
    assert found.poa > 2.0


def test_many_objects_are_cut_to_the_hottest_and_it_says_so() -> None:
    chains = [chain(100 * k + 1, 2) for k in range(100)]
    window = [prompt(0, each, 2) for each in chains]
    found = judged(window, fleet(1, 400), {})
    assert (found.objects, found.exact) == (64, False)


def test_branches_are_what_the_same_prompts_have() -> None:
    tree = Prefixes()
    root = chain(1, 4)
    tree.add(np.concatenate([root, chain(50, 3)]), "a", 1.0)
    tree.add(np.concatenate([root, chain(70, 2)]), "b", 1.0)
    tree.add(root[:2], "a", 1.0)
    seen = {
        (each.start, each.end, int(each.keys[each.start])): each.again for each in tree.branches
    }
    assert seen == {
        (0, 2, 1): {"b": 1.0, "a": 1.0},
        (2, 4, 3): {"b": 1.0},
        (4, 7, 50): {},
        (4, 6, 70): {},
    }


# --- in the control plane ---------------------------------------------------------------------


def pairs(keys: np.ndarray) -> np.ndarray:
    return np.stack([np.zeros_like(keys), keys], axis=1)


def plane(events: bool = True, blocks: int = 2**16) -> ControlPlane:
    made = ControlPlane(ControlConfig())
    made.observe(WorkerUp(Worker("w0", "", blocks=blocks, events=events)), 0)
    return made


def ask(made: ControlPlane, name: str, keys: np.ndarray, now: int) -> None:
    made.submit(Request(name, SIZE * len(keys) + 1, 8, hashes=pairs(keys)), now)


def stored(keys: np.ndarray) -> CacheChanged:
    return CacheChanged("w0", (BlockStored("r", 0, pairs(keys), no_hashes()),))


def test_without_kv_events_there_is_no_figure() -> None:
    for events in (False, True):
        made = plane(events)
        for k in range(MIN_PROMPTS):
            ask(made, f"r{k}", chain(1, 8), 0)
        made.tick(0)
        made.tick(BEAT)
        assert (made.status(BEAT).caching.placement is not None) is events


def test_rho_counts_active_blocks_and_not_cached_idle_ones() -> None:
    made = plane(blocks=64)
    made.observe(stored(chain(1, 64)), 0)
    assert made.status(0).caching.fleet_rho == 0.0
    ask(made, "r", chain(1, 8), 0)  # 129 tokens
    assert made.status(0).caching.fleet_rho == pytest.approx(129 / SIZE / 64)
    made.observe(LoadReport("w0", running=1, waiting=0, kv_usage=0.25), 1)
    assert made.status(1).caching.rho.tolist() == [0.25]  # as the worker says
    made.observe(LoadReport("w0", running=1, waiting=16, kv_usage=1.0), 2)
    assert made.status(2).caching.fleet_rho > 1.0  # those that wait want room too
    made.observe(Ended("r", FinishReason.STOP), 3)
    made.observe(LoadReport("w0", running=0, waiting=0, kv_usage=0.0), 3)
    assert made.status(3).caching.fleet_rho == 0.0


def test_rho_is_not_known_of_a_worker_that_does_not_say_how_many_blocks_it_has() -> None:
    assert math.isnan(plane(blocks=0).status(0).caching.fleet_rho)


def test_evicted_are_blocks_that_leave_the_device_and_prices_are_told_around_the_first() -> None:
    made = plane()
    often = chain(1, 8)
    made.observe(stored(often), 0)
    for k in range(MIN_PROMPTS):
        ask(made, f"r{k}", often, 0)
    made.tick(0)
    made.tick(BEAT)
    before = made.status(BEAT).caching
    assert (before.evicted, before.before, math.isnan(before.after)) == (0, 1.0, True)
    gone = BlockRemoved(pairs(often), Medium.DEVICE)
    made.observe(CacheChanged("w0", (gone, BlockRemoved(pairs(often), Medium.HOST))), BEAT)
    for k in range(512):
        ask(made, f"s{k}", often, BEAT)
    made.tick(2 * BEAT)
    after = made.status(2 * BEAT).caching
    assert after.evicted == 8
    assert after.rate == pytest.approx(8 / (BEAT / SECOND))
    assert after.first_eviction == 2 * BEAT / SECOND
    assert after.before == 1.0
    assert after.after >= 1.0
