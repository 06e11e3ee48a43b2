"""A worker of a fleet speaks to who shows the fleet's secret: over HTTP, KV events and tickets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from worker_process import Worker, start, stop

from pigou.config import ConfigError
from pigou.wire.fleet_secret import NONCE, PROOF, VARIABLE, FleetSecret, secure_client
from pigou.wire.kv_event_decoding import sequence_frame
from pigou.wire.prefill_decode_legs import leg_one, leg_two
from pigou.worker.config import WorkerConfig
from pigou.worker.http.fleet_auth import check_exposure

SECRET = FleetSecret("a secret of this test alone")
BEARER = {"authorization": f"Bearer {SECRET.token}"}
PROMPT = [4 + i % 90 for i in range(200)]
ROUTES = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/kv/offer"),
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/metrics"), ("GET", "/version"),
    ("GET", "/load"), ("GET", "/server_info"), ("GET", "/experts"), ("GET", "/kv_event_sources"),
    ("POST", "/reset_prefix_cache"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/nowhere"), ("DELETE", "/v1/models"), ("POST", "/v1/kv/end"),
]  # fmt: skip


@pytest.fixture
def guarded(start_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv(VARIABLE, SECRET.text().decode())
    return start_worker("--blocks", "64", "--kv-lease", "2")


def test_nothing_is_told_or_done_without_the_secret(guarded: Worker) -> None:
    for method, path in ROUTES:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": SECRET.token}):
            reply = guarded.call(method, path, b'{"prompt": "x"}' if method == "POST" else None,
                                 {"content-type": "application/json", **headers})  # fmt: skip
            assert reply.status == 401, (method, path, headers)
            assert reply.json["error"]["type"] == "AuthenticationError"
            assert b"tiny" not in reply.body
    body = b'{"prompt": "' + b"a" * (20 << 20) + b'"}'  # refused before it is read
    assert guarded.post("/v1/completions", body).status == 401
    assert guarded.call("GET", "/v1/models", headers=BEARER).json["data"][0]["id"] == "tiny"
    shown = {"authorization": f"Bearer {SECRET.text().decode()}"}
    assert guarded.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, shown).status == 200


def test_probes_get_a_status_and_no_body(guarded: Worker) -> None:
    for path in ("/health", "/ping"):
        reply = guarded.get(path)
        assert (reply.status, reply.body) == (200, b"")


def test_a_worker_proves_the_secret_to_who_asks_and_tells_no_token(guarded: Worker) -> None:
    reply = guarded.call("GET", "/v1/models", headers={NONCE: "some nonce"})
    told = {name.lower(): value for name, value in reply.headers.items()}
    assert SECRET.proves("some nonce", told[PROOF])
    assert SECRET.token not in str(told) + reply.body.decode()
    reply = guarded.call("GET", "/v1/models", headers={NONCE: "n" * 129})
    assert PROOF not in {name.lower() for name in reply.headers}


def test_kv_events_and_their_replay_reach_who_knows_the_secret_alone(guarded: Worker) -> None:
    source = guarded.call("GET", "/kv_event_sources", headers=BEARER).json["0"]
    assert source["encryption"] == "curve"
    reply = guarded.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, BEARER)
    assert reply.status == 200
    with zmq.Context() as context:

        def past(secret: FleetSecret | None) -> zmq.Socket[Any]:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            if secret is not None:
                secure_client(socket, secret)
            socket.connect(source["replay_endpoint"])
            socket.send_multipart([b"", sequence_frame(0)])
            return socket

        strangers = [past(None), past(FleetSecret("another secret, as long as that"))]
        friend = past(SECRET)
        assert friend.poll(10_000)
        assert b"BlockStored" in b"".join(friend.recv_multipart())
        for stranger in strangers:  # they asked before the friend did
            assert not stranger.poll(300)
            stranger.close(0)
        friend.close(0)


def test_a_tickets_blocks_enter_no_other_prompt_and_no_other_tenant(
    start_worker: Callable[..., Worker],
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET.text().decode())
    first = start_worker("--blocks", "64", "--kv-lease", "60")
    second = start(model_folder, "--blocks", "64", log=tmp_path / "log")
    try:
        _mix_up(first, second, tmp_path / "log")
    finally:
        stop(second)


def _mix_up(first: Worker, second: Worker, log: Path) -> None:

    def ask(worker: Worker, body: dict[str, Any]) -> Any:
        reply = worker.post("/v1/completions", body, BEARER)
        assert reply.status == 200, reply.body
        return reply.json

    def received() -> float:
        page = second.call("GET", "/metrics", headers=BEARER).body.decode()
        return sum(map(float, re.findall(r"^pigou_kv_blocks_received_total\S* (\S+)$", page, re.M)))

    asked = {"prompt": PROMPT, "max_tokens": 4, "cache_salt": "one"}
    ticket = ask(first, leg_one(asked, chat=False))["kv_transfer_params"]
    other = ask(first, leg_one(asked | {"cache_salt": "two"}, chat=False))["kv_transfer_params"]
    mixed = {**ticket, "remote_request_id": other["remote_request_id"],
             "remote_secret": other["remote_secret"]}  # fmt: skip
    for body, shown in (
        (asked | {"prompt": [*PROMPT[1:], 4]}, ticket),  # another prompt
        (asked | {"prompt": PROMPT[:100] + [9] * 100}, ticket),  # one that begins as it
        (asked | {"prompt": PROMPT[:100]}, ticket),  # a part of it
        (asked | {"cache_salt": "two"}, ticket),  # another tenant's
        (asked, other),
        (asked, mixed),
        (asked, {**ticket, "remote_mac": ""}),
        (asked, {**ticket, "remote_host": "127.0.0.2"}),
    ):
        reply = ask(second, leg_two(body, shown))
        assert reply["usage"]["completion_tokens"] == 4
    assert received() == 0
    assert log.read_text().count("a ticket is refused") == 8
    assert ask(second, leg_two(asked, ticket))["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("field", [{"host": "0.0.0.0"}, {"host": "::"}, {"host": "192.0.2.1"},
                                   {"host": "worker.example"}, {"kv_events_endpoint": "tcp://*:5557"},
                                   {"kv_replay_endpoint": "tcp://0.0.0.0:*"}])  # fmt: skip
def test_a_worker_that_others_reach_wants_a_secret_or_a_word(field: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(field))} is .*--fleet-secret-file"):
        check_exposure(WorkerConfig(**field), None)
    check_exposure(WorkerConfig(**field), SECRET)
    check_exposure(WorkerConfig(**field, allow_open=True), None)


@pytest.mark.parametrize("field", [{}, {"host": "localhost"}, {"host": "::1"},
                                   {"kv_events_endpoint": "ipc:///run/pigou/kv"},
                                   {"kv_events_endpoint": "tcp://[::1]:*"}])  # fmt: skip
def test_a_worker_of_this_machine_alone_may_be_open(field: dict[str, str]) -> None:
    check_exposure(WorkerConfig(**field), None)
