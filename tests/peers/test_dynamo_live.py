"""Pigou with a real Dynamo and its mock workers: probe, wrapper, switch, attribution."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.peers.dynamo_fakes import ScriptedSteering

from benchmarks.lib.dynamo_mockers import BLOCK_SIZE, NAME, Mockers, dynamo_home
from benchmarks.lib.peers import PeerMissing, shared
from benchmarks.lib.servers import LOOPBACK, Server, free_ports, get_json
from pigou.control.routing_controller import Parameters
from pigou.control.saturation.regime import Regime
from pigou_lab.dynamo_host.attribution import RequestLedger
from pigou_lab.dynamo_host.event_plane import EventPlane
from pigou_lab.dynamo_host.switch import Frontend, Switch, serve

pytestmark = [pytest.mark.dynamo, pytest.mark.slow, pytest.mark.timeout(240)]

NEW, OLD = "PIGOU_PEER_DYNAMO", "PIGOU_PEER_DYNAMO_142"
WORKERS = 4


def venv(variable: str) -> Path:
    try:
        shared()
        return dynamo_home(variable)
    except PeerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module", params=[NEW, OLD], ids=["newest", "1.4.2"])
def either(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Mockers]:
    """Four mock workers and a frontend that tells of its requests, of either version."""
    home = venv(request.param)
    with Mockers.start(home, tmp_path_factory.mktemp("dynamo"), WORKERS) as found:
        yield found


@pytest.fixture(scope="module")
def newest(tmp_path_factory: Any) -> Iterator[Mockers]:
    """The newest Dynamo, with a second frontend at a temperature."""
    with Mockers.start(venv(NEW), tmp_path_factory.mktemp("newest"), WORKERS) as found:
        found.frontend("--router-temperature", "0.7")
        yield found


def honours(mockers: Mockers) -> bool:
    return "1.4.2" in (mockers.home / ".peer-dynamo").read_text()


def prompt(generator: random.Random, family: int, shared_tokens: int = 64) -> list[int]:
    own = [generator.randrange(300, 1200) for _ in range(24)]
    return [300 + family] * shared_tokens + own


async def ask(
    session: aiohttp.ClientSession, url: str, tokens: list[int], **fields: Any
) -> dict[str, Any]:
    body = {"model": NAME, "prompt": tokens, "max_tokens": 6,
            "nvext": {"extra_fields": ["worker_id"]}, **fields}  # fmt: skip
    async with session.post(url + "/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        found: dict[str, Any] = await reply.json()
        return found


def worker_of(reply: dict[str, Any]) -> int:
    return int(reply["nvext"]["worker_id"]["decode_worker_id"])


def test_the_probe_tells_what_this_version_does(either: Mockers) -> None:
    for _ in range(2):
        done = either.python("-m", "pigou_lab.dynamo_host", "probe")
        told = json.loads(done.stdout)
        assert told["honoured"] is honours(either), done.stderr
        assert done.returncode == (0 if honours(either) else 3)
        assert told["workers"] == WORKERS
        for test in ("temperature", "weight"):
            assert told[test]["verdict"] == ("honoured" if honours(either) else "ignored")
            assert sum(told[test]["treated"].values()) == 100
            spread = len(told[test]["treated"])
            assert spread == (WORKERS if honours(either) else 1)


WRAPPED = """
import asyncio, collections, json, os, random
from pigou.control.saturation.regime import Regime
from pigou_lab.dynamo_host import binding
from pigou_lab.dynamo_host.router import AdaptiveRouter, OverridesIgnored
from tests.peers.dynamo_fakes import ScriptedSteering

async def main():
    runtime = binding.runtime()
    control = ScriptedSteering()
    router = await binding.router(runtime, "dynamo.backend.generate", 16)
    try:
        wrapped = await AdaptiveRouter.start(router, control, "m", block_size=16)
    except OverridesIgnored as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        os._exit(0)
    tokens = [random.randrange(300, 1200) for _ in range(256)]

    async def once(how, body=tokens):
        if how == "best_worker":
            return (await wrapped.best_worker(body))[0]
        if how == "generate":
            stream = await wrapped.generate(body, "m", stop_conditions={"max_tokens": 1})
        else:
            request = {"model": "m", "token_ids": body, "stop_conditions": {"max_tokens": 1},
                       "sampling_options": {}, "output_options": {}, "eos_token_ids": [],
                       "annotations": []}
            stream = await wrapped.generate_from_request(request)
        found = None
        async for answer in stream:
            found = found or answer["routing_data"]["worker_id"]["decode_worker_id"]
        return found

    await once("generate")
    while (await wrapped.best_worker(tokens))[2] < 16:
        await asyncio.sleep(0.05)
    told = {}
    for regime in (Regime.BELOW, Regime.TRANSITION):
        control.to(regime)
        calls = [await once("best_worker") for _ in range(100)]
        told[f"best_worker {regime}"] = list(collections.Counter(calls).values())
        told[f"in force {regime}"] = wrapped.status()["in_force"]["temperature"]
    for how in ("generate", "generate_from_request"):
        for regime in (Regime.BELOW, Regime.TRANSITION):
            control.to(regime)
            found = []
            for number in range(30):
                # What one worker alone holds, at first.
                fresh = [random.randrange(300, 1200) for _ in range(256)]
                control.to(Regime.BELOW)
                home = await once("generate", fresh)
                while (await wrapped.best_worker(fresh))[2] < 16:
                    await asyncio.sleep(0.01)
                control.to(regime)
                found.append(await once(how, fresh) == home)
            told[f"{how} {regime}"] = sum(found)
    told["heard"] = dict(collections.Counter(control.heard))
    print(json.dumps(told), flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_the_wrapper_sets_the_temperature_of_each_request_or_refuses(either: Mockers) -> None:
    root = Path(__file__).parents[2]
    paths = {"PYTHONPATH": f"{root / 'src'}:{root}"}
    done = either.python("-c", WRAPPED, env=paths, timeout_s=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if not honours(either):
        assert "does not honour" in told["refused"]
        assert "1.6.1" in told["refused"] or "Dynamo" in told["refused"]
        return
    assert told["best_worker below"] == [100]
    assert len(told["best_worker transition"]) == WORKERS
    assert told["in force transition"] == 0.7
    for how in ("generate", "generate_from_request"):
        assert told[f"{how} below"] == 30
        # exp(-1 / 0.7) = 0.24: 58 % stay where the prompt is cached.
        assert 8 <= told[f"{how} transition"] <= 27
    assert told["heard"]["arrived"] == told["heard"]["first"] == told["heard"]["ended"]


def test_the_router_service_runs_wrapped_or_refuses(either: Mockers) -> None:
    arguments = ["-m", "pigou_lab.dynamo_host", "route", "--", "--endpoint",
                 "dynamo.backend.generate", "--router-block-size", str(BLOCK_SIZE)]  # fmt: skip
    planes = {"DYN_DISCOVERY_BACKEND": "file"}
    if not honours(either):
        done = either.python(*arguments, env=planes)
        assert done.returncode == 3, done.stderr
        assert "does not honour" in done.stderr
        return
    server = Server(
        [str(either.home / "bin" / "python"), *arguments],
        url="", log=either.run_dir / "route.log", env={**either.environment, **planes},
    )  # fmt: skip
    try:
        asked = either.python("-c", ASK_SERVICE, timeout_s=60)
        assert asked.returncode == 0, asked.stderr + server.log_tail()
        worker, status = json.loads(asked.stdout)
        assert worker in either.instances()
        assert (status["regime"], status["per_request"]) == ("below", True)
        assert status["probe"]["temperature"]["verdict"] == "honoured"
    finally:
        server.stop()


ASK_SERVICE = """
import asyncio, json, os
from pigou_lab.dynamo_host import binding

async def ask(runtime, name, body):
    client = await runtime.endpoint(f"dynamo.router.{name}").client()
    for _ in range(150):  # it serves once it has probed
        try:
            await client.wait_for_instances()
            return [answer.data() async for answer in await client.generate(body)][0]
        except Exception as error:
            last = error
            await asyncio.sleep(0.2)
    raise last

async def main():
    runtime = binding.runtime()
    worker = await ask(runtime, "best_worker_id", list(range(300, 364)))
    print(json.dumps([worker, await ask(runtime, "status", {})]), flush=True)
    os._exit(0)

asyncio.run(main())
"""


async def test_every_request_is_attributed_from_the_event_plane(either: Mockers) -> None:
    ledger, generator = RequestLedger(), random.Random(3)
    async with EventPlane(ledger.take, folder=either.folder) as plane:
        await plane.settled()
        async with aiohttp.ClientSession() as session:
            asked = (
                ask(session, either.url, prompt(generator, number % 8)) for number in range(200)
            )
            replies = await asyncio.gather(*asked)
        truth = {each["id"]: worker_of(each) for each in replies}
        async with asyncio.timeout(60):
            while not all(ledger.get(each) and ledger[each].freed for each in truth):
                await asyncio.sleep(0.05)
    found = ledger.match(truth)
    assert (found.requests, found.matched, ledger.missed, plane.refused) == (200, 200, 0, 0)
    assert {each: ledger[each].worker for each in truth} == truth
    assert set(truth.values()) == set(either.instances())
    if not honours(either):
        assert all(ledger[each].own for each in truth)  # 1.6 workers tell of it themselves


async def test_workers_of_the_newest_tell_it_without_help_of_a_router(tmp_path: Path) -> None:
    with Mockers.start(venv(NEW), tmp_path, 2, frontend=()) as mockers:
        ledger, generator = RequestLedger(), random.Random(4)
        async with EventPlane(ledger.take, folder=mockers.folder) as plane:
            await plane.settled(2)
            async with aiohttp.ClientSession() as session:
                asked = (ask(session, mockers.url, prompt(generator, n)) for n in range(40))
                truth = {each["id"]: worker_of(each) for each in await asyncio.gather(*asked)}
            async with asyncio.timeout(60):
                while ledger.match(truth).share < 1.0:
                    await asyncio.sleep(0.05)
        assert {each: ledger[each].worker for each in truth} == truth


async def test_the_attribute_command_prints_a_line_for_each_request(newest: Mockers) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pigou_lab.dynamo_host", "attribute",
        "--folder", str(newest.folder), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        await asyncio.sleep(2.0)
        async with aiohttp.ClientSession() as session:
            reply = await ask(session, newest.url, list(range(300, 340)))
        async with asyncio.timeout(60):
            line = json.loads(await process.stdout.readline())
        assert reply["id"] == f"cmpl-{line['request']}"
        assert int(line["worker"]) == worker_of(reply)
    finally:
        process.terminate()
        await process.wait()


def spread(mockers: Mockers, url: str, number: int = 24) -> int:
    """Of prompts that one worker holds, how many are sent elsewhere by the frontend at `url`."""
    generator, away = random.Random(url), 0
    for _ in range(number):
        tokens = [generator.randrange(300, 1200) for _ in range(512)]
        fields = {"prompt": tokens, "max_tokens": 1, "nvext": {"extra_fields": ["worker_id"]}}
        home = worker_of(mockers.complete(**fields))
        time.sleep(0.03)  # for the KV event to reach the other frontend
        away += worker_of(mockers.complete(url, **fields)) != home
    return away


async def test_the_switch_sends_each_request_to_the_setting_of_its_regime(
    newest: Mockers,
) -> None:
    cold, warm = newest.url, newest.more[0].url
    control = ScriptedSteering()
    switch = Switch([Frontend(cold, Parameters(0.0)), Frontend(warm, Parameters(0.7))], control)
    runner = await serve(switch, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    try:
        away = {}
        for regime in (Regime.BELOW, Regime.TRANSITION):
            control.to(regime)
            away[regime] = await asyncio.to_thread(spread, newest, url)
        # At 0.7 exp(-1 / 0.7) = 0.24: 42 % leave; at 0 none does.
        assert away[Regime.BELOW] == 0
        assert away[Regime.TRANSITION] >= 3
    finally:
        await runner.cleanup()


async def test_no_stream_is_dropped_while_the_switch_turns(newest: Mockers) -> None:
    control, generator = ScriptedSteering(), random.Random(6)
    urls = [newest.url, newest.more[0].url]
    frontends = [Frontend(urls[0], Parameters(0.0)), Frontend(urls[1], Parameters(0.7))]
    switch = Switch(frontends, control)
    runner = await serve(switch, LOOPBACK, 0)
    url = f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    ledger, stop = RequestLedger(), asyncio.Event()

    async def turn() -> None:
        while not stop.is_set():
            below = control.regime is Regime.BELOW
            control.to(Regime.TRANSITION if below else Regime.BELOW)
            await asyncio.sleep(0.05)

    async def stream(session: aiohttp.ClientSession, number: int) -> tuple[str, int, int]:
        body = {"model": NAME, "prompt": prompt(generator, number % 8), "max_tokens": 24,
                "stream": True, "nvext": {"extra_fields": ["worker_id"]}}  # fmt: skip
        async with session.post(url + "/v1/completions", json=body) as reply:
            assert reply.status == 200
            parts = (await reply.read()).split(b"\n\n")
        assert parts[-2:] == [b"data: [DONE]", b""]
        chunks = [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]
        texts = sum(bool(c["choices"] and c["choices"][0]["text"]) for c in chunks)
        worker = next(worker_of(c) for c in chunks if c.get("nvext"))
        return chunks[0]["id"], worker, texts

    turning = asyncio.create_task(turn())
    try:
        async with EventPlane(ledger.take, folder=newest.folder) as plane:
            await plane.settled()
            async with aiohttp.ClientSession() as session:
                limit = asyncio.Semaphore(48)

                async def one(number: int) -> tuple[str, int, int]:
                    async with limit:
                        return await stream(session, number)

                found = await asyncio.gather(*(one(number) for number in range(300)))
            async with asyncio.timeout(60):
                while ledger.match(each for each, _, _ in found).share < 1.0:
                    await asyncio.sleep(0.05)
    finally:
        stop.set()
        await turning
        await runner.cleanup()
    state = switch.status()
    assert sum(each["sent"] for each in state["frontends"]) == 300
    assert min(each["sent"] for each in state["frontends"]) > 20
    assert sum(each["failed"] for each in state["frontends"]) == 0
    assert all(texts > 0 for _, _, texts in found)
    assert all(ledger[each].worker == worker for each, worker, _ in found)
    assert sum(Counter(worker for _, worker, _ in found).values()) == 300


def test_the_switch_command_serves_and_ends(newest: Mockers) -> None:
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "pigou_lab.dynamo_host", "switch", "--port", str(port),
            "--frontend", f"{newest.url},temperature=0",
            "--frontend", f"{newest.more[0].url},temperature=0.7",
            "--controller", "regime,table.transition.temperature=0.6",
            "--detector", "paper,theta1=0.2"]  # fmt: skip
    with Server(argv, url=f"http://{LOOPBACK}:{port}", log=newest.run_dir / "switch.log") as server:
        server.wait_healthy("/v1/models", 30)
        reply = newest.complete(server.url, prompt=[301, 302])
        assert reply["choices"]
        state = get_json(server.url + "/switch")
        assert state["regime"] == "below"
        assert state["active"] == newest.url
    assert not server.alive
