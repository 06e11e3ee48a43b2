"""From a checked request to `SamplingParams`, given the prompt's length and the model's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pigou.request import Grammar, SamplingParams
from pigou.wire.errors import bad_field, bad_request
from pigou.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    PoolingRequest,
)
from pigou.wire.request_validation import scores_only

_N = TypeVar("_N", int, float)

#: Default `max_tokens` of a completion (OpenAI's).
COMPLETION_TOKENS = 16

#: Lowest positive temperature, computed exactly; lower ones are raised to it, as vLLM does.
MIN_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model."""

    max_model_len: int  # maximum tokens of a sequence, prompt and output
    vocab_size: int  # token ids are below this


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling defaults (the model's generation config)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    json_close_after: int = 0  # Pigou's own key: see `pigou.request.Grammar.close_after`


def sampling_params(
    request: GenerationRequest,
    prompt_tokens: int,
    limits: ModelLimits,
    defaults: Defaults,
    seed: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return a checked request's sampling parameters; raises APIError 400 if it cannot fit."""
    limit = max_tokens(request, prompt_tokens, limits.max_model_len)
    min_tokens = request.min_tokens or 0
    if min_tokens > limit:
        raise bad_field(
            "min_tokens", f"is {min_tokens}; it must be at most max_tokens, which is {limit} here."
        )
    temperature = _or(request.temperature, defaults.temperature)
    stop_ids = request.stop_token_ids or []
    bias = {int(key): value for key, value in (request.logit_bias or {}).items()}
    for field, what, ids in (("stop_token_ids", "", stop_ids), ("logit_bias", "the token ", bias)):
        for token in ids:
            if token >= limits.vocab_size:
                raise bad_field(
                    field, f"has {what}{token}; the vocabulary has {limits.vocab_size} tokens."
                )
    return SamplingParams(
        max_tokens=limit,
        min_tokens=min_tokens,
        temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        logprobs=logprobs(request),
        prompt_logprobs=prompt_logprobs(request),
        pooling=request.pooling if isinstance(request, PoolingRequest) else None,
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=bias,
        grammar=grammar,
    )


def max_tokens(request: GenerationRequest, prompt_tokens: int, max_model_len: int) -> int:
    """Return the output limit within the context (1 to score a prompt only); APIError 400."""
    room = max_model_len - prompt_tokens
    if scores_only(request) and room >= 1:
        return 1
    if room < 1:
        raise bad_request(
            f"The model's context is {max_model_len} tokens, and the prompt has {prompt_tokens}: "
            "shorten it, so that at least one token of output fits.",
            "messages" if isinstance(request, ChatRequest) else "prompt",
        )
    name, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        return room if isinstance(request, ChatRequest) else min(room, COMPLETION_TOKENS)
    if wanted > room:
        raise bad_field(
            name,
            f"is {wanted}; the model's context is {max_model_len} tokens, and the prompt "
            f"has {prompt_tokens}: ask for at most {room}, or shorten the prompt.",
        )
    return wanted


def logprobs(request: GenerationRequest) -> int | None:
    """Return how many alternatives to report beside each token; None for no report."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    if not isinstance(request, CompletionRequest) or request.logprobs is False:
        return None
    return None if request.logprobs is None else int(request.logprobs)


def prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return the same for tokens of the prompt; echo with logprobs wants them, too."""
    if request.prompt_logprobs is None and isinstance(request, CompletionRequest) and request.echo:
        return logprobs(request)
    return request.prompt_logprobs


def _or(value: _N | None, default: _N) -> _N:
    return default if value is None else value
