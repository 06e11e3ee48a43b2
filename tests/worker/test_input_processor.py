"""Every field is honoured, or refused by name with a remedy; none is accepted and ignored."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from worker_process import Worker

from pigou.kv.tenure import Tenure
from pigou.request import SECOND

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def tokens(worker: Worker, prompt: Any = "Hello world", **fields: Any) -> list[int]:
    reply = worker.complete(prompt, return_token_ids=True, **fields)
    ids: list[int] = reply["choices"][0]["token_ids"]
    return ids


def text(worker: Worker, **fields: Any) -> Any:
    return worker.complete("Hello world", **fields)["choices"][0]


def test_max_tokens_has_vllms_defaults_and_must_fit_the_context(worker: Worker) -> None:
    assert len(tokens(worker)) == 16
    assert len(tokens(worker, [5] * 2046)) == 2
    body = {"prompt": [5] * 2046, "max_tokens": 3}
    refused = worker.post("/v1/completions", body)
    assert (refused.status, refused.json["error"]["param"]) == (400, "max_tokens")
    assert "ask for at most 2" in refused.json["error"]["message"]
    chat = CHAT | {"max_tokens": 5, "max_completion_tokens": 2}
    reply = worker.post("/v1/chat/completions", chat).json
    assert reply["usage"]["completion_tokens"] == 2


def test_stop_strings_end_the_text_before_them(worker: Worker) -> None:
    whole = text(worker, max_tokens=12)["text"]
    stop = whole[6:9]
    body = {"prompt": "Hello world", "max_tokens": 12, "stop": stop}
    cut = whole[: whole.index(stop)]
    choice = worker.complete(**body)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    kept = worker.complete(**body, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == cut + stop
    chunks = worker.post("/v1/completions", body | {"stream": True}).chunks
    assert "".join(c["choices"][0]["text"] for c in chunks) == cut
    assert chunks[-1]["choices"][0]["stop_reason"] == stop
    late = worker.complete(**body, min_tokens=12)["choices"][0]
    assert late["finish_reason"] == "length"


def test_stop_tokens_end_the_text_and_count(worker: Worker) -> None:
    ids = tokens(worker, max_tokens=12)
    at = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    fields = {"max_tokens": 12, "stop_token_ids": [ids[at]]}
    choice = text(worker, return_token_ids=True, **fields)
    assert choice["token_ids"] == ids[: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[at])
    assert choice["text"] == text(worker, max_tokens=at)["text"]
    assert len(tokens(worker, min_tokens=12, **fields)) == 12


def test_prompts_are_text_or_ids_one_or_many(worker: Worker) -> None:
    ids = worker.post("/tokenize", {"prompt": "Hello world"}).json["tokens"]
    expected = text(worker)["text"]
    for prompt in (ids, [ids], ["Hello world"]):
        assert worker.complete(prompt)["choices"][0]["text"] == expected
    both = worker.complete(["Hello world", "one two"])["choices"]
    assert [c["text"] for c in both] == [expected, worker.complete("one two")["choices"][0]["text"]]


def test_truncate_prompt_tokens_keeps_the_end(worker: Worker) -> None:
    ids = worker.post("/tokenize", {"prompt": "Hello world, hello there"}).json["tokens"]
    cut = worker.complete(ids, truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3
    assert cut["choices"][0]["text"] == worker.complete(ids[-3:])["choices"][0]["text"]


def test_special_tokens_can_be_shown(worker: Worker) -> None:
    reply = worker.complete([2, 75, 3], echo=True, max_tokens=1, skip_special_tokens=False)
    assert reply["choices"][0]["text"]


def test_prompt_logprobs_cover_the_prompt(worker: Worker) -> None:
    choice = text(worker, prompt_logprobs=1, max_tokens=1)
    assert choice["prompt_logprobs"][0] is None
    assert all("decoded_token" in next(iter(e.values())) for e in choice["prompt_logprobs"][1:])
    chat = worker.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0, "max_tokens": 1})
    assert chat.json["prompt_logprobs"][0] is None


def test_a_cache_salt_keeps_caches_apart(worker: Worker) -> None:
    prompt = [7] * 64
    fields = {"max_tokens": 1, "cache_salt": f"salt-{time.monotonic_ns()}"}

    def cached(**fields: Any) -> int:
        usage = worker.complete(prompt, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(**fields) == 0
    assert cached(**fields) == 63
    assert cached(max_tokens=1, cache_salt=fields["cache_salt"] + "b") == 0


def test_what_is_cached_under_an_expired_tenure_is_void(worker: Worker) -> None:
    prompt = [8] * 64

    def cached(tenure: Tenure) -> int:
        usage = worker.complete(prompt, max_tokens=1, cache_salt=tenure.salt())["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    now = time.time_ns()
    lasting = Tenure(tenant=f"{now}", expiry=now + 3600 * SECOND)
    assert [cached(lasting) for _ in range(2)] == [0, 63]
    soon = Tenure(tenant=f"{now}", expiry=now + SECOND)
    cached(soon)
    time.sleep(max(0, soon.expiry - time.time_ns()) / SECOND)
    stored = worker.metric("pigou_kv_blocks_cached")
    assert [cached(soon) for _ in range(2)] == [0, 0]
    assert worker.metric("pigou_kv_blocks_cached") <= stored, "what is void was cached"


def test_choices_of_one_prompt_share_its_blocks(worker: Worker) -> None:
    before = worker.metric("vllm:prefix_cache_hits_total")
    salt = f"salt-{time.monotonic_ns()}"
    worker.complete([9] * 64, n=3, temperature=1.0, max_tokens=2, cache_salt=salt)
    assert worker.metric("vllm:prefix_cache_hits_total") - before >= 2 * 48


def test_lower_priority_numbers_go_first(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker("--max-seqs", "1", "--sleep-base", "20000000", "--repeat", "1")
    from concurrent.futures import ThreadPoolExecutor

    def run(name: str, priority: int, tokens: int = 5) -> tuple[str, float]:
        worker.complete("Hello", max_tokens=tokens, priority=priority)
        return name, time.monotonic()

    def until(metric: str, count: int) -> None:
        while worker.metric(metric) != count:
            time.sleep(0.01)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(run, "first", 0, 200)
        until("vllm:num_requests_running", 1)
        low = pool.submit(run, "low", 5)
        until("vllm:num_requests_waiting", 1)
        high = pool.submit(run, "high", -5)
        until("vllm:num_requests_waiting", 2)
        ends = sorted((future.result() for future in (first, low, high)), key=lambda end: end[1])
    assert [name for name, _ in ends] == ["first", "high", "low"]


@pytest.mark.parametrize(
    ("options", "fields", "param"),
    [
        (("--order", "fcfs"), {"priority": 1}, "priority"),
        ((), {"deadline_ms": 5}, "deadline_ms"),
    ],
)
def test_what_the_order_cannot_honour_is_refused(
    start_worker: Callable[..., Worker], options: tuple[str, ...], fields: Any, param: str
) -> None:
    worker = start_worker(*options)
    reply = worker.post("/v1/completions", {"prompt": "a", **fields})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)


def test_fields_without_meaning_are_accepted(worker: Worker) -> None:
    fields = {
        "user": "u", "metadata": {"a": 1}, "store": False, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
        "spaces_between_special_tokens": True,
    }  # fmt: skip
    assert text(worker, max_tokens=2, **fields) == text(worker, max_tokens=2)


def test_unknown_fields_are_told_in_a_header(worker: Worker) -> None:
    body = {"prompt": "Hello world", "max_tokens": 2, "foo": 1, "stream_options": {"nope": 1}}
    plain = text(worker, max_tokens=2)
    whole = worker.post("/v1/completions", body)
    assert whole.json["choices"][0] == plain
    assert whole.headers["X-Pigou-Unknown-Fields"] == "foo, stream_options.nope"
    stream = worker.post("/v1/completions", body | {"stream": True})
    assert "".join(c["choices"][0]["text"] for c in stream.chunks) == plain["text"]
    assert stream.headers["X-Pigou-Unknown-Fields"] == "foo, stream_options.nope"
    chat = worker.post("/v1/chat/completions", CHAT | {"max_tokens": 1, "foo": 1})
    assert (chat.status, chat.headers["X-Pigou-Unknown-Fields"]) == (200, "foo")
    assert "X-Pigou-Unknown-Fields" not in worker.post("/v1/completions", {"prompt": "a"}).headers


def test_unknown_fields_are_refused_where_that_is_asked_for(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker("--unknown-fields", "refuse")
    for fields, param in (({"foo": 1}, "foo"), ({"stream_options": {"x": 1}}, "stream_options.x")):
        reply = worker.post("/v1/completions", {"prompt": "Hello", **fields})
        assert (reply.status, reply.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_without_output_scores_the_prompt(
    worker: Worker, logprobs: int | None, stream: bool
) -> None:
    body = {"prompt": ["Hello world", "one two"], "echo": True, "max_tokens": 0,
            "logprobs": logprobs, "return_token_ids": True}  # fmt: skip
    if not stream:
        reply = worker.post("/v1/completions", body).json
        choices, usage = reply["choices"], reply["usage"]
    else:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = worker.post("/v1/completions", body | options).chunks
        usage, choices = last["usage"], [chunk["choices"][0] for chunk in chunks]
        choices.sort(key=lambda choice: choice["index"])
    assert [c["text"] for c in choices] == ["Hello world", "one two"]
    assert [c["finish_reason"] for c in choices] == ["length", "length"]
    assert [c["token_ids"] for c in choices] == [[], []]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    more = worker.post("/v1/completions", {**body, "max_tokens": 1}).json["choices"]
    for choice, other in zip(choices, more, strict=True):
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        scores, tokens = choice["logprobs"]["token_logprobs"], choice["logprobs"]["tokens"]
        assert "".join(tokens) == choice["text"]
        assert scores == other["logprobs"]["token_logprobs"][:-1]
        assert scores[0] is None


REFUSED = [
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"guided_json": {}}, "guided_json"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "three"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "tenure1:00"}, "cache_salt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"resume_tokens": 1}, "resume_tokens"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_decode": True}, "stream": True}, "kv_transfer_params"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": [5] * 9000}, "prompt"),
    ({"prompt": "a" * 3_000_000}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"request_id": ""}, "request_id"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_honoured_is_refused_by_name(
    worker: Worker, fields: dict[str, Any], param: str
) -> None:
    reply = worker.post("/v1/completions", {"prompt": "Hello", **fields})
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param), error
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert error["message"]


REFUSED_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"messages": [{"role": "function", "name": "f", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages"),
    ({"chat_template": "x"}, "chat_template"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_CHAT, ids=lambda value: str(value)[:40])
def test_what_a_chat_cannot_honour_is_refused_by_name(
    worker: Worker, fields: dict[str, Any], param: str
) -> None:
    reply = worker.post("/v1/chat/completions", CHAT | fields)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body


def test_tools_may_be_listed_when_none_may_be_called(worker: Worker) -> None:
    body = CHAT | {"tools": [{"type": "function"}], "tool_choice": "none", "max_tokens": 1}
    assert worker.post("/v1/chat/completions", body).status == 200


def test_a_rendered_chat_can_be_sent_as_ids(worker: Worker) -> None:
    ids = worker.post("/tokenize", CHAT).json["tokens"]
    body = CHAT | {"max_tokens": 4}
    shown = [
        worker.post("/v1/chat/completions", body | more).json["choices"][0]["message"]
        for more in ({}, {"prompt_token_ids": ids})
    ]
    assert shown[0] == shown[1]


def test_an_unknown_model_is_not_found(worker: Worker) -> None:
    reply = worker.post("/v1/completions", {"prompt": "a", "model": "nope"})
    assert (reply.status, reply.json["error"]["type"]) == (404, "NotFoundError")
    assert worker.get("/v1/models/nope").status == 404


def test_a_stream_continues_where_another_broke_off(worker: Worker) -> None:
    ids = worker.post("/tokenize", {"prompt": "Zażółć 日本語"}).json["tokens"]
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 14, "stream": True,
                            "return_token_ids": True}  # fmt: skip
    plain = worker.complete(ids, max_tokens=14)["choices"][0]["text"]
    for stop in ([], [plain[9:12]]):
        chunks = worker.post("/v1/completions", body | {"stop": stop}).chunks
        shown = [c["choices"][0]["text"] for c in chunks]
        sampled = [t for c in chunks for t in c["choices"][0]["token_ids"]]
        for at in range(1, len(chunks)):
            more = {"prompt": ids + sampled[:at], "resume_tokens": at, "stop": stop}
            rest = worker.post("/v1/completions", body | more).chunks
            assert [c["choices"][0]["text"] for c in rest] == shown[at:]
            assert (
                rest[-1]["choices"][0]["finish_reason"]
                == (chunks[-1]["choices"][0]["finish_reason"])
            )
            assert [t for c in rest for t in c["choices"][0]["token_ids"]] == sampled[at:]


@pytest.mark.parametrize("echo", [False, True])
def test_a_resumed_stream_continues_its_offsets(worker: Worker, echo: bool) -> None:
    body: dict[str, Any] = {"prompt": [75, 80, 85, 90], "max_tokens": 8, "stream": True,
                            "logprobs": 1, "echo": echo, "return_token_ids": True}  # fmt: skip
    chunks = [c["choices"][0] for c in worker.post("/v1/completions", body).chunks]
    sampled = [c["token_ids"][0] for c in chunks]
    for at in range(1, 8):
        more = {"prompt": body["prompt"] + sampled[:at], "resume_tokens": at}
        rest = worker.post("/v1/completions", body | more).chunks
        assert [c["choices"][0]["logprobs"] for c in rest] == [c["logprobs"] for c in chunks[at:]]
        assert [c["choices"][0]["text"] for c in rest] == [c["text"] for c in chunks[at:]]


def test_a_resumed_chat_sends_no_role(worker: Worker) -> None:
    ids = worker.post("/tokenize", CHAT).json["tokens"]
    body = CHAT | {"prompt_token_ids": ids, "stream": True, "max_tokens": 4,
                   "return_token_ids": True}  # fmt: skip
    _, *chunks = worker.post("/v1/chat/completions", body).chunks
    sampled = [t for c in chunks for t in c["choices"][0]["token_ids"]]
    resumed = body | {"prompt_token_ids": ids + sampled[:2], "resume_tokens": 2}
    rest = worker.post("/v1/chat/completions", resumed).chunks
    assert [c["choices"] for c in rest] == [c["choices"] for c in chunks[2:]]
