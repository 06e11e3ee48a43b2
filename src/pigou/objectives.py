"""Objectives of requests, their attainment, and the limits and times that a planner is given."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pigou.config import ConfigError
from pigou.registry import read_struct

_INF = float("inf")
_LATENCY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|inf")
_NO_HEADERS: Mapping[str, str] = {}
#: Seconds in a unit of latency.
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
#: Seconds beyond which a latency without a unit is taken for milliseconds, and asked back.
_MAX_BARE_S = {"ttft": 100.0, "itl": 10.0}


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A service level objective: a share of *offered* requests is inside both latencies."""

    ttft_s: float = _INF  # seconds to the first token, above 0; infinity for no objective
    # seconds between tokens, the mean of a request, above 0; infinity for no objective.
    itl_s: float = _INF
    # per cent of the offered requests that shall be inside both, 0 to under 100.
    percentile: float = 95.0

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
        """Whether a request is inside both; no first token is outside, no ITL inside."""
        if ttft_s is None or not ttft_s <= self.ttft_s:
            return False
        return itl_s is None or itl_s <= self.itl_s

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=500ms,itl=30ms[,percentile=95]`; `tpot` is `itl`, seconds need no unit.

        Raises:
            ConfigError: a key is not known, is given twice, or its value does not fit.
        """
        keys = {"ttft": "ttft_s", "itl": "itl_s", "tpot": "itl_s", "percentile": "percentile"}
        values: dict[str, Any] = {}
        for item in text.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            field = keys.get(key)
            if field is None or not equals:
                raise ConfigError(
                    f"slo has {item!r}; give ttft=500ms,itl=40ms[,percentile=95], times in ms or s"
                )
            if field in values:
                raise ConfigError(f"slo gives {key} twice")
            values[field] = value.removesuffix("%") if field == key else latency_s(key, value)
        return read_struct("slo", cls, values)


def latency_s(name: str, value: float | str) -> float:
    """Return the seconds of a latency: a number of seconds, or text like `500ms` or `0.5s`.

    Raises:
        ConfigError: it is no latency, or a bare number that likely means milliseconds.
    """
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
    """A class of requests with an objective of its own: those that fit all that is given."""

    name: str = ""
    slo: Slo = msgspec.field(default_factory=Slo)
    weight: float = 1.0  # what a second of its delay counts for, above 0
    header: str = ""  # `name=value` of an HTTP header, the name in small letters; "" for any
    key: str = ""  # id of the API key; "" for any
    model: str = ""
    min_prompt_tokens: int = 0  # range of prompts, both ends counted
    max_prompt_tokens: int = 2**62

    def __post_init__(self) -> None:
        if not 0 < self.weight < _INF:
            raise ValueError(f"weight is {self.weight}; it must be finite and above 0")
        if self.header and "=" not in self.header:
            raise ValueError(f"header is {self.header!r}; give name=value")
        if not 0 <= self.min_prompt_tokens <= self.max_prompt_tokens:
            raise ValueError("give 0 <= min_prompt_tokens <= max_prompt_tokens")

    def matches(self, headers: Mapping[str, str], key: str, model: str, prompt_tokens: int) -> bool:
        """Whether a request belongs here; names of headers are in small letters."""
        if self.header:
            name, _, value = self.header.partition("=")
            if headers.get(name) != value:
                return False
        if (self.key and self.key != key) or (self.model and self.model != model):
            return False
        return self.min_prompt_tokens <= prompt_tokens <= self.max_prompt_tokens


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the fleet. GPUs of starting and of draining workers count."""

    max_gpus: int | None = None  # of all pools together; None for no limit
    pool_gpus: dict[str, int] = {}  # most of one pool, by its name
    model_gpus: dict[str, int] = {}  # most of one model's pools together, by the model
    min_workers: int = 1  # fewest that a pool keeps, starting ones counted
    pool_min_workers: dict[str, int] = {}  # the same by the pool's name; others have `min_workers`

    def __post_init__(self) -> None:
        limits = {"max_gpus": self.max_gpus, "min_workers": self.min_workers}
        limits |= {f"pool_gpus of {pool!r}": gpus for pool, gpus in self.pool_gpus.items()}
        limits |= {f"model_gpus of {model!r}": gpus for model, gpus in self.model_gpus.items()}
        limits |= {f"pool_min_workers of {k!r}": v for k, v in self.pool_min_workers.items()}
        for name, value in limits.items():
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")

    def min_of(self, pool: str) -> int:
        """Return the fewest workers that a pool keeps."""
        return self.pool_min_workers.get(pool, self.min_workers)


class ProvisioningTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds that changes of a fleet take; at least 0."""

    start_up_s: float = 100.0  # from an order to a worker that is ready
    warm_up_s: float = 10.0  # after that, in which its speed is not representative
    drain_s: float = 10.0
    flip_s: float = _INF  # that a change of role takes, its drain counted; infinity where none can
    # after an order, when a worker that did not start counts as one that cannot; None for three
    # times `start_up_s`, at least 30.
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

    def name_of(
        self, key: str, prompt_tokens: int, headers: Mapping[str, str] = _NO_HEADERS,
        model: str = "",
    ) -> str:  # fmt: skip
        """Return the name of a request's class; empty where it belongs to none."""
        fits = (one.name for one in self.classes if one.matches(headers, key, model, prompt_tokens))
        return next(fits, "")

    def slo_of(self, name: str) -> Slo | None:
        """Return the objective of the class of this name; None where it has none."""
        return next((entry.slo for entry in self.classes if entry.name == name), self.slo)

    def attained(self, name: str, ttft_s: float | None, itl_s: float | None) -> bool:
        """Whether a request that is done is inside the objective of its class."""
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
        """Return the objectives, and the shares of offered requests that attained them."""
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
