"""A server that answers as vLLM 0.32 with `--enable-scale-out`: the same tokens as text and as ids.

Its replies follow what the real one sent; its tokens depend on the last three before them alone, so
that a continued request goes on as it would have.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.gateway.stub import Seen, Stub
from tokenizers.decoders import DecodeStream

from pigou.gateway.prompt_reader import PromptTokenizer
from pigou.models import bundled_path
from pigou.request import Role

TOKENIZER = PromptTokenizer.load(bundled_path())
BACKEND = TOKENIZER.tokenizer.backend
WORDS = BACKEND.get_vocab_size()
EOS = min(TOKENIZER.tokenizer.eos)
GENERATE = "/inference/v1/generate"
DEFAULTS = {"temperature": 0.6, "top_p": 1.0, "stop": [], "stop_token_ids": [], "output_kind": 2,
            "skip_clone": True}  # fmt: skip


def following(ids: list[int]) -> int:
    """Return the token after `ids`; one in 50 ends the reply."""
    drawn = zlib.crc32(repr(ids[-3:]).encode())
    return EOS if drawn % 50 == 0 else drawn % WORDS


def engine(ids: list[int], params: dict[str, Any]) -> Iterator[tuple[int, str, str | None, Any]]:
    """Yield token, new text, finish and stop reason of each step, as vLLM's detokenizer does."""
    stops, include = params.get("stop") or [], params.get("include_stop_str_in_output")
    stops = [stops] if isinstance(stops, str) else stops
    skip = params.get("skip_special_tokens") is not False
    stream = DecodeStream(ids=list(ids), skip_special_tokens=skip)
    hold = max(map(len, stops), default=1) - 1 if not include else 0
    all_ids, text, shown = list(ids), "", 0
    for number in range(1, params["max_tokens"] + 1):
        token, finish, reason = following(all_ids), None, None
        all_ids.append(token)
        if token == EOS and not params.get("ignore_eos"):
            finish = "stop"
        elif token in (params.get("stop_token_ids") or []):
            finish, reason = "stop", token
        elif number == params["max_tokens"]:
            finish = "length"
        before = len(text)
        if finish != "stop" or include:
            text += stream.step(BACKEND, token) or ""
        ends = [(text.find(stop, max(0, before - len(stop) + 1)) + len(stop), stop)
                for stop in stops if stop in text[max(0, before - len(stop) + 1) :]]  # fmt: skip
        if ends and len(text) > before:
            end, reason = min(ends, key=lambda pair: pair[0])
            finish, text = "stop", text[: end if include else end - len(reason)]
        until = max(shown, len(text) - (0 if finish else hold))
        yield token, text[shown:until], finish, reason
        shown = until
        if finish:
            return


@dataclass
class TokenTwin(Stub):
    """The server; `offers` turns the endpoint off, `refuses` is the status of its answers."""

    stock: bool = True
    model: str = field(default_factory=lambda: str(bundled_path()))
    role: Role = Role.BOTH
    offers: bool | None = True  # None cuts the connection of who asks
    refuses: int = 200
    reasoning: bool = False
    cap: int | None = None  # bound of the server's own on a chat's output

    def __post_init__(self) -> None:
        self.routes = {"/v1/completions/render": self.render, GENERATE: self._serve,
                       "/v1/chat/completions/render": self.render}  # fmt: skip

    async def render(self, request: web.Request) -> web.StreamResponse:
        if self.offers is None:
            assert request.transport is not None
            request.transport.abort()
        if not self.offers:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        body = await request.json()
        ids = self._ids(body)
        params = dict(DEFAULTS)
        kwargs = None
        if "messages" in body:
            params["max_tokens"] = self.cap or 2048 - len(ids)
            kwargs = {"chat_template_kwargs": {}} if self.reasoning else None
        one = {"token_ids": ids, "sampling_params": params, "output_mode": "tokens",
               "reasoning_parser_kwargs": kwargs}  # fmt: skip
        return web.json_response(one if "messages" in body else [one])

    def _ids(self, body: dict[str, Any]) -> list[int]:
        tokenizer = TOKENIZER.tokenizer
        if "messages" not in body:
            prompt = body["prompt"]
            return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert TOKENIZER.template is not None
        messages = [m | {"content": m["content"] if isinstance(m["content"], str) else
                         "\n".join(part["text"] for part in m["content"])}
                    for m in body["messages"]]  # fmt: skip
        last = bool(body.get("continue_final_message"))
        text = TOKENIZER.template.render(
            messages, add_generation_prompt=body.get("add_generation_prompt") is not False,
            continue_final_message=last, variables=body.get("chat_template_kwargs") or {},
        )  # fmt: skip
        return tokenizer.encode(text, special=False)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self._ids(await request.json())})

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(Seen(request.path, body, request.headers["x-request-id"]))
        await self._hold(0)
        tokens, chat = request.path == GENERATE, "messages" in body
        if tokens and self.refuses != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.refuses)
        ids = body["token_ids"] if tokens else self._ids(body)
        params = body["sampling_params"] if tokens else body
        most = params.get("max_completion_tokens") or params.get("max_tokens")
        if not tokens and (params.get("temperature") or 0) > 2:
            return web.json_response({"error": {"message": "too hot", "code": 400}}, status=400)
        params = params | {"max_tokens": most or (2048 - len(ids) if tokens or chat else 16)}
        steps = list(engine(ids, params))
        id = request.headers["x-request-id"]
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + len(steps),
                 "completion_tokens": len(steps),
                 "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
        told = bool(body.get("return_token_ids"))
        if body.get("stream"):
            frames = self._chunks(id, tokens, chat, ids, steps, told)
            more = (body.get("stream_options") or {}).get("include_usage")
            return await self._send_all(request, [*frames, *([usage] if more else [])], id, chat,
                                        tokens)  # fmt: skip
        ticket = {"ticket": self.name} if body.get("kv_transfer_params") else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": steps[-1][2], "logprobs": None,
                                  "stop_reason": steps[-1][3]}  # fmt: skip
        made = [token for token, *_ in steps]
        text = "".join(new for _, new, _, _ in steps)
        head: dict[str, Any] = {"model": self.model, "created": 1, "usage": usage,
                                "kv_transfer_params": ticket}  # fmt: skip
        prompt = ids if told else None
        if tokens:
            return web.json_response(head | {"choices": [choice | {"token_ids": made}]})
        choice["token_ids"] = made if told else None
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            head |= {"id": f"chatcmpl-{id}", "object": "chat.completion", "prompt_logprobs": None,
                     "prompt_token_ids": prompt}  # fmt: skip
        else:
            choice |= {"text": text, "prompt_logprobs": None, "prompt_token_ids": prompt}
            head |= {"id": f"cmpl-{id}", "object": "text_completion"}
        return web.json_response(head | {"choices": [choice]})

    def _chunks(
        self, id: str, tokens: bool, chat: bool, ids: list[int], steps: list[Any], told: bool
    ) -> Iterator[dict[str, Any]]:
        if tokens:
            for token, _, finish, reason in steps:
                yield {"choices": [{"index": 0, "finish_reason": finish, "stop_reason": reason,
                                    "token_ids": [token], "logprobs": None}],
                       "usage": None, "request_id": f"generate-tokens-{id}"}  # fmt: skip
            return
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id}", "object": kind, "created": 1,
                "model": self.model}  # fmt: skip
        if chat:
            choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""},
                                      "logprobs": None, "finish_reason": None}  # fmt: skip
            yield head | {"choices": [choice], "prompt_token_ids": ids if told else None}
        for number, (token, text, finish, reason) in enumerate(steps):
            choice = {"index": 0, "logprobs": None, "finish_reason": finish,
                      "token_ids": [token] if told else None}  # fmt: skip
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            if not chat:
                choice["prompt_token_ids"] = ids if told and not number else None
            if not chat or finish:
                choice["stop_reason"] = reason
            yield head | {"choices": [choice]}

    async def _send_all(
        self, request: web.Request, frames: list[dict[str, Any]], id: str, chat: bool, tokens: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for sent, chunk in enumerate(frames):
            if await self._misbehave(request, response, {}, sent):
                return response
            if "prompt_tokens" in chunk:
                kind = "chat.completion.chunk" if chat else "text_completion"
                head = {} if tokens else {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id}",
                                          "object": kind, "created": 1,
                                          "model": self.model}  # fmt: skip
                await self._send(response, head | {"choices": [], "usage": chunk})
            else:
                await self._send(response, chunk)
        await response.write(b"data: [DONE]\n\n")
        return response


def plain(status: int, text: str) -> tuple[int, list[Any]]:
    """Return a reply without times, the server's fingerprint, and fields that vLLM leaves null."""

    def kept(value: Any) -> Any:
        if isinstance(value, list):
            return [kept(each) for each in value]
        if not isinstance(value, dict):
            return value
        dropped = ("created", "system_fingerprint", "created_cache_tokens")
        return {
            name: kept(each)
            for name, each in value.items()
            if name not in dropped and each is not None
        }

    if not text.startswith("data:"):
        return status, [kept(json.loads(text))]
    events = [event.removeprefix("data: ") for event in text.split("\n\n")]
    return status, [kept(json.loads(e)) if e.startswith("{") else e for e in events]
