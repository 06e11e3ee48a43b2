"""Laws of the limits of an API key."""

from __future__ import annotations

import asyncio
import random
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from stub import Script, Stub, serving

from pigou.config import ConfigError, ControlConfig
from pigou.gateway.auth.budgets import BudgetLedger, read_budgets
from pigou.gateway.auth.keys import Key, KeyBudget, KeyLimits, Keys
from pigou.gateway.metrics import OTHER_TENANTS, TenantMetrics
from pigou.gateway.request import GatewayRun, ParsedRequest
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
    ("limits", "named"),
    [
        ({"rate": 3}, "rate"),
        ({"queued": -1}, "limits.queued is -1"),
        ({"minute": {"requests": -1}}, "limits.minute.requests is -1"),
        ({"day": {"token": 5}}, "token"),
        ({"session": {"seconds": "inf"}}, "seconds"),
        ({"hour": {"requests": 5}}, "hour"),
    ],
)
def test_a_limit_or_budget_that_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, limits: dict[str, Any], named: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(entry(limits))
    with pytest.raises(ConfigError, match=named):
        Keys.read(path)


def budgeted(**periods: dict[str, float]) -> Keys:
    return keys(**{name: KeyBudget(**limits) for name, limits in periods.items()})  # type: ignore[arg-type]


async def test_a_spent_budget_is_refused_by_name_with_the_time_of_its_reset() -> None:
    async with serving(Stub("a"), keys=budgeted(minute={"requests": 2})) as fleet:
        for left in (1, 0):
            status, _, headers = await post(fleet, {"prompt": "x", "max_tokens": 2})
            assert status == 200
            assert headers["x-ratelimit-remaining-requests"] == str(left)
            assert headers["x-ratelimit-limit-requests"] == "2"
        status, reply, headers = await post(fleet, {"prompt": "x"})
        assert status == 429
        budget = reply["error"]["budget"]
        assert budget == {"name": "minute.requests", "limit": 2, "used": 2, "requested": 1,
                          "reset_s": int(headers["retry-after"])}  # fmt: skip
        assert 50 <= budget["reset_s"] <= 61
        assert "minute.requests of this API key is 2" in reply["error"]["message"]
        assert (await post(fleet, {"prompt": "x"}, "two"))[0] == 200


async def test_tokens_are_claimed_with_max_tokens_and_settled_by_what_came() -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    async with serving(stub, keys=budgeted(day={"tokens": 100})) as fleet:
        first = asyncio.create_task(post(fleet, {"prompt": [1] * 10, "max_tokens": 60}))
        await eventually(lambda: stub.active == 1)
        status, reply, headers = await post(fleet, {"prompt": [1] * 10, "max_tokens": 60})
        assert (status, reply["error"]["budget"]["used"]) == (429, 70)
        assert headers["x-should-retry"] == "false", "a day is no time to wait for"
        held.set()
        assert (await first)[0] == 200
        _, reply, headers = await post(fleet, {"prompt": [1] * 10, "max_tokens": 5})
        assert reply["usage"]["total_tokens"] == 15
        status, reply, _ = await post(fleet, {"prompt": [1] * 10, "max_tokens": 400})
        assert status == 429
        assert reply["error"]["budget"]["reset_s"] is None
        assert "send fewer" in reply["error"]["message"]


async def test_steps_of_a_session_end_and_others_go_on() -> None:
    async with serving(Stub("a"), keys=budgeted(session={"requests": 1})) as fleet:
        statuses = []
        for session in ("s1", "s1", "s2"):
            headers = {"authorization": "Bearer one", "x-pigou-session": session}
            async with (
                aiohttp.ClientSession() as http,
                http.post(fleet.url + TEXT, json={"prompt": "x"}, headers=headers) as response,
            ):
                statuses.append(response.status)
        assert statuses == [200, 429, 200]


async def test_worker_seconds_of_all_sequences_count_and_a_running_stream_is_not_cut() -> None:
    stub = Stub("a", script=Script(delay_s=0.06))
    async with serving(stub, key_budgets=("minute.seconds=0.1",)) as fleet:
        body = {"prompt": "x", "n": 2, "max_tokens": 4, "stream": True}
        async with aiohttp.ClientSession() as http:
            async with http.post(fleet.url + TEXT, json=body) as response:
                assert response.status == 200
                assert (await response.text()).endswith("data: [DONE]\n\n")
            async with http.post(fleet.url + TEXT, json={"prompt": "x"}) as response:
                budget = (await response.json())["error"]["budget"]
            async with http.get(fleet.url + "/usage") as response:
                shown = (await response.json())["budgets"]
        assert budget["name"] == "minute.seconds"
        assert budget["used"] > 0.4
        assert shown[0]["used"] == pytest.approx(budget["used"], abs=1e-5)


def test_default_budgets_are_read_in_every_unit() -> None:
    texts = ["minute.requests=2", "day.tokens=2e6", "day.seconds=0.5", "session.price=3"]
    read = read_budgets(texts)
    assert (read.minute.requests, read.day.tokens, read.day.seconds) == (2, 2_000_000, 0.5)
    assert read.session.price == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("minute.tokens", "PERIOD.UNIT=LIMIT"), ("hour.tokens=1", "PERIOD.UNIT=LIMIT"),
        ("day.tokens=x", "day.tokens is 'x'"), ("day.tokens=nan", "day.tokens is nan"),
        ("day.tokens=0", "day.tokens is 0"), ("day.tokens=1.5", "key_budgets"),
    ],
)  # fmt: skip
def test_a_default_budget_that_cannot_be_honoured_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_budgets([text])


def test_a_budget_of_price_needs_prices() -> None:
    with pytest.raises(ConfigError, match="--prices"):
        BudgetLedger(read_budgets(["day.price=2"]), (), False, lambda: 0)


async def test_a_tenant_sees_its_own_latency_and_hits_and_no_other_tenants() -> None:
    own = [Key(name, sha256(name.encode()).digest()) for name in ("acme", "beta")]
    async with serving(Stub("a"), keys=Keys(own)) as fleet:
        for key in ("acme", "acme", "beta"):
            body = {"prompt": [1] * 10, "max_tokens": 3, "stream": True}
            headers = {"authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession() as http:
                async with http.post(fleet.url + TEXT, json=body, headers=headers) as response:
                    await response.read()
                async with http.get(fleet.url + "/metrics", headers=headers) as response:
                    page = await response.text()
            for name in ("time_to_first_token_seconds_count", "prompt_tokens_total"):
                assert re.search(f'pigou_tenant_{name}{{.*tenant="{key}"}} [1-9]', page)
            assert {*re.findall('tenant="([^"]*)"', page)} == {key}


def test_series_of_tenants_are_bounded_and_none_of_them_falls() -> None:
    metrics, before, draw = TenantMetrics(shown=3), dict[str, float](), random.Random(1)
    for count in range(1, 400):
        tenant = f"t{int(draw.expovariate(0.3))}"
        parsed = ParsedRequest(id="1", wire_id="1", chat=False, stream=False, body={},
                               prompt_tokens=1, max_tokens=1, tenant=tenant)  # fmt: skip
        metrics.ended(GatewayRun.of(parsed), "")
        family = next(iter(metrics.families()))
        now = {sample.labels["tenant"]: sample.value for sample in family.samples}
        assert len(now) <= 4
        assert sum(now.values()) == count
        assert now[OTHER_TENANTS] >= before.get(OTHER_TENANTS, 0)
        before = now
    assert {"t0", "t1"} <= now.keys()


def paid(path: Path, *limits: dict[str, Any]) -> Keys:
    """Two tenants' keys, `one` and `two`, of one payer."""
    entries = [
        {
            "tenant": name,
            "sha256": sha256(name.encode()).hexdigest(),
            "payer": "acme",
            "limits": own,
        }
        for name, own in zip(("one", "two"), limits, strict=True)
    ]
    file = path / "keys.json"
    file.write_bytes(msgspec.json.encode({"keys": entries}))
    return Keys.read(file)


async def test_keys_of_one_payer_share_its_budgets_and_limits(tmp_path: Path) -> None:
    made = paid(tmp_path, {"minute": {"requests": 2}, "queued": 3}, {})
    async with serving(Stub("a"), keys=made) as fleet:
        for key in ("one", "two"):
            assert (await post(fleet, {"prompt": "x", "max_tokens": 2}, key))[0] == 200
        for key in ("one", "two"):
            status, reply, _ = await post(fleet, {"prompt": "x"}, key)
            assert (status, reply["error"]["budget"]["used"]) == (429, 2)


async def test_requests_of_a_payers_tenants_wait_as_one_account(tmp_path: Path) -> None:
    held = asyncio.Event()
    stub = Stub("a", script=Script(held=held))
    control = ControlConfig(admission={"order": "fair"}, max_inflight=1)
    async with serving(stub, keys=paid(tmp_path, {}, {}), control=control) as fleet:
        posts = [
            asyncio.create_task(post(fleet, {"prompt": "x"}, key)) for key in ("one", "two", "two")
        ]
        queue = fleet.plane_driver.plane.queue
        await eventually(lambda: len(queue) == 2)
        assert {waiting.request.account for waiting in queue} == {"acme"}
        assert queue.quota.queued("acme")[0] == 2
        held.set()
        assert [(await each)[0] for each in posts] == [200] * 3


def test_keys_of_one_payer_with_different_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys of payer 'acme' have different limits"):
        paid(tmp_path, {"queued": 3}, {"queued": 4})
