"""What the load client asks an endpoint before it loads it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from pigou.workload.api_flavour import ApiFlavour
from pigou.workload.endpoint_client import EndpointClient, read_answer
from pigou.workload.prompts import PromptJob
from pigou.workload.request_outcome import Failure

_REFUSED = ("HTTP 400", "HTTP 422")
_CARD_SECONDS = 30.0
_T = TypeVar("_T")


class EndpointError(Exception):
    """The endpoint cannot be loaded as asked; says what it answered."""


@dataclass(frozen=True)
class ModelCard:
    """A served model."""

    id: str
    # most tokens of a prompt and its output; None when the endpoint does not say.
    max_model_len: int | None = None
    parent: str | None = None  # the model that an adapter belongs to; None for a model


class _ModelList(msgspec.Struct):
    data: list[ModelCard]


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def find_model(session: aiohttp.ClientSession, base: str, name: str) -> ModelCard:
    """Return the card of the named model, or of the first that is no adapter.

    A name that is not listed gets a bare card.

    Raises:
        EndpointError: the endpoint is not there, or no name was given and it lists no model.
    """
    reply = await _request(session, "GET", f"{base}/v1/models")
    models = _decode(reply, _ModelList)
    cards = models.data if models else []
    if name:
        return next((card for card in cards if card.id == name), ModelCard(name))
    if not cards:
        answer = reply[1][:200].decode(errors="replace")
        raise EndpointError(
            f"{base}/v1/models lists no model ({reply[0]}: {answer}); name one with --model"
        )
    return next((card for card in cards if not card.parent), cards[0])


async def tokenize(
    session: aiohttp.ClientSession, base: str, model: str, text: str
) -> list[int] | None:
    """Return the text's token ids, without special ones; None when the endpoint offers none."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = _decode(await _request(session, "POST", f"{base}/tokenize", body), _Tokens)
    return reply.tokens if reply and reply.tokens else None


async def find_flavour(
    client: EndpointClient, probe: PromptJob, ignore_eos: bool | None
) -> ApiFlavour:
    """Return the richest flavour that the endpoint takes, found by sending `probe`.

    Args:
        ignore_eos: True insists on it, None takes it where it is known, False leaves it out.

    Raises:
        EndpointError: every flavour is refused, or something else is wrong.
    """
    flavour: ApiFlavour | None = ApiFlavour(ignore_eos=ignore_eos is not False)
    first: Failure | None = None
    while flavour is not None:
        speaker = EndpointClient(
            client.session, client.base, client.model, flavour, client.chat, client.timeout
        )
        answer = (await speaker.send(probe, 0)).result
        if not isinstance(answer, Failure) or answer.reason == "no tokens":
            return flavour
        first = first or answer
        if answer.reason not in _REFUSED:
            break
        simpler = flavour.simpler(answer.detail)
        if ignore_eos and simpler and not simpler.ignore_eos:
            raise EndpointError(
                f"{client.base} refuses ignore_eos ({answer.detail}); use --no-ignore-eos"
            )
        flavour = simpler
    assert first is not None
    raise EndpointError(
        f"{client.base} does not answer a small request: {first.reason}: {first.detail}"
    )


async def _request(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> tuple[int, bytes]:
    try:
        async with (
            asyncio.timeout(_CARD_SECONDS),
            session.request(method, url, json=body) as reply,
        ):
            return reply.status, await read_answer(reply)
    except (aiohttp.ClientError, OSError) as error:
        raise EndpointError(f"{url} does not answer: {error or type(error).__name__}") from error


def _decode(reply: tuple[int, bytes], kind: type[_T]) -> _T | None:
    if reply[0] != 200:
        return None
    try:
        return msgspec.json.decode(reply[1], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
