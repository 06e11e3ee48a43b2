"""Rules of the endpoint picker protocol, one a test, by a client that behaves as Envoy does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[epp]'")
pytest.importorskip("envoy", reason="xds-protos is not installed: pip install '.[epp]'")

import grpc
import grpc.aio
from tests.fleet.peers.test_exchange import MemoryBus, MemoryHub
from tests.gateway.stub import Stub
from tests.integrations.fake_envoy import (
    BUFFERED,
    DUPLEX,
    JSON,
    NONE,
    Picker,
    chunk,
    completion,
    picker_of,
    usage,
)

from pigou.cli import main
from pigou.config import ConfigError, ControlConfig
from pigou.integrations.endpoint_pools import open_pool
from pigou.integrations.epp_config import EppConfig, certificate
from pigou.request import SECOND, Role
from pigou.wire.fleet_secret import FleetSecret

NARROW = ControlConfig(max_inflight=1, peer_reads=False)
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
Rule = Callable[[Picker], Awaitable[None]]


def two(rule: Rule, **options: Any) -> None:
    """Run a rule against a picker with two stock workers."""
    run(rule, Stub("a", stock=True), Stub("b", stock=True), **options)


def run(rule: Rule, *stubs: Stub, **options: Any) -> None:
    async def main() -> None:
        async with picker_of(*stubs, **options) as picker:
            await rule(picker)
            await picker.settled()
            assert all(up.inflight == 0 for up in picker.serving.plane_driver.upstreams.values())

    asyncio.run(main())


def routed(picker: Picker) -> list[Any]:
    return [r.request for r in picker.serving.plane_driver.plane.state.requests.values()]


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.01)


# --- the pick -------------------------------------------------------------------------------------


def test_the_cheapest_endpoint_comes_first_and_the_others_follow_by_price() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as busy:
            first = await busy.ask(completion())
            second = await picker.ask(completion(), headers={"x-pigou-prices": "1"})
            assert second.endpoints == first.endpoints[::-1], "the idle one is cheaper"
            await busy.reply(chunk(" a"))
        assert set(first.endpoints) == {picker.at(0), picker.at(1)}

    two(rule)


def test_as_many_fallbacks_are_named_as_the_option_says() -> None:
    async def rule(picker: Picker) -> None:
        assert len((await picker.ask(completion())).endpoints) == 1

    two(rule, epp=EppConfig(listen_port=0, plaintext=True, fallbacks=0))


@pytest.mark.parametrize("number", [0, 1])
def test_a_subset_is_kept_to_by_ip_and_port_or_ip(number: int) -> None:
    async def rule(picker: Picker) -> None:
        for _ in range(3):
            picked = await picker.ask(completion(), subset=[picker.at(number), "10.9.9.9:1"])
            assert picked.endpoints == [picker.at(number)]
        picked = await picker.ask(completion(), subset="127.0.0.1")
        assert len(picked.endpoints) == 2

    two(rule)


@pytest.mark.parametrize("hint", [[], "", ["192.168.1.1:8080"]])
def test_an_empty_subset_or_one_of_strangers_is_answered_503(hint: Any) -> None:
    async def rule(picker: Picker) -> None:
        assert (await picker.ask(completion(), subset=hint)).status == 503

    two(rule)


def test_without_a_ready_endpoint_the_answer_is_503_at_once() -> None:
    async def rule(picker: Picker) -> None:
        picked = await picker.ask(completion())
        assert (picked.status, picked.headers["Retry-After"]) == (503, "1")

    run(rule)


def test_a_full_fleet_sheds_with_429_and_when_to_try_again() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as one, picker.stream() as other:
            await one.ask(completion())
            await other.ask(completion())
            async with picker.stream() as third:
                waiting = asyncio.create_task(third.ask(completion()))
                await until(lambda: picker.serving.plane_driver.queued)
                picked = await picker.ask(completion())
                assert picked.status == 429
                assert int(picked.headers["Retry-After"]) >= 1
                await one.reply(chunk(" a"))
                assert (await waiting).endpoints, "the queued one got the free place"
                await third.reply(chunk(" a"))
            await other.reply(chunk(" a"))

    two(rule, control=ControlConfig(max_inflight=1, max_queued=1, peer_reads=False))


def test_a_request_that_waits_too_long_is_answered_429() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as one:
            await one.ask(completion())
            assert (await picker.ask(completion())).status == 429
            await one.reply(chunk(" a"))

    narrow = ControlConfig(max_inflight=1, queue_timeout=SECOND // 5, peer_reads=False)
    run(rule, Stub("a", stock=True), control=narrow)


def test_an_objective_below_zero_is_shed_in_place_of_waiting() -> None:
    async def rule(picker: Picker) -> None:
        batch = {"x-gateway-inference-objective": "batch"}
        assert (await picker.ask(completion(), headers=batch)).endpoints, "there was room"
        async with picker.stream() as one:
            await one.ask(completion())
            assert (await picker.ask(completion(), headers=batch)).status == 429
            assert not picker.serving.plane_driver.queued
            await one.reply(chunk(" a"))

    epp = EppConfig(listen_port=0, plaintext=True, objectives={"batch": -1})
    run(rule, Stub("a", stock=True), control=NARROW, epp=epp)


@pytest.mark.parametrize("prefix", ["x-gateway-inference", "x-llm-d-inference"])
def test_objective_and_fairness_id_are_priority_and_tenant(prefix: str) -> None:
    async def rule(picker: Picker) -> None:
        headers = {f"{prefix}-objective": "chat", f"{prefix}-fairness-id": "team-a"}
        async with picker.stream() as stream:
            await stream.ask(completion(priority=3), headers=headers)
            [request] = routed(picker)
            assert (request.tenant, request.priority) == ("team-a", -5)
            await stream.reply(chunk(" a"))
        async with picker.stream() as stream:
            await stream.ask(completion(priority=3))
            [request] = routed(picker)
            assert (request.tenant, request.priority) == ("", 3)
            await stream.reply(chunk(" a"))

    two(rule, epp=EppConfig(listen_port=0, plaintext=True, objectives={"chat": 5}))


def test_a_model_name_is_rewritten_with_the_length_of_the_body() -> None:
    async def rule(picker: Picker) -> None:
        headers = {"x-gateway-model-name-rewrite": "stub"}
        picked = await picker.ask(completion(model="public-name"), headers=headers)
        assert picked.body is not None
        assert json.loads(picked.body) == {"model": "stub", "prompt": "Once upon a time",
                                           "max_tokens": 8}  # fmt: skip
        assert picked.headers["content-length"] == str(len(picked.body))
        assert (await picker.ask(completion(model="public-name"))).status == 404

    two(rule)


def test_the_ttft_objective_is_a_deadline_where_the_order_goes_by_deadlines() -> None:
    def rule_of(deadline: bool) -> Rule:
        async def rule(picker: Picker) -> None:
            async with picker.stream() as stream:
                await stream.ask(completion(), headers={"x-slo-ttft-ms": "60000"})
                [request] = routed(picker)
                assert (request.deadline - request.arrival == 60 * SECOND) is deadline
                await stream.reply(chunk(" a"))
            if not deadline:
                assert (await picker.ask(completion(deadline_ms=9))).status == 400

        return rule

    two(rule_of(True), control=ControlConfig(admission={"order": "edf"}, peer_reads=False))
    two(rule_of(False))


def test_a_remote_prefill_is_named_to_the_decode_workers_sidecar() -> None:
    async def rule(picker: Picker) -> None:
        picked = await picker.ask(completion(prompt=list(range(1, 1500))))
        assert picked.endpoints == [picker.at(1)]
        assert picked.headers["x-prefiller-host-port"] == picker.at(0)

    async def local(picker: Picker) -> None:
        picked = await picker.ask(completion(), headers={"x-prefiller-host-port": "1.2.3.4:5"})
        assert "x-prefiller-host-port" not in picked.headers
        wanted = ["x-prefiller-host-port", "x-pigou-fleet-tenant"]
        assert picked.removed == wanted, "a client must not choose them"

    # A decode worker without room for prompts of its own is priced by a policy that splits always.
    run(rule, Stub("p", Role.PREFILL), Stub("d", Role.DECODE),
        control=ControlConfig(policy="least-loaded", peer_reads=False))  # fmt: skip
    two(local)


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "data", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"model": "stub"}', 400),
        ("/v1/chat/completions", b'{"messages": null}', 400),
        ("/v1/chat/completions", b"\xff", 400),
        ("/v1/completions", b'{"prompt": "x", "kv_transfer_params": {"a": 1}}', 400),
        ("/v1/completions", b'{"model": "unknown", "prompt": "x"}', 404),
        ("/v1/embeddings", b"{", 0),
        ("/v1/embeddings", b'{"input": "x"}', 0),
        ("/primary-gateway-test", b'{"model": "stub", "prompt": "Write"}', 0),
        ("/other", b'{"messages": 3}', 0),
    ],
)
def test_an_invalid_body_is_answered_400_on_its_route_and_passes_on_others(
    path: str, data: bytes, status: int
) -> None:
    async def rule(picker: Picker) -> None:
        picked = await picker.ask(data, path=path)
        assert picked.status == status, picked.error
        assert bool(status) or picked.body == data

    run(rule, Stub("a", stock=True))


def test_a_body_beyond_the_limit_is_answered_413() -> None:
    async def rule(picker: Picker) -> None:
        assert (await picker.ask(completion("x" * 2000), pieces=5)).status == 413
        assert (await picker.ask(completion())).endpoints

    two(rule, max_body=1000)


def test_a_request_without_a_body_is_routed() -> None:
    async def rule(picker: Picker) -> None:
        for mode in (DUPLEX, BUFFERED, NONE):
            async with picker.stream(mode) as stream:
                picked = await stream.ask(None, path="/v1/models")
                assert picked.endpoints
                await stream.reply(b"{}", headers=JSON)

    two(rule)


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_any_chunking_of_a_body_is_one_decision_and_the_same_bytes(mode: int) -> None:
    async def rule(picker: Picker) -> None:
        data = completion(prompt=[7, 8, 9] * 600, max_tokens=1)
        for pieces in (1, 2, 7, 300) if mode == DUPLEX else (1,):
            async with picker.stream(mode) as stream:
                picked = await stream.ask(data, pieces=pieces)
                assert picked.body in (data, None)
                assert (picked.body is None) is (mode == BUFFERED)
                [request] = routed(picker)
                assert request.prompt == 1800
                assert len(request.keys[32]) == 1800 // 32
                await stream.reply(chunk(" a"))

    two(rule)


def test_prompts_are_keyed_under_the_salt_that_the_worker_sees() -> None:
    prompt = list(range(1, 321))

    async def rule(picker: Picker) -> None:
        async def cached(**fields: Any) -> int:
            async with picker.stream() as stream:
                picked = await stream.ask(completion(prompt, **fields))
                assert picked.body == completion(prompt, **fields), "it passes unchanged"
                headers, _ = await stream.reply(chunk(" a"))
                why = picker.serving.plane_driver.plane.decision(headers["x-pigou-decision"])
                assert why is not None
                return int(why.choice.cached)

        assert [await cached(cache_salt="a"), await cached(cache_salt="b"), await cached()] == [
            0
        ] * 3
        assert [await cached(cache_salt="a"), await cached()] == [319, 319]

    run(rule, Stub("a", stock=True))


def test_a_tenure_is_written_into_the_body_and_fairness_ids_are_isolated_on_demand() -> None:
    async def rule(picker: Picker) -> None:
        async def salt(**headers: str) -> str | None:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            picked = await picker.ask(completion(), headers=named)
            assert picked.body is not None, picked.error
            return json.loads(picked.body).get("cache_salt")

        isolates = picker.serving.picker._config.isolate_tenants
        assert await salt() is None
        corpus = await salt(x_pigou_tenure_corpus="news")
        assert corpus
        assert corpus != await salt(x_pigou_tenure_corpus="sport")
        one = await salt(x_gateway_inference_fairness_id="one")
        two = await salt(x_gateway_inference_fairness_id="two")
        assert (one is None) is not isolates
        assert (one == two) is not isolates
        picked = await picker.ask(completion(), headers={"x-pigou-tenure-nothing": "x"})
        assert picked.status == 400

    two(rule)
    two(rule, epp=EppConfig(listen_port=0, plaintext=True, isolate_tenants=True))


# --- the reply ------------------------------------------------------------------------------------


def test_prices_and_the_reason_are_told_on_request_alone() -> None:
    async def rule(picker: Picker) -> None:
        for value, told in (("1", True), ("0", False), ("", False)):
            async with picker.stream() as stream:
                picked = await stream.ask(completion(), headers={"x-pigou-prices": value})
                headers, _ = await stream.reply(chunk(" a"))
                assert ("x-pigou-prices" in headers) is told
                assert headers["x-pigou-worker"] in ("attached-0", "attached-1")
            if told:
                prices = json.loads(headers["x-pigou-prices"])
                assert [row["endpoint"] for row in prices["candidates"]] == picked.endpoints
                assert prices["candidates"][0]["chosen"]
                assert "cached" in prices["reason"]

    two(rule)


def test_tokens_are_counted_from_chunks_and_then_from_the_usage() -> None:
    async def rule(picker: Picker) -> None:
        driver = picker.serving.plane_driver
        async with picker.stream() as stream:
            await stream.ask(completion(stream=True))
            [request] = driver.plane.state.requests.values()
            await stream.reply(chunk(" a"), chunk(" b"), end=False)
            assert request.first_token_at, "it is told at once"
            await until(lambda: request.generated == 2)
            part = b"".join((usage(9, 7), b"data: [DONE]\n\n"))
            for start in range(0, len(part), 11):
                await stream.pass_on(part[start : start + 11], start + 11 >= len(part))
        usage_of = picker.serving._metrics.usage("")
        assert usage_of == {"prompt_tokens": 9.0, "generation_tokens": 7.0}

    run(rule, Stub("a", stock=True))


def test_a_whole_reply_is_counted_by_its_usage() -> None:
    async def rule(picker: Picker) -> None:
        reply = {"choices": [{"finish_reason": "stop"}],
                 "usage": {"prompt_tokens": 3, "completion_tokens": 4}}  # fmt: skip
        async with picker.stream() as stream:
            await stream.ask(completion())
            data = json.dumps(reply).encode()
            await stream.reply(data[:9], data[9:], headers=JSON)
        assert picker.serving._metrics.usage("")["generation_tokens"] == 4

    run(rule, Stub("a", stock=True))


def test_a_fallback_that_served_takes_over_what_was_booked() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as stream:
            picked = await stream.ask(completion())
            chosen = 0 if picked.endpoints[0] == picker.at(0) else 1
            assert (picker.load(chosen), picker.load(1 - chosen)) == (1, 0)
            await stream.reply(chunk(" a"), served=picked.endpoints[1], end=False)
            await until(lambda: (picker.load(chosen), picker.load(1 - chosen)) == (0, 1))
            await stream.pass_on(chunk(" b"), True)

    two(rule)


def test_workers_get_their_key_on_routes_of_generation_and_no_other_worker_does() -> None:
    async def rule(picker: Picker) -> None:
        keys = {picker.at(number): f"Bearer key-{number}" for number in range(2)}
        async with picker.stream() as busy:
            first = await busy.ask(completion())
            second = await picker.ask(completion(), headers={"authorization": "Bearer client's"})
            for picked in (first, second):
                assert picked.headers["authorization"] == keys[picked.endpoints[0]]
                assert len(picked.endpoints) == 1, "the other one has another key"
            await busy.reply(chunk(" a"))
        for path in ("/limits", "/v1/completions/../../limits", "/v1/kv/offer"):
            picked = await picker.ask(completion(), headers={":path": path})
            assert "authorization" not in picked.headers

    stubs = [Stub(name, stock=True) for name in "ab"]
    run(rule, *stubs, keys=("key-0", "key-1"))


def test_a_stranger_that_served_weighs_on_no_worker() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as stream:
            await stream.ask(completion())
            await stream.reply(chunk(" a"), served="10.9.9.9:80", end=False)
            assert picker.load(0) + picker.load(1) == 0
            await stream.pass_on(chunk(" b"), True)

    two(rule)


def test_a_reply_of_an_error_ends_the_request_as_failed() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as stream:
            await stream.ask(completion())
            await stream.reply(
                b"{}", headers={":status": "500", "content-type": "application/json"}
            )
        assert picker.serving._metrics.usage("")["generation_tokens"] == 0

    run(rule, Stub("a", stock=True))


def test_a_request_ends_when_the_proxy_resets_its_stream_at_any_time() -> None:
    async def rule(picker: Picker) -> None:
        driver = picker.serving.plane_driver
        async with picker.stream() as one:
            await one.ask(completion())
            with suppress(AssertionError, asyncio.CancelledError):
                async with picker.stream() as queued:
                    asking = asyncio.create_task(queued.ask(completion()))
                    await until(lambda: driver.queued == 1)
                    queued.call.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: driver.queued == 0)
            await one.reply(chunk(" a"))
        for replied in (False, True):
            with suppress(asyncio.CancelledError):
                async with picker.stream() as broken:
                    await broken.ask(completion())
                    if replied:
                        await broken.reply(chunk(" a"), end=False)
                    broken.call.cancel()
            await until(lambda: not driver.plane.state.requests)

    run(rule, Stub("a", stock=True), control=NARROW)


def test_a_stream_that_ends_in_good_order_without_a_reply_ends_its_request() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as stream:
            await stream.ask(completion())
        async with picker.stream(response_mode=NONE) as stream:
            await stream.ask(completion())
            await stream.reply(end=False)
        await until(lambda: not picker.serving.plane_driver.plane.state.requests)

    run(rule, Stub("a", stock=True))


# --- health, TLS, replicas ------------------------------------------------------------------------


class ListedLater:
    """A pool whose endpoints are known when it is told so."""

    ready = False

    async def follow(self, apply: Any) -> None:
        apply([])
        await asyncio.Event().wait()


def test_an_endpoint_of_another_model_is_left_out_and_the_others_are_served(tmp_path: Path) -> None:
    stubs = [Stub("a", stock=True), Stub("b", stock=True), Stub("c", stock=True, model="other")]

    async def main() -> None:
        runners = [await stub.start() for stub in stubs]
        path = tmp_path / "pool.json"
        dead = {"url": "http://127.0.0.1:1"}
        entries = [dead, *({"url": stub.url} for stub in stubs)]
        path.write_text(json.dumps({"endpoints": entries}))
        began = time.monotonic()
        async with picker_of(pool=open_pool(str(path))) as picker:
            assert time.monotonic() - began < 60, "it does not wait for the dead one"
            rows = {row.url: row for row in picker.serving.supervisor.rows()}
            await until(lambda: [rows[stub.url].state for stub in stubs[:2]] == ["up", "up"])
            assert "different models" in rows[stubs[2].url].last_end
            path.write_text(json.dumps({"endpoints": entries[2:]}))
            await until(lambda: list(picker.serving.plane_driver.upstreams)
                        == [f"127.0.0.1:{stubs[1].port}"])  # fmt: skip
        for runner in runners:
            await runner.cleanup()

    asyncio.run(main())


def test_before_its_pool_is_known_a_picker_lives_but_is_not_ready() -> None:
    pool = ListedLater()

    async def rule(picker: Picker) -> None:
        async def services() -> list[int]:
            return [await picker.health(name) for name in ("liveness", "readiness", "", EXT_PROC)]

        assert await services() == [1, 2, 2, 2]
        assert (await picker.ask(completion())).status == 503
        pool.ready = True
        assert await services() == [1, 1, 1, 1]
        assert (await picker.ask(completion())).endpoints
        with pytest.raises(grpc.aio.AioRpcError, match="no service"):
            await picker.health("other")

    two(rule, pool=pool)


def test_a_picker_that_stops_lets_streams_end_and_takes_no_others() -> None:
    async def rule(picker: Picker) -> None:
        async with picker.stream() as stream:
            await stream.ask(completion())
            stopping = asyncio.create_task(picker.serving.stop())
            await until(lambda: picker.serving.gateway.shutdown.begun)
            assert await picker.health("readiness") == 2
            assert await picker.health("liveness") == 1
            assert (await picker.ask(completion())).status == 503
            assert (await stream.reply(chunk(" a")))[1] == chunk(" a")
        await stopping

    two(rule)


@pytest.mark.parametrize("own", [False, True])
def test_tls_is_on_by_default_by_a_certificate_given_or_made(own: bool, tmp_path: Path) -> None:
    key, cert = certificate(EppConfig())
    epp = EppConfig(listen_port=0)
    if own:
        (tmp_path / "key").write_bytes(key)
        (tmp_path / "cert").write_bytes(cert)
        files = {"tls_key": str(tmp_path / "key"), "tls_cert": str(tmp_path / "cert")}
        epp = EppConfig(listen_port=0, **files)

    async def rule(picker: Picker) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await picker.health("readiness")  # in plaintext
        if own:
            credentials = grpc.ssl_channel_credentials(cert)
            options = [("grpc.ssl_target_name_override", "pigou-epp")]
            address = f"127.0.0.1:{picker.serving.epp_port}"
            async with grpc.aio.secure_channel(address, credentials, options) as channel:
                picker.channel = channel
                assert await picker.health("readiness") == 1
                assert (await picker.ask(completion())).endpoints

    two(rule, epp=epp)


@pytest.mark.parametrize(
    "fields",
    [{"tls_cert": "x"}, {"plaintext": True, "tls_cert": "x", "tls_key": "y"}, {"fallbacks": -1},
     {"objectives": {"a": 0.5}}, {"listen_port": 70000}],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EppConfig(**fields)
    with pytest.raises(ConfigError, match="cannot be read"):
        certificate(EppConfig(tls_cert="/absent", tls_key="/absent"))


def test_two_replicas_share_load_state() -> None:
    hub, secret = MemoryHub(), FleetSecret.make()

    def join(serving: Any) -> None:
        serving._secret = secret
        serving.join_peers(MemoryBus(hub))

    async def main() -> None:
        stubs = Stub("a", stock=True), Stub("b", stock=True)
        async with picker_of(*stubs, prepare=join) as one:
            urls = [stub.url for stub in stubs]
            async with picker_of(prepare=join, urls=urls) as other, one.stream() as stream:
                await until(lambda: len(other.serving.plane_driver.upstreams) == 2)
                first = await stream.ask(completion(prompt=list(range(1, 1000))))
                state = other.serving.plane_driver.plane.state
                await until(lambda: int(state.columns.decode_requests.sum()) == 1)
                for _ in range(4):
                    picked = await other.ask(completion(prompt=list(range(2000, 3000))))
                    assert picked.endpoints[0] != first.endpoints[0], "it knows the other's load"
                await stream.reply(chunk(" a"))
                await until(lambda: int(state.columns.decode_requests.sum()) == 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "give --pool, --attach or --registry"),
        (["--attach", "nowhere"], "is no base URL"),
        (["--attach", "http://h:1", "--tls-key", "k"], "--tls-cert and --tls-key belong together"),
        (["--attach", "http://h:1", "--peers", "nats://h:1"], "--fleet-secret-file"),
        (["--attach", "http://h:1", "--objectives", "a=x"], "--objectives"),
    ],
)
def test_the_command_refuses_what_it_cannot_do_with_a_remedy(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["epp", "--port", "0", "--status-port", "0", *arguments])
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err
