"""The least loaded pair."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pigou.control.routing.view import Candidates, FleetView
from pigou.request import Request


class LeastLoaded:
    """Fewest streams on the decode worker, then fewest prompt tokens on the prefill worker.

    cost(p, d) = decode_requests[d] + s(p),  s(p) = t / (2 (t + 1)) for t = prefill_tokens[p],
    and s = 3/4 where the decode worker computes the prompt itself. s stays under 1 and grows
    with t, so it only decides between equal decode workers, and a prompt is computed remotely
    whenever that is possible (the unconditional disaggregation of vLLM's example proxy).
    """

    name: ClassVar[str] = "least-loaded"

    def costs(
        self,
        request: Request,  # noqa: ARG002
        fleet: FleetView,
        candidates: Candidates,
    ) -> NDArray[np.float64]:
        """Return one cost a candidate, in streams."""
        tokens = fleet.prefill_tokens[candidates.prefill].astype(np.float64)
        share = np.where(candidates.prefill < 0, 0.75, tokens / (2 * (tokens + 1)))
        return fleet.decode_requests[candidates.decode].astype(np.float64) + share
