"""What runs of the load client, and profiles of a worker, are asked to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields, is_http_url, option
from pigou.objectives import Slo

if TYPE_CHECKING:
    import numpy as np

    from pigou.sim.arrival_rate import RateSchedule

_LENGTHS = re.compile(r"(\d+)(?::(\d+))?", re.ASCII)
_REQUESTS = 100


@dataclass(frozen=True)
class LengthRange:
    """Numbers of tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> LengthRange:
        """Parse `N` or `MIN:MAX`; raises ConfigError with the option's name."""
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


class EndpointConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoint that a command measures."""

    url: Annotated[str, option("Endpoint or worker, as http://127.0.0.1:8000.", argument=True)]
    model: Annotated[str, option("Model name; by default the first one listed.", "Endpoint")] = ""
    api_key: Annotated[
        str,
        option(
            "API key, sent as bearer token.",
            "Endpoint",
            variables=("PIGOU_API_KEY", "OPENAI_API_KEY"),
            show_default=False,
        ),
    ] = ""

    def __post_init__(self) -> None:
        if not is_http_url(self.url):
            raise ConfigError(
                f"the URL is {self.url!r}; write for example http://127.0.0.1:8000 or https://host"
            )
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            raise ConfigError("the URL holds a user or a password; use --api-key")
        if parts.query or parts.fragment:
            raise ConfigError(f"the URL is {self.url!r}; leave out what follows the path")

    @property
    def base(self) -> str:
        """The endpoint's URL, without `/v1` and without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


class ProfileConfig(EndpointConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One profile of one worker."""

    max_batched_tokens: Annotated[
        int, option("Tokens that the worker computes per step; 0 asks it (2048 if unknown).")
    ] = 0
    max_seqs: Annotated[
        int, option("Maximum of concurrent streams to measure; 0 asks the worker (64 if unknown).")
    ] = 0
    max_request_tokens: Annotated[
        int,
        option(
            "Maximum of tokens per request; 0 asks the worker (2048 if unknown).",
            name="max_model_len",
            flags=("--max-model-len", "--longest"),
        ),
    ] = 0
    repeats: Annotated[int, option("Repetitions of each measurement; the median counts.")] = 5
    steps: Annotated[int, option("Steps of each decode measurement.")] = 32
    seed: Annotated[int | None, option("Seed of the prompts; by default random.")] = None
    timeout: Annotated[float, option("Seconds after which a request fails.")] = 120.0
    budget: Annotated[
        float,
        option(
            "Time limit in seconds: it measures fewer rounds and streams to stay inside, but one "
            "whole round at least; 0 for no limit."
        ),
    ] = 240.0

    def __post_init__(self) -> None:
        EndpointConfig.__post_init__(self)
        check_fields(self, "max_batched_tokens", "max_seqs", "max_request_tokens", ge=0)
        check_bounds("repeats", self.repeats, ge=1)
        check_bounds("steps", self.steps, ge=4)
        if self.seed is not None:
            check_bounds("seed", self.seed, ge=0)
        if self.max_request_tokens and self.max_request_tokens < 128:
            raise ConfigError(
                f"max_request_tokens is {self.max_request_tokens}; give at least 128, or 0 "
                "to ask the worker"
            )
        check_bounds("budget", self.budget, ge=0, unit=" seconds")
        check_bounds("timeout", self.timeout, gt=0, unit=" seconds")


class BenchConfig(EndpointConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run of the load client."""

    chat: Annotated[bool, option("Send chat completions.", "Endpoint", flags=("--chat",))] = False
    concurrency: Annotated[
        int | None,
        option("Closed loop: requests always in flight. (default: 1 without --rate)", "Load"),
    ] = None
    rate: Annotated[
        float | str | None,
        option(
            "Open loop: requests per second, or 5@0/20@60 (20 from second 60 on), or a CSV file.",
            "Load",
            form="rate",
        ),
    ] = None
    cv: Annotated[
        float | None,
        option(
            "Variation (CV) of gamma-distributed gaps; 0 is even. (default: 1, Poisson)", "Load"
        ),
    ] = None
    max_inflight: Annotated[
        int | None,
        option("Maximum of requests in flight; the wait counts as client queue wait.", "Load"),
    ] = None
    requests: Annotated[
        int | None,
        option("Requests to send. (default: 100 without --duration)", "Load", name="count"),
    ] = None
    duration: Annotated[float | None, option("Seconds to send requests in.", "Load")] = None
    warmup: Annotated[int, option("Requests sent first, which are not measured.", "Load")] = 0
    input: Annotated[str, option("Prompt tokens: N or MIN:MAX.", "Prompts")] = "512"
    output: Annotated[str, option("Output tokens to ask for: N or MIN:MAX.", "Prompts")] = "128"
    ignore_eos: Annotated[
        bool | None,
        option(
            "Generate past the end token. (default: if the endpoint supports it)",
            "Prompts",
            flags=("--ignore-eos/--no-ignore-eos",),
        ),
    ] = None
    text: Annotated[str, option("Text file to take prompts from.", "Prompts")] = ""
    prefixes: Annotated[
        int, option("Number of shared prefixes; each prompt begins with one, at random.", "Prompts")
    ] = 0
    prefix_length: Annotated[int, option("Tokens per prefix, besides --input.", "Prompts")] = 0
    trace: Annotated[
        str, option("Recorded sessions to replay: Mooncake, Azure or agent traces.", "Trace")
    ] = ""
    trace_scale: Annotated[float, option("Factor on the trace's lengths.", "Trace")] = 1.0
    trace_speed: Annotated[float, option("Divisor of the trace's times.", "Trace")] = 1.0
    trace_block: Annotated[
        float,
        option("Tokens per block if the trace does not say; 0 for what fits all rows.", "Trace"),
    ] = 0.0
    trace_unit: Annotated[
        str, option("Unit of the times in Mooncake's format: s, ms, us, ns; else ms.", "Trace")
    ] = ""
    sessions: Annotated[
        int | None, option("Sessions of the trace to replay. (default: all)", "Trace")
    ] = None
    seed: Annotated[int, option("Seed of arrivals, prompts and lengths.", "Load")] = 0
    timeout: Annotated[float, option("Seconds after which a request fails.", "Endpoint")] = 600.0
    slo: Annotated[
        str, option("Objective (SLO) to report attainment of: ttft=500ms,itl=40ms.", "Results")
    ] = ""

    def __post_init__(self) -> None:
        self._check_conflicts()
        check_bounds("--count", 1 if self.requests is None else self.requests, ge=1)
        for minimum, names in (
            (1, ("concurrency", "max_inflight", "sessions")),
            (0, ("warmup", "prefixes", "prefix_length", "seed")),
        ):
            for name in names:
                if (value := getattr(self, name)) is not None:
                    check_bounds(f"--{name.replace('_', '-')}", value, ge=minimum)
        for name in ("rate", "duration", "timeout", "trace_scale", "trace_speed"):
            if not isinstance(value := getattr(self, name), str | None):
                check_bounds(f"--{name.replace('_', '-')}", value, gt=0)
        from pigou.sim.arrival_rate import check_cv  # here, as it loads compiled kernels

        check_cv("--cv", self.cv or 0.0)
        self.inputs, self.outputs, self.arrivals, self.objective  # noqa: B018  (they raise where they are wrong)
        EndpointConfig.__post_init__(self)

    def _check_conflicts(self) -> None:
        conflicts = (
            (self.rate is not None and self.concurrency is not None,
             "--rate (open loop) and --concurrency (closed loop) exclude one another; give one"),
            (self.cv is not None and self.rate is None,
             "--cv shapes the arrivals of an open loop; give --rate with it"),
            (self.max_inflight is not None and self.rate is None,
             "--max-inflight bounds an open loop; without --rate use --concurrency"),
            (self.requests is not None and self.duration is not None,
             "--count and --duration both say when to end; give one"),
            (bool(self.prefixes) != bool(self.prefix_length),
             "--prefixes and --prefix-length go together; give both"),
            (bool(self.trace) and (bool(self.text) or self.chat or bool(self.prefixes)),
             "--trace gives the prompts, as token ids; leave out --text, --chat and --prefixes"),
            (bool(self.trace) and any((self.requests, self.duration, self.max_inflight)),
             "--trace says how much is sent; choose with --sessions, and leave out --count, "
             "--duration and --max-inflight"),
            (not self.trace and self.sessions is not None,
             "--sessions chooses among those of a --trace; give one"),
            (not self.trace and (self.trace_scale != 1.0 or self.trace_speed != 1.0
                                 or self.trace_block or self.trace_unit),
             "--trace-scale, -speed, -block and -unit are of a --trace; give one")
        )  # fmt: skip
        for wrong, message in conflicts:
            if wrong:
                raise ConfigError(message)

    @property
    def objective(self) -> Slo | None:
        """Parsed `slo`, or None."""
        try:
            return Slo.parse(self.slo) if self.slo else None
        except ConfigError as error:
            raise ConfigError(f"--slo is {self.slo!r}: {error}") from None

    @property
    def inputs(self) -> LengthRange:
        """Tokens of a prompt, without a shared prefix."""
        return LengthRange.parse("--input", self.input)

    @property
    def outputs(self) -> LengthRange:
        """Tokens asked for."""
        return LengthRange.parse("--output", self.output)

    @property
    def arrivals(self) -> float | RateSchedule | None:
        """Requests per second, or their schedule; None for a closed loop."""
        from pigou.sim.arrival_rate import read_rate

        if not isinstance(self.rate, str):
            return self.rate
        try:
            return read_rate(self.rate)
        except ConfigError as error:
            raise ConfigError(f"--{error}") from None

    @property
    def count(self) -> int | None:
        """Requests to send; None when the duration decides, or the end of a schedule."""
        if self.duration is not None:
            return None
        arrivals = self.arrivals if self.requests is None else None
        schedule = None if isinstance(arrivals, int | float) else arrivals
        if schedule is not None and schedule.is_finite:
            return None
        return self.requests or _REQUESTS

    @property
    def slots(self) -> int:
        """Requests in flight of the closed loop."""
        return self.concurrency or 1


class SweepTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An otherwise idle live fleet to sweep; none without a URL."""

    url: Annotated[
        str,
        option(
            "Live fleet to measure, otherwise idle, in place of a simulated one; give "
            "--workers N, --blocks and the like as it has them.",
            "Live fleet",
        ),
    ] = ""
    decode_workers: Annotated[int, option("Decode workers of the live fleet.", "Live fleet")] = 1
    api_key: Annotated[
        str,
        option(
            "API key, sent as bearer token.",
            "Live fleet",
            variables=("PIGOU_API_KEY",),
            show_default=False,
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_bounds("decode_workers", self.decode_workers, ge=1)
        if not self.url and self.decode_workers != 1:
            raise ConfigError(
                f"decode_workers is {self.decode_workers}; it goes with --url, give that"
            )
