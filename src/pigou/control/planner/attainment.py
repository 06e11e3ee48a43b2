"""Attainment: the share of offered requests that are inside their objective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pigou.control.planner.objectives import Slo, WorkloadClass

_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Objectives:
    """What requests are to attain."""

    slo: Slo | None = None  # of requests that belong to no class; None where they have no objective
    # with objectives of their own; a request belongs to the first that fits.
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

    def class_of(
        self, key: str, prompt_tokens: int, headers: Mapping[str, str] = _NO_HEADERS,
        model: str = "",
    ) -> WorkloadClass | None:  # fmt: skip
        """Return the class of a request; None for one that belongs to none."""
        for entry in self.classes:
            if entry.matches(headers, key, model, prompt_tokens):
                return entry
        return None

    def name_of(
        self, key: str, prompt_tokens: int, headers: Mapping[str, str] = _NO_HEADERS,
        model: str = "",
    ) -> str:  # fmt: skip
        """Return the name of a request's class; arguments as of `class_of`."""
        entry = self.class_of(key, prompt_tokens, headers, model)
        return "" if entry is None else entry.name

    def slo_of(self, name: str) -> Slo | None:
        """Return the objective of the class of this name; None where it has none."""
        for entry in self.classes:
            if entry.name == name:
                return entry.slo
        return self.slo

    def attained(self, name: str, ttft_s: float | None, itl_s: float | None) -> bool:
        """Whether a request that is done is inside the objective of its class.

        Args:
            ttft_s: its seconds to the first token.
            itl_s: its mean seconds between tokens; None where it has one token only.
        """
        slo = self.slo_of(name)
        return slo is None or slo.attained(ttft_s, itl_s)


def class_label(name: str) -> str:
    """Return a class as it is shown: `default` for the requests that belong to none."""
    return name or "default"


class AttainmentCounter:
    """Counts offered requests, and those of them that attained their objective, by class."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self.requests: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()

    def add(self, name: str, attained: bool) -> None:
        """Count a request of a class; one that was refused or failed is outside."""
        self.requests[name] += 1
        self.inside[name] += attained

    def share(self, name: str) -> float:
        """Return the share of a class that attained; 1 where nothing was offered."""
        return _share(self.inside[name], self.requests[name])

    def document(self) -> dict[str, Any]:
        """Return the objectives, and the shares of offered requests that attained them.

        ITL is the mean of a request. A share is 1 where nothing was offered.
        """
        figures = _terms(self.objectives.slo or Slo())
        figures["attained"] = _share(self.inside.total(), self.requests.total())
        if self.objectives.classes:
            figures["classes"] = {
                entry.name: {
                    **_terms(entry.slo),
                    "offered": self.requests[entry.name],
                    "attained": self.share(entry.name),
                }
                for entry in self.objectives.classes
            }
        return figures


def _terms(slo: Slo) -> dict[str, Any]:
    """Return the terms of an objective; None where it has no limit."""
    return {
        "ttft_s": slo.ttft_s if slo.ttft_s < math.inf else None,
        "itl_s": slo.itl_s if slo.itl_s < math.inf else None,
        "percentile": slo.percentile,
    }


def _share(attained: int, count: int) -> float:
    return attained / count if count else 1.0
