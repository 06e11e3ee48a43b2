"""Strict priorities, and fair sharing between the tenants within each."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pigou.control.admission.vtc import Fair, FairParams
from pigou.control.admission.waiting import Waiting
from pigou.request import Request

#: Bands whose counters are kept; beyond, the one that was idle longest begins anew.
_MOST_BANDS = 64
#: Of priorities on the wire.
_HIGHEST = 2**31 - 1


class PriorityFair:
    """Lower `Request.priority` first; within one priority as `Fair`, with counters of its own.

    So the bound of `Fair` holds for two tenants that wait in the same band, while it is served.
    A tenant chooses its requests' priorities itself: where tenants are not to be trusted with
    that, use `fair` with `within: priority`.
    """

    Params: ClassVar[type[msgspec.Struct]] = FairParams
    holds_back: ClassVar[bool] = True
    refuses_late: ClassVar[bool] = False

    def __init__(self, params: FairParams | None = None) -> None:
        self.params = params or FairParams()
        self._bands: dict[int, Fair] = {}

    @property
    def reserve(self) -> float:
        """Share of each worker that is closed to tenants above their part of the fleet."""
        return self.params.reserve

    def add(self, waiting: Waiting) -> None:
        """A request begins to wait."""
        priority = waiting.request.priority
        band = self._bands.pop(priority, None) or Fair(self.params)
        self._bands[priority] = band  # the last used is the last of the dictionary
        band.add(waiting)
        if len(self._bands) > _MOST_BANDS:
            idle = next((name for name, each in self._bands.items() if each.idle), None)
            if idle is not None:
                del self._bands[idle]

    def remove(self, waiting: Waiting) -> None:
        """A request waits no more."""
        band = self._bands.get(waiting.request.priority)
        if band is not None:
            band.remove(waiting)

    def first(self, now: int) -> Waiting | None:
        """Return who goes next; the cost is that of the number of priorities in use."""
        waiting = [(name, band) for name, band in self._bands.items() if not band.idle]
        return min(waiting)[1].first(now) if waiting else None

    def last(self, waiting: Waiting, most: int, own: bool) -> list[Waiting]:
        """Return requests of a higher priority number, the highest first; then as `Fair`."""
        found: list[Waiting] = []
        priority = waiting.request.priority
        tenant = waiting.request.tenant if own else None
        for name in sorted(self._bands, reverse=True):
            if name > priority:
                found += self._bands[name].newest(most - len(found), tenant)
            elif name == priority:
                found += self._bands[name].last(waiting, most - len(found), own)
            if len(found) >= most:
                break
        return found

    def taken(self, waiting: Waiting, uncached: int) -> None:
        """Charge the prompt of a request that goes."""
        band = self._bands.get(waiting.request.priority)
        if band is not None:
            band.taken(waiting, uncached)

    def served(self, request: Request, tokens: int) -> None:
        """Charge output tokens that came."""
        band = self._bands.get(request.priority)
        if band is not None:
            band.served(request, tokens)

    def behind(self, waiting: Waiting) -> bool:
        """Whether the tenant had less than those that wait in this band."""
        band = self._bands.get(waiting.request.priority)
        return band is not None and band.behind(waiting)

    def priority(self, waiting: Waiting, above: bool) -> int | None:
        """Let tenants above their part yield to the others of the same priority."""
        return max(-_HIGHEST, min(2 * waiting.request.priority + above, _HIGHEST))
