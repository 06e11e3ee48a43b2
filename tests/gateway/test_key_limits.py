"""Laws of the limits of an API key."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from stub import Script, Stub, serving

from pigou.config import ConfigError, ControlConfig
from pigou.gateway.auth.keys import Key, KeyLimits, Keys
from pigou.request import SECOND

TEXT = "/v1/completions"


def keys(**limits: int) -> Keys:
    own = Key("acme", sha256(b"one").digest(), limits=KeyLimits(**limits))
    return Keys([own, Key("acme", sha256(b"two").digest())])


async def post(fleet: Any, body: Any, key: str = "one") -> tuple[int, Any, Any]:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + TEXT, json=body, headers=headers) as response,
    ):
        return response.status, await response.json(), response.headers


async def eventually(check: Any) -> None:
    for _ in range(6000):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


@pytest.mark.parametrize(
    ("limits", "body", "field"),
    [
        ({"queued": 3}, {"prompt": "x", "n": 4}, "limits.queued of this API key is 3"),
        ({"queued": 3}, {"prompt": ["x"] * 4}, "limits.queued of this API key is 3"),
        ({"queued_tokens": 99}, {"prompt": [1] * 50, "max_tokens": 50}, "limits.queued_tokens"),
        ({"queued_tokens": 99}, {"prompt": "x", "n": 2, "max_tokens": 50}, "limits.queued_tokens"),
    ],
)
async def test_what_a_key_may_not_have_waiting_is_refused_by_name(
    limits: dict[str, int], body: dict[str, Any], field: str
) -> None:
    async with serving(Stub("a"), keys=keys(**limits)) as fleet:
        status, reply, headers = await post(fleet, body)
        assert status == 429
        assert field in reply["error"]["message"]
        assert "send fewer" in reply["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        assert (await post(fleet, body, "two"))[0] == 200, "another key has its own limits"
        assert (await post(fleet, {"prompt": "x", "max_tokens": 8}))[0] == 200


@pytest.mark.parametrize("body", [{"prompt": ["x"] * 6}, {"prompt": "x"}])
async def test_no_more_sequences_of_a_key_run_than_it_may_have(body: dict[str, Any]) -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    async with serving(stub, keys=keys(sequences=2)) as fleet:
        going = [asyncio.create_task(post(fleet, body)) for _ in range(3)]
        await eventually(lambda: stub.active == 2)
        other = asyncio.create_task(post(fleet, {"prompt": "mine"}, "two"))
        await eventually(lambda: stub.active == 3)
        for _ in range(3):
            await asyncio.sleep(0.1)
        assert stub.active == 3
        held.set()
        assert [(await each)[0] for each in [*going, other]] == [200] * 4
        await fleet.settle()
        going = [asyncio.create_task(post(fleet, body)) for _ in range(2)]
        assert [(await each)[0] for each in going] == [200] * 2, "what ended counts no more"


async def test_who_leaves_while_waiting_for_its_turn_takes_none() -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    async with serving(stub, keys=keys(sequences=1, queued=2)) as fleet:
        first = asyncio.create_task(post(fleet, {"prompt": "x"}))
        await eventually(lambda: stub.active == 1)
        gone = asyncio.create_task(post(fleet, {"prompt": "y", "n": 2}))
        await asyncio.sleep(0.2)
        assert (await post(fleet, {"prompt": "z"}))[0] == 429
        gone.cancel()
        await eventually(lambda: fleet.metrics.cancelled._value.get() == 1)
        last = asyncio.create_task(post(fleet, {"prompt": "z"}))
        held.set()
        assert ((await first)[0], (await last)[0]) == (200, 200)
        assert {seen.body["prompt"] for seen in stub.seen} == {"x", "z"}


async def test_waiting_for_ones_own_sequences_ends_with_the_queue_timeout() -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    control = ControlConfig(queue_timeout=SECOND // 5)
    async with serving(stub, keys=keys(sequences=1), control=control) as fleet:
        first = asyncio.create_task(post(fleet, {"prompt": "x"}))
        await eventually(lambda: stub.active == 1)
        status, reply, _ = await post(fleet, {"prompt": "y"})
        assert status == 429
        assert "limits.sequences of this API key is 1" in reply["error"]["message"]
        held.set()
        assert (await first)[0] == 200
        assert (await post(fleet, {"prompt": "z"}))[0] == 200


def entry(limits: dict[str, Any]) -> bytes:
    key = {"tenant": "acme", "sha256": "0" * 64, "limits": limits}
    return msgspec.json.encode({"keys": [key]})


def test_limits_are_read_from_the_keys_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(entry({"sequences": 8, "queued_tokens": 100}))
    (key,) = Keys.read(path)._keys
    assert key.limits == KeyLimits(sequences=8, queued_tokens=100)


@pytest.mark.parametrize(
    ("limits", "named"), [({"rate": 3}, "rate"), ({"queued": -1}, "limits.queued is -1")]
)
def test_a_limit_that_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, limits: dict[str, Any], named: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(entry(limits))
    with pytest.raises(ConfigError, match=named):
        Keys.read(path)
