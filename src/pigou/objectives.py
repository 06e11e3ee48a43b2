"""Objectives of requests, their attainment, and a planner's limits and times."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pigou.config import ClassLane, ConfigError, QueueClass, check_fields, key_values
from pigou.registry import read_struct

_INF = float("inf")
_LATENCY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf")
_NO_HEADERS: Mapping[str, str] = {}
#: Seconds per unit.
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
#: Seconds beyond which a latency without unit is taken for milliseconds and rejected.
_MAX_BARE_S = {"ttft": 100.0, "itl": 10.0}


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A service level objective: a share of *offered* requests inside both latencies."""

    ttft_s: float = _INF  # above 0; infinity for no objective
    itl_s: float = _INF  # a request's mean, above 0; infinity for no objective
    percentile: float = 95.0  # per cent of offered requests inside both, 0 to under 100

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.percentile < 100:
            raise ValueError(f"percentile is {self.percentile}; it must be from 0 to under 100")

    @property
    def share(self) -> float:
        """Share of requests that shall be inside, 0 to under 1."""
        return self.percentile / 100.0

    def attained(self, ttft_s: float | None, itl_s: float | None) -> bool:
        """True if inside both; without first token False, without ITL inside."""
        if ttft_s is None or not ttft_s <= self.ttft_s:
            return False
        return itl_s is None or itl_s <= self.itl_s

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=500ms,itl=30ms[,percentile=95]` (`tpot` is `itl`); raises ConfigError."""
        keys = {"ttft": "ttft_s", "itl": "itl_s", "tpot": "itl_s", "percentile": "percentile"}
        values: dict[str, Any] = {}
        form = "ttft=500ms,itl=40ms[,percentile=95], times in ms or s"
        for key, value in key_values("slo", text.split(","), form).items():
            if (field := keys.get(key)) is None or field in values:
                raise ConfigError(f"slo has {key}={value}; write {form}")
            values[field] = value.removesuffix("%") if field == key else latency_s(key, value)
        return read_struct("slo", cls, values)


def latency_s(name: str, value: float | str) -> float:
    """Return seconds of `500ms` or a number; raises ConfigError, also for likely milliseconds."""
    text = str(value).strip()
    if (match := _LATENCY.match(text)) is None or text[match.end() :].strip() not in {"", *_UNITS}:
        raise ConfigError(f"{name} is {text!r}; give a latency above 0, as 500ms or 0.5s")
    number, unit = float(match[0]), text[match.end() :].strip()
    limit_s = _MAX_BARE_S["itl" if name == "tpot" else name]
    if not unit and limit_s < number < _INF:
        raise ConfigError(
            f"{name} is {text}, without a unit seconds: write {text}ms, or {text}s if seconds are "
            "meant"
        )
    return number * _UNITS[unit or "s"]


class WorkloadClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of requests with its own objective; all given fields must match."""

    name: str = ""
    slo: Slo = msgspec.field(default_factory=Slo)
    weight: float = 1.0  # weight of a second of delay, above 0
    header: str = ""  # `name=value` of an HTTP header, name in lower case; "" for any
    key: str = ""  # API key id; "" for any
    model: str = ""
    min_prompt_tokens: int = 0  # inclusive range
    max_prompt_tokens: int = 2**62
    chunk: int = 0  # most tokens of a step on its workers; 0 for their own
    concurrency: int = 0  # most streams for each worker that decodes; 0 for no limit
    lane: ClassLane = ""

    def __post_init__(self) -> None:
        check_fields(self, "chunk", "concurrency", ge=0)
        if not 0 < self.weight < _INF:
            raise ValueError(f"weight is {self.weight}; it must be finite and above 0")
        if self.header and "=" not in self.header:
            raise ValueError(f"header is {self.header!r}; give name=value")
        if not 0 <= self.min_prompt_tokens <= self.max_prompt_tokens:
            raise ValueError("give 0 <= min_prompt_tokens <= max_prompt_tokens")

    def matches(self, headers: Mapping[str, str], key: str, model: str, prompt_tokens: int) -> bool:
        """True if a request belongs to the class; header names are in lower case."""
        if self.header:
            name, _, value = self.header.partition("=")
            if headers.get(name) != value:
                return False
        if (self.key and self.key != key) or (self.model and self.model != model):
            return False
        return self.min_prompt_tokens <= prompt_tokens <= self.max_prompt_tokens


#: Classes of workloads and their usual latencies, tokens per step, streams per worker and lane.
PRESETS: Mapping[str, WorkloadClass] = {
    "realtime": WorkloadClass(
        slo=Slo(ttft_s=0.15, itl_s=0.015), chunk=512, concurrency=32, lane="short"
    ),
    "chat": WorkloadClass(
        slo=Slo(ttft_s=0.4, itl_s=0.03), chunk=2048, concurrency=128, lane="short"
    ),
    "agent": WorkloadClass(
        slo=Slo(ttft_s=0.1, itl_s=0.02), chunk=1024, concurrency=64, lane="short"
    ),
    "document": WorkloadClass(
        slo=Slo(ttft_s=1.5, itl_s=0.05), chunk=2048, concurrency=16, lane="long"
    ),
    "batch": WorkloadClass(slo=Slo(ttft_s=10.0, itl_s=0.1), lane="background"),
}


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the fleet. GPUs of starting and draining workers count."""

    max_gpus: int | None = None  # limit over all pools; None for no limit
    pool_gpus: dict[str, int] = {}  # limits by pool
    model_gpus: dict[str, int] = {}  # limits by model, over its pools
    min_workers: int = 1  # least per pool, starting ones counted
    pool_min_workers: dict[str, int] = {}  # the same by pool; default `min_workers`

    def __post_init__(self) -> None:
        limits = {"max_gpus": self.max_gpus, "min_workers": self.min_workers}
        limits |= {f"pool_gpus of {pool!r}": gpus for pool, gpus in self.pool_gpus.items()}
        limits |= {f"model_gpus of {model!r}": gpus for model, gpus in self.model_gpus.items()}
        limits |= {f"pool_min_workers of {k!r}": v for k, v in self.pool_min_workers.items()}
        for name, value in limits.items():
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")

    def min_of(self, pool: str) -> int:
        """Return a pool's least number of workers."""
        return self.pool_min_workers.get(pool, self.min_workers)


class ProvisioningTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that changes of a fleet take; at least 0."""

    start_up_s: float = 100.0  # from order to ready
    warm_up_s: float = 10.0  # then, with unrepresentative speed
    drain_s: float = 10.0
    flip_s: float = _INF  # change of role with its drain; infinity if impossible
    # from order to unplaceable; None for three times `start_up_s`, at least 30
    give_up_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("start_up_s", "warm_up_s", "drain_s"):
            if not 0 <= getattr(self, name) < _INF:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite, at least 0")
        if not self.flip_s >= 0:
            raise ValueError(f"flip_s is {self.flip_s}; it must be at least 0")
        if self.give_up_s is not None and not self.give_up_s >= 0:
            raise ValueError(f"give_up_s is {self.give_up_s}; it must be at least 0")

    @property
    def patience_s(self) -> float:
        """Seconds for which a starting worker counts as supply."""
        return max(3.0 * self.start_up_s, 30.0) if self.give_up_s is None else self.give_up_s


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives of requests."""

    slo: Slo | None = None  # objective of requests without a class; None for none
    classes: tuple[WorkloadClass, ...] = ()  # a request belongs to the first match

    @property
    def known(self) -> bool:
        """True if there are any."""
        return self.slo is not None or bool(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """Class names, including "" for requests without a class."""
        names = tuple(entry.name for entry in self.classes)
        return names if "" in names else (*names, "")

    def name_of(
        self, key: str, prompt_tokens: int, headers: Mapping[str, str] = _NO_HEADERS,
        model: str = "",
    ) -> str:  # fmt: skip
        """Return a request's class; empty without one."""
        fits = (one.name for one in self.classes if one.matches(headers, key, model, prompt_tokens))
        return next(fits, "")

    def values_of(self, header: str) -> list[str]:
        """Return the values of a header by which requests choose a class."""
        pairs = (entry.header.partition("=") for entry in self.classes)
        return [value for name, _, value in pairs if name == header]

    def slo_of(self, name: str) -> Slo | None:
        """Return a class's objective; None without one."""
        return next((entry.slo for entry in self.classes if entry.name == name), self.slo)

    @property
    def queue_classes(self) -> dict[str, QueueClass]:
        """The classes as admission knows them."""
        return {
            one.name: QueueClass(
                concurrency=one.concurrency, lane=one.lane,
                ttft_ms=round(one.slo.ttft_s * 1000) if one.slo.ttft_s < math.inf else 0,
            )
            for one in self.classes
        }  # fmt: skip

    def chunk_of(self, model: str) -> int | None:
        """Return the least tokens per step that a class of a model wants; None for any."""
        chunks = [one.chunk for one in self.classes if one.chunk and one.model in ("", model)]
        return min(chunks, default=None)

    def attained(self, name: str, ttft_s: float | None, itl_s: float | None) -> bool:
        """True if a finished request is inside its class's objective."""
        slo = self.slo_of(name)
        return slo is None or slo.attained(ttft_s, itl_s)


def class_label(name: str) -> str:
    """Return a class for display: `default` for requests without one."""
    return name or "default"


class AttainmentCounter:
    """Counts offered and attained requests by class."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self.requests: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()

    def add(self, name: str, attained: bool) -> None:
        """Count a request; refused and failed ones do not attain."""
        self.requests[name] += 1
        self.inside[name] += attained

    def share(self, name: str) -> float:
        """Return a class's attained share; 1 if nothing was offered."""
        return _share(self.inside[name], self.requests[name])

    def document(self) -> dict[str, Any]:
        """Return the objectives and attained shares of offered requests."""
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
    return {
        "ttft_s": slo.ttft_s if slo.ttft_s < math.inf else None,
        "itl_s": slo.itl_s if slo.itl_s < math.inf else None,
        "percentile": slo.percentile,
    }


def _share(attained: int, count: int) -> float:
    return attained / count if count else 1.0
