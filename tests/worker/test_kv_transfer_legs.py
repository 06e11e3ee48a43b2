"""Prefill and decode in two legs over HTTP, between two worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import Worker, start, stop

from pigou.config import ConfigError
from pigou.kv.tenure import Tenure
from pigou.wire.prefill_decode_legs import ASK, leg_one, leg_two
from pigou.worker.config import WorkerConfig
from pigou.worker.http.prefiller import PREFILLED, PREFILLER

PROMPT = [4 + i % 90 for i in range(200)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[tuple[Worker, Worker]]:
    workers = [
        start(model_folder, "--blocks", "64", "--kv-lease", "2", "--role", role, *options)
        for role, options in (("prefill", ()), ("decode", ("--prefiller-networks", "127.0.0.0/8")))
    ]
    yield workers[0], workers[1]
    for worker in workers:
        stop(worker)


def prefill(worker: Worker, body: dict[str, Any]) -> dict[str, Any]:
    reply = worker.post("/v1/completions", leg_one(body, chat=False))
    assert reply.status == 200, reply.body
    ticket: dict[str, Any] = reply.json["kv_transfer_params"]
    return ticket


def salted(name: str) -> dict[str, Any]:
    return BODY | {"cache_salt": f"{name}-{time.monotonic_ns()}"}


def test_the_second_leg_computes_at_most_a_block(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    body = salted("legs")
    alone = first.complete(**salted("alone"))["choices"][0]
    before = second.metric("pigou_kv_blocks_received_total")
    ticket = prefill(first, body)
    assert first.metric("pigou_kv_requests_held") == 1
    assert ticket["do_remote_prefill"] is True
    reply = second.post("/v1/completions", leg_two(body, ticket)).json
    assert reply["choices"][0]["token_ids"] == alone["token_ids"]
    assert reply["choices"][0]["text"] == alone["text"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert reply["kv_transfer_params"] is None
    assert second.metric("pigou_kv_blocks_received_total") - before == 12
    assert second.metric("vllm:prompt_tokens_by_source_total", source="local_compute") <= 16
    first.settle()
    second.settle()


def test_legs_whose_tenure_has_expired_pass_their_blocks_on_and_leave_none(
    pair: tuple[Worker, Worker],
) -> None:
    first, second = pair
    body = BODY | {"cache_salt": Tenure(expiry=1).salt()}
    alone = first.complete(**salted("alone"))["choices"][0]
    cached = [each.metric("pigou_kv_blocks_cached") for each in pair]
    for _ in range(2):
        reply = second.post("/v1/completions", leg_two(body, prefill(first, body))).json
        assert reply["choices"][0]["token_ids"] == alone["token_ids"]
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        first.settle()
        second.settle()
    for each, before in zip(pair, cached, strict=True):
        assert each.metric("pigou_kv_blocks_cached") <= before


def test_a_prompt_that_is_cached_there_is_not_pulled(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    body = salted("cached")
    second.complete(**body)
    before = second.metric("pigou_kv_blocks_received_total")
    second.post("/v1/completions", leg_two(body, prefill(first, body)))
    assert second.metric("pigou_kv_blocks_received_total") == before
    first.settle()


def test_a_ticket_that_leads_nowhere_is_computed_here(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    body = salted("nowhere")
    ticket = prefill(first, body) | {"remote_port": 1}
    reply = second.post("/v1/completions", leg_two(body, ticket))
    assert reply.status == 200
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first.settle()


def test_blocks_that_nobody_pulls_are_freed_when_the_lease_ends(
    pair: tuple[Worker, Worker],
) -> None:
    first, _ = pair
    prefill(first, salted("lease"))
    assert first.metric("pigou_kv_requests_held") == 1
    first.settle()


def test_choices_of_a_second_leg_share_what_was_pulled(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    body = salted("choices") | {"n": 3, "temperature": 1.0}
    before = second.metric("pigou_kv_blocks_received_total")
    reply = second.post("/v1/completions", leg_two(body, prefill(first, body))).json
    assert len(reply["choices"]) == 3
    assert second.metric("pigou_kv_blocks_received_total") - before == 12
    second.settle()


def test_a_prompt_shorter_than_a_block_has_no_ticket(pair: tuple[Worker, Worker]) -> None:
    first, _ = pair
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "kv_transfer_params": ASK}
    assert first.post("/v1/completions", body).json["kv_transfer_params"] is None
    first.settle()


def test_chats_have_two_legs_too(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    text = "one two three four five six seven eight nine ten " * 4
    body = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 5}
    ticket = first.post("/v1/chat/completions", leg_one(body, chat=True)).json["kv_transfer_params"]
    reply = second.post("/v1/chat/completions", leg_two(body, ticket)).json
    assert reply["usage"]["completion_tokens"] == 5
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def address(worker: Worker) -> str:
    return worker.url.removeprefix("http://")


@pytest.mark.parametrize("dead", ["", "127.0.0.1:1,"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_decode_worker_gets_the_prompt_of_the_prefiller_that_the_picker_names(
    pair: tuple[Worker, Worker], dead: str, stream: bool
) -> None:
    first, second = pair
    body = salted("picked") | {"stream": stream, "stream_options": {"include_usage": True}}
    body = body if stream else {k: v for k, v in body.items() if k != "stream_options"}
    alone = first.complete(**salted("alone"))["choices"][0]
    before = second.metric("pigou_kv_blocks_received_total")
    reply = second.post("/v1/completions", body, {PREFILLER: dead + address(first)})
    assert reply.headers[PREFILLED] == address(first)
    pages = reply.chunks if stream else [reply.json]
    tokens = [t for page in pages for c in page["choices"] for t in c["token_ids"]]
    assert tokens == alone["token_ids"]
    assert pages[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert second.metric("pigou_kv_blocks_received_total") - before == 12
    first.settle()
    second.settle()


def test_a_chat_has_its_first_leg_at_the_prefiller(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    text = "ten nine eight seven six five four three two one " * 4
    body = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 5}
    reply = second.post("/v1/chat/completions", body, {PREFILLER: address(first)})
    assert reply.headers[PREFILLED] == address(first)
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_prompt_whose_prefiller_is_gone_or_refuses_is_computed_here(
    pair: tuple[Worker, Worker],
) -> None:
    first, second = pair
    for fields, target in (
        (salted("gone"), "127.0.0.1:1"),
        (salted("refused") | {"prompt": [PROMPT, PROMPT[1:]]}, address(first)),
        (salted("short") | {"prompt": [5, 6, 7]}, address(first)),
    ):
        reply = second.post("/v1/completions", fields, {PREFILLER: target})
        assert (reply.status, reply.headers[PREFILLED]) == (200, "local")
    wrong = second.post("/v1/completions", salted("x") | {"n": -1}, {PREFILLER: address(first)})
    assert wrong.status == 400
    assert "n" in wrong.json["error"]["message"]
    first.settle()


@pytest.mark.parametrize(
    "target",
    ["10.0.0.1:80", "localhost:80", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:0",
     "http://127.0.0.1:80", "127.0.0.1:80,[", ","],
)  # fmt: skip
def test_a_worker_asks_only_prefillers_of_its_networks(
    pair: tuple[Worker, Worker], target: str
) -> None:
    first, second = pair
    for worker, named in ((second, target), (first, "127.0.0.1:80")):
        reply = worker.post("/v1/completions", BODY, {PREFILLER: named})
        assert reply.status == 400
        assert "--prefiller-networks" in reply.json["error"]["message"]
    both = BODY | {"kv_transfer_params": ASK}
    assert second.post("/v1/completions", both, {PREFILLER: address(first)}).status == 400


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefiller_networks"):
        WorkerConfig(prefiller_networks="10.0.0.1/8")


def test_a_client_that_leaves_during_the_pull_leaks_nothing(
    start_worker: Callable[..., Worker],
) -> None:
    first = start_worker("--blocks", "64", "--kv-lease", "2", "--kv-transfer", "tcp")
    second = start_worker("--blocks", "64", "--max-seqs", "1", "--sleep-base", "20000000")
    blocker = second.connect()
    blocker.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1000}',
                    {"content-type": "application/json"})  # fmt: skip
    body = salted("leaver")
    import json

    leaver = second.connect()
    leaver.request("POST", "/v1/completions", json.dumps(leg_two(body, prefill(first, body))),
                   {"content-type": "application/json"})  # fmt: skip
    time.sleep(0.1)
    leaver.close()
    blocker.close()
    first.settle()
    second.settle()


def offer(worker: Worker, body: dict[str, Any]) -> dict[str, Any] | None:
    reply = worker.post("/v1/kv/offer", body)
    assert reply.status == 200, reply.body
    ticket: dict[str, Any] | None = reply.json["kv_transfer_params"]
    return ticket


def test_what_one_worker_has_cached_another_reads(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    body = salted("lent")
    alone = first.complete(**body)["choices"][0]
    steps = first.metric("pigou_engine_steps_total")
    longer = body | {"prompt": PROMPT + [7] * 100}
    ticket = offer(first, longer)
    assert ticket is not None
    assert first.metric("pigou_kv_requests_held") == 1
    before = second.metric("pigou_kv_blocks_received_total")
    reply = second.post("/v1/completions", leg_two(longer, ticket)).json
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert second.metric("pigou_kv_blocks_received_total") - before == 12
    assert second.complete(**body)["choices"][0]["token_ids"] == alone["token_ids"]
    first.settle()
    second.settle()
    assert first.metric("pigou_engine_steps_total") == steps, "the source computed something"
    assert first.metric("pigou_kv_blocks_lent_total") >= 12


def test_nothing_is_offered_of_what_is_not_cached_or_of_another_tenure(
    pair: tuple[Worker, Worker],
) -> None:
    first, _ = pair
    body = salted("mine")
    assert offer(first, body) is None
    first.complete(**body)
    assert offer(first, body | {"cache_salt": "theirs"}) is None
    assert offer(first, BODY | {"cache_salt": Tenure(expiry=1).salt()}) is None
    assert offer(first, body | {"prompt": [5, 6, 7]}) is None
    assert first.metric("pigou_kv_requests_held") == 0


def test_an_offer_of_a_chat_is_found_by_its_messages(pair: tuple[Worker, Worker]) -> None:
    first, second = pair
    chat = {"messages": [{"role": "user", "content": "what news " * 40}], "max_tokens": 4}
    reply = first.post("/v1/chat/completions", chat)
    if reply.status == 400:  # the test's model has no template
        chat["prompt_token_ids"] = PROMPT
        first.post("/v1/chat/completions", chat)
    ticket = offer(first, chat)
    assert ticket is not None
    reply = second.post("/v1/chat/completions", leg_two(chat, ticket))
    assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    first.settle()
    second.settle()


def test_an_offer_that_cannot_be_understood_is_refused(pair: tuple[Worker, Worker]) -> None:
    first, _ = pair
    assert first.post("/v1/kv/offer", {"max_tokens": 3}).status == 400
    assert first.post("/v1/kv/offer", {"prompt": [[4], [5]]}).status == 400
    assert first.post("/v1/kv/offer", {"prompt": [4], "model": "other"}).status == 404
    assert first.post("/v1/kv/offer", b"[]").status == 400


def test_a_worker_says_with_whom_it_shares_its_cache(
    pair: tuple[Worker, Worker], model_folder: Path
) -> None:
    layouts = [each.get("/server_info").json["kv_layout"] for each in pair]
    assert layouts[0] == layouts[1]
    assert layouts[0].startswith("auto:")
    alone = start(model_folder, "--blocks", "64", "--kv-transfer", "none")
    try:
        assert alone.get("/server_info").json["kv_layout"] == ""
        alone.complete(**BODY)
        assert offer(alone, BODY) is None
        alone.settle()
    finally:
        stop(alone)


def test_a_first_leg_reads_from_a_third_worker_what_is_cached_there(
    pair: tuple[Worker, Worker], model_folder: Path
) -> None:
    first, second = pair
    third = start(model_folder, "--blocks", "64", "--kv-lease", "2")
    try:
        body = salted("three")
        third.complete(**body)
        longer = body | {"prompt": PROMPT + [7] * 100}
        alone = third.complete(**longer | {"cache_salt": "other"})["choices"][0]
        received = first.metric("pigou_kv_blocks_received_total")
        leg = leg_one(longer, chat=False, read=offer(third, longer))
        reply = first.post("/v1/completions", leg).json
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert first.metric("pigou_kv_blocks_received_total") - received == 12
        reply = second.post("/v1/completions", leg_two(longer, reply["kv_transfer_params"])).json
        assert reply["choices"][0]["token_ids"] == alone["token_ids"]
        for each in (first, second, third):
            each.settle()
    finally:
        stop(third)
