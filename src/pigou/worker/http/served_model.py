"""What the HTTP side knows of the model it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from pigou.kv.tenure import Tenure, salt_expiry
from pigou.text.chat_template import ChatTemplate
from pigou.text.tokenizer import Tokenizer
from pigou.text.tool_calls import ParserName, detect_parser
from pigou.wire.sampling_params import Defaults, ModelLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model, by the name that requests use."""

    name: str
    root: str  # where its files are, or what it was asked for as
    created: int  # Unix time in seconds at which it was loaded
    tokenizer: Tokenizer
    template: ChatTemplate | None  # for chats; None where the model has none
    eos: frozenset[int]  # tokens that end a sequence
    limits: ModelLimits
    defaults: Defaults  # sampling that holds where a request says nothing
    seed: Callable[[str], bytes]  # from a cache salt to the seed of block hashes
    release: str  # digest of its weights, which is in all seeds
    # in which it calls tools of its own accord; None where it is not known.
    tool_format: ParserName | None = None


def seeds(name: str, digest: str) -> Callable[[str], bytes]:
    """Return the function from a cache salt to the seed of block hashes."""

    @lru_cache(maxsize=4096)
    def seed(salt: str) -> bytes:
        own = Tenure(model=name, release=digest, cache_salt=salt, expiry=salt_expiry(salt))
        return own.digest()

    return seed


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the model's chat templates as one; None where it has none."""
    return ChatTemplate.choose(tokenizer.templates, tokenizer.names)


def tool_format(template: ChatTemplate | None, option: str) -> ParserName | None:
    """Return the format of a model's tool calls."""
    if option == "auto":
        return detect_parser(None if template is None else template.identity)
    return None if option == "none" else cast("ParserName", option)


#: Sampling values of a generation config: minimum, maximum, and whether the minimum is allowed.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "json_close_after": (0, 2**31 - 1, True),
}
_WHOLE = ("top_k", "json_close_after")


def sampling_defaults(generation: dict[str, Any]) -> Defaults:
    """Return the sampling that `generation_config.json` asks for, as vLLM reads it.

    `do_sample` is not looked at, as in vLLM: a temperature of 0 is greedy. A value that no
    request could ask for is left out with a warning, so that a published file with a slip does
    not keep its model from being served.
    """
    given: dict[str, Any] = {}
    for name, (low, high, inclusive) in _RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        if _is_within(value, low, high, inclusive) and (name not in _WHOLE or value == int(value)):
            given[name] = int(value) if name in _WHOLE else float(value)
            continue
        log.warning(
            "generation_config.json: %s is %r, which is left out; it must be in %s%g, %g]",
            name, value, "[" if inclusive else "(", low, high,
        )  # fmt: skip
    return Defaults(**given)


def _is_within(value: object, minimum: float, maximum: float, inclusive: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value <= maximum:
        return False
    return value >= minimum if inclusive else value > minimum
