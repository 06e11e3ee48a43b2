"""Laws of a fleet whose workers change while it serves: no stream is lost, or is another."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import msgspec
import pytest
from tests.fleet.harness import WATCH, Client, attached, running, text, until
from tests.gateway.stub import Script, Stub, whole_text

from pigou.config import ControlConfig

#: Tokens of a stream that is under way while the fleet changes: 20 ms each.
TOKENS = 32


def state(id: str, wanted: str) -> Any:
    return lambda rows: id in rows and rows[id]["state"] == wanted


def gone(id: str) -> Any:
    return lambda rows: id not in rows


async def streams(client: Client, count: int = 6) -> list[asyncio.Task[list[dict[str, Any]]]]:
    """Begin streams; return once they run."""
    tasks = [asyncio.create_task(client.reply(max_tokens=TOKENS)) for _ in range(count)]

    def run(rows: dict[str, dict[str, Any]]) -> bool:
        return sum(row["decode_requests"] for row in rows.values()) >= count

    await until(client, run)
    return tasks


async def equal(tasks: list[asyncio.Task[list[dict[str, Any]]]], expected: str) -> None:
    """Check that streams came to their end, each with the expected text."""
    assert [text(chunks) for chunks in await asyncio.gather(*tasks)] == [expected] * len(tasks)


@pytest.mark.slow
async def test_streams_under_way_outlive_every_change() -> None:
    control = ControlConfig(policy="least-loaded")  # prompts go to the prefill worker
    async with running(1, 2, 0, control=control) as (_, client):
        expected = text(await client.reply(max_tokens=TOKENS))

        # A worker drains while another is added.
        tasks = await streams(client)
        status, answer = await client.change("POST", "/workers/decode-0/drain")
        assert (status, answer["workers"][0]["state"]) == (202, "draining")
        assert (await client.change("POST", "/workers/decode-0/drain"))[0] == 202
        status, answer = await client.change("DELETE", "/workers/decode-1")
        assert status == 409
        assert answer["error"]["message"] == "decode-1 is the last worker that decodes."
        status, answer = await client.change("POST", "/workers", {"role": "decode"})
        assert status == 202
        (row,) = answer["workers"]
        assert (row["id"], row["pool"], row["state"]) == ("decode-2", "decode", "starting")
        more = await streams(client, 1)
        await equal(tasks + more, expected)
        await until(client, gone("decode-0"))
        await until(client, state("decode-2", "up"))

        # It is killed while it drains: its streams move, and it is gone.
        tasks = await streams(client)
        pid = (await client.workers())["decode-1"]["pid"]
        await client.change("POST", "/workers/decode-1/drain")
        os.kill(pid, signal.SIGKILL)
        await equal(tasks, expected)
        rows = await until(client, gone("decode-1"))
        assert set(rows) == {"prefill-0", "decode-2"}

        # A flip keeps process and cache; past the limit its streams go on elsewhere.
        status, answer = await client.change("POST", "/workers/prefill-0/flip", {"role": "decode"})
        assert status == 202
        before = await until(client, lambda rows: rows["prefill-0"]["epoch"] == 1)
        tasks = await streams(client)
        assert (await client.workers())["prefill-0"]["decode_requests"]
        flip = {"role": "prefill", "limit_s": 0}
        assert (await client.change("POST", "/workers/prefill-0/flip", flip))[0] == 202
        rows = await until(client, lambda rows: rows["prefill-0"]["epoch"] == 2)
        row = rows["prefill-0"]
        assert (row["role"], row["pool"], row["state"]) == ("prefill", "prefill", "up")
        assert (row["pid"], row["restarts"]) == (before["prefill-0"]["pid"], 0)
        assert row["cached_blocks"]
        await equal(tasks, expected)

        # It goes at once with streams under way.
        status, answer = await client.change("POST", "/workers/prefill-0/flip", {"role": "decode"})
        await until(client, lambda rows: rows["prefill-0"]["epoch"] == 3)
        tasks = await streams(client)
        status, answer = await client.change("DELETE", "/workers/decode-2?now=true")
        assert (status, answer["workers"][0]["state"]) == (202, "stopped")
        assert set(await client.workers()) == {"prefill-0"}
        await equal(tasks, expected)


@pytest.mark.slow
async def test_a_worker_that_is_killed_while_it_starts_starts_again() -> None:
    async with running(0, 0, 1) as (serving, client):
        expected = text(await client.reply())
        await client.change("POST", "/workers", {"role": "both"})
        rows = await until(client, lambda rows: rows["both-1"]["pid"])
        assert rows["both-1"]["state"] == "starting"
        os.kill(rows["both-1"]["pid"], signal.SIGKILL)
        rows = await until(client, state("both-1", "backoff"))
        assert "ended with status -9 before it was ready" in rows["both-1"]["note"]
        assert text(await client.reply()) == expected
        rows = await until(client, state("both-1", "up"))
        assert (rows["both-1"]["restarts"], rows["both-1"]["unplaceable"]) == (1, False)
        # One restarts in order while the other serves; its id and role stay.
        before = rows["both-1"]["pid"]
        tasks = await streams(client, 4)
        status, answer = await client.change("POST", "/workers/both-1/restart")
        assert (status, answer["workers"][0]["note"]) == (202, "it will start again")
        assert (await client.change("POST", "/workers/both-1/restart"))[0] == 202
        await equal(tasks, text(await client.reply(max_tokens=TOKENS)))
        rows = await until(client, lambda rows: rows["both-1"]["restarts"] == 2)
        rows = await until(client, state("both-1", "up"))
        assert rows["both-1"]["pid"] not in (0, before)
        # The end of the fleet finds one that starts, and one that drains.
        tasks = await streams(client, 2)
        await client.change("POST", "/workers", {"role": "prefill"})
        await until(client, lambda rows: rows["prefill-0"]["pid"])
        await client.change("POST", "/workers/both-0/drain")
        for task in tasks:
            task.cancel()
    assert not [row for row in serving.supervisor.rows() if row.state == "up"]


async def test_a_worker_that_cannot_start_is_reported_and_stops_nobody() -> None:
    watch = msgspec.structs.replace(WATCH, min_backoff_s=0.01)
    stub = Stub("a")
    async with attached(stub, watch=watch, template=("--block-size", "0")) as (serving, client):
        await client.change("POST", "/workers", {"role": "decode"})
        rows = await until(client, lambda rows: rows["decode-0"]["unplaceable"])
        assert "--block-size is 0" in rows["decode-0"]["note"]
        assert "3 starts failed" in rows["decode-0"]["note"]
        assert text(await client.reply(max_tokens=5, ignore_eos=None)) == whole_text(5)
        assert serving.live_fleet.pools == ("decode", "both.attached")
        status, _ = await client.change("DELETE", "/workers/decode-0")
        assert status == 202
        assert set(await client.workers()) == {"a"}


async def test_servers_are_attached_drained_and_let_go() -> None:
    ends = asyncio.Event()
    first, second = Stub("a", script=Script(held=ends, held_after=5)), Stub("b")
    runner = await second.start()
    watch = msgspec.structs.replace(WATCH, drain=60.0)  # at its limit a drain moves streams
    async with attached(first, watch=watch) as (_, client):
        tasks = [
            asyncio.create_task(client.reply(max_tokens=30, ignore_eos=None)) for _ in range(3)
        ]
        await until(client, lambda rows: rows["a"]["decode_requests"] == 3)
        status, answer = await client.change("POST", "/workers", {"attach": second.url})
        assert status == 202
        assert answer["workers"][0]["id"] == "attached-1"
        await until(client, state("attached-1", "up"))
        status, answer = await client.change("POST", "/workers", {"attach": second.url + "/"})
        assert status == 409
        assert "is attached as attached-1" in answer["error"]["message"]
        assert (await client.change("POST", "/workers/a/drain"))[0] == 202
        await until(client, state("a", "draining"))
        assert first.active == 3, "a drain cuts nothing"
        ends.set()
        await equal(tasks, whole_text(30))
        assert not first.cancelled
        await until(client, gone("a"))
        assert first.health == 200
        status, _ = await client.change("POST", "/workers", {"attach": f"{first.url},role=decode"})
        assert status == 202
        rows = await until(client, state("attached-2", "up"))
        assert rows["attached-2"]["pool"] == "decode.attached"
        # A server of Pigou changes its role, as often as it is asked to.
        for epoch, role in enumerate(("prefill", "both"), 1):
            flip = await client.change("POST", "/workers/attached-2/flip", {"role": role})
            assert flip[0] == 202
            rows = await until(client, lambda rows, e=epoch: rows["attached-2"]["epoch"] == e)
            assert rows["attached-2"]["pool"] == f"{role}.attached"
            assert (await client.change("POST", "/workers/attached-2/flip", {"role": role}))[
                0
            ] == 202
        assert (await client.workers())["attached-2"]["epoch"] == 2
    await runner.cleanup()


async def test_a_stock_server_is_not_flipped() -> None:
    async with attached(Stub("a", stock=True), Stub("b", stock=True)) as (_, client):
        status, answer = await client.change("POST", "/workers/a/flip", {"role": "prefill"})
        assert status == 409
        assert "attach it again in its new role" in answer["error"]["message"]
        assert (await client.change("DELETE", "/workers/a"))[0] == 202
        await until(client, gone("a"))


async def test_past_its_limit_a_drain_sends_streams_elsewhere() -> None:
    hangs = Script(hang_after=3, times=4)
    stubs = Stub("a", script=hangs), Stub("b", script=hangs)
    watch = msgspec.structs.replace(WATCH, hang=0.0)
    async with attached(*stubs, watch=watch) as (serving, client):
        tasks = [
            asyncio.create_task(client.reply(max_tokens=12, ignore_eos=None)) for _ in range(4)
        ]
        await until(client, lambda rows: sum(row["tokens"] for row in rows.values()) == 12)
        await client.change("POST", "/workers/a/drain", {"limit_s": 600})
        await asyncio.sleep(0.2)
        assert set(await client.workers()) == {"a", "b"}
        await client.change("POST", "/workers/a/drain", {"limit_s": 0.1})
        await until(client, gone("a"))
        assert not stubs[0].active
        assert serving.plane_driver.plane.state.ids == ("b",)
        for task in tasks:
            task.cancel()


#: Method, path, body, status, words of the answer.
REFUSED: tuple[tuple[str, str, Any, int, str], ...] = (
    ("POST", "/workers", {}, 400, "Give role (and count), or attach"),
    ("POST", "/workers", {"role": "decode", "attach": "http://h:1"}, 400, "only one of them"),
    ("POST", "/workers", {"role": "judge"}, 400, 'role has a wrong value, "judge"'),
    ("POST", "/workers", {"role": "decode", "count": 0}, 400, "count has a wrong value, 0"),
    ("POST", "/workers", {"role": "decode", "count": 65}, 400, "count has a wrong value, 65"),
    ("POST", "/workers", {"role": "decode", "number": 2}, 400, "Unknown field number"),
    ("POST", "/workers", {"attach": "here"}, 400, "'here' is no base URL"),
    ("POST", "/workers", {"attach": "http://h:1", "count": 1}, 400, "count belongs to role"),
    ("POST", "/workers", [1], 400, "The body must be a JSON object"),
    ("POST", "/workers", {"role": "decode"}, 409, "this fleet starts no workers"),
    ("POST", "/workers/nobody/drain", None, 404, "There is no worker 'nobody'"),
    ("POST", "/workers/a/drain", {"limit_s": -1}, 400, "limit_s is -1; it must be 0 to 86400"),
    ("POST", "/workers/a/drain", {"limit": 1}, 400, "Unknown field limit"),
    ("POST", "/workers/a/drain", None, 409, "a is the last worker that decodes"),
    ("POST", "/workers/a/restart", None, 409, "a is not started here"),
    ("POST", "/workers/a/flip", {}, 400, "role is required, and missing"),
    ("POST", "/workers/nobody/flip", {"role": "both"}, 404, "There is no worker 'nobody'"),
    ("POST", "/workers/a/flip", {"role": "prefill"}, 409, "a is the last worker that decodes"),
    ("DELETE", "/workers/a", None, 409, "a is the last worker that decodes"),
    ("DELETE", "/workers/a?now=true", None, 409, "a is the last worker that decodes"),
    ("DELETE", "/workers/a?now=maybe", None, 400, "now is 'maybe'; give true or false"),
    ("DELETE", "/workers/a?soon=1", None, 400, "Unknown parameter soon"),
    ("DELETE", "/workers/nobody", None, 404, "There is no worker 'nobody'"),
    ("PUT", "/workers", {}, 405, "does not take PUT"),
)


async def test_what_cannot_be_done_is_refused() -> None:
    async with attached(Stub("a")) as (_, client):
        for method, path, body, status, words in REFUSED:
            answered, answer = await client.change(method, path, body)
            message = answer["error"]["message"]
            assert (answered, words in message) == (status, True), (method, path, body, answer)
            assert set(await client.workers()) == {"a"}


async def test_pages_of_other_sites_change_nothing() -> None:
    async with attached(Stub("a")) as (_, client):
        for path in ("/workers/a/drain", "/workers"):
            status, answer = await client.change(
                "POST", path, {"role": "both"}, headers={"origin": "https://evil.example"}
            )
            assert status == 403
            assert "pages of other sites" in answer["error"]["message"]
        own = {"origin": client.url}
        assert (await client.change("POST", "/workers/a/drain", headers=own))[0] == 409


async def test_garbage_bodies_are_refused() -> None:
    async with attached(Stub("a")) as (_, client):
        json = {"content-type": "application/json"}
        for data, headers, words in (
            (b"{", json, "not valid JSON"),
            (b"\xff\xfe", json, "The body"),
            (b'{"role": ' + b"[" * 2000 + b"]" * 2000 + b"}", json, "role"),
            (b'{"role": "both"}', {"content-type": "text/plain"}, "send application/json"),
        ):
            async with client.session.post(
                client.url + "/workers", data=data, headers=headers
            ) as response:
                assert response.status == 400
                assert words in (await response.json())["error"]["message"]
