"""State of the workers and of the requests on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from pigou.compiled import DirectCalls, bare_kernel
from pigou.config import LaneConfig
from pigou.control.latency_model.estimates import pairs
from pigou.control.messages import Choice, LoadReport, RemoteKVFetch
from pigou.control.peers.bookings import (
    BACKGROUND,
    BOOKED,
    COLUMNS,
    OVER_EXPECTED,
    PREFILLS,
    STREAMS,
    PeerLedger,
)
from pigou.request import NEVER, Counts, Flags, Request, Shares, Worker

#: Stands for the row of a worker that is gone.
GONE = -1
_MIN_SLOTS = 256
_KINDS: dict[str, type] = {"Flags": np.bool_, "Counts": np.int64, "Shares": np.float64}
#: Columns that say how much a worker has to do, as the status API shows them.
LOADS = (
    "prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens", "running",
    "waiting", "kv_usage",
)  # fmt: skip


class RoutedRequest(msgspec.Struct, eq=False):
    """Load and progress of a routed request; times in nanoseconds."""

    request: Request
    decode: str | None  # worker charged with the stream; None once it is gone
    prefill: str | None  # worker charged with the prompt; None once it is computed
    prefill_worker: str  # remote prefill worker; "" for local prefill
    uncached: int  # prompt tokens to compute
    arrived_at: int  # arrival, or time of routing if unknown
    routed_at: int  # time of routing
    slots: StreamSlots  # tokens are at index `slot`, -1 after the end
    slot: int = -1
    final_tokens: int = 0  # tokens at the end
    prefill_done_at: int = 0  # end of remote prefill; 0 before, and for local prefill
    # whether its worker had no prompt to compute when the transfer began.
    transfer_alone: bool = False
    first_token_at: int = 0  # first token; 0 before, or if tokens are not seen
    decoding: bool = False  # True if it counts as a decoding stream
    inflight: int = 1  # fleet's requests at routing, itself included
    prompts_ahead: int = 0  # prompts pending at its worker at routing
    setting: int = 0
    background: bool = False  # True if other prompts overtake its prompt
    pairs: int = 0
    # where the beginning of its prompt is read; None where nowhere.
    read: RemoteKVFetch | None = None
    cached: int = 0  # prompt tokens cached on its worker
    given_up: bool = False
    claimed_at: int = 0  # time of the pull; 0 for none

    @property
    def remote(self) -> bool:
        """True if prefill is remote."""
        return self.prefill_worker != ""

    @property
    def tokens(self) -> int:
        """Tokens charged to `decode`: prompt and output so far."""
        return self.final_tokens if self.slot < 0 else self.slots.tokens.item(self.slot)

    @property
    def generated(self) -> int:
        """Output tokens so far, as far as they are seen."""
        return self.tokens - self.request.prompt


class StreamSlots:
    """Token counts of routed requests, one slot each, (slots,)."""

    def __init__(self) -> None:
        self.requests: list[RoutedRequest | None] = []
        self._free: list[int] = []
        #: row of the streaming worker, `GONE` once it has left
        self.row: Counts = np.zeros(0, dtype=np.int64)
        self.prompt, self.tokens, self.expected = (self.row.copy() for _ in range(3))
        self.streaming: Flags = np.zeros(0, dtype=np.bool_)  # whether the first token came

    def allocate(self, request: RoutedRequest, row: int, prompt: int, expected: int) -> int:
        """Return a free slot; `prompt` and `expected` are in tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.requests[slot] = request
        self.row[slot], self.prompt[slot], self.tokens[slot] = row, prompt, prompt
        self.expected[slot], self.streaming[slot] = expected, False
        return slot

    def free(self, slot: int) -> None:
        """Free a slot."""
        self.requests[slot] = None
        self.row[slot] = GONE
        self._free.append(slot)

    def owner(self, slot: int) -> RoutedRequest:
        """Return the request of an allocated slot."""
        owner = self.requests[slot]
        assert owner is not None, f"no request has slot {slot}"
        return owner

    def down(self, row: int) -> None:
        """Remove a worker's row; later rows move down."""
        self.row[self.row == row] = GONE
        self.row[self.row > row] -= 1

    def add_tokens(
        self, slots: Counts, counts: Counts, decode_tokens: Counts, over_expected: Counts,
        flow_tokens: Counts,
    ) -> int:  # fmt: skip
        """Count output tokens of slots, (n,), in the arrays by worker; return unexpected ones."""
        return _add_tokens(
            slots, counts, self.row, self.prompt, self.tokens, self.expected, self.streaming,
            decode_tokens, over_expected, flow_tokens,
        )  # fmt: skip

    def over_expected(self, slot: int) -> int:
        """Return how many tokens exceed the expectation."""
        return max(0, self.tokens.item(slot) - self.expected.item(slot))

    def _grow(self) -> None:
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
    """Kernel of `StreamSlots.add_tokens`."""
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
    """Pending prompts of each worker; `tokens`, `pairs` and `since` (ns) are of the first."""

    def __init__(self) -> None:
        self.tokens: Counts = np.zeros(0, dtype=np.int64)
        self.pairs, self.since = self.tokens.copy(), self.tokens.copy()
        self._prompts: list[dict[str, tuple[int, int]]] = []

    def up(self) -> None:
        """Add a worker as the last row."""
        self._prompts.append({})
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.append(getattr(self, name), 0))

    def down(self, row: int) -> None:
        """Remove a worker."""
        del self._prompts[row]
        for name in ("tokens", "pairs", "since"):
            setattr(self, name, np.delete(getattr(self, name), row))

    def add(self, row: int, request: str, tokens: int, pairs: int, now: int) -> None:
        """Add a prompt to worker `row`, or change its tokens."""
        prompts = self._prompts[row]
        first = not prompts
        prompts[request] = tokens, pairs
        if first or next(iter(prompts)) == request:
            self.tokens[row], self.pairs[row] = tokens, pairs
            if first:
                self.since[row] = now

    def remove(self, row: int, request: str, now: int) -> None:
        """Remove a prompt that was computed or dropped."""
        prompts = self._prompts[row]
        first = next(iter(prompts), None) == request
        del prompts[request]
        if first:
            self.tokens[row], self.pairs[row] = next(iter(prompts.values()), (0, 0))
            self.since[row] = now


@lru_cache(maxsize=64)
def all_workers(workers: int) -> Flags:
    """Return flags that are all set, (workers,); shared and read-only."""
    flags = np.ones(workers, dtype=np.bool_)
    flags.flags.writeable = False
    return flags


def both(first: Flags, second: Flags) -> Flags:
    """Return where both are set, (workers,); may return one of them."""
    everywhere = all_workers(len(first))
    if second is everywhere:
        return first
    return second if first is everywhere else first & second


class Columns(msgspec.Struct, eq=False):
    """One entry per worker, (workers,) each."""

    prefills: Flags  # True if it does remote prefill
    decodes: Flags  # True if it decodes
    block_size: Counts  # tokens in a block
    blocks: Counts  # device KV blocks, 0 if unknown
    max_seqs: Counts  # maximum of streams, 0 if unknown
    prefill_requests: Counts  # prompts pending or under prefill
    prefill_tokens: Counts  # uncached tokens of these
    prefill_pairs: Counts  # attention pairs of these tokens
    background_requests: Counts  # prompts of these that priorities up to 0 overtake
    background_tokens: Counts
    background_pairs: Counts
    decode_requests: Counts  # streams running or about to
    decode_tokens: Counts  # tokens of these, prompt and output
    over_expected_tokens: Counts  # tokens of these above the expectation at routing
    pending_prefill_tokens: Counts  # tokens of these still to compute
    decoding: Counts  # streams with a computed prompt
    served: Counts  # total of requests sent to decode
    running: Shares  # requests running, as reported
    waiting: Shares  # requests waiting, as reported
    kv_usage: Shares  # share of KV blocks in use, 0 to 1, as reported
    layout: Counts  # cache layout by number; equal ones may fetch from each other, 0 from none
    version: Counts  # deployment version by number; KV moves between workers of one alone


class FleetState:
    """Workers and their load.

    A request charges its decode worker 1 request and its tokens until it ends, and its prefill
    worker 1 request and its uncached tokens until prefill is done.
    """

    def __init__(self) -> None:
        self.lane: LaneConfig | None = None  # lane of long prompts in workers; None for one queue
        self.workers: list[Worker] = []  # in the order of the rows
        self.ids: tuple[str, ...] = ()  # their names, in the same order
        self._layouts: dict[str, int] = {}
        self._versions: dict[str, int] = {"": 0}
        self.block_sizes: frozenset[int] = frozenset()
        self.limited = self.sized = self.has_fetch_sources = False
        self.draining: set[str] = set()  # ids
        self.reported: dict[str, int] = {}  # time of each worker's last report, nanoseconds
        self.background = self.over_expected_tokens = 0
        self.row: dict[str, int] = {}  # by worker id; rows change when a worker leaves
        self.requests: dict[str, RoutedRequest] = {}  # routed requests by id
        self.oldest_arrival = NEVER  # lower bound on arrivals of requests without a token
        self.slots: StreamSlots = StreamSlots()
        self.backlog = PrefillBacklog()
        #: load of other gateways on the workers; also in the columns
        self.peers = PeerLedger()
        self.columns = Columns(
            **{
                name: np.zeros(0, dtype=_KINDS[kind])
                for name, kind in Columns.__annotations__.items()
            }
        )

    def up(self, worker: Worker) -> None:
        """Add a worker, or update it; its load stays."""
        row = self.row.get(worker.id)
        if row is None:
            row = self.row[worker.id] = len(self.workers)
            self.workers.append(worker)
            self.backlog.up()
            for name in Columns.__struct_fields__:
                column = getattr(self.columns, name)
                setattr(self.columns, name, np.append(column, column.dtype.type(0)))
            self.add_booked(row, self.peers.up(worker.id).tolist())
        self.workers[row] = worker
        self.draining.discard(worker.id)
        self._set_roles(row, worker.role.prefills, worker.role.decodes)
        self.columns.block_size[row] = worker.block_size
        self.columns.blocks[row] = worker.blocks
        self.columns.max_seqs[row] = worker.max_seqs
        self.columns.layout[row] = self._number(worker.fetch_layout)
        version = self._versions.setdefault(worker.version, len(self._versions))
        if self.columns.version[row] != version:
            self.columns.version = self.columns.version.copy()  # as for roles
            self.columns.version[row] = version
        self._name()

    def drain(self, worker: str) -> None:
        """Mark a worker as draining; route nothing new to it. Unknown ids are ignored."""
        row = self.row.get(worker)
        if row is not None:
            self.draining.add(worker)
            self._set_roles(row, False, False)

    def _set_roles(self, row: int, prefills: bool, decodes: bool) -> None:
        if (self.columns.prefills[row], self.columns.decodes[row]) != (prefills, decodes):
            # New arrays: caches that depend on them see that roles have changed.
            self.columns.prefills = self.columns.prefills.copy()
            self.columns.decodes = self.columns.decodes.copy()
            self.columns.prefills[row], self.columns.decodes[row] = prefills, decodes

    def _number(self, layout: str) -> int:
        return self._layouts.setdefault(layout, len(self._layouts) + 1) if layout else 0

    def down(self, worker: str) -> int | None:
        """Forget a worker and its load; return its row, None if unknown."""
        row = self.row.get(worker)
        if row is None:
            return None
        for routed in self.requests.values():
            if routed.decode == worker:
                routed.decode = None
            if routed.prefill == worker:
                routed.prefill = None
        self.draining.discard(worker)
        self.reported.pop(worker, None)
        self.slots.down(row)
        self.backlog.down(row)
        self.peers.down(row)
        self.background -= int(self.columns.background_requests[row])
        self.over_expected_tokens -= int(self.columns.over_expected_tokens[row])
        del self.workers[row]
        self._name()
        self.row = {worker_id: index for index, worker_id in enumerate(self.ids)}
        for name in Columns.__struct_fields__:
            setattr(self.columns, name, np.delete(getattr(self.columns, name), row))
        return row

    def _name(self) -> None:
        self.ids = tuple(worker.id for worker in self.workers)
        self.block_sizes = frozenset(worker.block_size for worker in self.workers)
        self.limited = any(worker.max_seqs for worker in self.workers)
        self.sized = any(worker.blocks for worker in self.workers)
        layouts = [worker.fetch_layout for worker in self.workers if worker.layout]
        self.has_fetch_sources = len(set(layouts)) < len(layouts)

    def start(
        self, request: Request, choice: Choice, uncached: int, now: int, priority: int = 0,
        output: int = 0,
    ) -> RoutedRequest:  # fmt: skip
        """Charge a routed request to its workers, which must be up; `output` is per sequence."""
        computes = self.row[choice.prefill or choice.decode]
        routed = RoutedRequest(
            request=request, decode=choice.decode, prefill=choice.prefill or choice.decode,
            prefill_worker=choice.prefill or "", uncached=uncached,
            arrived_at=min(request.arrival or now, now), routed_at=now,
            slots=self.slots, inflight=self.inflight + 1,
            prompts_ahead=self.columns.prefill_requests.item(computes),
            background=(priority > 0 and self.workers[computes].overtakes)
            or (self.lane is not None and self.lane.is_long(request.prompt)),
            pairs=int(pairs(uncached, request.prompt)), read=choice.read, cached=choice.cached,
        )  # fmt: skip
        row = self.row[choice.decode]
        expected = request.prompt + output * request.sequences
        routed.slot = self.slots.allocate(routed, row, request.prompt, expected)
        self.requests[request.id] = routed
        self.oldest_arrival = min(self.oldest_arrival, routed.arrived_at)
        self.backlog.add(computes, request.id, uncached, routed.pairs, now)
        self._charge_prefill(routed, 1)
        columns = self.columns
        _calls.add_four(
            columns.served, columns.pending_prefill_tokens, columns.decode_requests,
            columns.decode_tokens, row, 1, request.prompt, request.sequences, request.prompt,
        )  # fmt: skip
        return routed

    def fetch_failed(self, routed: RoutedRequest, uncached: int) -> None:
        """Charge the whole prompt after a failed remote KV fetch."""
        routed.read = None
        self._charge_prefill(routed, -1)
        routed.uncached = uncached
        routed.pairs = int(pairs(uncached, routed.request.prompt))
        self._charge_prefill(routed, 1)
        if routed.prefill is not None:
            row = self.row[routed.prefill]
            self.backlog.add(row, routed.request.id, uncached, routed.pairs, routed.routed_at)

    def claimed(self, routed: RoutedRequest, worker: str, cached: int, now: int) -> None:
        """Move a prompt to the worker that pulled it, with `cached` tokens."""
        self._discharge_prefill(routed, now)
        row = self.row[worker]
        routed.prefill, routed.claimed_at, routed.cached = worker, now, cached
        routed.prefill_worker = "" if worker == routed.decode else worker
        uncached = routed.uncached = max(1, routed.request.prompt - cached)
        routed.pairs = int(pairs(uncached, routed.request.prompt))
        routed.prompts_ahead = self.columns.prefill_requests.item(row)
        self.backlog.add(row, routed.request.id, uncached, routed.pairs, now)
        self._charge_prefill(routed, 1)

    def prefilled(self, routed: RoutedRequest, now: int) -> None:
        """Discharge the worker that computed the prompt; idempotent."""
        if routed.prefill is None:
            return
        self._discharge_prefill(routed, now)
        if routed.decode is not None:
            routed.decoding = True
            row = self.row[routed.decode]
            self.columns.decoding[row] += routed.request.sequences
            self.columns.pending_prefill_tokens[row] -= routed.request.prompt

    def end(self, request: str, now: int) -> RoutedRequest | None:
        """Discharge and return a request; None if it was not routed."""
        routed = self.requests.pop(request, None)
        if routed is None:
            return None
        self._discharge_prefill(routed, now)
        if routed.decode is not None:
            columns, sequences = self.columns, routed.request.sequences
            decoding = sequences if routed.decoding else 0
            _calls.add_four(
                columns.decoding, columns.pending_prefill_tokens, columns.decode_requests,
                columns.decode_tokens, self.row[routed.decode], -decoding,
                0 if routed.decoding else -routed.request.prompt, -sequences, -routed.tokens,
            )  # fmt: skip
        over_expected = self.slots.over_expected(routed.slot)
        if over_expected and routed.decode is not None:
            self.columns.over_expected_tokens[self.row[routed.decode]] -= over_expected
            self.over_expected_tokens -= over_expected
        routed.decoding = False
        routed.final_tokens = routed.tokens
        self.slots.free(routed.slot)
        routed.slot = -1
        return routed

    @property
    def inflight(self) -> int:
        """Requests on the workers, other gateways' streams included."""
        return len(self.requests) + self.peers.streams

    def add_booked(self, row: int, change: Sequence[int]) -> None:
        """Charge a worker with the growth of other gateways' load (`BOOKED`)."""
        for name, count in zip(BOOKED[:COLUMNS], change, strict=False):
            if count:
                getattr(self.columns, name)[row] += count
        self.background += change[BACKGROUND]
        self.over_expected_tokens += change[OVER_EXPECTED]

    def report(self, report: LoadReport, now: int) -> None:
        """Record a worker's report; unknown ids are ignored."""
        row = self.row.get(report.worker)
        if row is not None:
            self.reported[report.worker] = now
            self.columns.running[row] = report.running
            self.columns.waiting[row] = report.waiting
            self.columns.kv_usage[row] = report.kv_usage

    def open_to(self, exclude: frozenset[str], eligible: frozenset[str] = frozenset()) -> Flags:
        """Return which workers a request may use, (workers,): `eligible`, or all not excluded."""
        if not (exclude or eligible):
            return all_workers(len(self.workers))
        flags = np.array(
            [not eligible or worker in eligible for worker in self.ids], dtype=np.bool_
        )
        for worker in exclude:
            row = self.row.get(worker)
            if row is not None:
                flags[row] = False
        return flags

    def figures(self, worker: str) -> dict[str, Any]:
        """Return a worker's load by the names in `LOADS`; zeros if unknown."""
        if (row := self.row.get(worker)) is None:
            return dict.fromkeys(LOADS, 0)
        return {name: getattr(self.columns, name)[row].item() for name in LOADS}

    def is_drained(self, worker: str) -> bool:
        """True if no routed request weighs on a worker, or it is unknown."""
        if (row := self.row.get(worker)) is None:
            return True
        weighs = self.columns.prefill_requests[row] + self.columns.decode_requests[row]
        return bool(weighs == self.peers.total[[PREFILLS, STREAMS], row].sum())

    def _charge_prefill(self, routed: RoutedRequest, sign: int) -> None:
        if routed.prefill is not None:
            row, columns = self.row[routed.prefill], self.columns
            _calls.add_four(
                columns.prefill_requests, columns.prefill_tokens, columns.prefill_pairs,
                columns.prefill_requests, row, sign, sign * routed.uncached, sign * routed.pairs, 0,
            )  # fmt: skip
            if routed.background:
                self.background += sign
                self.columns.background_requests[row] += sign
                self.columns.background_tokens[row] += sign * routed.uncached
                self.columns.background_pairs[row] += sign * routed.pairs

    def _discharge_prefill(self, routed: RoutedRequest, now: int) -> None:
        if routed.prefill is not None:
            self._charge_prefill(routed, -1)
            self.backlog.remove(self.row[routed.prefill], routed.request.id, now)
            routed.prefill = None


@bare_kernel
def _add_four(
    a: Counts, b: Counts, c: Counts, d: Counts, row: int, to_a: int, to_b: int, to_c: int, to_d: int
) -> None:
    """Add to four columns in one row: a compiled call takes less than two additions by NumPy."""
    a[row] += to_a
    b[row] += to_b
    c[row] += to_c
    d[row] += to_d


_calls = DirectCalls(
    add_four=(_add_four, "void(i8[::1], i8[::1], i8[::1], i8[::1], i8, i8, i8, i8, i8)")
)
