"""What a run of the load client is asked to do."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import numpy as np

from pigou.config import ConfigError
from pigou.sim.workload import LEAST_CV, MOST_CV

_LENGTHS = re.compile(r"(\d+)(?::(\d+))?", re.ASCII)
_REQUESTS = 100


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Lengths:
        """Read `N` or `MIN:MAX`; raises ConfigError, which names the option, for anything else."""
        match = _LENGTHS.fullmatch(text.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high:
            raise ConfigError(
                f"{name} is {text!r}; write N or MIN:MAX, tokens from 1 up, for example 128 or "
                "64:512"
            )
        return cls(low, high)

    def draw(self, rng: np.random.Generator) -> int:
        """Return one length."""
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class BenchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run of the load client.

    Attributes:
        url: of the endpoint, with or without `/v1`; kept without.
        model: name to ask for; "" for the first that the endpoint lists.
        api_key: sent as a bearer token; "" sends none.
        chat: chat completions, not completions.
        concurrency: requests always in flight (closed loop); 1 when `rate` is not given either.
        rate: requests per second (open loop).
        cv: coefficient of variation of the gaps between arrivals (default 1: Poisson).
        max_inflight: most requests of an open loop in flight at once; None for no limit.
        requests: how many are sent; 100 when `duration` is not given either.
        duration: seconds in which requests are sent; those under way then are waited for.
        warmup: requests sent before, which are not measured.
        input: tokens of a prompt, a shared prefix not counted.
        output: tokens asked for.
        ignore_eos: go on past the end token; None asks for it where the endpoint knows it.
        text: file whose passages are the prompts; "" makes them from common words.
        prefixes: shared prefixes, of which each prompt gets one at random in front; 0 for none.
        prefix_length: tokens of each.
        trace: file with recorded sessions, which give prompts, lengths and times; "" for none.
        trace_scale: lengths of the trace are multiplied by this.
        trace_speed: times of the trace are divided by this.
        sessions: of the trace, the first so many; None for all.
        seed: of arrivals, prompts and lengths.
        timeout: seconds after which a request that was sent has failed.
    """

    url: str
    model: str = ""
    api_key: str = ""
    chat: bool = False
    concurrency: int | None = None
    rate: float | None = None
    cv: float | None = None
    max_inflight: int | None = None
    requests: int | None = None
    duration: float | None = None
    warmup: int = 0
    input: str = "512"
    output: str = "128"
    ignore_eos: bool | None = None
    text: str = ""
    prefixes: int = 0
    prefix_length: int = 0
    trace: str = ""
    trace_scale: float = 1.0
    trace_speed: float = 1.0
    sessions: int | None = None
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what contradicts itself, and values out of range."""
        self._check_conflicts()
        for name in ("concurrency", "max_inflight", "requests", "sessions"):
            _least(name, getattr(self, name), 1)
        for name in ("warmup", "prefixes", "prefix_length", "seed"):
            _least(name, getattr(self, name), 0)
        for name in ("rate", "duration", "timeout", "trace_scale", "trace_speed"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        if self.cv and not LEAST_CV <= self.cv <= MOST_CV:
            raise ConfigError(
                f"--cv is {self.cv}; it must be 0 (even gaps), or {LEAST_CV:g} to {MOST_CV:g}"
            )
        self.inputs, self.outputs  # noqa: B018  (they raise when they cannot be read)
        self._check_url()

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # brackets that do not close, a port that is no number
            usable = False
        if not usable:
            raise ConfigError(
                f"the URL is {self.url!r}; write for example http://127.0.0.1:8000 or https://host"
            )
        if parts.username or parts.password:
            raise ConfigError("the URL holds a user or a password; use --api-key")
        if parts.query or parts.fragment:
            raise ConfigError(f"the URL is {self.url!r}; leave out what follows the path")

    def _check_conflicts(self) -> None:
        conflicts = (
            (self.rate is not None and self.concurrency is not None,
             "--rate (open loop) and --concurrency (closed loop) exclude one another; give one"),
            (self.cv is not None and self.rate is None,
             "--cv shapes the arrivals of an open loop; give --rate with it"),
            (self.max_inflight is not None and self.rate is None,
             "--max-inflight bounds an open loop; without --rate use --concurrency"),
            (self.requests is not None and self.duration is not None,
             "--requests and --duration both say when to end; give one"),
            (bool(self.prefixes) != bool(self.prefix_length),
             "--prefixes and --prefix-length go together; give both"),
            (bool(self.trace) and (bool(self.text) or self.chat or bool(self.prefixes)),
             "--trace gives the prompts, as token ids; leave out --text, --chat and --prefixes"),
            (bool(self.trace) and any((self.requests, self.duration, self.max_inflight)),
             "--trace says how much is sent; choose with --sessions, and leave out --requests, "
             "--duration and --max-inflight"),
            (not self.trace and self.sessions is not None,
             "--sessions chooses among those of a --trace; give one"),
            (not self.trace and (self.trace_scale != 1.0 or self.trace_speed != 1.0),
             "--trace-scale and --trace-speed change a --trace; give one"),
        )  # fmt: skip
        for wrong, message in conflicts:
            if wrong:
                raise ConfigError(message)

    @property
    def base(self) -> str:
        """The endpoint's URL, without `/v1` and without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def inputs(self) -> Lengths:
        """Tokens of a prompt, without a shared prefix."""
        return Lengths.parse("--input", self.input)

    @property
    def outputs(self) -> Lengths:
        """Tokens asked for."""
        return Lengths.parse("--output", self.output)

    @property
    def count(self) -> int | None:
        """Requests to send; None when the duration decides."""
        return (self.requests or _REQUESTS) if self.duration is None else None

    @property
    def slots(self) -> int:
        """Requests in flight of the closed loop."""
        return self.concurrency or 1


def _least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
