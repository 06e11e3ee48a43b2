"""What the control plane knows of its workers: who is up, and how much each has to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.control.latency_model.estimates import pairs
from pigou.control.lines import Lines
from pigou.control.messages import Choice, LoadReport, Read
from pigou.control.stream_slots import Seats
from pigou.request import Request, Worker

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]
Flags = NDArray[np.bool_]


@lru_cache(maxsize=64)
def everybody(workers: int) -> Flags:
    """Return flags that are all set, (workers,); shared, so they cannot be written to."""
    found = np.ones(workers, dtype=np.bool_)
    found.flags.writeable = False
    return found


def both(first: Flags, second: Flags) -> Flags:
    """Return where both are set, (workers,); one of them itself where the other is `everybody`."""
    everywhere = everybody(len(first))
    if second is everywhere:
        return first
    return second if first is everywhere else first & second


@dataclass(slots=True)
class Columns:
    """One entry a worker, shape (workers,) each; the names are those of `FleetView`.

    `beyond` are those of `decode_tokens` that were not expected when their requests were routed,
    `coming` those of prompts that are still to be computed; `decoding` counts the streams whose
    prompt is computed; `background_...` are those of `prefill_...` that requests of a priority up
    to 0 overtake; `max_seqs` is the worker's own limit, 0 when it did not say; `layout` numbers
    those of the caches, 0 where nobody reads.
    """

    prefills: Flags
    decodes: Flags
    block_size: Counts
    blocks: Counts
    max_seqs: Counts
    prefill_requests: Counts
    prefill_tokens: Counts
    prefill_pairs: Counts
    background_requests: Counts
    background_tokens: Counts
    background_pairs: Counts
    decode_requests: Counts
    decode_tokens: Counts
    beyond: Counts
    coming: Counts
    decoding: Counts
    served: Counts
    running: Shares
    waiting: Shares
    kv_usage: Shares
    layout: Counts


_KINDS: dict[str, type] = {"Flags": np.bool_, "Counts": np.int64, "Shares": np.float64}
_NAMES = tuple(field.name for field in fields(Columns))
#: Columns that say how much a worker has to do, for whoever shows them.
LOADS = (
    "prefill_requests",
    "prefill_tokens",
    "decode_requests",
    "decode_tokens",
    "running",
    "waiting",
    "kv_usage",
)


class Load(msgspec.Struct, eq=False):
    """What one routed request weighs, where, and when it came how far.

    Attributes:
        request: the request.
        decode: worker that is charged with the stream; None once that worker is gone.
        prefill: worker that is charged with the prompt; None once it is computed.
        prefill_worker: the other worker that the prompt was sent to; "" where there is none.
        uncached: tokens of the prompt that its worker had to compute.
        pairs: of those with the ones before them.
        routed: when it was sent off, in nanoseconds.
        handed: when its remote prefill ended; 0 before, and for a local one.
        first: when its first token came; 0 before, and where tokens are not seen.
        decoding: whether it counts among the streams whose prompt is computed.
        inflight: requests of the fleet when it was sent off, itself counted.
        ahead: prompts that its prompt was sent to join.
        setting: of the controller, that it was routed under.
        background: whether its prompt is overtaken where it is computed.
        read: where the beginning of its prompt is read; None where nowhere.
        cached: tokens of the prompt that its worker had itself.
        given_up: its driver was told that it waited too long.
        seats: where its tokens are counted, under the number `seat`; -1 once it is over.
        last: its tokens then.
    """

    request: Request
    decode: str | None
    prefill: str | None
    prefill_worker: str
    uncached: int
    routed: int
    seats: Seats[Load]
    seat: int = -1
    last: int = 0
    handed: int = 0
    first: int = 0
    decoding: bool = False
    inflight: int = 1
    ahead: int = 0
    setting: int = 0
    background: bool = False
    pairs: int = 0
    read: Read | None = None
    cached: int = 0
    given_up: bool = False

    @property
    def remote(self) -> bool:
        """Whether the prompt was sent to another worker than the stream."""
        return self.prefill_worker != ""

    @property
    def tokens(self) -> int:
        """Tokens charged to `decode`: the prompt, and what was generated so far."""
        return self.last if self.seat < 0 else self.seats.tokens.item(self.seat)

    @property
    def generated(self) -> int:
        """Tokens that were generated so far, as far as they were seen."""
        return self.tokens - self.request.prompt


class State:
    """Workers and their load.

    A request weighs on its decode worker from its route to its end (1 request, prompt plus output
    tokens), and on whoever computes its prompt until that is done (1 request, its uncached
    tokens).

    Attributes:
        workers: in the order of the rows.
        ids: their names, in the same order.
        block_sizes: the different ones among them.
        limited: whether any of them says how many streams it runs at once.
        sized: whether any of them says how many blocks it has.
        lends: whether any two of them can read from each other.
        background: prompts to be computed that others overtake.
        beyond: output tokens that were not expected, on all workers.
        row: of a worker by its id; rows change when a worker goes.
        columns: their figures.
        loads: of the routed requests, by id.
        seats: where their tokens are counted.
        lines: prompts that are to be computed, in order.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.ids: tuple[str, ...] = ()
        self._layouts: dict[str, int] = {}
        self.block_sizes: frozenset[int] = frozenset()
        self.limited = self.sized = self.lends = False
        self.background = self.beyond = 0
        self.row: dict[str, int] = {}
        self.loads: dict[str, Load] = {}
        self.seats: Seats[Load] = Seats()
        self.lines = Lines()
        self.columns = Columns(
            **{each.name: np.zeros(0, dtype=_KINDS[str(each.type)]) for each in fields(Columns)}
        )

    def up(self, worker: Worker) -> None:
        """Add a worker, or renew what is known of it (its load stays)."""
        row = self.row.get(worker.id)
        if row is None:
            row = self.row[worker.id] = len(self.workers)
            self.workers.append(worker)
            self.lines.up()
            for name in _NAMES:
                column = getattr(self.columns, name)
                setattr(self.columns, name, np.append(column, column.dtype.type(0)))
        self.workers[row] = worker
        roles = worker.role.prefills, worker.role.decodes
        if (self.columns.prefills[row], self.columns.decodes[row]) != roles:
            # New arrays: whoever remembers something by them sees that roles have changed.
            self.columns.prefills = self.columns.prefills.copy()
            self.columns.decodes = self.columns.decodes.copy()
            self.columns.prefills[row], self.columns.decodes[row] = roles
        self.columns.block_size[row] = worker.block_size
        self.columns.blocks[row] = worker.blocks
        self.columns.max_seqs[row] = worker.max_seqs
        self.columns.layout[row] = self._number(worker.layout)
        self._name()

    def _number(self, layout: str) -> int:
        """Return a number of its own for each layout; 0 for none."""
        return self._layouts.setdefault(layout, len(self._layouts) + 1) if layout else 0

    def down(self, worker: str) -> int | None:
        """Forget a worker and all that weighs on it; return the row that it had.

        An unknown one is no error: None.
        """
        row = self.row.get(worker)
        if row is None:
            return None
        for load in self.loads.values():
            if load.decode == worker:
                load.decode = None
            if load.prefill == worker:
                load.prefill = None
        self.seats.down(row)
        self.lines.down(row)
        self.background -= int(self.columns.background_requests[row])
        self.beyond -= int(self.columns.beyond[row])
        del self.workers[row]
        self._name()
        self.row = {name: place for place, name in enumerate(self.ids)}
        for name in _NAMES:
            setattr(self.columns, name, np.delete(getattr(self.columns, name), row))
        return row

    def _name(self) -> None:
        self.ids = tuple(each.id for each in self.workers)
        self.block_sizes = frozenset(each.block_size for each in self.workers)
        self.limited = any(each.max_seqs for each in self.workers)
        self.sized = any(each.blocks for each in self.workers)
        layouts = [each.layout for each in self.workers if each.layout]
        self.lends = len(set(layouts)) < len(layouts)

    def start(
        self, request: Request, choice: Choice, uncached: int, now: int, priority: int = 0,
        output: int = 0,
    ) -> Load:  # fmt: skip
        """Charge a routed request to its workers, which must be up.

        Args:
            request: the request.
            choice: its workers.
            uncached: tokens of its prompt that are to be computed.
            now: nanoseconds.
            priority: as its workers are told.
            output: tokens that each of its sequences is expected to generate.
        """
        computes = self.row[choice.prefill or choice.decode]
        load = Load(
            request=request,
            decode=choice.decode,
            prefill=choice.prefill or choice.decode,
            prefill_worker=choice.prefill or "",
            uncached=uncached,
            routed=now,
            seats=self.seats,
            inflight=len(self.loads) + 1,
            ahead=self.columns.prefill_requests.item(computes),
            background=priority > 0 and self.workers[computes].overtakes,
            pairs=int(pairs(uncached, request.prompt)),
            read=choice.read,
            cached=choice.cached,
        )
        row = self.row[choice.decode]
        expected = request.prompt + output * request.sequences
        load.seat = self.seats.take(load, row, request.prompt, expected)
        self.loads[request.id] = load
        self.lines.join(computes, request.id, uncached, load.pairs, now)
        self.columns.served[row] += 1
        self.columns.coming[row] += request.prompt
        self._charge_prefill(load, 1)
        self._charge_decode(load, 1)
        return load

    def unread(self, load: Load, uncached: int) -> None:
        """Charge the whole of a prompt whose beginning could not be read."""
        load.read = None
        self._charge_prefill(load, -1)
        load.uncached = uncached
        load.pairs = int(pairs(uncached, load.request.prompt))
        self._charge_prefill(load, 1)
        if load.prefill is not None:
            row = self.row[load.prefill]
            self.lines.join(row, load.request.id, uncached, load.pairs, load.routed)

    def prefilled(self, load: Load, now: int) -> None:
        """Discharge whoever computed the prompt; does nothing the second time."""
        if load.prefill is None:
            return
        self._discharge_prefill(load, now)
        if load.decode is not None:
            load.decoding = True
            row = self.row[load.decode]
            self.columns.decoding[row] += load.request.sequences
            self.columns.coming[row] -= load.request.prompt

    def end(self, request: str, now: int) -> Load | None:
        """Discharge a request entirely; return what it weighed, None if it was not routed."""
        load = self.loads.pop(request, None)
        if load is None:
            return None
        self._discharge_prefill(load, now)
        if load.decode is not None:
            row = self.row[load.decode]
            if load.decoding:
                self.columns.decoding[row] -= load.request.sequences
            else:
                self.columns.coming[row] -= load.request.prompt
        self._charge_decode(load, -1)
        beyond = self.seats.beyond(load.seat)
        if beyond and load.decode is not None:
            self.columns.beyond[self.row[load.decode]] -= beyond
            self.beyond -= beyond
        load.decoding = False
        load.last = load.tokens
        self.seats.leave(load.seat)
        load.seat = -1
        return load

    def report(self, report: LoadReport) -> None:
        """Note what a worker says of itself; an unknown worker is no error."""
        row = self.row.get(report.worker)
        if row is not None:
            self.columns.running[row] = report.running
            self.columns.waiting[row] = report.waiting
            self.columns.kv_usage[row] = report.kv_usage

    def on(self, worker: str) -> Iterator[Load]:
        """Loads that stream from this worker."""
        return (load for load in self.loads.values() if load.decode == worker)

    def figures(self, worker: str) -> dict[str, Any]:
        """Return how much a worker has to do, by the names in `LOADS`; zeros for an unknown one."""
        row = self.row.get(worker)
        if row is None:
            return dict.fromkeys(LOADS, 0)
        return {name: getattr(self.columns, name)[row].item() for name in LOADS}

    def _charge_prefill(self, load: Load, sign: int) -> None:
        if load.prefill is not None:
            row = self.row[load.prefill]
            self.columns.prefill_requests[row] += sign
            self.columns.prefill_tokens[row] += sign * load.uncached
            self.columns.prefill_pairs[row] += sign * load.pairs
            if load.background:
                self.background += sign
                self.columns.background_requests[row] += sign
                self.columns.background_tokens[row] += sign * load.uncached
                self.columns.background_pairs[row] += sign * load.pairs

    def _discharge_prefill(self, load: Load, now: int) -> None:
        if load.prefill is not None:
            self._charge_prefill(load, -1)
            self.lines.leave(self.row[load.prefill], load.request.id, now)
            load.prefill = None

    def _charge_decode(self, load: Load, sign: int) -> None:
        if load.decode is not None:
            row = self.row[load.decode]
            self.columns.decode_requests[row] += sign * load.request.sequences
            self.columns.decode_tokens[row] += sign * load.tokens
