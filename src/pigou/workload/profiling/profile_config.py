"""What a profile is asked to cover."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from pigou.config import ConfigError, check_bounds
from pigou.config_option import option


class ProfileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One profile of one worker."""

    url: Annotated[str, option("The worker, like http://127.0.0.1:8100.", argument=True)]
    model: Annotated[str, option("Name; by default the first that it lists.")] = ""
    api_key: Annotated[
        str,
        option(
            "Sent as bearer token.",
            variables=("PIGOU_API_KEY", "OPENAI_API_KEY"),
            show_default=False,
        ),
    ] = ""
    max_batched_tokens: Annotated[
        int, option("Tokens that it computes in a step; 0 asks it. (unknown: 2048)")
    ] = 0
    max_seqs: Annotated[
        int, option("Most streams at once to measure; 0 asks it. (unknown: 64)")
    ] = 0
    max_request_tokens: Annotated[
        int,
        option(
            "Most tokens of a request; 0 asks it. (unknown: 2048)",
            name="max_model_len",
            flags=("--max-model-len", "--longest"),
        ),
    ] = 0
    repeats: Annotated[int, option("Of each measurement; their median counts.")] = 5
    steps: Annotated[int, option("Of each measurement of decodes.")] = 32
    seed: Annotated[int | None, option("Of the prompts; by default they are others each time.")] = (
        None
    )
    timeout: Annotated[float, option("Seconds after which a request failed.")] = 120.0
    budget: Annotated[
        float,
        option(
            "Seconds that it may take: fewer rounds and streams are measured where they would "
            "take longer; 0 for no limit. The first round is always whole."
        ),
    ] = 240.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL is {self.url!r}; write for example http://127.0.0.1:8100")
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

    @property
    def base(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")
