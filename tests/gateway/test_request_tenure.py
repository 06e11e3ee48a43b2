"""What a request states of its tenure is honoured within its key's grant, or refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from tests.gateway.stub import Fleet, Stub, serving

from pigou.config import ConfigError
from pigou.gateway.auth.keys import Keys, make_key
from pigou.gateway.auth.tenure import (
    OPEN_POLICY,
    KeyPolicy,
    TenureChoices,
    TenureDefaults,
    TenureHeaders,
    header,
    read_tenure_headers,
)
from pigou.gateway.request import BodyFields
from pigou.gateway.request_parsing import ServerScope
from pigou.kv.tenure import Tenure, salt_expiry
from pigou.request import NEVER, SECOND, Role
from pigou.wire.errors import APIError

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
NOW = 1_800_000_000 * SECOND
GRANT = KeyPolicy(
    tenure=TenureDefaults(principal="svc", permissions=frozenset({"a"}), safety="v3", ttl=60),
    may=TenureChoices(principal=("ann", "user:*"), permissions=("a", "b"), corpus=("*",), ttl=3600),
)


def stated(**values: str) -> TenureHeaders:
    return read_tenure_headers({header(field): value for field, value in values.items()})


def applied(policy: KeyPolicy = GRANT, **values: str) -> Tenure:
    return policy.apply("t", stated(**values), NOW)


def refusal(policy: KeyPolicy = GRANT, **values: str) -> APIError:
    with pytest.raises(APIError) as refused:
        applied(policy, **values)
    return refused.value


# --- headers ------------------------------------------------------------------------------------


def test_every_field_has_a_header() -> None:
    values = {
        "principal": "ann", "release": "r", "template": "t", "corpus": "c", "safety": "s",
        "permissions": " b,\ta ", "tools": "", "expiry": "1800000001",
    }  # fmt: skip
    found = stated(**values)
    assert found == TenureHeaders(
        principal="ann", release="r", template="t", corpus="c", safety="s",
        permissions=frozenset("ab"), tools=frozenset(), expiry=1_800_000_001,
    )  # fmt: skip
    assert stated(ttl="60") == TenureHeaders(ttl=60)
    assert stated() == TenureHeaders()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Pigou-Tenure-Tenant", "x"), ("X-Pigou-Tenure", "x"), ("X-Pigou-Tenure-Purpose", "x"),
        ("X-Pigou-Tenure-Principle", "x"), ("X-Pigou-Tenure-Principal", ""),
        ("X-Pigou-Tenure-Principal", "x" * 257), ("X-Pigou-Tenure-Permissions", "a,,b"),
        ("X-Pigou-Tenure-Permissions", ","), ("X-Pigou-Tenure-Permissions", "a," * 64 + "a"),
        ("X-Pigou-Tenure-TTL", "0"), ("X-Pigou-Tenure-TTL", "-1"), ("X-Pigou-Tenure-TTL", "1.5"),
        ("X-Pigou-Tenure-TTL", "1e3"), ("X-Pigou-Tenure-TTL", "1_0"), ("X-Pigou-Tenure-TTL", "٣"),
        ("X-Pigou-Tenure-TTL", "9" * 10), ("X-Pigou-Tenure-Expiry", ""),
        ("X-Pigou-Tenure-Expiry", "9" * 11), ("X-Pigou-Tenure-Expiry", "2027-01-01"),
    ],
)  # fmt: skip
def test_a_header_that_says_nothing_sensible_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(APIError) as refused:
        read_tenure_headers({name: value})
    assert refused.value.status == 400
    assert name in refused.value.message
    assert refused.value.param == name


def test_a_header_that_comes_twice_and_two_ends_are_refused() -> None:
    twice = CIMultiDict([("x-pigou-tenure-corpus", "a"), ("X-Pigou-Tenure-Corpus", "b")])
    with pytest.raises(APIError, match="twice"):
        read_tenure_headers(twice)
    with pytest.raises(APIError, match="keep one"):
        stated(ttl="60", expiry="1900000000")


# --- grants -------------------------------------------------------------------------------------


def test_a_key_fixes_what_its_requests_leave_out() -> None:
    tenure = applied()
    assert (tenure.tenant, tenure.principal, tenure.safety) == ("t", "svc", "v3")
    assert tenure.permissions == {"a"}
    assert NOW < tenure.expiry <= NOW + 60 * SECOND


def test_a_request_sets_what_its_key_lets_it() -> None:
    for name in ("ann", "user:", "user:zoe", "svc"):
        assert applied(principal=name).principal == name
    assert applied(permissions="").permissions == frozenset()
    assert applied(permissions="b,a").permissions == {"a", "b"}
    assert applied(corpus="anything, at all").corpus == "anything, at all"
    assert applied(safety="v3") == applied()
    assert applied(ttl="3600").expiry <= NOW + 3600 * SECOND
    until = NOW // SECOND + 3600
    assert applied(expiry=str(until)).expiry == until * SECOND


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("principal", "bob", "'ann', 'user:*'"), ("principal", "ANN", "'ann'"),
        ("principal", "ann2", "'ann'"), ("principal", "xuser:a", "'user:*'"),
        ("permissions", "a,c", "'a', 'b'"), ("permissions", "a*", "'a', 'b'"),
        ("safety", "v4", "leave the header out"), ("release", "r", "leave the header out"),
        ("tools", "x", "leave the header out"), ("tools", "", "leave the header out"),
        ("ttl", "3601", "at most 3600 seconds"),
        ("expiry", str(NOW // SECOND + 3601), "at most 3600 seconds"),
    ],
)  # fmt: skip
def test_a_request_sets_nothing_else(field: str, value: str, told: str) -> None:
    error = refusal(**{field: value})
    assert error.status == 403
    assert error.param == header(field)
    assert header(field) in error.message
    assert told in error.message


def test_an_expiry_that_is_past_is_refused() -> None:
    for seconds in (0, -1):
        error = refusal(OPEN_POLICY, expiry=str(NOW // SECOND + seconds))
        assert (error.status, "past" in error.message) == (400, True)
    assert applied(OPEN_POLICY, expiry=str(NOW // SECOND + 1)).expiry == NOW + SECOND


def test_nothing_may_be_set_with_a_key_that_grants_nothing() -> None:
    for field, value in {"principal": "x", "ttl": "1", "expiry": "1900000000"}.items():
        assert refusal(KeyPolicy(), **{field: value}).status == 403
    assert applied(KeyPolicy()) == Tenure(tenant="t")


# --- the file -----------------------------------------------------------------------------------


def entry(tmp_path: Path, text: str, name: str = "keys.yaml") -> Keys:
    path = tmp_path / name
    path.write_text(text)
    return Keys.read(path)


def test_both_forms_of_the_file_say_what_each_key_gives(tmp_path: Path) -> None:
    secret, line = make_key("acme")
    yaml = f"""
keys:
  - tenant: acme
    sha256: "{line.partition(":")[2]}"
    tenure: {{principal: svc, permissions: [a], safety: v3, ttl: 60}}
    may:
      principal: [ann, "user:*"]
      permissions: [a, b]
      corpus: ["*"]
      ttl: 3600
"""
    bearer = f"Bearer {secret}"
    key = entry(tmp_path, yaml).find(bearer)
    assert key is not None
    assert (key.tenant, key.policy) == ("acme", GRANT)
    as_json = json.dumps({"keys": [{"tenant": "acme", "sha256": line.partition(":")[2]}]})
    key = entry(tmp_path, as_json, "keys.json").find(bearer)
    assert key is not None
    assert key.policy == KeyPolicy()
    key = entry(tmp_path, line, "keys").find(bearer)
    assert key is not None
    assert key.policy is OPEN_POLICY
    assert entry(tmp_path, line, "keys").find("Bearer other") is None


DIGEST = "sha256: " + "a" * 64


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys: []", "no keys"),
        ("key: []", "unknown field"),
        ("keys: [{tenant: a}]", "sha256"),
        ("keys: [{tenant: a, sha256: abc}]", "sha256 is 'abc'"),
        (f"keys: [{{tenant: a b, {DIGEST}}}]", "tenant 'a b'"),
        (f"keys: [{{tenant: a, {DIGEST}, mai: {{}}}}]", "unknown field `mai`"),
        (f"keys: [{{tenant: a, {DIGEST}, tenure: {{tenant: b}}}}]", "unknown field `tenant`"),
        (f"keys: [{{tenant: a, {DIGEST}, tenure: {{purpose: answer}}}}]", "`purpose`"),
        (f"keys: [{{tenant: a, {DIGEST}, tenure: {{principal: ''}}}}]", "tenure.principal has ''"),
        (f"keys: [{{tenant: a, {DIGEST}, tenure: {{permissions: ['a,b']}}}}]", "'a,b'"),
        (f"keys: [{{tenant: a, {DIGEST}, tenure: {{ttl: 0}}}}]", "tenure.ttl is 0"),
        (f"keys: [{{tenant: a, {DIGEST}, may: {{ttl: 9999999999}}}}]", "may.ttl is 9999999999"),
        (f"keys: [{{tenant: a, {DIGEST}, may: {{principal: bob}}}}]", "array"),
        (f"keys: [{{tenant: a, {DIGEST}, may: {{principal: ['a*b']}}}}]", "may.principal has"),
        (f"keys: [{{tenant: a, {DIGEST}, may: {{principal: ['']}}}}]", "may.principal has ''"),
        (f"keys: [{{tenant: a, {DIGEST}}}, {{tenant: b, {DIGEST}}}]", "twice"),
        ("keys: [", "keys.yaml"),
    ],
)
def test_a_bad_file_of_keys_is_refused_with_the_place(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        entry(tmp_path, text)
    assert told in str(refused.value)
    assert "keys.yaml" in str(refused.value)


# --- what the gateway knows ---------------------------------------------------------------------

words = st.text(alphabet="ab;:1\0", max_size=3)
facts = st.builds(
    ServerScope,
    model=words,
    release=words,
    releases=st.frozensets(words, max_size=2),
    template=words,
)
said = st.builds(Tenure, tenant=words, release=words, template=words, tools=st.frozensets(words))


def joined(known: ServerScope, tenure: Tenure, tools: list[Any] | None = None) -> Tenure:
    body = {} if tools is None else {"tools": msgspec.Raw(msgspec.json.encode(tools))}
    return known.extend(tenure, BodyFields(), body, chat=True)


@given(st.tuples(facts, said), st.tuples(facts, said))
def test_what_is_known_and_what_is_said_never_stand_for_each_other(
    one: tuple[ServerScope, Tenure], other: tuple[ServerScope, Tenure]
) -> None:
    nothing = any(said == Tenure() and not known.release for known, said in (one, other))
    if not nothing:
        assert (one == other) == (joined(*one) == joined(*other))


def test_tools_join_the_tenure_one_by_one_and_in_any_order() -> None:
    tenure = Tenure(tenant="t", tools=frozenset({"v1"}))
    one, other = {"function": {"name": "a"}}, {"function": {"name": "b"}}
    assert joined(ServerScope(), tenure, [one, other]) == joined(
        ServerScope(), tenure, [other, one]
    )
    found = {joined(ServerScope(), tenure, tools) for tools in (None, [one], [other], [one, other])}
    assert len(found) == 4
    assert joined(ServerScope(), tenure, []) == joined(ServerScope(), tenure)


def test_who_says_nothing_has_no_tenure_unless_there_is_a_release() -> None:
    known = ServerScope("m", "", frozenset({"w"}), "t")
    assert joined(known, Tenure()) == Tenure()
    assert joined(ServerScope(release="r"), Tenure()) != Tenure()
    assert joined(known, Tenure(tenant="a")).model == "m"


# --- over HTTP ----------------------------------------------------------------------------------


async def ask(
    fleet: Fleet, headers: Mapping[str, str] | None = None, path: str = TEXT, **body: Any
) -> tuple[int, Any]:
    body = {"prompt": "x"} | body
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(fleet.url + path, json=body) as response,
    ):
        return response.status, await response.json()


def salts(fleet: Fleet) -> list[str | None]:
    return [seen.body.get("cache_salt") for stub in fleet.stubs.values() for seen in stub.seen]


async def test_an_open_gateway_honours_every_header_and_refuses_others() -> None:
    chosen = [
        {}, {"Principal": "ann"}, {"Principal": "bob"}, {"Permissions": "a,b"},
        {"Permissions": "a"}, {"Corpus": "ann"}, {"Safety": "ann"}, {"Tools": "a"},
        {"Release": "ann"}, {"Template": "ann"}, {"TTL": "86400"}, {"Expiry": "4000000000"},
    ]  # fmt: skip
    async with serving(Stub("a")) as fleet:
        for each in chosen:
            headers = {f"X-Pigou-Tenure-{name}": value for name, value in each.items()}
            assert (await ask(fleet, headers))[0] == (403 if "Expiry" in each else 200)
        await ask(fleet, {"X-Pigou-Tenure-Permissions": "b,a"})
        found = salts(fleet)
        assert found[0] is None
        assert found[-1] == found[3]
        assert len(set(found)) == len(chosen) - 1
        before = len(found)
        for headers in ({"X-Pigou-Tenure-User": "a"}, {"X-Pigou-Tenure-Expiry": "1000"}):
            status, answer = await ask(fleet, headers)
            assert (status, answer["error"]["type"]) == (400, "BadRequestError")
            assert next(iter(headers)) in answer["error"]["message"]
        status, answer = await ask(fleet, {}, cache_salt="")
        assert (status, answer["error"]["param"]) == (400, "cache_salt")
        assert len(salts(fleet)) == before


async def test_bytes_that_are_no_text_are_values_like_any() -> None:
    async with serving(Stub("a")) as fleet:
        parts = urlsplit(fleet.url)
        answers = []
        for value in (b"\xff", b"\xfe", b"\xff" * 257, b"\xc3\xa9", b"e\xcc\x81"):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"connection: close\r\nx-pigou-tenure-principal: " + value + b"\r\n"
                b'content-length: 14\r\n\r\n{"prompt":"x"}'
            )
            answers.append((await reader.read())[9:12])
            writer.close()
        assert answers == [b"200", b"200", b"400", b"200", b"200"]
        assert len(set(salts(fleet))) == 4


async def test_a_clients_salt_is_part_of_its_tenure_and_never_another() -> None:
    """Who learns the salt of another tenure, and sends it, gets a tenure of its own."""
    async with serving(Stub("a")) as fleet:
        await ask(fleet, {"X-Pigou-Tenure-Principal": "ann"}, cache_salt="s")
        (stolen,) = salts(fleet)
        assert stolen is not None
        await ask(fleet, cache_salt=stolen)
        await ask(fleet, {"X-Pigou-Tenure-Principal": "ann"}, cache_salt=stolen)
        await ask(fleet, {"X-Pigou-Tenure-Principal": "ann"})
        await ask(fleet, cache_salt="s")
        assert len(set(salts(fleet))) == 5


async def test_a_key_bounds_what_its_requests_state(tmp_path: Path) -> None:
    secrets = []
    entries = []
    for may in ({"principal": ["ann"]}, {}):
        secret, line = make_key("acme")
        secrets.append({"authorization": f"Bearer {secret}"})
        entries.append({"tenant": "acme", "sha256": line.partition(":")[2], "may": may})
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    async with serving(Stub("a"), keys=Keys.read(path)) as fleet:
        ann, bob = ({"X-Pigou-Tenure-Principal": name} for name in ("ann", "bob"))
        assert (await ask(fleet, ann))[0] == 401
        assert [(await ask(fleet, secret | ann))[0] for secret in secrets] == [200, 403]
        status, answer = await ask(fleet, secrets[0] | bob)
        assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")
        assert [(await ask(fleet, secret))[0] for secret in secrets] == [200, 200]
        assert len(set(salts(fleet))) == 2, "two keys of a tenant differ only by what they say"


async def test_the_tenure_knows_tools_release_and_template() -> None:
    tools = [{"type": "function", "function": {"name": "a"}}]
    ann = {"X-Pigou-Tenure-Principal": "ann"}
    found = []
    for release in ("", "r1", "r2"):
        async with serving(Stub("a"), strict=False, release=release) as fleet:
            messages = [{"role": "user", "content": "x"}]
            strict = [tools[0] | {"strict": True}]
            await ask(fleet, ann)
            await ask(fleet, ann, CHAT, messages=messages, tools=tools)
            await ask(fleet, ann, CHAT, messages=messages, tools=strict)
            await ask(fleet, ann, CHAT, messages=messages, chat_template="{{ messages }}")
            await ask(fleet, ann, CHAT, messages=messages, chat_template="{{ messages}}")
            await ask(fleet)
            found += salts(fleet)
    assert len(set(found)) == len(found)
    assert [salt is None for salt in found].count(True) == 1


async def test_both_legs_and_a_stream_that_moves_have_one_salt() -> None:
    stubs = (Stub("p", Role.PREFILL), Stub("d", Role.DECODE), Stub("e", Role.DECODE))
    async with serving(*stubs) as fleet:
        for stub in stubs[1:]:
            stub.script.die_after, stub.script.times = 2, 1
        async with (
            aiohttp.ClientSession(headers={"X-Pigou-Tenure-TTL": "3600"}) as session,
            session.post(
                fleet.url + TEXT, json={"prompt": list(range(40)), "stream": True, "max_tokens": 9}
            ) as response,
        ):
            assert "[DONE]" in await response.text()
        found = salts(fleet)
        assert len(found) >= 4
        assert len(set(found)) == 1
        assert found[0] is not None
        assert time.time_ns() < salt_expiry(found[0]) < NEVER


async def test_a_request_that_waited_past_its_expiry_has_a_salt_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time_ns=lambda: 2**62, monotonic_ns=time.monotonic_ns)
    stubs = Stub("p", Role.PREFILL), Stub("d", Role.DECODE)
    body = {"prompt": list(range(40)), "max_tokens": 3}
    async with serving(*stubs) as fleet:
        for when in ("in time", "late"):
            if when == "late":
                monkeypatch.setattr("pigou.gateway.proxy.driver.time", clock)
            for headers in ({}, {"X-Pigou-Tenure-TTL": "315360000"}):
                assert (await ask(fleet, headers, **body))[0] == 200
                async with (
                    aiohttp.ClientSession(headers=headers) as session,
                    session.post(fleet.url + TEXT, json=body | {"stream": True}) as response,
                ):
                    assert "[DONE]" in await response.text()
    for stub in stubs:
        found = [seen.body.get("cache_salt") for seen in stub.seen]
        assert found[:2] == found[4:6] == [None, None]
        assert found[2] == found[3]
        assert found[2].startswith("tenure1:")
        assert all(salt.startswith("expired-") for salt in found[6:])
        assert len(set(found[6:])) == 2
    legs = [[seen.body.get("cache_salt") for seen in stub.seen] for stub in stubs]
    assert legs[0] == legs[1]
