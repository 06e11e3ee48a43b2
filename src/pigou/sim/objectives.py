"""Objectives of a simulation's requests, and the share of offered requests that attain them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pigou.control.planner.objectives import Slo, WorkloadClass
from pigou.request import SECOND
from pigou.sim.request_run import RequestRun, RunOutcome


@dataclass(frozen=True, slots=True)
class Objectives:
    """What requests are to attain.

    Attributes:
        slo: of requests that belong to no class; None where they have no objective.
        classes: with objectives of their own; a request belongs to the first that fits.
    """

    slo: Slo | None = None
    classes: tuple[WorkloadClass, ...] = ()

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return self.slo is not None or bool(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, "" for the requests that belong to none among them."""
        names = tuple(entry.name for entry in self.classes)
        return names if "" in names else (*names, "")

    def class_of(self, tenant: str, prompt_tokens: int) -> WorkloadClass | None:
        """Return the class of a request; None for one that belongs to none."""
        for entry in self.classes:
            if entry.matches({}, tenant, entry.model, prompt_tokens):
                return entry
        return None

    def name_of(self, tenant: str, prompt_tokens: int) -> str:
        """Return the name of a request's class."""
        entry = self.class_of(tenant, prompt_tokens) if self.classes else None
        return "" if entry is None else entry.name

    def name_of_run(self, run: RequestRun) -> str:
        """Return the name of a request's class."""
        return self.name_of(run.spec.tenant, run.spec.prompt_tokens)

    def attained(self, run: RequestRun, since_ns: int) -> bool:
        """Whether a request is done, and inside its objective.

        Args:
            run: the request.
            since_ns: from which TTFT counts.
        """
        if run.outcome is not RunOutcome.DONE:
            return False
        entry = self.class_of(run.spec.tenant, run.spec.prompt_tokens)
        slo = self.slo if entry is None else entry.slo
        if slo is None:
            return True
        itl_ns = request_itl_ns(run)
        itl_s = None if itl_ns is None else itl_ns / SECOND
        return slo.attained((run.first_token_ns - since_ns) / SECOND, itl_s)

    def document(self, runs: Sequence[RequestRun]) -> dict[str, Any]:
        """Return the objectives, and the shares of offered requests that attained them.

        TTFT counts from the intention to send, ITL is the mean of a request. A share is 1 where
        nothing was offered.
        """
        count, attained = Counter[str](), Counter[str]()
        for run in runs:
            name = self.name_of_run(run)
            count[name] += 1
            attained[name] += self.attained(run, run.intended_ns)
        figures = _terms(self.slo or Slo())
        figures["attained"] = _share(sum(attained.values()), len(runs))
        if self.classes:
            figures["classes"] = {
                entry.name: {
                    **_terms(entry.slo),
                    "offered": count[entry.name],
                    "attained": _share(attained[entry.name], count[entry.name]),
                }
                for entry in self.classes
            }
        return figures


#: Of a simulation without any.
NO_OBJECTIVES = Objectives()


def request_itl_ns(run: RequestRun) -> float | None:
    """Return the mean nanoseconds of a request between its tokens; None where it has only one."""
    if run.output_tokens < 2:
        return None
    return (run.last_token_ns - run.first_token_ns) / (run.output_tokens - 1)


def _terms(slo: Slo) -> dict[str, Any]:
    """Return the terms of an objective; None where it has no limit."""
    return {
        "ttft_s": slo.ttft_s if slo.ttft_s < math.inf else None,
        "itl_s": slo.itl_s if slo.itl_s < math.inf else None,
        "percentile": slo.percentile,
    }


def _share(attained: int, count: int) -> float:
    return attained / count if count else 1.0
