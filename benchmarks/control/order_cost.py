"""CPU time of a queue order for each request: add, first, taken, 8 reports of tokens, end.

    python -m benchmarks.control.order_cost [--requests 4000] [--repeats 3]

Always 8 requests of each tenant wait, prompts of 2,048 tokens in blocks of 16, half of them a
prefix of their tenant's. Orders take turns; the least of the repeats is shown, and its ratio to
`fair`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from pigou.control.admission.fair_order import TenantOrder
from pigou.control.admission.queue_order import QueuedRequest, load
from pigou.control.admission.usage_prices import FleetRates
from pigou.request import SECOND, Request

ORDERS = ("fcfs", "fair", "drf", "karma", "dlpm", "d2lpm", "market")
PROMPT, BLOCK, REPORTS, WAITING = 2048, 16, 8, 8


def requests(count: int, tenants: int) -> list[QueuedRequest]:
    """Return requests of tenants in turn."""
    rng, blocks = np.random.default_rng(0), PROMPT // BLOCK
    prefixes = rng.integers(1, 2**63, (tenants, blocks // 2), dtype=np.uint64)
    made = []
    for number in range(count):
        own = rng.integers(1, 2**63, blocks // 2, dtype=np.uint64)
        keys = np.concatenate([prefixes[number % tenants], own])
        request = Request(
            f"r{number}", PROMPT, 256, tenant=f"t{number % tenants}", keys={BLOCK: keys}
        )
        made.append(QueuedRequest(request, number, PROMPT // 2, output=200, serial=number))
    return made


def seconds(name: str, count: int, tenants: int) -> float:
    """Return the CPU seconds of a request."""
    order, made = load({"order": name}), requests(count, tenants)
    running: list[Request] = []
    follower = order if isinstance(order, TenantOrder) and order.follows else None
    if follower is not None:
        follower.reprice(FleetRates(1e5, 1e4, 1e6))
    ahead, began = WAITING * tenants, time.process_time()
    for number, waiting in enumerate(made):
        order.add(waiting)
        if number < ahead:
            continue
        now = number * SECOND // 100
        first = order.first(now)
        assert first is not None
        if follower is not None:
            follower.began(first.request, f"w{number % 8}", now)
        order.taken(first, PROMPT // 2)
        running.append(first.request)
        for _ in range(REPORTS):
            order.served(first.request, 25)
        if len(running) > 64 and follower is not None:
            follower.ended(running.pop(0), now)
    return (time.process_time() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for tenants in (10, 200):
        least = dict.fromkeys(ORDERS, float("inf"))
        for _ in range(args.repeats):
            for name in ORDERS:
                least[name] = min(least[name], seconds(name, args.requests, tenants))
        for name, cost in least.items():
            ratio = cost / least["fair"]
            print(f"{tenants:4} tenants  {name:<8} {cost * 1e6:8.1f} us a request {ratio:6.2f}x")


if __name__ == "__main__":
    main()
