"""What a profile is asked to cover."""

from __future__ import annotations

from typing import Annotated

from pigou.config import ConfigError, check_bounds, option
from pigou.workload.bench_config import EndpointConfig


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
        for name, minimum in (
            ("max_batched_tokens", 0), ("max_seqs", 0), ("max_request_tokens", 0), ("repeats", 1),
            ("steps", 4), ("seed", 0)
        ):  # fmt: skip
            value = getattr(self, name)
            check_bounds(name, minimum if value is None else value, ge=minimum)
        if self.max_request_tokens and self.max_request_tokens < 128:
            raise ConfigError(
                f"max_request_tokens is {self.max_request_tokens}; give at least 128, or 0 "
                "to ask the worker"
            )
        check_bounds("budget", self.budget, ge=0, unit=" seconds")
        check_bounds("timeout", self.timeout, gt=0, unit=" seconds")
