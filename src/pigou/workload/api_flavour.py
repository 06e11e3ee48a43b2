"""Which fields of a request an endpoint takes, and the bodies made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pigou.workload.prompts import PromptJob


@dataclass(frozen=True)
class ApiFlavour:
    """Fields that a body has beyond model, prompt and stream."""

    continuous: bool = True  # usage on every chunk, which tells its tokens (vLLM, SGLang, Pigou)
    ignore_eos: bool = True  # go on past the end token (the same)
    temperature: bool = True  # 0, for greedy output
    usage: bool = True  # usage at the end of the stream
    limit: str = "max_tokens"  # name of the field for the most output tokens

    def body(self, model: str, job: PromptJob, *, chat: bool) -> dict[str, Any]:
        """Return the body of a streamed request for the job."""
        body: dict[str, Any] = {"model": model, "stream": True, self.limit: job.output}
        if chat:
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        if self.temperature:
            body["temperature"] = 0
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.usage:
            body["stream_options"] = {"include_usage": True}
            if self.continuous:
                body["stream_options"]["continuous_usage_stats"] = True
        return body

    def simpler(self, refusal: str) -> ApiFlavour | None:
        """Return the flavour without the field that a refusal names.

        When it names none, the least common field goes; None when there is nothing left to drop.
        """
        steps: dict[str, tuple[bool, dict[str, Any]]] = {
            "continuous_usage_stats": (self.usage and self.continuous, {"continuous": False}),
            "ignore_eos": (self.ignore_eos, {"ignore_eos": False}),
            "temperature": (self.temperature, {"temperature": False}),
            "stream_options": (self.usage, {"usage": False}),
            "max_tokens": (self.limit == "max_tokens", {"limit": "max_completion_tokens"}),
        }
        possible = {name: changes for name, (present, changes) in steps.items() if present}
        if not possible:
            return None
        named = [name for name in possible if name in refusal]
        changes = possible[named[0] if named else next(iter(possible))]
        return replace(self, **changes)
