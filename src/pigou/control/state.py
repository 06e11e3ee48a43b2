"""What the control plane knows of its workers: who is up, and how much each has to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pigou.control.messages import Choice, LoadReport
from pigou.request import Request, Worker

_COUNTS = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens")
_REPORTS = ("running", "waiting", "kv_usage")


@dataclass(slots=True)
class Load:
    """What one routed request weighs, and where.

    Attributes:
        request: the request.
        decode: worker that is charged with the stream; None once that worker is gone.
        prefill: worker that is charged with the prompt; None once it is computed.
        tokens: charged to `decode`: the prompt, and what was generated so far.
    """

    request: Request
    decode: str | None
    prefill: str | None
    tokens: int


class State:
    """Workers and their load, as arrays with one entry a worker.

    A request weighs on its decode worker from its route to its end (1 request, prompt plus output
    tokens), and on whoever computes its prompt until that is done (1 request, the prompt's
    tokens). `row` maps a worker's id to its place; places change when a worker goes.
    """

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.row: dict[str, int] = {}
        self.loads: dict[str, Load] = {}
        self.counts: dict[str, NDArray[np.int64]] = {
            name: np.zeros(0, dtype=np.int64) for name in _COUNTS
        }
        self.reports: dict[str, NDArray[np.float64]] = {
            name: np.zeros(0, dtype=np.float64) for name in _REPORTS
        }

    def up(self, worker: Worker) -> None:
        """Add a worker, or renew what is known of it (its load stays)."""
        row = self.row.get(worker.id)
        if row is not None:
            self.workers[row] = worker
            return
        self.row[worker.id] = len(self.workers)
        self.workers.append(worker)
        for name in _COUNTS:
            self.counts[name] = np.append(self.counts[name], np.int64(0))
        for name in _REPORTS:
            self.reports[name] = np.append(self.reports[name], np.float64(0))

    def down(self, worker: str) -> None:
        """Forget a worker and all that weighs on it; an unknown one is no error."""
        row = self.row.get(worker)
        if row is None:
            return
        for load in self.loads.values():
            if load.decode == worker:
                load.decode = None
            if load.prefill == worker:
                load.prefill = None
        del self.workers[row]
        self.row = {each.id: place for place, each in enumerate(self.workers)}
        for name in _COUNTS:
            self.counts[name] = np.delete(self.counts[name], row)
        for name in _REPORTS:
            self.reports[name] = np.delete(self.reports[name], row)

    def start(self, request: Request, choice: Choice) -> None:
        """Charge a routed request to its workers, which must be up."""
        prefill = choice.prefill if choice.prefill is not None else choice.decode
        load = Load(request, choice.decode, prefill, request.prompt)
        self.loads[request.id] = load
        self._charge_prefill(load, 1)
        self._charge_decode(load, 1)

    def prefilled(self, request: str) -> None:
        """Discharge whoever computed the prompt; does nothing the second time."""
        load = self.loads.get(request)
        if load is None or load.prefill is None:
            return
        self._charge_prefill(load, -1)
        load.prefill = None

    def grew(self, request: str, tokens: int) -> None:
        """Charge `tokens` more output tokens to the decode worker."""
        load = self.loads.get(request)
        if load is None:
            return
        load.tokens += tokens
        if load.decode is not None:
            self.counts["decode_tokens"][self.row[load.decode]] += tokens

    def end(self, request: str) -> bool:
        """Discharge a request entirely; return whether it was routed."""
        self.prefilled(request)
        load = self.loads.pop(request, None)
        if load is None:
            return False
        self._charge_decode(load, -1)
        return True

    def report(self, report: LoadReport) -> None:
        """Note what a worker says of itself; an unknown worker is no error."""
        row = self.row.get(report.worker)
        if row is None:
            return
        for name in _REPORTS:
            self.reports[name][row] = getattr(report, name)

    def on(self, worker: str) -> Iterator[Load]:
        """Loads that stream from this worker."""
        return (load for load in self.loads.values() if load.decode == worker)

    def _charge_prefill(self, load: Load, sign: int) -> None:
        if load.prefill is not None:
            row = self.row[load.prefill]
            self.counts["prefill_requests"][row] += sign
            self.counts["prefill_tokens"][row] += sign * load.request.prompt

    def _charge_decode(self, load: Load, sign: int) -> None:
        if load.decode is not None:
            row = self.row[load.decode]
            self.counts["decode_requests"][row] += sign
            self.counts["decode_tokens"][row] += sign * load.tokens
