"""A prefill queue: at least one delivery, exactly one effect, nobody is forgotten or starved."""

import random
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import pytest

from pigou.config import ConfigError
from pigou.control.pull_queue.config import PullQueueConfig, pull_queue_config
from pigou.control.pull_queue.prefill_queue import (
    PrefillClaim,
    PrefillDeadLetter,
    PrefillExpired,
    PrefillItem,
    PrefillQueue,
    ServiceLaw,
    ServiceTable,
)
from pigou.games.queueing import mgc_wait
from pigou.request import NEVER, SECOND


def queue_of(*workers: str, **config: object) -> PrefillQueue:
    queue = PrefillQueue(PullQueueConfig(**{"order": "fifo", "batch_wait_ms": 0.0} | config))  # type: ignore[arg-type]
    for worker in workers:
        queue.worker_up(worker)
    return queue


def seconds_of(table: dict[str, Sequence[float]]) -> ServiceLaw:
    def law(items: Sequence[PrefillItem]) -> ServiceTable:
        return table_of(items, [table[item.request] for item in items])

    return law


def table_of(items: Sequence[PrefillItem], rows: Sequence[Sequence[float]]) -> ServiceTable:
    seconds = np.array(rows, dtype=float)
    tokens = np.array([[item.tokens] for item in items])
    return ServiceTable(seconds, np.broadcast_to(tokens, seconds.shape))


def equal(workers: int) -> ServiceLaw:
    return lambda items: table_of(items, [[1.0] * workers] * len(items))


def test_the_first_in_goes_first_and_priority_before_arrival() -> None:
    queue = queue_of("p0", batch_tokens=1000)
    for number, priority in enumerate((1, 0, 1, 0)):
        queue.enqueue(PrefillItem(f"r{number}", 10, number, priority=priority), 5)
    assert [claim.item.request for claim in queue.claim("p0", 5)] == ["r1", "r3", "r0", "r2"]


def test_a_claim_is_the_smallest_batch_that_saturates() -> None:
    queue = queue_of("p0", batch_tokens=300)
    for number in range(5):
        queue.enqueue(PrefillItem(f"r{number}", 120, number), 5)
    assert len(queue.claim("p0", 5)) == 3
    assert len(queue) == 2


def test_dynamos_first_design_takes_one_prompt_at_a_time() -> None:
    queue = queue_of("p0", batch_tokens=1)
    for number in range(5):
        queue.enqueue(PrefillItem(f"r{number}", 120, number), 5)
    assert len(queue.claim("p0", 5)) == 1


def test_a_worker_waits_for_its_batch_but_not_for_long() -> None:
    queue = queue_of("p0", batch_tokens=300, batch_wait_ms=2.0)
    queue.enqueue(PrefillItem("r0", 120, 0), 0)
    assert queue.claim("p0", 0) == []
    assert queue.next_ns(0) == 2_000_000
    assert len(queue.claim("p0", 2_000_000)) == 1


def test_a_burst_is_shared_by_idle_workers_in_one_round() -> None:
    """A push gives 1 + 2 + 13 requests in three iterations for a burst of 16 (dynamo 10786)."""
    workers = ("p0", "p1", "p2", "p3")
    queue = queue_of(*workers, order="price", batch_tokens=4096, batch_wait_ms=2.0)
    for number in range(16):
        assert queue.claim("p0", 0, equal(4)) == []
        queue.enqueue(PrefillItem(f"r{number}", 64, 0), 0)
    shares = [len(queue.claim(worker, 2_000_000, equal(4))) for worker in workers]
    assert shares == [4, 4, 4, 4]


def test_a_lease_that_ends_delivers_again_in_the_old_place() -> None:
    queue = queue_of("p0", "p1", batch_tokens=1, lease_s=2.0)
    queue.enqueue(PrefillItem("r0", 10, 1), 5)
    queue.enqueue(PrefillItem("r1", 10, 2), 5)
    (first,) = queue.claim("p0", 5)
    assert queue.next_ns(5) == first.lease_end_ns == 5 + 2 * SECOND
    assert queue.tick(2 * SECOND) == []
    assert queue.tick(first.lease_end_ns) == []
    (again,) = queue.claim("p1", first.lease_end_ns)
    assert (again.item.request, again.delivery) == ("r0", 2)


def test_an_extended_lease_holds() -> None:
    queue = queue_of("p0", lease_s=2.0)
    queue.enqueue(PrefillItem("r0", 10, 1), 5)
    queue.claim("p0", 5)
    assert (queue.extend("p0", SECOND), queue.extend("p1", SECOND)) == (1, 0)
    queue.tick(2 * SECOND + 5)
    assert len(queue) == 0
    queue.tick(3 * SECOND)
    assert len(queue) == 1


def test_a_worker_that_computes_another_prompt_keeps_that_alone() -> None:
    queue = queue_of("p0", lease_s=2.0)
    for name in ("r0", "r1"):
        queue.enqueue(PrefillItem(name, 300, 1), 5)
    queue.claim("p0", 5)
    assert queue.extend("p0", SECOND, "r1") == 2
    queue.tick(2 * SECOND + 5)
    assert [queue.claimant(name) for name in ("r0", "r1", "r2")] == ["", "p0", ""]


def test_the_first_offer_counts_whoever_made_it() -> None:
    queue = queue_of("p0", "p1", lease_s=2.0)
    queue.enqueue(PrefillItem("r0", 10, 1), 5)
    queue.claim("p0", 5)
    queue.tick(3 * SECOND)
    queue.claim("p1", 3 * SECOND)
    assert queue.ack("r0", 0, 4 * SECOND)  # of p0, late but first
    assert not queue.ack("r0", 0, 5 * SECOND)
    assert queue.claims_of("p1") == 0
    assert queue.counts.duplicates == 1


def test_a_dead_workers_prompts_go_to_another_at_once() -> None:
    queue = queue_of("p0", "p1")
    queue.enqueue(PrefillItem("r0", 10, 1), 5)
    queue.claim("p0", 5)
    assert queue.worker_down("p0", 6) == []
    assert queue.claim("p0", 6) == []
    assert queue.claim("p1", 6)[0].delivery == 2


def test_a_prompt_that_nobody_computes_becomes_a_dead_letter() -> None:
    queue = queue_of("p0", max_deliveries=3)
    item = PrefillItem("r0", 10, 1)
    queue.enqueue(item, 5)
    for now in (5, 6):
        queue.claim("p0", now)
        assert queue.worker_down("p0", now) == []
        queue.worker_up("p0")
    queue.claim("p0", 7)
    assert queue.worker_down("p0", 7) == [PrefillDeadLetter(item, 3)]
    assert len(queue) == 0
    assert not queue.ack("r0", 0, 8)


def test_deliveries_that_no_worker_began_do_not_make_a_dead_letter() -> None:
    """A gateway that stood still answers the questions of several deliveries at once."""
    queue = queue_of("p0", "p1", max_deliveries=2)
    item = PrefillItem("r0", 10, 1)
    queue.enqueue(item, 5)
    for number in range(6):
        claim = queue.claim_one("r0", f"p{number % 2}", 5 + number)
        assert isinstance(claim, PrefillClaim)
    later = SECOND
    assert isinstance(queue.claim_one("r0", "p0", later), PrefillClaim)
    assert queue.claim_one("r0", "p1", 2 * later) == [PrefillDeadLetter(item, 2)]


def test_a_deadline_never_passes_silently() -> None:
    queue = queue_of("p0", lease_s=1.0)
    late, claimed = (PrefillItem(name, 600, 1, deadline_ns=10) for name in ("late", "claimed"))
    queue.enqueue(claimed, 5)
    queue.claim("p0", 5)
    queue.enqueue(late, 5)
    assert queue.next_ns(5) == 10
    assert queue.tick(10) == [PrefillExpired(late)]
    assert queue.tick(5 + SECOND) == [PrefillExpired(claimed)]  # its worker died
    assert queue.counts.expired == 2


def test_a_cancelled_prompt_is_forgotten_and_its_worker_named() -> None:
    queue = queue_of("p0", batch_tokens=1)
    for name in ("r0", "r1"):
        queue.enqueue(PrefillItem(name, 10, 1), 5)
    queue.claim("p0", 5)
    assert [queue.cancel(name) for name in ("r0", "r1", "r2")] == ["p0", "", None]
    assert not queue.ack("r0", 0, 6)
    assert queue.claim("p0", 6) == []


def test_the_same_prompt_is_queued_once_and_a_newer_incarnation_replaces_it() -> None:
    queue = queue_of("p0", duplicate_window_s=1.0)
    assert queue.enqueue(PrefillItem("r0", 10, 1), 5)
    assert not queue.enqueue(PrefillItem("r0", 10, 1), 6)
    queue.claim("p0", 6)
    assert queue.enqueue(PrefillItem("r0", 10, 1, incarnation=1), 7)
    assert not queue.ack("r0", 0, 8)  # the older one's offer
    queue.claim("p0", 8)
    assert queue.ack("r0", 1, 9)
    assert not queue.enqueue(PrefillItem("r0", 10, 1, incarnation=1), 10)
    queue.tick(2 * SECOND)
    assert queue.enqueue(PrefillItem("r0", 10, 1), 2 * SECOND)  # long after


def test_a_prompt_is_left_to_the_worker_that_has_its_prefix() -> None:
    law = seconds_of({"busy": (0.1, 9.0), "shared": (1.0, 0.1)})
    queue = queue_of("p0", "p1", order="price")
    queue.enqueue(PrefillItem("busy", 600, 0), 0)
    queue.claim("p0", 0, law)
    queue.enqueue(PrefillItem("shared", 600, 0), 0)
    late = SECOND // 5
    assert queue.free_s("p0", 0) == pytest.approx(0.1)
    assert queue.claim("p0", late, law) == []
    assert queue.counts.left == 1
    assert queue.claim("p1", late, law)[0].item.request == "shared"


def test_nobody_is_passed_over_more_than_the_bound() -> None:
    queue = queue_of("p0", order="price", batch_tokens=1, max_bypass=3, window=8)
    table = {"head": (5.0,)} | {f"r{n}": (0.1,) for n in range(20)}
    queue.enqueue(PrefillItem("head", 10, 0), 0)
    order = []
    for number in range(20):
        queue.enqueue(PrefillItem(f"r{number}", 10, 1), 1)
    while not order or order[-1] != "head":
        (claim,) = queue.claim("p0", 1, seconds_of(table))
        queue.ack(claim.item.request, 0, 1)
        order.append(claim.item.request)
    assert len(order) == 4


def test_nobody_is_passed_over_beyond_the_time_bound() -> None:
    queue = queue_of("p0", "p1", order="price", max_bypass_s=1.0)
    law = seconds_of({"shared": (9.0, 0.1)})
    queue.enqueue(PrefillItem("shared", 600, 0), 0)
    assert queue.claim("p0", 0, law) == []
    assert queue.next_ns(0) == SECOND
    assert len(queue.claim("p0", SECOND, law)) == 1


@pytest.mark.parametrize("order", ["fifo", "price"])
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_ends_exactly_once(order: str, seed: int) -> None:
    """Workers die, stall and answer twice; clients leave; gateways send twice."""
    rng = random.Random(seed)
    workers = ["p0", "p1", "p2"]
    queue = queue_of(
        *workers, order=order, batch_tokens=40, lease_s=0.3, max_deliveries=4, max_bypass=2,
        max_bypass_s=0.5,
    )  # fmt: skip
    table = {f"r{n}": [rng.choice((0.1, 0.02)) for _ in workers] for n in range(150)}

    def law(items: Sequence[PrefillItem]) -> ServiceTable:
        return table_of(
            items, [[table[i.request][int(w[1])] for w in queue.workers] for i in items]
        )

    ended: dict[str, str] = {}
    held: list[tuple[str, str]] = []
    now, sent = 0, 0

    def end(request: str, how: str) -> None:
        assert ended.setdefault(request, how) is how

    while len(ended) < 150 or held:
        now += rng.randrange(20_000_000)
        if sent < 150 and rng.random() < 0.7:
            deadline = now + SECOND if rng.random() < 0.3 else NEVER
            item = PrefillItem(f"r{sent}", rng.randrange(1, 30), now, deadline_ns=deadline)
            assert queue.enqueue(item, now)
            assert not queue.enqueue(item, now)
            sent += 1
        effects = queue.tick(now)
        if rng.random() < 0.05:
            worker = rng.choice(workers)
            effects += queue.worker_down(worker, now)
            queue.worker_up(worker)
        for effect in effects:
            end(effect.item.request, type(effect).__name__)
        if rng.random() < 0.02 and sent:
            name = f"r{rng.randrange(sent)}"
            if queue.cancel(name) is not None:
                end(name, "cancelled")
        for worker in queue.workers:
            if not queue.claims_of(worker):
                held += [(c.item.request, worker) for c in queue.claim(worker, now, law)]
        while held and rng.random() < 0.6:
            request, _ = held.pop(rng.randrange(len(held)))
            if queue.ack(request, 0, now):
                end(request, "acked")
    counts = queue.counts
    assert counts.acked + counts.dead + counts.expired + counts.cancelled == 150
    assert len(queue) == 0


def waits(split: bool, servers: int, rho: float, prompts: int) -> float:
    """Mean wait in services of Poisson prompts of one size, pulled, or split at random."""
    rng = random.Random(3)
    names = [f"p{n}" for n in range(servers)]
    queues = [queue_of(name) for name in names] if split else [queue_of(*names)]
    ends: list[tuple[int, str, int, str]] = []  # time, worker, queue, request
    arrival, wait = 0, 0

    def pull(number: int, worker: str, now: int) -> None:
        nonlocal wait
        for claim in queues[number].claim(worker, now):
            wait += now - claim.item.arrival_ns
            heappush(ends, (now + SECOND, worker, number, claim.item.request))

    for prompt in range(prompts):
        arrival += round(rng.expovariate(servers * rho) * SECOND)
        while ends and ends[0][0] <= arrival:
            now, worker, number, request = heappop(ends)
            assert queues[number].ack(request, 0, now)
            pull(number, worker, now)
        number = rng.randrange(len(queues))
        queues[number].enqueue(PrefillItem(str(prompt), 600, arrival), arrival)
        for worker in queues[number].workers:
            if not queues[number].claims_of(worker):
                pull(number, worker, arrival)
                break
    return wait / SECOND / prompts


def test_one_queue_for_four_workers_is_an_mdc_queue() -> None:
    """At a load of 0.8, four M/D/1 queues wait five times as long as one M/D/4."""
    one, split = waits(False, 4, 0.8, 40_000), waits(True, 4, 0.8, 40_000)
    assert split == pytest.approx(2.0, rel=0.1)  # Pollaczek-Khinchine: rho / (2 (1 - rho))
    assert one == pytest.approx(mgc_wait(4, 0.8, 0.0), rel=0.15)
    assert 4.0 < split / one < 6.5


@pytest.mark.parametrize(
    ("uncached", "queued", "local"),
    [(1000, 0, True), (1001, 0, False), (1001, 1, False), (1001, 2, True), (9000, 3, True)],
)
def test_dynamos_thresholds_keep_short_prompts_local_and_all_beside_a_long_queue(
    uncached: int, queued: int, local: bool
) -> None:
    assert PullQueueConfig(local="thresholds").is_local(uncached, queued) is local
    assert not PullQueueConfig().is_local(uncached, queued)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "shove"}, "'shove'"),
        ({"mode": "push", "toll": 1}, "has no toll"),
        ({"mode": "pull", "tol": 1}, "tol"),
        ({"mode": "pull", "window": 0}, "window is 0"),
    ],
)
def test_what_is_no_queue_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pull_queue_config(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_tokens", 0), ("max_bypass", -1), ("lease_s", 0.0), ("toll", float("nan"))],
)
def test_limits_under_which_nothing_ends_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        PullQueueConfig(**{name: value})  # type: ignore[arg-type]
