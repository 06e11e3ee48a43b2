"""A scripted trtllm-serve, by TensorRT-LLM 1.2's `openai_protocol.py`: no other fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.gateway.stub import BASE, Stub

#: Fields of `ChatCompletionRequest` and `CompletionRequest` that clients of Pigou send.
COMMON = {
    "model", "max_tokens", "stream", "stream_options", "temperature", "top_p", "top_k", "n",
    "seed", "stop", "ignore_eos", "min_tokens", "disaggregated_params", "priority", "logit_bias",
    "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "user",
}  # fmt: skip
COMPLETION, CHAT = COMMON | {"prompt"}, COMMON | {
    "messages", "prompt_token_ids", "cache_salt", "max_completion_tokens",
}  # fmt: skip
ITERATION = {
    "iter": 154, "iterLatencyMS": 7.0, "numActiveRequests": 3, "numQueuedRequests": 1,
    "kvCacheStats": {"maxNumBlocks": 1000, "usedNumBlocks": 250, "tokensPerBlock": 4},
}  # fmt: skip


@dataclass
class TrtllmStub(Stub):
    """One server; `context` gives tickets, `polls` are answers of `/kv_cache_events`."""

    stock: bool = True
    context: bool = False
    finish: str = "not_finished"
    polls: list[Any] = field(default_factory=list)

    async def start(self) -> web.AppRunner:
        self.routes["/kv_cache_events"] = self._events
        return await super().start()

    async def _events(self, _: web.Request) -> web.Response:
        return web.json_response(self.polls.pop(0) if self.polls else [])

    async def _tell(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            card = {"id": self.model, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
            return web.json_response({"object": "list", "data": [card]})
        if request.path == "/metrics":
            return web.json_response([ITERATION])
        return await super()._tell(request)

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        known = CHAT if request.path.endswith("chat/completions") else COMPLETION
        if odd := body.keys() - known:
            return web.json_response({"error": f"extra inputs: {odd}"}, status=400)
        ticket = body.get("disaggregated_params") or {}
        if ticket.get("request_type") == "generation_only":
            assert ticket["ctx_request_id"] == 7
            assert ticket["encoded_opaque_state"] == "opaque"
            assert body.get("prompt_token_ids") or isinstance(body["prompt"], list)
        return await super()._reply(request)

    def _whole(self, body: dict[str, Any], chat: bool, ids: list[int], last: int) -> dict[str, Any]:
        reply = super()._whole(body, chat, ids, last)
        asked = body.get("disaggregated_params") or {}
        if asked.get("request_type") == "context_only":
            params = {"request_type": "context_only", "first_gen_tokens": [BASE],
                      "ctx_request_id": 7, "encoded_opaque_state": "opaque",
                      "disagg_request_id": asked["disagg_request_id"]}  # fmt: skip
            reply["choices"][0] |= {"finish_reason": self.finish, "disaggregated_params": params}
            reply["prompt_token_ids"] = ids
        return reply
