"""Routed requests: slots where their output tokens are counted, and the prefill backlog."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.compiled import bare_kernel
from pigou.control.messages import RemoteKVFetch
from pigou.request import Request

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Stands for the row of a worker that is gone.
GONE = -1
_MIN_SLOTS = 256


class RoutedRequest(msgspec.Struct, eq=False):
    """What one routed request weighs, where, and how far it is; times are in nanoseconds."""

    request: Request
    decode: str | None  # worker that is charged with the stream; None once that worker is gone
    prefill: str | None  # worker that is charged with the prompt; None once it is computed
    prefill_worker: str  # the other worker that the prompt was sent to; "" where there is none
    uncached: int  # tokens of the prompt that its worker had to compute
    routed_at: int  # when it was sent off
    slots: StreamSlots  # where its tokens are counted, at index `slot`; -1 once it is over
    slot: int = -1
    final_tokens: int = 0  # its tokens then
    prefill_done_at: int = 0  # when its remote prefill ended; 0 before, and for a local one
    # whether its worker had no prompt to compute when the transfer began.
    transfer_alone: bool = False
    first_token_at: int = 0  # when its first token came; 0 before, and where tokens are not seen
    decoding: bool = False  # whether it counts among the streams whose prompt is computed
    inflight: int = 1  # requests of the fleet when it was sent off, itself counted
    prompts_ahead: int = 0  # prompts that its prompt was sent to join
    setting: int = 0
    background: bool = False  # whether its prompt is overtaken where it is computed
    pairs: int = 0
    # where the beginning of its prompt is read; None where nowhere.
    read: RemoteKVFetch | None = None
    cached: int = 0  # tokens of the prompt that its worker had itself
    given_up: bool = False
    claimed_at: int = 0  # when a worker pulled its prompt; 0 where none did

    @property
    def remote(self) -> bool:
        """Whether the prompt was sent to another worker than the stream."""
        return self.prefill_worker != ""

    @property
    def tokens(self) -> int:
        """Tokens charged to `decode`: the prompt, and what was generated so far."""
        return self.final_tokens if self.slot < 0 else self.slots.tokens.item(self.slot)

    @property
    def generated(self) -> int:
        """Tokens that were generated so far, as far as they were seen."""
        return self.tokens - self.request.prompt

    @property
    def arrived_at(self) -> int:
        """When the client sent it, in nanoseconds; when it was routed, where that is not known."""
        return min(self.request.arrival or self.routed_at, self.routed_at)


class StreamSlots:
    """Tokens of the routed requests; the arrays have one entry a slot, (slots,)."""

    def __init__(self) -> None:
        self.requests: list[RoutedRequest | None] = []
        self._free: list[int] = []
        #: of the worker that streams, `GONE` once it is
        self.row: Counts = np.zeros(0, dtype=np.int64)
        self.prompt, self.tokens, self.expected = (self.row.copy() for _ in range(3))
        self.streaming: Flags = np.zeros(0, dtype=np.bool_)  # whether the first token came

    def allocate(self, request: RoutedRequest, row: int, prompt: int, expected: int) -> int:
        """Return a slot that no other request has; `prompt` and `expected` are tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.requests[slot] = request
        self.row[slot], self.prompt[slot], self.tokens[slot] = row, prompt, prompt
        self.expected[slot], self.streaming[slot] = expected, False
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.requests[slot] = None
        self.row[slot] = GONE
        self._free.append(slot)

    def owner(self, slot: int) -> RoutedRequest:
        """Return whose slot it is, which must be allocated."""
        owner = self.requests[slot]
        assert owner is not None, f"no request has slot {slot}"
        return owner

    def down(self, row: int) -> None:
        """Forget the row of a worker; those after it have a row less."""
        self.row[self.row == row] = GONE
        self.row[self.row > row] -= 1

    def add_tokens(
        self, slots: Counts, counts: Counts, decode_tokens: Counts, over_expected: Counts,
        flow_tokens: Counts,
    ) -> int:  # fmt: skip
        """Count output tokens, `counts` of the requests with these slots, (n,) each.

        The arrays by worker grow: tokens of streams, tokens that were not expected, tokens after
        the first of their streams. Returns by how much `over_expected` grew in all.
        """
        return _add_tokens(
            slots, counts, self.row, self.prompt, self.tokens, self.expected, self.streaming,
            decode_tokens, over_expected, flow_tokens,
        )  # fmt: skip

    def over_expected(self, slot: int) -> int:
        """Return how many tokens came that were not expected."""
        return max(0, self.tokens.item(slot) - self.expected.item(slot))

    def _grow(self) -> None:
        """Make room for twice as many."""
        old = len(self.requests)
        new = max(_MIN_SLOTS, old)
        none = np.zeros(new, dtype=np.int64)
        self.row = np.append(self.row, none + GONE)
        self.prompt = np.append(self.prompt, none)
        self.tokens = np.append(self.tokens, none)
        self.expected = np.append(self.expected, none)
        self.streaming = np.append(self.streaming, none > 0)
        self.requests += [None] * new
        self._free += range(old + new - 1, old - 1, -1)


@bare_kernel
def _add_tokens(
    slots: Counts, counts: Counts, row: Counts, prompt: Counts, tokens: Counts, expected: Counts,
    streaming: Flags, decode_tokens: Counts, over_expected: Counts, flow_tokens: Counts,
) -> int:  # fmt: skip
    """As `StreamSlots.add_tokens`."""
    grown = 0
    for i in range(slots.shape[0]):
        slot, count = slots[i], counts[i]
        before = tokens[slot]
        after = before + count
        tokens[slot] = after
        worker = row[slot]
        if worker < 0:
            continue
        decode_tokens[worker] += count
        if streaming[slot]:
            flow_tokens[worker] += count if before > prompt[slot] else count - 1
        if after > expected[slot]:
            more = after - max(before, expected[slot])
            over_expected[worker] += more
            grown += more
    return grown


class PrefillBacklog:
    """Prompts that each worker has to compute, in the order in which they were sent.

    The first of a worker is under way: `tokens` are its uncached ones (0 without one), `pairs`
    those with the ones before them, `since` when it became the first, in nanoseconds, (workers,)
    each.
    """

    def __init__(self) -> None:
        self.tokens: Counts = np.zeros(0, dtype=np.int64)
        self.pairs, self.since = self.tokens.copy(), self.tokens.copy()
        self._prompts: list[dict[str, tuple[int, int]]] = []

    def up(self) -> None:
        """Add a worker; its row is the last."""
        self._prompts.append({})
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.append(getattr(self, name), 0))

    def down(self, row: int) -> None:
        """Remove a worker."""
        del self._prompts[row]
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.delete(getattr(self, name), row))

    def add(self, row: int, request: str, tokens: int, pairs: int, now: int) -> None:
        """Add a prompt of worker `row`; one that is there already has so many tokens now."""
        prompts = self._prompts[row]
        first = not prompts
        prompts[request] = tokens, pairs
        if first or next(iter(prompts)) == request:
            self.tokens[row], self.pairs[row] = tokens, pairs
            if first:
                self.since[row] = now

    def remove(self, row: int, request: str, now: int) -> None:
        """Remove a prompt that is computed, or was given up."""
        prompts = self._prompts[row]
        first = next(iter(prompts), None) == request
        del prompts[request]
        if first:
            self.tokens[row], self.pairs[row] = next(iter(prompts.values()), (0, 0))
            self.since[row] = now
