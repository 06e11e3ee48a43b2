"""ServedModel: the served model, as the HTTP side sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pigou.config import ConfigError
from pigou.kv.tenure import Tenure, salt_expiry
from pigou.text.chat_template import ChatTemplate
from pigou.text.model_files import read_object
from pigou.text.reasoning import detect_family
from pigou.text.tokenizer import Tokenizer
from pigou.text.tool_calls import ParserName, detect_parser
from pigou.wire.sampling_params import Defaults, ModelLimits
from pigou.worker.adapters import AdapterStore

log = logging.getLogger(__name__)
#: Sampling values of a generation config: minimum, maximum, minimum inclusive.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, 2**31 - 1, True),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "json_close_after": (0, 2**31 - 1, True),
}
_WHOLE = ("top_k", "json_close_after")


@dataclass(frozen=True)
class ServedModel:
    """A model, by the name that requests use."""

    name: str
    root: str  # folder, or the requested name
    created: int  # load time, Unix seconds
    tokenizer: Tokenizer
    template: ChatTemplate | None  # for chats, if any
    eos: frozenset[int]  # tokens that end a sequence
    limits: ModelLimits
    defaults: Defaults  # sampling defaults
    seed: Callable[..., bytes]  # cache salt and adapter's key -> seed of block hashes
    release: str  # weights digest, part of all seeds
    tool_format: ParserName | None = None  # format of the model's own tool calls, if known
    reasoning: str | None = None  # family by which replies reason, if any
    pooling: str = "none"  # how hidden states are pooled to embeddings: last, mean or none
    dimensions: Sequence[int] = ()  # lengths that embeddings may be cut to
    adapters: AdapterStore | None = None

    def version(self, name: str | None) -> str:
        """Return the key of a LoRA adapter's version, or a key; empty for the model itself."""
        served = self.adapters.served.get(name or "") if self.adapters is not None else None
        return served.key if served is not None else "" if name in (None, self.name) else name or ""


def seeds(name: str, digest: str) -> Callable[..., bytes]:
    """Return the function from cache salt and adapter's key to block hash seed."""

    @lru_cache(maxsize=4096)
    def seed(salt: str, adapter: str = "") -> bytes:
        release = f"{digest}:{adapter}" if adapter else digest
        own = Tenure(model=name, release=release, cache_salt=salt, expiry=salt_expiry(salt))
        return own.digest()

    return seed


def read_spec(path: Path) -> dict[str, Any]:
    """Read a file of JSON in a model's folder; raises ConfigError."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Merge the model's chat templates; None without any."""
    return ChatTemplate.choose(tokenizer.templates, tokenizer.names)


def tool_format(template: ChatTemplate | None, option: str) -> ParserName | None:
    """Return the format of a model's tool calls."""
    if option == "auto":
        return detect_parser(None if template is None else template.identity)
    return None if option == "none" else cast("ParserName", option)


def reasoning_family(template: ChatTemplate | None, option: str) -> str | None:
    """Return the family of a model's reasoning."""
    if option == "auto":
        return detect_family(None if template is None else template.identity)
    return None if option == "none" else option


def sampling_defaults(generation: dict[str, Any]) -> Defaults:
    """Return the sampling defaults of `generation_config.json`, as vLLM reads them.

    `do_sample` is ignored, as in vLLM: temperature 0 is greedy. Invalid values are skipped with a
    warning, so that a faulty file does not block serving.
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
