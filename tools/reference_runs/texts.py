"""Greedy texts of fifty requests, over the paths that a request can take through live servers.

Token eviction is not among them: which entries go depends on who runs beside whom at that time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

from .journals import kill_worker, serving

_MODEL = "pigou-tiny"
_TOPICS = ("the harbour at dawn", "a train over the hills", "bread and salt", "an old radio")
Body = dict[str, Any]


class Ask(NamedTuple):
    """A request: its route below /v1 and its body."""

    route: str
    body: Body


def completion(prompt: Any, tokens: int = 16, **fields: Any) -> Ask:
    """Return a greedy completion."""
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **fields}
    return Ask("completions", body)


def chat(text: str, tokens: int = 16, **fields: Any) -> Ask:
    """Return a greedy chat of one message."""
    messages = [{"role": "user", "content": text}]
    body = {"model": _MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, **fields}
    return Ask("chat/completions", body)


def long(topic: int, sentences: int) -> str:
    """Return a prompt of about nine tokens a sentence."""
    return " ".join(f"Line {n} tells of {_TOPICS[topic]}." for n in range(sentences))


_STREAM: Body = {"stream": True, "stream_options": {"include_usage": True}}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
           "age": {"type": "integer"}}, "required": ["name", "age"]}  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bari"]}},
            "required": ["city"],
        },
    },
}

#: Requests of the API's features, sent one after another.
FEATURES = {
    "completion": completion("Good morning"),
    "completion-stream": completion("Good morning", **_STREAM),
    "chat": chat("Good morning! How are you?"),
    "chat-stream": chat("Good morning! How are you?", **_STREAM),
    "short-context": completion(long(1, 3), 20, **_STREAM),
    "two-choices": completion("The sea", n=2),
    "list-of-prompts": completion(["The sea", "The hills", "The road"]),
    "token-ids": completion([301, 302, 303, 304, 305]),
    "stop-string": completion("Once upon a time", 40, stop=["e", "the"]),
    "stop-included": completion("Once upon", 40, stop=[" a"], include_stop_str_in_output=True),
    "log-probabilities": completion("The sea", 6, logprobs=3),
    "chat-log-probabilities": chat("The sea", 6, logprobs=True, top_logprobs=2),
    "prompt-log-probabilities": completion("The sea is", 4, prompt_logprobs=1),
    "echo": completion("The sea", 4, echo=True),
    "min-tokens": completion("The end.", 20, min_tokens=12),
    "ignore-eos": completion("The end.", 20, ignore_eos=True),
    "logit-bias": completion("The sea", 8, logit_bias={"305": 8.0, "301": -100.0}),
    "repetition-penalty": completion("la la la la", 16, repetition_penalty=1.4),
    "presence-and-frequency": completion(
        "la la la la", 16, presence_penalty=0.8, frequency_penalty=0.6
    ),
    "json-object": chat("A person", 40, response_format={"type": "json_object"}),
    "json-schema": chat("A person", 48, response_format={
        "type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}),
    "regex": completion("A date:", 16, structured_outputs={"regex": r"\d{4}-\d{2}-\d{2}"}),
    "choice": completion("Colour:", 8, structured_outputs={"choice": ["red", "green", "blue"]}),
    "grammar": completion("Sum:", 12, structured_outputs={
        "grammar": 'start: NUM "+" NUM\nNUM: /[0-9]{1,3}/'}),
    "tool-required": chat("Weather?", 48, tools=[_TOOL], tool_choice="required"),
    "tool-auto": chat("Weather?", 16, tools=[_TOOL]),
    "two-streams": completion("The sea", n=2, **_STREAM),
    "stop-token": completion("The sea", 30, stop_token_ids=[305, 306, 307]),
    "flat-temperature": completion("The sea", top_k=1, top_p=0.9, min_p=0.1),
    "one-token": completion("The sea", 1),
    "long-prompt": completion(long(0, 60), 24),
    "prefix-again": completion(long(0, 60), 24),
    "prefix-continued": completion(long(0, 60) + " Then night came.", 24, **_STREAM),
    "salted-prefix": completion(long(0, 60), 24, cache_salt="ann"),
}  # fmt: skip
#: Long streams, asked together, so that blocks run short or workers die under them.
TOGETHER = {f"together-{n}": completion(long(n % 4, 12 + 3 * n), 32, ignore_eos=True, **_STREAM)
            for n in range(4)}  # fmt: skip
#: Turns of sessions, one after another, whose blocks do not stay on the device.
TURNS = {f"turn-{n}": completion(long(n % 2, 20 + 4 * (n // 2)), 12) for n in range(4)}


class Servers(NamedTuple):
    """Servers, and what is asked of them: one by one, then together."""

    covers: str
    options: str  # after `pigou`, of what is started
    each: dict[str, Ask]  # requests by name, asked one after another
    together: dict[str, Ask]  # requests by name, asked at once
    kills: bool = False  # whether a worker is killed under those


_WORKER = "worker --port 0 --rehearse 0"
SERVERS = {
    "prefill-decode": Servers(
        "features of the API over P/D transfer", "--prefill 1 --decode 1", FEATURES, {}
    ),
    "migrated": Servers(
        "streams whose worker is killed", "--prefill 1 --decode 2", {}, TOGETHER, kills=True
    ),
    "preempted": Servers(
        "chunked prefill, recompute", f"{_WORKER} --blocks 40 --max-batched-tokens 32 --repeat 1",
        {}, TOGETHER,
    ),
    "swapped": Servers(
        "preempted to host memory", f"{_WORKER} --blocks 40 --host-blocks 128", {}, TOGETHER
    ),
    "host-tier": Servers(
        "blocks that come back from host memory", f"{_WORKER} --blocks 40 --tier host=16MiB",
        TURNS, {},
    ),
}  # fmt: skip


def greedy_texts(name: str) -> dict[str, Any]:
    """Start servers, ask, and return each reply without ids and times."""
    servers = SERVERS[name]
    starting = _working if servers.options.startswith("worker") else serving
    with starting(servers.options) as (url, process):
        replies = {key: reply(url, ask) for key, ask in servers.each.items()}
        if servers.together:
            replies |= _together(url, process, servers)
    return replies


def _together(
    url: str, process: subprocess.Popen[str], servers: Servers
) -> dict[str, dict[str, Any]]:
    begun = threading.Barrier(len(servers.together) + 1)

    def ask(one: Ask) -> dict[str, Any]:
        begun.wait()
        return reply(url, one)

    with concurrent.futures.ThreadPoolExecutor(len(servers.together)) as pool:
        futures = {key: pool.submit(ask, one) for key, one in servers.together.items()}
        begun.wait()
        if servers.kills:
            time.sleep(0.4)
            kill_worker(process, last=True)
        return {key: future.result() for key, future in futures.items()}


def reply(url: str, ask: Ask) -> dict[str, Any]:
    """Send a request; return text, log-probabilities, finish reasons and usage of the reply."""
    request = urllib.request.Request(
        f"{url}/v1/{ask.route}",
        json.dumps(ask.body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": json.loads(error.read())["error"]["message"]}
    if not ask.body.get("stream"):
        return _told(json.loads(text))
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return _joined([json.loads(line) for line in lines])


def _told(body: Body) -> dict[str, Any]:
    return {"choices": _clean(body["choices"]), "usage": _usage(body.get("usage"))}


def _usage(usage: Any) -> Any:
    """Keep the token counts; how much was cached depends on timing under load."""
    return usage and {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}


def _clean(value: Any) -> Any:
    """Leave ids out, round log-probabilities as far as they do not depend on the batch."""
    if isinstance(value, dict):
        return {key: _clean(one) for key, one in value.items() if key != "id"}
    if isinstance(value, list):
        return [_clean(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def _joined(chunks: list[Body]) -> dict[str, Any]:
    """Return what a stream said: texts and finish reasons by choice, and its usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        if "error" in chunk:
            return {"error": chunk["error"].get("message")}
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[index] = texts.get(index, "") + text
            if choice.get("finish_reason"):
                reasons[index] = choice["finish_reason"]
    return {
        "texts": [texts[index] for index in sorted(texts)],
        "finish_reasons": [reasons.get(index) for index in sorted(texts)],
        "usage": _usage(usage),
    }


@contextlib.contextmanager
def _working(options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `pigou worker`; yield its address and its process."""
    command = [sys.executable, "-m", "pigou", *options.split()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
        process.terminate()
        process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
