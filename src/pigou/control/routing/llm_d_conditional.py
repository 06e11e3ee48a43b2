"""llm-d's conditional disaggregation."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pigou.control.routing.conditional import Conditional, ConditionalParams
from pigou.control.routing.limits import finite
from pigou.control.routing.policy import RequestView
from pigou.control.routing.view import Candidates, Flags, FleetView


class LlmDConditionalParams(
    ConditionalParams, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """Parameters of `LlmDConditional`.

    Attributes:
        inner: policy that chooses among what is left.
        non_cached_tokens: uncached tokens from which a prompt is computed remotely; 0 never is
            (llm-d's default; its examples have the 512 that is the default here).
        prompt_tokens: length of the prompt from which it is; 0 sets no limit.
    """

    inner: str = "llm-d"
    non_cached_tokens: int = 512
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        finite(self, "non_cached_tokens", "prompt_tokens")


class LlmDConditional(Conditional):
    """A prompt is computed remotely iff, for its decode worker d,

        prompt - tokens held by d >= non_cached_tokens  and  prompt >= prompt_tokens

    and `non_cached_tokens` is not 0. llm-d router, `prefix-based-pd-decider`. Blocks count whole
    in whatever tier they are.
    """

    name: ClassVar[str] = "llm-d-conditional"
    Params = LlmDConditionalParams

    def local(
        self,
        request: RequestView,
        fleet: FleetView,
        candidates: Candidates,  # noqa: ARG002
    ) -> Flags:
        """Return whether each worker would compute the prompt itself, (workers,)."""
        own = self.params
        if own.non_cached_tokens == 0 or request.prompt < own.prompt_tokens:
            return np.ones(len(fleet.ids), dtype=np.bool_)
        left = request.prompt - fleet.overlap * fleet.block_size
        found: Flags = left < own.non_cached_tokens
        return found
