"""A small HTTP client: whole replies, streams, metrics."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

JSON = {"content-type": "application/json"}


@dataclass
class Reply:
    """An answer; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Streamed:
    """What a client saw of one stream."""

    chat: bool = False
    chunks: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: Any = None
    usage: dict[str, Any] | None = None
    logprobs: list[Any] = field(default_factory=list)
    error: Any = None
    roles: int = 0
    done: bool = False

    def feed(self, payload: str) -> None:
        assert not self.done, "there is something after [DONE]"
        if payload == "[DONE]":
            self.done = True
            return
        chunk = json.loads(payload)
        self.chunks.append(chunk)
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        assert self.finish is None, "there is something after the end"
        delta = choice.get("delta", {})
        self.roles += "role" in delta
        self.text += (delta.get("content") if self.chat else choice.get("text")) or ""
        self.tokens += choice.get("token_ids") or []
        self.logprobs += told(choice.get("logprobs"), self.chat)
        self.finish, self.stop = choice.get("finish_reason"), choice.get("stop_reason")

    @property
    def told(self) -> tuple[Any, ...]:
        """What must be the same however the stream was made."""
        assert self.done, "the stream broke off"
        assert self.error is None, self.error
        ids = {(c["id"], c["model"], c["created"], c["object"]) for c in self.chunks}
        assert len(ids) == 1, ids
        assert self.roles == self.chat
        usage = self.usage and {k: v for k, v in self.usage.items() if k.endswith("_tokens")}
        return self.text, self.tokens, self.finish, self.stop, usage, self.logprobs


def told(logprobs: Any, chat: bool) -> list[Any]:
    """Return (token, logprob, offset or None, alternatives) of each token."""
    if not logprobs:
        return []
    if chat:
        return [
            (item["token"], Near(item["logprob"]), None,
             {other["token"] for other in item["top_logprobs"]})
            for item in logprobs["content"]
        ]  # fmt: skip
    rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"],
               logprobs["top_logprobs"], strict=True)  # fmt: skip
    return [(token, Near(value), offset, set(top)) for token, value, offset, top in rows]


class Near(float):
    """A logprob: equal to whatever is within 0.001 of it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-3


@dataclass
class Metrics:
    """A page of metrics, all of one moment."""

    lines: list[str]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.lines:
            if not line.startswith(name):
                continue
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(
                f'{k}="{v}"' in head for k, v in labels.items()
            ):
                total += float(value)
        return total


#: What the fleets of these tests prove to each other to know; workers are asked with it.
SECRET = "the secret of the fleets of these tests"


class Endpoint:
    """A server's address, and the bearer key that it wants."""

    def __init__(self, url: str, bearer: str = "") -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {bearer}"} if bearer else {}

    def connect(self, timeout: float = 120) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)

    def call(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, self.headers | (headers or {}))
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.call("GET", path)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, data, JSON | (headers or {}))

    def complete(self, **body: Any) -> Any:
        """Return the JSON of a completion, or of a chat where there are messages."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        reply = self.post(path, body)
        assert reply.status == 200, reply.body
        return reply.json

    def stream(self, **body: Any) -> Streamed:
        """Return a whole stream."""
        *_, streamed = self.follow(**body)
        return streamed

    def follow(self, **body: Any) -> Generator[Streamed, None, None]:
        """Yield a stream after each of its payloads."""
        streamed = Streamed(chat="messages" in body)
        for payload in self.payloads(**body):
            streamed.feed(payload)
            yield streamed

    def payloads(self, **body: Any) -> Generator[str, None, None]:
        """Yield the payloads of a stream as they come; ending early hangs up."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        connection = self.connect()
        try:
            data = json.dumps(body | {"stream": True})
            connection.request("POST", path, data, self.headers | JSON)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
        finally:
            connection.close()

    def metrics(self) -> Metrics:
        """Return the page of metrics."""
        return Metrics(self.get("/metrics").body.decode().splitlines())

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        return self.metrics().metric(name, **labels)

    def settle(self, name: str = "worker", seconds: float = 60.0) -> None:
        """Wait until a Pigou worker has nothing to do and all its blocks are free."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting",
                 "pigou_kv_requests_held", "pigou_kv_requests_loading")  # fmt: skip
        while True:
            page = self.metrics()
            busy = {each: value for each in names if (value := page.metric(each))}
            free, all_ = page.metric("pigou_kv_blocks_free"), page.metric("pigou_kv_blocks")
            if not busy and free == all_ and self.get("/load").json["server_load"] == 0:
                return
            assert time.monotonic() < end, f"{name}: {busy}, {free} of {all_} blocks are free"
            time.sleep(0.05)
