"""Laws of the front door: what comes in, what is refused, and how it is told."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from tests.gateway.stub import Fleet, Script, Stub, serving, whole_text

from pigou.config import ConfigError, ControlConfig
from pigou.gateway.auth.keys import Keys, make_key
from pigou.gateway.config import GatewayConfig
from pigou.request import Role

PROMPT = "a prompt that is longer than one block of sixteen tokens, surely so it is"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def post(
    fleet: Fleet, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any, Mapping[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(fleet.url + path, data=data, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read()), response.headers


async def get(fleet: Fleet, path: str) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(fleet.url + path) as response:
        return response.status, await response.read()


async def eventually(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something is true."""
    for _ in range(int(timeout_s / 0.01)):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not become true")


async def raw(fleet: Fleet, data: bytes) -> bytes:
    parts = urlsplit(fleet.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(65536), 60)
    writer.close()
    return answer


@pytest.mark.parametrize("chat", [False, True])
async def test_the_openai_client_works_unmodified(chat: bool) -> None:
    async with serving(Stub("p", Role.PREFILL), Stub("d", Role.DECODE)) as fleet:
        client = openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        if chat:
            messages: Any = [{"role": "user", "content": PROMPT}]
            whole = await client.chat.completions.create(model="stub", messages=messages)
            assert whole.choices[0].message.content == whole_text(5)
            stream: Any = await client.chat.completions.create(
                model="stub", messages=messages, max_completion_tokens=7, **options
            )
            parts = [chunk async for chunk in stream]
            text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        else:
            made = await client.completions.create(model="stub", prompt=PROMPT)
            assert made.choices[0].text == whole_text(5)
            stream = await client.completions.create(
                model="stub", prompt=PROMPT, max_tokens=7, **options
            )
            parts = [chunk async for chunk in stream]
            text = "".join(p.choices[0].text for p in parts if p.choices)
        assert text == whole_text(7)
        assert parts[-1].usage.completion_tokens == 7
        assert [model.id async for model in client.models.list()] == ["stub"]
        assert (await client.models.retrieve("stub")).id == "stub"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("org/nope")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="stub", prompt="x", temperature=7)
        assert bad.value.param == "temperature"
        await client.close()
        await fleet.settle()


BAD: list[tuple[str, Any, str | None]] = [
    (TEXT, b"", None),
    (TEXT, b"{", None),
    (TEXT, b"[]", None),
    (TEXT, b'"x"', None),
    (TEXT, b"null", None),
    (TEXT, b'{"prompt": "\xff"}', None),
    (TEXT, b'{"prompt": ' + b"[" * 5000, None),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": 3}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": "x", "guided_json": {}}, "guided_json"),
    (TEXT, {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "x", "n": 0}, "n"),
    (TEXT, {"prompt": "x", "stream": "perhaps"}, "stream"),
    (TEXT, {"prompt": "x", "stop": [""]}, "stop"),
    (TEXT, {"prompt": "x", "seed": 1.5}, "seed"),
    (TEXT, {"prompt": "x", "kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
    (TEXT, {"prompt": "x", "resume_tokens": 1}, "resume_tokens"),
    (TEXT, {"prompt": "x", "request_id": "a b"}, "request_id"),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages"),
]  # fmt: skip


async def test_unknown_fields_reach_no_worker_and_are_told() -> None:
    body = {"prompt": "x", "nonsense": 1, "stream_options": {"every": 2}}
    async with serving(Stub("a")) as fleet:
        for more in ({}, {"stream": True}):
            async with (
                aiohttp.ClientSession() as session,
                session.post(fleet.url + TEXT, json=body | more) as response,
            ):
                assert response.status == 200
                told = response.headers["x-pigou-unknown-fields"]
                assert told == "nonsense, stream_options.every"
        for seen in fleet.stubs["a"].seen:
            assert "nonsense" not in seen.body
            assert seen.body["stream_options"] == {}


async def test_unknown_fields_are_refused_where_that_is_asked_for() -> None:
    async with serving(Stub("a"), unknown_fields="refuse") as fleet:
        status, answer, _ = await post(fleet, TEXT, {"prompt": "x", "nonsense": 1})
        assert (status, answer["error"]["param"]) == (400, "nonsense")
        assert fleet.stubs["a"].seen == []


async def test_stock_workers_judge_fields_themselves() -> None:
    async with serving(Stub("a", stock=True), strict=False, unknown_fields="refuse") as fleet:
        status, _, _ = await post(fleet, TEXT, {"prompt": "x", "nonsense": 1})
        assert status == 200
        assert fleet.stubs["a"].seen[0].body["nonsense"] == 1


async def test_every_malformed_request_gets_the_documented_error() -> None:
    async with serving(Stub("a")) as fleet:
        for path, body, param in BAD:
            status, answer, _ = await post(fleet, path, body)
            error = answer["error"]
            assert (status, error["code"], error["type"]) == (400, 400, "BadRequestError"), body
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param, (body, error)
        assert fleet.stubs["a"].seen == []
        status, _, _ = await post(fleet, TEXT, {"prompt": "x"})
        assert status == 200
        assert fleet.idle()


async def test_other_doors_and_methods_have_the_envelope_of_every_error() -> None:
    async with serving(Stub("a")) as fleet:
        status, body = await get(fleet, "/nowhere")
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (404, 404, "NotFoundError")
        assert "/nowhere" in error["message"]
        async with (
            aiohttp.ClientSession() as session,
            session.delete(fleet.url + "/v1/models") as response,
        ):
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (405, "MethodNotAllowedError")
            assert set(error) == {"message", "type", "param", "code"}
            assert response.headers["allow"] == "GET"
        status, answer, _ = await post(fleet, TEXT, b"{}", {"content-type": "text/plain"})
        assert (status, "application/json" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("refusal", [400, 501])
async def test_a_workers_refusal_is_passed_on_as_the_requests_fault(refusal: int) -> None:
    bad = Script(status=refusal)
    for stubs in (
        [Stub("a", script=bad)],
        [Stub("p", Role.PREFILL, script=bad), Stub("d", Role.DECODE)],
    ):
        async with serving(*stubs) as fleet:
            for stream in (False, True):
                body = {"prompt": PROMPT, "stream": stream}
                status, answer, _ = await post(fleet, TEXT, body)
                assert (status, answer["error"]["message"]) == (400, "scripted")
            await fleet.settle()


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_worker_is_passed_over(status: int, stream: bool) -> None:
    script = Script(status=status, times=1)
    async with serving(Stub("a", script=script), Stub("b", script=script)) as fleet:
        body = {"prompt": PROMPT, "stream": stream}
        data = json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                fleet.url + TEXT, data=data, headers={"content-type": "application/json"}
            ) as response,
        ):
            assert response.status == 200
            await response.read()
        await fleet.settle()


async def test_busy_workers_make_a_503_with_a_time_to_retry() -> None:
    async with serving(*(Stub(name, script=Script(status=503)) for name in "abcd")) as fleet:
        status, answer, headers = await post(fleet, TEXT, {"prompt": PROMPT})
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        assert headers["retry-after"] == "1"


async def test_a_reply_that_is_not_streamed_is_made_again_elsewhere() -> None:
    script = Script(die_after=0, times=1)
    async with serving(Stub("a", script=script), Stub("b", script=script)) as fleet:
        status, answer, _ = await post(fleet, TEXT, {"prompt": PROMPT, "seed": 5})
        assert (status, answer["choices"][0]["text"]) == (200, whole_text(5))
        asked = [seen.body["seed"] for stub in fleet.stubs.values() for seen in stub.seen]
        assert asked == [5, 5]


async def test_a_full_queue_sheds_and_a_cancelled_request_leaves_it() -> None:
    control = ControlConfig(max_inflight=1, max_queued=1)
    stub = Stub("a", script=Script(held=asyncio.Event()))
    async with serving(stub, control=control) as fleet:
        first = asyncio.create_task(post(fleet, TEXT, {"prompt": "x"}))
        await eventually(lambda: len(stub.seen) == 1)
        second = asyncio.create_task(post(fleet, TEXT, {"prompt": "x"}))
        await eventually(lambda: fleet.plane_driver.queued == 1)
        status, answer, headers = await post(fleet, TEXT, {"prompt": "x"})
        assert (status, int(headers["retry-after"]) >= 1) == (503, True)
        assert "the queue is full" in answer["error"]["message"]
        second.cancel()
        await eventually(lambda: fleet.plane_driver.queued == 0)
        stub.script.held.set()
        assert (await first)[0] == 200
        await fleet.settle()


async def test_a_tenant_whose_share_of_the_queue_is_full_gets_a_429_and_others_may_wait(
    tmp_path: Path,
) -> None:
    secrets, lines = zip(*(make_key(name) for name in ("loud", "calm")), strict=True)
    path = tmp_path / "keys"
    path.write_text("\n".join(lines) + "\n")
    loud, calm = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    control = ControlConfig(max_inflight=1, max_queued=2)
    stub = Stub("a")
    async with serving(stub, control=control, keys=Keys.read(path)) as fleet:

        def send(headers: dict[str, str]) -> asyncio.Task[tuple[int, Any, Mapping[str, str]]]:
            return asyncio.create_task(post(fleet, TEXT, {"prompt": "x"}, headers))

        assert (await send(calm))[0] == 200
        stub.script.held = asyncio.Event()
        going = [send(loud)]
        await eventually(lambda: len(stub.seen) == 2)
        for queued in (1, 2):
            going.append(send(loud))
            await eventually(lambda queued=queued: fleet.plane_driver.queued == queued)
        status, answer, headers = await send(loud)
        assert (status, answer["error"]["type"]) == (429, "RateLimitError")
        assert "the tenant's share of the queue is full" in answer["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        going.append(send(calm))
        await eventually(lambda: fleet.plane_driver.queued == 3)
        stub.script.held.set()
        assert [(await each)[0] for each in going] == [200] * 4
        await fleet.settle()


async def test_a_prompt_that_is_scored_is_computed_where_it_is_decoded() -> None:
    async with serving(Stub("p", Role.PREFILL), Stub("d", Role.DECODE)) as fleet:
        assert (await post(fleet, TEXT, {"prompt": [1] * 64, "prompt_logprobs": 1}))[0] == 200
        assert fleet.stubs["p"].seen == []
        await fleet.settle()


async def test_the_request_id_of_the_client_reaches_the_worker() -> None:
    async with serving(Stub("a")) as fleet:
        await post(fleet, TEXT, {"prompt": "x"}, {"x-request-id": "mine-1"})
        await post(fleet, TEXT, {"prompt": "x", "request_id": "mine-2"})
        assert [seen.request_id for seen in fleet.stubs["a"].seen] == ["mine-1", "mine-2"]


IDS = ["mine-1", "a", "!" + "~" * 255, "a/b?c=%41#[{'\"}]", "x,y;z=1"]


@pytest.mark.parametrize("given", IDS)
async def test_every_reply_tells_the_clients_request_id_again(given: str) -> None:
    headers = {"x-request-id": given, "content-type": "application/json"}
    asked: list[tuple[str, str, Any, int]] = [
        ("POST", TEXT, {"prompt": "x"}, 200),
        ("POST", TEXT, {"prompt": "x", "stream": True}, 200),
        ("POST", TEXT, {"prompt": "x", "guided_json": {}}, 400),
        ("POST", CHAT, {"messages": [], "stream": True}, 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", TEXT, None, 405),
    ]
    async with serving(Stub("a")) as fleet, aiohttp.ClientSession() as session:
        for method, path, body, status in asked:
            async with session.request(
                method, fleet.url + path, json=body, headers=headers
            ) as response:
                assert (response.status, response.headers["x-request-id"]) == (status, given), path
                await response.read()
        assert [seen.request_id for seen in fleet.stubs["a"].seen] == [given, given]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health", b"GET /", b"GET /metrics", b"GET /nowhere", b"GET /v1/nowhere",
        b"GET /v1/completions", b"OPTIONS /v1/models", b"POST /v1/completions", b"GET /decisions/x",
        b"POST /tokenize", b"not http",
    ],
)  # fmt: skip
async def test_a_reply_without_an_id_from_its_client_has_one_all_the_same(head: bytes) -> None:
    async with serving(Stub("a"), host="127.0.0.1") as fleet:
        answer = await raw(
            fleet, head + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: 2\r\n\r\n{}",
        )  # fmt: skip
        lines = answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        ids = [line for line in lines if line.startswith(b"x-request-id: ")]
        assert len(ids) == 1, answer
        assert len(ids[0]) > len(b"x-request-id: ")


@pytest.mark.parametrize("given", ["a b", "x" * 257, "\u00e9"])
async def test_what_is_no_request_id_is_refused_and_not_told_again(given: str) -> None:
    async with serving(Stub("a")) as fleet:
        for body, headers in (({"request_id": given}, {}), ({}, {"x-request-id": given})):
            status, answer, told = await post(fleet, TEXT, {"prompt": "x"} | body, headers)
            assert (status, answer["error"]["param"]) == (400, "request_id")
            assert told["x-request-id"] not in ("", given)


async def test_bodies_and_headers_have_limits() -> None:
    async with serving(Stub("a"), max_body=1000, max_header=500, max_headers=20) as fleet:
        status, answer, _ = await post(fleet, TEXT, {"prompt": "x" * 2000})
        assert (status, answer["error"]["type"]) == (413, "RequestTooLargeError")
        many = b"".join(b"x-%d: 1\r\n" % i for i in range(40))
        for head in (b"x-long: " + b"y" * 5000 + b"\r\n", many):
            answer_bytes = await raw(fleet, b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
            assert b" 431 " in answer_bytes[:13], answer_bytes[:300]
            assert b'"code":431' in answer_bytes
        answer_bytes = await raw(fleet, b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in answer_bytes[:13], answer_bytes[:200]
        assert (await get(fleet, "/health"))[0] == 200


async def test_keys_open_the_door_and_keep_tenants_apart(tmp_path: Path) -> None:
    secrets, lines = zip(*(make_key(name) for name in ("ann", "bob")), strict=True)
    path = tmp_path / "keys"
    path.write_text("# tenants\n\n" + "\n".join(lines) + "\n")
    assert secrets[0] not in path.read_text()
    async with serving(Stub("a"), keys=Keys.read(path)) as fleet:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": secrets[0]}):
            status, answer, _ = await post(fleet, TEXT, {"prompt": "x"}, headers)
            assert (status, answer["error"]["type"]) == (401, "AuthenticationError")
            assert (answer["error"]["param"], answer["error"]["code"]) == ("authorization", 401)
        assert (await get(fleet, "/health"))[0] == 200
        assert (await get(fleet, "/workers"))[0] == 401
        for secret, salt in ((secrets[0], None), (secrets[1], None), (secrets[1], "s")):
            body = {"prompt": "x"} | ({"cache_salt": salt} if salt else {})
            headers = {"authorization": f"Bearer {secret}"}
            assert (await post(fleet, TEXT, body, headers))[0] == 200
            assert (await post(fleet, TEXT, body, headers))[0] == 200
        salts = [seen.body["cache_salt"] for seen in fleet.stubs["a"].seen]
        assert salts[::2] == salts[1::2]
        assert len(set(salts)) == 3


@pytest.mark.parametrize("line", ["nohash", "a b:" + "0" * 64, "t:" + "0" * 63, "t:" + "G" * 64])
def test_a_bad_line_of_keys_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# x\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        Keys.read(path)


def test_an_open_door_must_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="--allow-open"):
        GatewayConfig(host="0.0.0.0")
    GatewayConfig(host="0.0.0.0", allow_open=True)
    GatewayConfig(host="0.0.0.0", api_keys_file="keys")
    GatewayConfig(host="::1")


@pytest.mark.parametrize("path", ["/health", "/ping", "/", "/version", "/metrics"])
async def test_a_probe_may_ask_for_the_head_alone(path: str) -> None:
    async with (
        serving(Stub("a")) as fleet,
        aiohttp.ClientSession() as session,
        session.head(fleet.url + path) as response,
    ):
        assert (response.status, await response.read()) == (200, b"")


async def test_health_says_whether_anybody_decodes() -> None:
    async with serving(Stub("p", Role.PREFILL)) as fleet:
        assert (await get(fleet, "/health"))[0] == 503
    async with serving(Stub("d", Role.DECODE)) as fleet:
        status, body = await get(fleet, "/health")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        await fleet.plane_driver.down("d")
        assert (await get(fleet, "/health"))[0] == 503


async def test_the_small_pages_answer() -> None:
    async with serving(Stub("a")) as fleet:
        status, answer, _ = await post(fleet, "/tokenize", {"prompt": "abc"})
        assert (status, answer["count"]) == (200, 3)
        status, page = await get(fleet, "/")
        assert status == 200
        assert b"/workers" in page
        assert b"http" not in page.replace(b"http-equiv", b""), "the page needs nothing from afar"
        await post(fleet, TEXT, {"prompt": "x"})
        _, metrics = await get(fleet, "/metrics")
        assert (
            b'pigou_requests_total{model_name="stub",route="/v1/completions",status="200"} 1.0'
            in metrics
        )
        assert b'pigou_generation_tokens_total{model_name="stub",tenant=""} 5.0' in metrics
        assert b'pigou_index_evicted_blocks_total{model_name="stub"} 0.0' in metrics
        assert json.loads((await get(fleet, "/version"))[1])["version"]
        view = json.loads((await get(fleet, "/workers"))[1])
        assert view["queued"] == 0


async def test_a_slow_client_holds_up_nobody_else() -> None:
    async with serving(Stub("a", script=Script(per_chunk=50))) as fleet:
        parts = urlsplit(fleet.url)
        slow = socket.create_connection((parts.hostname, parts.port))
        body = json.dumps({"prompt": "x", "max_tokens": 200_000, "stream": True}).encode()
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        await asyncio.sleep(0.3)
        status, _, _ = await asyncio.wait_for(post(fleet, TEXT, {"prompt": "x"}), 60)
        assert status == 200
        slow.close()
        await fleet.settle()
