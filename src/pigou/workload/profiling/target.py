"""The worker that is measured: its limits, and prompts that it has not seen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from pigou.wire.metrics_text import RUNNING, WAITING, cache_config, totals
from pigou.workload.api_flavour import ApiFlavour
from pigou.workload.endpoint import EndpointError, find_flavour, find_model, tokenize
from pigou.workload.endpoint_client import EndpointClient, read_answer
from pigou.workload.profiling.profile_config import ProfileConfig
from pigou.workload.prompts import WORDS, PromptJob
from pigou.workload.request_outcome import SentRequest, Stream

_TOKENS, _SEQS, _MAX_REQUEST_TOKENS = 2048, 64, 2048


@dataclass(frozen=True)
class Limits:
    """What a worker can hold."""

    tokens: int  # that it computes in a step, at most
    seqs: int  # that it runs at once, at most
    max_request_tokens: int  # prompt and output of a request
    room: int  # tokens that its KV cache holds
    block: int  # tokens in a block of it
    repeat: int = 1  # steps that it plans at once, as long as its sequences do not change
    blocks: int = 0  # of its KV cache; 0 where it does not say


@dataclass(frozen=True)
class Target:
    """A worker, and how it is asked."""

    client: EndpointClient
    limits: Limits
    vocabulary: list[int]  # token ids that prompts are made of
    rng: np.random.Generator

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that shares no prefix with any before."""
        drawn = self.rng.choice(self.vocabulary, size=tokens)
        return [int(token) for token in drawn]

    async def ask(self, prompt: list[int], output: int) -> tuple[SentRequest, Stream]:
        """Send a request.

        Raises:
            EndpointError: it failed.
        """
        outcome = await self.client.send(PromptJob(prompt, output), 0)
        if not isinstance(outcome.result, Stream):
            failure = outcome.result
            raise EndpointError(
                f"a prompt of {len(prompt)} tokens with {output} to come failed: "
                f"{failure.reason}: {failure.detail}"
            )
        return outcome, outcome.result

    async def ask_all(
        self, prompts: list[list[int]], output: int
    ) -> list[tuple[SentRequest, Stream]]:
        """Send requests at once."""
        return list(await asyncio.gather(*(self.ask(prompt, output) for prompt in prompts)))


async def find_target(config: ProfileConfig, session: aiohttp.ClientSession) -> Target:
    """Ask a worker what it is.

    Raises:
        EndpointError: it is not there, is busy, or takes no token ids.
    """
    card = await find_model(session, config.base, config.model)
    client = EndpointClient(session, config.base, card.id, ApiFlavour(), timeout=config.timeout)
    words = await tokenize(session, config.base, card.id, " " + " ".join(WORDS))
    if words is None:
        raise EndpointError(f"{config.base} has no /tokenize: prompts are sent as token ids")
    probe = PromptJob(words[:8], 1)
    client = EndpointClient(
        session, config.base, card.id, await find_flavour(client, probe, True),
        timeout=config.timeout,
    )  # fmt: skip
    said = await _read(session, f"{config.base}/server_info")
    about = _about(said)
    page = await _read(session, f"{config.base}/metrics")
    if any(totals(page, (RUNNING, WAITING)).values()):
        raise EndpointError(f"{config.base} is busy; measure it while it has nothing else to do")
    limits = _limits(config, about, cache_config(page), card.max_model_len)
    return Target(client, limits, sorted(set(words)), np.random.default_rng(config.seed))


def _about(said: bytes) -> dict[str, Any]:
    """Return what `/server_info` says; nothing where that is no JSON object."""
    try:
        return msgspec.json.decode(said, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _count(value: object) -> int:
    """Return a whole number from 0 up; 0 for what is none."""
    return value if type(value) is int and value > 0 else 0


def _limits(
    config: ProfileConfig, about: dict[str, Any], cache: dict[str, int], max_model_len: int | None
) -> Limits:
    block = _count(about.get("block_size")) or (cache.get("block_size") or 16)
    blocks = _count(about.get("blocks")) or cache.get("num_gpu_blocks", 0)
    max_request_tokens = min(
        limit
        for limit in (config.max_request_tokens, max_model_len or _MAX_REQUEST_TOKENS)
        if limit
    )
    return Limits(
        tokens=config.max_batched_tokens or (_count(about.get("max_batched_tokens")) or _TOKENS),
        seqs=config.max_seqs or min(_SEQS, _count(about.get("max_seqs")) or _SEQS),
        max_request_tokens=max_request_tokens,
        room=blocks * block or max_request_tokens,
        block=block,
        repeat=max(1, _count(about.get("repeat"))),
        blocks=blocks,
    )


async def _read(session: aiohttp.ClientSession, url: str) -> bytes:
    try:
        async with asyncio.timeout(30.0), session.get(url) as reply:
            return await read_answer(reply) if reply.status == 200 else b""
    except (aiohttp.ClientError, OSError) as error:
        raise EndpointError(f"{url} does not answer: {error or type(error).__name__}") from error
