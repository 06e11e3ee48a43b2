"""A mix of request lengths: shares, prompts and answers, and a prefix that all share."""

from __future__ import annotations

import re
from bisect import bisect
from itertools import accumulate, count, islice
from random import Random
from typing import Self

import msgspec

from pigou.config import ConfigError
from pigou.sim.arrival_rate import RateSchedule
from pigou.sim.workload import MAX_TOKENS, OpenLoop, RequestSpec, renewal

_PART = re.compile(r"([\d.]+):(\d+)/(\d+)")
#: Tokens of a block id.
_BLOCK = 16
#: Scope of the block ids.
_SCOPE = 2


class LengthMix(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a few lengths."""

    # share (they add up to 1), prompt tokens and output tokens of each kind.
    parts: tuple[tuple[float, int, int], ...]
    prefix: int = 0  # tokens at the beginning of each prompt that all have in common

    @classmethod
    def parse(cls, text: str) -> tuple[Self, str]:
        """Read `mix=0.7:512/128,0.3:4096/256[,prefix=N]`; return what else there is, too."""
        parts: list[tuple[float, int, int]] = []
        prefix, others = 0, []
        for item in text.removeprefix("mix=").split(","):
            match = _PART.fullmatch(item.strip())
            if match is not None:
                parts.append((float(match[1]), int(match[2]), int(match[3])))
            elif item.startswith("prefix="):
                prefix = _tokens("prefix", item.removeprefix("prefix="))
            elif "=" in item:
                others.append(item)
            else:
                raise ConfigError(f"mix has {item!r}; write SHARE:PROMPT/OUTPUT, like 0.7:512/128")
        for _, prompt, output in parts:
            if not 1 <= prompt <= MAX_TOKENS or not 1 <= output <= MAX_TOKENS:
                raise ConfigError(f"mix has {prompt}/{output}; tokens must be 1 to {MAX_TOKENS}")
        total = sum(share for share, _, _ in parts)
        if abs(total - 1.0) > 1e-6:
            raise ConfigError(f"mix: the shares add up to {total:g}; they must add up to 1")
        if parts and prefix >= min(prompt for _, prompt, _ in parts):
            raise ConfigError(f"mix: prefix is {prefix}; it must be below the shortest prompt")
        return cls(parts=tuple(parts), prefix=prefix), ",".join(others)

    def arrivals(
        self, rate: float | RateSchedule, cv: float, requests: int, seconds: float, seed: int
    ) -> OpenLoop:
        """Return requests at random times (`renewal_times`).

        Args:
            cv: standard deviation of a gap over its mean; 1 is Poisson.
            requests: at most; 0 takes all those of `seconds`.
            seconds: in which they are sent; 0 takes `requests` of them.
        """
        return renewal(_Sampler(self), rate, cv, requests, seconds, seed)


class _Sampler:
    """Draws requests of a mix; what follows the shared prefix is new in each prompt."""

    def __init__(self, mix: LengthMix) -> None:
        self._parts = mix.parts
        self._bounds = list(accumulate(share for share, _, _ in mix.parts))
        self._shared = tuple(range(mix.prefix // _BLOCK))
        self._fresh = count(len(self._shared))

    def sample(self, rng: Random) -> RequestSpec:
        """Return the next request."""
        kind = bisect(self._bounds, rng.random() * self._bounds[-1])
        _, prompt, output = self._parts[min(kind, len(self._parts) - 1)]
        if not self._shared:
            return RequestSpec(prompt, output)
        rest = islice(self._fresh, prompt // _BLOCK - len(self._shared))
        return RequestSpec(prompt, output, (*self._shared, *rest), _SCOPE, float(_BLOCK))


def _tokens(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"mix: {name} is {text!r}; it must be a number of tokens")
    return int(text)
