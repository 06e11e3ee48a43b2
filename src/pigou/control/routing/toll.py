"""Pigou's own policy: what a choice costs its request, and what it costs all others."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.control.routing.policy import Costs, RequestView, Table
from pigou.control.routing.toll_kernel import PARTS, price
from pigou.control.routing.view import Candidates, Counts, FleetView
from pigou.control.speeds.estimates import Estimates


class TollParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Toll`, neither of which needs tuning.

    Attributes:
        toll: share of the tolls that is charged; 0 is the selfish choice.
        overlap_weight: share of its cached prefix that a request counts on.
    """

    toll: float = 1.0
    overlap_weight: float = 1.0


class Toll:
    """Expected private cost plus toll, in seconds; there are no weights to tune.

    For a prompt with u uncached tokens on worker p (p = d where it is computed locally), N
    expected output tokens, n streams on decode worker d:

        wait      Q_p = prefill_base q_p + prefill_token U_p   (q_p prompts there, of U_p tokens)
        prefill   s = prefill_base_p + prefill_token_p u
        transfer  x = transfer_base_d + transfer_token_d (tokens that d lacks), 0 where p = d
        decode    N f_d(n + 1)
        toll of the stream    N n (f_d(n+1) - f_d(n))
        toll of the queue     w lambda_p (Q_p + s) / (1 - rho_p)
        toll of the stall     z n, where p = d
        z = stall_base_d + stall_token_d u;   w = z where p = d and n > 0, s elsewhere

    The stream's toll is the marginal-cost toll of the routing game (design, "Three games, three
    prices"; Georgiou 2026, Eq. 7 gives the game). The queue's: whoever comes to p before it next
    runs empty is delayed by w; a backlog of Q + s lasts (Q + s) / (1 - rho) and lambda_p of them
    come a second (the busy period of an M/G/1 queue begun by that much work; Kleinrock, Queueing
    Systems I, 5.8). Where streams run, chunks of a prompt are mixed with them, and take z from each
    of the n; so much is whoever comes next delayed, too (`Stall` learns z; less than s where
    the weights are read for the streams anyway). Remote or local prefill is decided by these sums alone.
    """

    name: ClassVar[str] = "toll"

    def __init__(self, params: TollParams | None = None) -> None:
        self.params = params or TollParams()

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return one cost a candidate, in seconds."""
        return self.table(request, fleet, candidates).total

    def parts(
        self, request: RequestView, fleet: FleetView, candidates: Candidates
    ) -> dict[str, Costs]:
        """Return wait, prefill, transfer and decode of the request, and its three tolls."""
        return self.table(request, fleet, candidates).parts

    def table(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Table:
        """Return the parts and their sum, in one array."""
        found = np.empty((len(PARTS) + 1, len(candidates)))
        price(
            fleet.estimates.table,
            fleet.prefill_requests,
            fleet.prefill_tokens,
            fleet.decode_requests,
            fleet.cached(request.prompt),
            candidates.prefill,
            candidates.decode,
            request.prompt,
            fleet.output,
            self.params.toll,
            self.params.overlap_weight,
            found,
        )
        return Table(PARTS, found)


def stream_tolls(known: Estimates, streams: Counts, output: float) -> Costs:
    """Return the seconds that one more stream on each worker would cost those there, (workers,).

    The toll of the stream alone: N n (f(n+1) - f(n)), its prompt not counted.

    Args:
        known: speeds of the workers.
        streams: on each worker, (workers,).
        output: tokens that a stream is expected to have (N).
    """
    rows, here = np.arange(len(streams)), streams.astype(np.float64)
    found: Costs = output * here * (known.itl(rows, here + 1.0) - known.itl(rows, here))
    return found
