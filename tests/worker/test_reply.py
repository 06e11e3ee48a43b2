"""Replies have the shapes of a vLLM server: key by key, in order where it matters."""

from __future__ import annotations

from typing import Any

from worker_process import Worker

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_completion_has_vllms_keys(worker: Worker) -> None:
    reply = worker.complete("Hello world", max_tokens=4, request_id="my-req")
    assert reply["id"] == "cmpl-my-req"
    assert reply["object"] == "text_completion"
    assert reply["model"] == "tiny"
    assert set(reply) == {
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint",
        "usage", "kv_transfer_params",
    }  # fmt: skip
    choice = reply["choices"][0]
    assert set(choice) == {
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids",
        "prompt_logprobs", "prompt_token_ids",
    }  # fmt: skip
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == (
        "length", None, None,
    )  # fmt: skip
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 4


def test_streamed_text_is_the_text(worker: Worker) -> None:
    body = {"prompt": "Hello world", "max_tokens": 9}
    whole = worker.complete(**body)
    chunks = worker.post("/v1/completions", body | {"stream": True}).chunks
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert len(chunks) == 9
    assert all("usage" not in chunk for chunk in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 8 + ["length"]
    assert all(
        list(c["choices"][0])
        == [
            "index",
            "text",
            "logprobs",
            "finish_reason",
            "stop_reason",
            "prompt_token_ids",
            "token_ids",
        ]
        for c in chunks
    )


def test_a_stream_can_end_with_its_usage(worker: Worker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Hello world", "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, last = worker.post("/v1/completions", body).chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3]


def test_a_chat_stream_opens_with_the_role(worker: Worker) -> None:
    body = CHAT | {"max_tokens": 3, "stream": True, "n": 2, "temperature": 1.0}
    reply = worker.post("/v1/chat/completions", body)
    assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    chunks = reply.chunks
    opening = [c["choices"][0] for c in chunks[:2]]
    assert [c["delta"] for c in opening] == [{"role": "assistant", "content": ""}] * 2
    assert [c["index"] for c in opening] == [0, 1]
    rest = [c["choices"][0] for c in chunks[2:]]
    assert all(set(c["delta"]) == {"content"} for c in rest)
    ends = [c for c in rest if c["finish_reason"]]
    assert [c["finish_reason"] for c in ends] == ["length", "length"]
    assert all("stop_reason" in c for c in ends)
    assert all("stop_reason" not in c for c in rest if not c["finish_reason"])


def test_a_chat_reply_has_a_message(worker: Worker) -> None:
    reply = worker.post("/v1/chat/completions", CHAT | {"max_tokens": 3}).json
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    message = reply["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert "tool_calls" not in message


def test_token_ids_are_returned_where_vllm_has_them(worker: Worker) -> None:
    body: dict[str, Any] = {"prompt": "Hello world", "max_tokens": 3, "return_token_ids": True}
    choice = worker.complete(**body)["choices"][0]
    assert len(choice["token_ids"]) == 3
    assert choice["prompt_token_ids"]
    chunks = worker.post("/v1/completions", body | {"stream": True}).chunks
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[t] for t in choice["token_ids"]]
    asked = [c["choices"][0]["prompt_token_ids"] for c in chunks]
    assert asked == [choice["prompt_token_ids"], None, None]
    chat = CHAT | {"max_tokens": 2, "return_token_ids": True}
    whole = worker.post("/v1/chat/completions", chat).json
    assert len(whole["choices"][0]["token_ids"]) == 2
    role, *_ = worker.post("/v1/chat/completions", chat | {"stream": True}).chunks
    assert role["prompt_token_ids"] == whole["prompt_token_ids"]


def test_choices_are_indexed_prompt_by_prompt(worker: Worker) -> None:
    reply = worker.complete(["one", "two"], n=2, max_tokens=2, temperature=1.0)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    texts = [c["text"] for c in reply["choices"]]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    ids = [worker.post("/tokenize", {"prompt": t}).json["count"] for t in ("one", "two")]
    assert reply["usage"]["prompt_tokens"] == sum(ids)
    assert reply["usage"]["completion_tokens"] == 8


def test_logprobs_of_completions_have_offsets(worker: Worker) -> None:
    body = {"prompt": "Hello world", "max_tokens": 6, "logprobs": 2}
    told = worker.complete(**body)["choices"][0]["logprobs"]
    lengths = [len(token) for token in told["tokens"]]
    assert told["text_offset"] == [sum(lengths[:i]) for i in range(6)]
    assert all(1 <= len(top) <= 3 for top in told["top_logprobs"])
    chunks = worker.post("/v1/completions", body | {"stream": True}).chunks
    pieces = [c["choices"][0]["logprobs"] for c in chunks]
    assert [p["text_offset"][0] for p in pieces] == told["text_offset"]
    assert [p["tokens"][0] for p in pieces] == told["tokens"]


def test_echo_shows_the_prompt_and_its_logprobs(worker: Worker) -> None:
    body = {"prompt": "Hello world", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = worker.complete(**body)["choices"][0]
    assert choice["text"].startswith("Hello world")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]).startswith("Hello world")
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) - 2
    chunks = worker.post("/v1/completions", body | {"stream": True}).chunks
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


def test_chat_logprobs_have_bytes(worker: Worker) -> None:
    body = CHAT | {"max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    content = worker.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert all(bytes(item["bytes"]) == item["token"].encode() for item in content)
    assert all(len(item["top_logprobs"]) == 2 for item in content)


def test_the_small_routes_answer(worker: Worker) -> None:
    models = worker.get("/v1/models").json
    assert [m["id"] for m in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == 2048
    assert worker.get("/v1/models/tiny").json["id"] == "tiny"
    assert worker.get("/health").status == 200
    assert worker.get("/ping").status == 200
    assert worker.get("/version").json["version"]
    assert worker.get("/load").json == {"server_load": 0}
    assert worker.get("/server_info").json["block_size"] == 16
    source = worker.get("/kv_event_sources").json["0"]
    assert source["publisher"] == "zmq"
    assert worker.post("/reset_prefix_cache", b"").json == {"success": True}
    page = worker.get("/metrics")
    assert page.headers["Content-Type"] == "text/plain; version=1.0.0; charset=utf-8"
    assert b"vllm:cache_config_info{" in page.body


def test_tokenize_and_detokenize_are_inverse(worker: Worker) -> None:
    text = "Hello wörld 😀"
    reply = worker.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert worker.post("/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": text}
    chat = worker.post("/tokenize", CHAT).json["tokens"]
    shown = worker.post("/detokenize", {"tokens": chat}).json["prompt"]
    assert shown == "<|begin|><|user|>hi<|end|><|assistant|>"


def test_an_id_outside_the_vocabulary_has_no_text_and_is_refused(worker: Worker) -> None:
    for wrong in (400, 999999):
        reply = worker.post("/detokenize", {"tokens": [5, wrong, 6]})
        assert (reply.status, reply.json["error"]["param"]) == (400, "tokens")
        assert f"token id {wrong}" in reply.json["error"]["message"]
    assert worker.post("/detokenize", {"tokens": [399]}).status == 200
    assert worker.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_the_request_id_is_echoed(worker: Worker) -> None:
    headers = {"X-Request-Id": "abc-1"}
    reply = worker.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers)
    assert reply.headers["X-Request-Id"] == "abc-1"
    assert reply.json["id"] == "cmpl-abc-1"
    bad = worker.post("/v1/completions", {"prompt": "", "max_tokens": 1}, headers)
    assert bad.headers["X-Request-Id"] == "abc-1"


def test_a_reply_without_an_id_from_its_client_has_one_all_the_same(worker: Worker) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    reply = worker.post("/v1/completions", body)
    assert reply.json["id"] == f"cmpl-{reply.headers['X-Request-Id']}"
    for path, sent in (
        ("/v1/completions", body | {"stream": True}),
        ("/tokenize", {}),
        ("/no", {}),
    ):
        assert worker.post(path, sent).headers["X-Request-Id"], path
