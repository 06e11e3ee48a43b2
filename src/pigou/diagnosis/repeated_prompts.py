"""Prompts that come again after an attempt that was not served: the signal of a retry storm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from pigou.request import Request

#: Seconds within which a prompt that comes again counts, and prompts that are remembered.
_WITHIN_S, _PROMPTS = 60.0, 20_000


def prompt_key(request: Request) -> Hashable | None:
    """Return what stands for a request's prompt; None where it has no full block."""
    for keys in (*request.keys.values(), request.hashes[:, 0]):
        if len(keys):
            return request.tenant, request.prompt, int(keys[-1])
    return None


class RepeatedPrompts:
    """Remembers the prompts of attempts that were given up, refused or failed; memory is bounded.

    Attributes:
        count: prompts that came again.
    """

    def __init__(self) -> None:
        self.count = 0
        self._open: dict[str, Hashable] = {}
        self._unserved: OrderedDict[Hashable, float] = OrderedDict()

    def arrive(self, request: str, prompt: Hashable | None, now_s: float) -> bool:
        """Note a request's prompt, None for one that is not known; return whether it came again.

        Further attempts of the same request are none of the client's, and count for nothing.
        """
        if prompt is None or request in self._open:
            return False
        self._open[request] = prompt
        at = self._unserved.pop(prompt, None)
        repeated = at is not None and now_s - at <= _WITHIN_S
        self.count += repeated
        return repeated

    def end(self, request: str, now_s: float, *, served: bool) -> None:
        """Note the end of a request; one that is not known counts for nothing."""
        prompt = self._open.pop(request, None)
        if prompt is None or served:
            return
        self._unserved[prompt] = now_s
        self._unserved.move_to_end(prompt)
        if len(self._unserved) > _PROMPTS:
            self._unserved.popitem(last=False)
