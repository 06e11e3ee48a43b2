"""What the engine thread notes of requests that are traced: transfers and chunks of prompts."""

from __future__ import annotations

from collections.abc import Sequence

from pigou.engine.plan import Plan
from pigou.worker.commands import Add

#: Part of a prompt that was computed: request, begin and end in monotonic nanoseconds, tokens.
PromptChunk = tuple[str, int, int, int]


class TracedPrompts:
    """The traced requests in the engine; false while there are none."""

    def __init__(self) -> None:
        self._loading: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._loading)

    def add(self, add: Add) -> None:
        """Take a request that the engine took, if it is traced."""
        if add.trace_id:
            self._loading[add.request.id] = 0

    def drop(self, request: str) -> None:
        """Forget a request that left the engine."""
        self._loading.pop(request, None)

    def load(self, request: str, now_ns: int) -> None:
        """Note that blocks of a request are on their way."""
        if self._loading.get(request) == 0:
            self._loading[request] = now_ns

    def loading(self, request: str) -> int:
        """Return when the blocks of a request were asked for; 0 where none were, or not traced."""
        return self._loading.get(request, 0)

    def chunks(
        self, plan: Plan, entries: Sequence[str], start_ns: int, end_ns: int
    ) -> list[PromptChunk]:
        """Return the chunks of traced prompts in a plan, which are its last entries.

        Args:
            start_ns: when its first step began, in monotonic nanoseconds.
        """
        chunks: list[PromptChunk] = []
        for entry in range(len(plan.counts) - 1, -1, -1):
            tokens = plan.counts.item(entry)
            if tokens <= 1:
                break
            if entries[entry] in self._loading:
                chunks.append((entries[entry], start_ns, end_ns, tokens))
        return chunks
