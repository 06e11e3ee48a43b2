"""The toll policy: expected seconds of the request, plus those it costs all others."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from pigou.config import check_fields
from pigou.control.routing.policy import MAX_WEIGHT, Costs, CostTable, RequestView
from pigou.control.routing.toll.kernel import cost_rows
from pigou.control.routing.toll.terms import PARTS
from pigou.control.routing.view import AdapterPrices, Candidates, FleetView

#: Requests over which the mean TTFT is taken.
_MEMORY = 128.0


class TollParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Toll`."""

    toll: float = 1.0  # share of the tolls that is charged; 0 is the selfish choice
    # weight of a second to the first token beyond 1, where the request has waited for the fleet's
    # mean TTFT; 0 is the least mean time, however long the tail.
    urgency: float = 2.0
    # seconds that a token from host memory takes, as a share of those to compute it; workers tell
    # no rates. Above 1 makes no sense: they compute what is quicker so.
    host_restore: float = 0.1
    storage_restore: float = 0.5  # the same for disk and object storage

    def __post_init__(self) -> None:
        check_fields(self, "toll", "urgency", ge=0, le=MAX_WEIGHT)
        check_fields(self, "host_restore", "storage_restore", ge=0, le=1)


_FULL_PRICE = TollParams()


class Toll:
    """Private seconds, their urgency, and three tolls (`terms` has each formula).

    Example:
        policy = Toll(TollParams(urgency=0.5))
        seconds = policy.costs(request, fleet, candidates)
    """

    name: ClassVar[str] = "toll"

    def __init__(self, params: TollParams | None = None) -> None:
        self.params = params or TollParams()
        self.recent_ttft = MeanTtft()

    @property
    def full_price(self) -> bool:
        """True if the parts are the true cost: all tolls, nothing else."""
        return self.params == _FULL_PRICE

    def costs(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> Costs:
        """Return one cost per candidate, in seconds."""
        return self.parts(request, fleet, candidates).total

    def parts(self, request: RequestView, fleet: FleetView, candidates: Candidates) -> CostTable:
        """Return wait, prefill, transfer, decode, urgency and the tolls, (candidates,) each."""
        own = self.params
        setting = own.toll, self.rise, own.host_restore, own.storage_restore
        table = CostTable(PARTS, cost_rows(request, fleet, candidates, setting))
        if fleet.adapters is None:
            return table
        return toll_adapter(table, fleet.adapters, candidates, own.toll, self.rise)

    def note(
        self, _: RequestView, _fleet: FleetView, _candidates: Candidates, chosen: int,
        parts: CostTable, /,
    ) -> None:  # fmt: skip
        """Record the expected TTFT of the chosen candidate, for the mean."""
        seconds = parts.rows.item
        self.recent_ttft.add(seconds(0, chosen) + seconds(1, chosen) + seconds(2, chosen))

    @property
    def rise(self) -> float:
        """Extra weight of a second to the first token per second before it."""
        mean_s = self.recent_ttft.seconds
        return self.params.urgency / mean_s if mean_s > 0.0 else 0.0


def toll_adapter(
    table: CostTable, adapters: AdapterPrices, candidates: Candidates, toll: float, rise: float
) -> CostTable:
    """Add the loads of the request's LoRA adapter: its own wait, and a toll for who is evicted.

    The wait is L, as urgent as the rest: rise ((T + L)^2 - T^2) / 2; the toll is the expected
    seconds to load again what is evicted. A remote prefill worker loads it too.
    """
    remote = (candidates.prefill >= 0) & (candidates.prefill != candidates.decode)
    load_s, displaced_s = (
        seconds[candidates.decode] + np.where(remote, seconds[candidates.prefill], 0.0)
        for seconds in (adapters.load_s, adapters.displaced_s)
    )
    rows = np.vstack((table.rows[:-1], toll * displaced_s, table.rows[-1:]))
    ttft_s = rows[:3].sum(axis=0)
    urgent_s = rise * load_s * (ttft_s + 0.5 * load_s)
    rows[0] += load_s
    rows[PARTS.index("urgency")] += urgent_s
    rows[-1] += load_s + urgent_s + rows[-2]
    return CostTable((*PARTS, "toll_adapter"), rows)


class MeanTtft:
    """Mean of expected TTFTs of recent requests, in seconds; 0 before the first."""

    def __init__(self) -> None:
        self.seconds, self._seen = 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Add one; the mean is over about the last hundred."""
        self._seen = min(_MEMORY, self._seen + 1.0)
        self.seconds += (seconds - self.seconds) / self._seen
