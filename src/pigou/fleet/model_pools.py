"""Several models behind one gateway: what is said of each, and of the workers that serve it."""

from __future__ import annotations

import re

import msgspec

from pigou.config import ConfigError
from pigou.gateway.config import Overflow

#: Seconds that a fallback may be worth: a day.
_MAX_PRICE_S = 86_400.0
#: Ends of the names of pools that no model's name has.
_KINDS = ("attached", "registered")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}", re.ASCII)


class ModelPoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several models behind a gateway, and the local workers of it.

    Attributes:
        prefill, decode, both: local workers to start; one for both where nobody says.
    """

    name: str
    model: str = ""  # folder, hub id or 'bundled'; empty for one that attached servers alone serve
    prefill: int = 0
    decode: int = 0
    both: int = 0
    device: str = ""  # of its workers; empty for that of all
    tokenizer: str = ""  # folder or hub id; by default where the workers say that the model is
    # another model pool, or the base URL of another fleet, for requests that find no worker free;
    # empty for none.
    overflow: str = ""
    overflow_price_s: float = 1.0  # what one of them is worth there, in seconds of waiting here
    overflow_key: str = ""  # bearer key of the other fleet

    def __post_init__(self) -> None:
        if not 0 <= self.overflow_price_s <= _MAX_PRICE_S:
            raise ConfigError(
                f"model_pool {self.name!r} has overflow_price_s={self.overflow_price_s}; it must "
                f"be 0 to {_MAX_PRICE_S:g} seconds"
            )
        if self.overflow_key and not self.overflow.startswith("http"):
            raise ConfigError(
                f"model_pool {self.name!r} has overflow_key, and no URL as overflow; leave it out"
            )
        if not _MODEL_NAME.fullmatch(self.name) or self.name.split(".")[-1] in _KINDS:
            raise ConfigError(
                f"model_pool is named {self.name[:80]!r}; a name has letters, digits and ._:/@-, "
                "and does not end in 'attached' or 'registered'"
            )
        if min(self.prefill, self.decode, self.both) < 0:
            raise ConfigError(f"model_pool {self.name!r} has fewer than 0 workers")
        if not self.model and (self.prefill or self.decode or self.both or self.device):
            raise ConfigError(
                f"model_pool {self.name!r} has workers to start, and no model=; give one, or "
                "attach servers that report it"
            )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Local workers to start for prefill, for decode, and for both."""
        given = self.prefill, self.decode, self.both
        return given if any(given) or not self.model else (0, 0, 1)


class DeclaredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a gateway serves."""

    name: str = ""  # that its workers report; empty where they may report any, all of them the same
    aliases: tuple[str, ...] = ()  # further names that requests may use
    tokenizer: str = ""  # folder or hub id; empty asks the workers
    overflow: Overflow | None = None  # where requests go that it cannot serve now; None for nowhere
