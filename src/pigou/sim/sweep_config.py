"""What `pigou sweep` measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from pigou.config import ConfigError
from pigou.config_option import option

_Number = TypeVar("_Number", int, float)
_GROUP = "Tables"
_MAX_CELLS = 10_000


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cells of the tables, each a simulation. Lists are numbers with commas."""

    isl: Annotated[
        str, option("Prompt tokens, as 512,2048.", _GROUP, flags=("--input", "--isl"))
    ] = "256,1024,4096"
    workers: Annotated[str, option("Sizes of the prefill pool.", _GROUP)] = "1,2,4"
    utilisation: Annotated[
        str, option("Loads of it, shares of what it computes at most.", _GROUP)
    ] = "0.3,0.5,0.7,0.8,0.9"
    requests: Annotated[int, option("Requests of each cell of that table.", _GROUP)] = 400
    concurrency: Annotated[str, option("Users of one decode worker; up to --max-seqs.", _GROUP)] = (
        "1,4,16,64,256"
    )
    contexts: Annotated[str, option("Tokens that its streams hold in the mean.", _GROUP)] = (
        "512,2048,8192"
    )
    osl: Annotated[
        int, option("Output tokens of these requests.", _GROUP, flags=("--output", "--osl"))
    ] = 128
    seed: Annotated[int, option("Of arrivals.", _GROUP)] = 0

    def __post_init__(self) -> None:
        cells = len(self.isls) * len(self.pool_sizes) * len(self.utilisations)
        cells += len(self.user_counts) * len(self.context_tokens)
        if cells > _MAX_CELLS:
            raise ConfigError(f"isl gives {cells:,} cells with the others; at most {_MAX_CELLS:,}")
        if not 10 <= self.requests <= 1_000_000:
            raise ConfigError(f"requests is {self.requests}; it must be 10 to 1000000")
        if not 2 <= self.osl <= 100_000:
            raise ConfigError(f"osl is {self.osl}; it must be 2 to 100000")
        if min(self.context_tokens) <= self.osl // 2:
            raise ConfigError(
                f"contexts is {self.contexts!r}; each must be above half of osl, {self.osl // 2}"
            )

    @property
    def isls(self) -> tuple[int, ...]:
        """Prompt tokens, rising."""
        return _numbers("isl", self.isl, int, 1, 10_000_000)

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Workers of the prefill pool, rising."""
        return _numbers("workers", self.workers, int, 1, 256)

    @property
    def utilisations(self) -> tuple[float, ...]:
        """Loads, rising."""
        return _numbers("utilisation", self.utilisation, float, 0.01, 0.99)

    @property
    def user_counts(self) -> tuple[int, ...]:
        """Users of one decode worker, rising."""
        return _numbers("concurrency", self.concurrency, int, 1, 100_000)

    @property
    def context_tokens(self) -> tuple[int, ...]:
        """Tokens that streams hold, rising."""
        return _numbers("contexts", self.contexts, int, 2, 10_000_000)

    def decode_cells(self, max_seqs: int, kv_tokens: float) -> list[tuple[int, int]]:
        """Return users and tokens that each holds, of the cells that a worker can hold."""
        return [
            (users, context)
            for context in self.context_tokens
            for users in self.user_counts
            if users <= max_seqs and users * (context + self.osl) <= kv_tokens
        ]


def _numbers(
    name: str, text: str, kind: Callable[[str], _Number], low: float, high: float
) -> tuple[_Number, ...]:
    """Read numbers with commas between them."""
    try:
        values = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; write numbers with commas") from None
    if not low <= values[0] <= values[-1] <= high:
        raise ConfigError(f"{name} is {text!r}; each must be {low:g} to {high:g}")
    return tuple(values)
