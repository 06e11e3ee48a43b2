"""Effects of degraded modes on requests: cached answers, a smaller model, shorter answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from pigou.config import ConfigError
from pigou.control.degradation import DegradedMode, Mode
from pigou.gateway.caches.layers import SAMPLED, SEMANTIC, CacheControl
from pigou.gateway.gateway import Gateway
from pigou.gateway.model_routing import GatewayModel
from pigou.gateway.proxy.overflow import OVERFLOW_HEADER
from pigou.gateway.request import GatewayRun
from pigou.gateway.request_parsing import DEGRADED_HEADER

#: Tokens of a completion that does not say how many.
_DEFAULT_TOKENS = 16


def check_modes(gateway: Gateway) -> None:
    """Raise `ConfigError` for a smaller model that no request can name."""
    for mode in gateway.config.degrade:
        names = [model.name for model in gateway.routing if model.name]
        if mode.to and mode.to not in names:
            raise ConfigError(
                f"degrade: to is {mode.to!r}; it must be a model of --model-pool"
                + (f": {', '.join(names)}" if names else "")
            )


def active(
    name: Mode, run: GatewayRun, model: GatewayModel, headers: Mapping[str, str]
) -> DegradedMode | None:
    """Return a mode that is on for a request; None if not."""
    modes = model.plane_driver.degradation
    return None if DEGRADED_HEADER in headers else modes.active(name, run.workload)


def cache_control(
    own: CacheControl, cacheable: bool, run: GatewayRun, model: GatewayModel,
    headers: Mapping[str, str],
) -> CacheControl:  # fmt: skip
    """Return what a request may have of the cache of answers; `cacheable` without the mode.

    Where the mode is configured, sampled answers are stored. While it is on, they are found, and
    answers to similar questions too.
    """
    mode = model.plane_driver.degradation.modes.get("cached")
    if DEGRADED_HEADER in headers or mode is None or not mode.serves(run.workload):
        return own
    is_on = active("cached", run, model, headers) is not None
    return replace(
        own, reads=own.reads and (cacheable or is_on),
        wants=own.wants | ({SAMPLED, SEMANTIC} if is_on else {SAMPLED}),
    )  # fmt: skip


def replaces(run: GatewayRun, model: GatewayModel, headers: Mapping[str, str]) -> str:
    """Return the smaller model that answers a request; empty for its own."""
    mode = active("model", run, model, headers)
    if mode is None or run.parsed.adapter or OVERFLOW_HEADER in headers:
        return ""
    return mode.to if mode.to != model.name else ""


def shorten(run: GatewayRun, model: GatewayModel, headers: Mapping[str, str]) -> bool:
    """Cap a request's output tokens; False if it has none to spare.

    Tool calls and structured output stay whole.
    """
    mode, parsed = active("max_tokens", run, model, headers), run.parsed
    fields, body = parsed.fields, parsed.body
    if mode is None:
        return False
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = getattr(fields, name)
    if wanted is None and not parsed.chat:
        wanted = _DEFAULT_TOKENS
    formatted = fields.response_format is not None and fields.response_format.type != "text"
    shortest = body.get("min_tokens")
    shortest = msgspec.json.decode(shortest) if isinstance(shortest, msgspec.Raw) else shortest
    if (
        (wanted is not None and wanted <= mode.limit)
        or (formatted or fields.structured_outputs is not None or fields.tools)
        or (isinstance(shortest, int) and shortest > mode.limit)
    ):
        return False
    run.body = {**body, name: msgspec.Raw(msgspec.json.encode(mode.limit))}
    limited = msgspec.structs.replace(fields, **{name: mode.limit})
    run.parsed = replace(parsed, body=run.body, fields=limited, max_tokens=mode.limit)
    return True
