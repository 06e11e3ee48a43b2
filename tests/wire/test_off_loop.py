"""Laws of work off the event loop: bounded, in turn by tenant, cancelled with its client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pigou.wire.errors import APIError
from pigou.wire.fair_turns import FairThreadPool


@contextmanager
def occupied(threads: int = 1, most: int = 64) -> Iterator[tuple[FairThreadPool, threading.Event]]:
    """Give an `FairThreadPool` whose work waits for an event, and that event."""
    work, go = FairThreadPool(threads, most), threading.Event()
    try:
        yield work, go
    finally:
        go.set()
        work.close()


async def begin(
    work: FairThreadPool, tenant: str, call: Callable[[], object]
) -> asyncio.Task[object]:
    task = asyncio.create_task(work.run(tenant, call))
    await asyncio.sleep(0)
    return task


async def test_tenants_take_turns_whoever_came_first() -> None:
    done: list[str] = []
    with occupied() as (work, go):
        tasks = [await begin(work, "first", go.wait)]
        for tenant in ("many",) * 4 + ("one", "two", "two"):
            tasks.append(await begin(work, tenant, lambda t=tenant: done.append(t)))
        go.set()
        await asyncio.gather(*tasks)
    assert done == ["many", "one", "two", "many", "two", "many", "many"]


async def test_no_more_threads_work_than_there_are_to_be() -> None:
    with occupied(threads=2) as (work, go):
        running = threading.Semaphore(0)
        tasks = [
            await begin(work, str(i), lambda: (running.release(), go.wait())) for i in range(5)
        ]
        await asyncio.to_thread(lambda: [running.acquire(timeout=60) for _ in range(2)])
        assert not running.acquire(blocking=False)
        go.set()
        await asyncio.gather(*tasks)


async def test_what_a_client_left_is_not_worked_on() -> None:
    done: list[str] = []
    with occupied() as (work, go):
        tasks = [await begin(work, "a", go.wait)]
        left = await begin(work, "a", lambda: done.append("left"))
        stays = await begin(work, "a", lambda: done.append("stays"))
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        go.set()
        await asyncio.gather(*tasks, stays)
        assert done == ["stays"]
        assert await work.run("b", lambda: 7) == 7


async def test_a_client_that_leaves_as_its_turn_comes_gives_it_to_the_next() -> None:
    with occupied() as (work, go):
        first = await begin(work, "a", go.wait)
        left = await begin(work, "b", lambda: 1)
        stays = await begin(work, "c", lambda: 2)
        go.set()
        first.add_done_callback(lambda _: left.cancel())
        await asyncio.wait([first, left])
        assert await asyncio.wait_for(stays, 60) == 2
        assert await work.run("d", lambda: 3) == 3


async def test_a_thread_stays_taken_until_the_work_of_a_client_that_left_ends() -> None:
    done: list[int] = []
    with occupied() as (work, go):
        first = await begin(work, "a", go.wait)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = await begin(work, "b", lambda: done.append(1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not done
        go.set()
        await second
        assert done == [1]


async def test_a_tenant_with_too_much_waiting_is_refused_and_others_are_not() -> None:
    with occupied(most=3) as (work, go):
        tasks = [await begin(work, "a", go.wait)]
        tasks += [await begin(work, "a", lambda: None) for _ in range(3)]
        with pytest.raises(APIError) as raised:
            await work.run("a", lambda: None)
        assert (raised.value.status, raised.value.retry_after) == (429, 1)
        assert "3 large requests" in raised.value.message
        tasks.append(await begin(work, "b", lambda: None))
        go.set()
        await asyncio.gather(*tasks)
        assert await work.run("a", lambda: 7) == 7


async def test_what_work_raises_is_raised_and_frees_its_thread() -> None:
    with occupied() as (work, _):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await work.run("a", lambda: 1 // 0)
        assert await work.run("a", lambda: 7) == 7
