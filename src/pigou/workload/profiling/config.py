"""What a profile is asked to cover."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from pigou.config import ConfigError


class ProfileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One profile of one worker.

    Attributes:
        url: of the worker, with or without `/v1`; kept without.
        model: name to ask for; "" for the first that it lists.
        api_key: sent as a bearer token; "" sends none.
        max_batched_tokens: that the worker computes in a step; 0 asks it, and takes 2,048 where
            it does not say.
        max_seqs: most streams at once that are measured; 0 asks it, and takes 64 where it does not
            say.
        longest: most tokens of a request; 0 asks it.
        repeats: of each measurement, of which the median counts.
        steps: of each measurement of decodes.
        seed: of the prompts; None for others each time, as a worker's cache may still hold the
            last ones.
        timeout: seconds after which a request has failed.
        budget: seconds that all may take: fewer rounds, and fewer streams at once, are measured
            where they would take longer. 0 for no limit. The first round is always whole.
    """

    url: str
    model: str = ""
    api_key: str = ""
    max_batched_tokens: int = 0
    max_seqs: int = 0
    longest: int = 0
    repeats: int = 5
    steps: int = 32
    seed: int | None = None
    timeout: float = 120.0
    budget: float = 240.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL is {self.url!r}; write for example http://127.0.0.1:8100")
        for name, least in (
            ("max_batched_tokens", 0), ("max_seqs", 0), ("longest", 0), ("repeats", 1),
            ("steps", 4), ("seed", 0),
        ):  # fmt: skip
            if (getattr(self, name) or 0) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.longest and self.longest < 128:
            raise ConfigError(
                f"longest is {self.longest}; give at least 128, or 0 to ask the worker"
            )
        if not 0.0 <= self.budget < float("inf"):
            raise ConfigError(f"budget is {self.budget}; it must be at least 0 seconds")
        if not 0.0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout is {self.timeout}; it must be above 0 seconds")

    @property
    def base(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")
