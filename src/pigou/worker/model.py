"""What the HTTP side knows of the model it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pigou.config import ConfigError
from pigou.kv.tenure import Tenure, salt_expiry
from pigou.text.template import ChatTemplate
from pigou.text.tokenizer import Tokenizer
from pigou.wire.sampling import Defaults, Limits


@dataclass(frozen=True)
class ServedModel:
    """A model, by the name that requests use.

    Attributes:
        name: that requests use.
        root: where its files are, or what it was asked for as.
        created: Unix time in seconds at which it was loaded.
        tokenizer: of the model.
        template: for chats; None where the model has none.
        eos: tokens that end a sequence.
        limits: of context and vocabulary.
        defaults: sampling that holds where a request says nothing.
        seed: from a cache salt to the seed of block hashes.
        release: digest of its weights, which is in all seeds.
    """

    name: str
    root: str
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos: frozenset[int]
    limits: Limits
    defaults: Defaults
    seed: Callable[[str], bytes]
    release: str


def seeds(name: str, digest: str) -> Callable[[str], bytes]:
    """Return the function from a cache salt to the seed of block hashes.

    Args:
        name: of the model.
        digest: of its weights.
    """

    @lru_cache(maxsize=4096)
    def seed(salt: str) -> bytes:
        own = Tenure(model=name, release=digest, cache_salt=salt, expiry=salt_expiry(salt))
        return own.digest()

    return seed


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the model's chat templates as one; None where it has none."""
    return ChatTemplate.choose(tokenizer.templates, tokenizer.names)


def sampling_defaults(generation: dict[str, Any]) -> Defaults:
    """Return the sampling that `generation_config.json` asks for, as vLLM reads it.

    Raises:
        ConfigError: a value is out of range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    defaults = Defaults(**given)
    if not (0 <= defaults.temperature <= 2 and 0 < defaults.top_p <= 1 and defaults.top_k >= -1):
        raise ConfigError(f"generation_config.json asks for {given}; a value is out of range")
    return defaults
