"""What the load client asks an endpoint before it loads it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from pigou.workload.bounded import read_answer
from pigou.workload.client import Client
from pigou.workload.dialect import Dialect
from pigou.workload.outcome import Failure
from pigou.workload.prompts import Job

_REFUSED = ("HTTP 400", "HTTP 422")
_CARD_SECONDS = 30.0
_T = TypeVar("_T")


class EndpointError(Exception):
    """The endpoint cannot be loaded as asked; says what it answered."""


@dataclass(frozen=True)
class Card:
    """A served model.

    Attributes:
        id: its name.
        max_model_len: most tokens of a prompt and its output; None when the endpoint does not say.
    """

    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def find_model(session: aiohttp.ClientSession, base: str, name: str) -> Card:
    """Return the card of the named model, or of the first; a bare one when none are listed.

    Raises:
        EndpointError: the endpoint is not there, or no name was given and it lists no model.
    """
    reply = await _request(session, "GET", f"{base}/v1/models")
    found = _decode(reply, _Cards)
    cards = found.data if found else []
    if name:
        return next((card for card in cards if card.id == name), Card(name))
    if not cards:
        answer = reply[1][:200].decode(errors="replace")
        raise EndpointError(
            f"{base}/v1/models lists no model ({reply[0]}: {answer}); name one with --model"
        )
    return cards[0]


async def tokenize(
    session: aiohttp.ClientSession, base: str, model: str, text: str
) -> list[int] | None:
    """Return the text's token ids, without special ones; None when the endpoint offers none."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    found = _decode(await _request(session, "POST", f"{base}/tokenize", body), _Tokens)
    return found.tokens if found and found.tokens else None


async def find_dialect(client: Client, probe: Job, ignore_eos: bool | None) -> Dialect:
    """Return the richest dialect that the endpoint takes, found by sending `probe`.

    Args:
        client: its own dialect is not looked at.
        probe: a small job.
        ignore_eos: True insists on it, None takes it where it is known, False leaves it out.

    Raises:
        EndpointError: every dialect is refused, or something else is wrong.
    """
    dialect: Dialect | None = Dialect(ignore_eos=ignore_eos is not False)
    first: Failure | None = None
    while dialect is not None:
        speaker = Client(
            client.session, client.base, client.model, dialect, client.chat, client.timeout
        )
        answer = (await speaker.send(probe, 0)).result
        if not isinstance(answer, Failure) or answer.reason == "no tokens":
            return dialect
        first = first or answer
        if answer.reason not in _REFUSED:
            break
        simpler = dialect.simpler(answer.detail)
        if ignore_eos and simpler and not simpler.ignore_eos:
            raise EndpointError(
                f"{client.base} refuses ignore_eos ({answer.detail}); use --no-ignore-eos"
            )
        dialect = simpler
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
