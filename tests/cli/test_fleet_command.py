"""`pigou fleet` changes the workers of a gateway, and tells what that refuses."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.fleet.harness import attached, until
from tests.gateway.stub import Stub
from typer.testing import CliRunner, Result

from pigou.cli import build


def fleet(*arguments: str) -> Result:
    wide = {"COLUMNS": "200"}  # notes of kernels that are compiled take room from other columns
    return CliRunner().invoke(build(["fleet", "version"]), ["fleet", *arguments], env=wide)


async def test_workers_are_listed_added_flipped_and_removed() -> None:
    other = Stub("b")
    runner = await other.start()
    async with attached(Stub("a")) as (_, client):

        async def run(command: str, *arguments: str, code: int = 0) -> str:
            done = await asyncio.to_thread(fleet, command, client.url, *arguments)
            assert done.exit_code == code, done.output
            return done.output

        assert "both.attached" in await run("list")
        assert json.loads(await run("list", "--json"))["workers"][0]["id"] == "a"
        added = await run("add", "--attach", f"{other.url},role=decode")
        assert added == "attached-1 is starting, role decode\n"
        await until(client, lambda rows: rows["attached-1"]["state"] == "up")
        flipped = await run("flip", "attached-1", "--role", "both", "--limit", "1")
        assert flipped.startswith("attached-1 is draining")
        await until(client, lambda rows: rows["attached-1"]["epoch"] == 1)
        assert json.loads(await run("drain", "a", "--json"))["workers"][0]["state"] == "draining"
        await until(client, lambda rows: "a" not in rows)
        refused = await run("remove", "attached-1", "--now", code=1)
        assert refused == "pigou fleet remove: attached-1 is the last worker that decodes.\n"
        assert "no worker is started" in await run("add", "--role", "decode", code=1)
        assert "count has a wrong value" in await run(
            "add", "--role", "both", "--count", "0", code=2
        )
        assert "There is no worker 'no/body'" in await run("drain", "no/body", code=1)
    await runner.cleanup()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["list", "here"], 2, "'here' is no URL"),
        (["list", "http://[::1"], 2, "is no URL"),
        (["list", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1: "),
        (["add", "http://h"], 2, "give --role or --attach"),
        (["add", "http://h", "--role", "both", "--attach", "http://x"], 2, "only one of them"),
        (["add", "http://h", "--attach", "http://x", "--count", "2"], 2, "--count is 2"),
        (["flip", "http://h", "w"], 2, "--role"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], code: int, words: str) -> None:
    done = fleet(*arguments)
    assert done.exit_code == code
    assert words in done.output
