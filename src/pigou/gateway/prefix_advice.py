"""Advice on the beginning of a request's prompt, in a header of the reply, on request."""

from __future__ import annotations

import msgspec

from pigou.diagnosis.prefix_advice import MAX_PIECES, PrefixAdvisor
from pigou.diagnosis.prompt_pieces import prompt_pieces
from pigou.gateway.request import GatewayRequest

#: A request that has it, with any value, is answered with it.
ADVICE_HEADER = "x-pigou-prefix-advice"
#: Bytes of messages that are read for it.
_MAX_BYTES = 2**18


class RequestAdvisor:
    """Advises on the prompts of requests that ask for it."""

    def __init__(self) -> None:
        self._advisor = PrefixAdvisor()

    def advise(self, call: GatewayRequest) -> str:
        """Return the advice for a request; one of several prompts is judged by the first."""
        prompt = call.fields.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        body = {"prompt": prompt}
        if call.chat:
            messages = memoryview(call.fields.messages)
            if len(messages) > _MAX_BYTES:
                return f"unknown; messages have over {_MAX_BYTES} bytes"
            body = {"messages": msgspec.json.decode(messages)}
        pieces = prompt_pieces(body, MAX_PIECES)
        if pieces is None:
            return "unknown; the prompt is neither text nor token ids"
        return self._advisor.advise(call.tenant, pieces)
