"""Asks a worker to lend what it has cached of a prompt to the one that is to compute it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pigou.gateway.call import Body
from pigou.gateway.failure import Rejected, WorkerFailed
from pigou.gateway.upstream import Upstream
from pigou.lifecycle.messages import FetchKV
from pigou.request import SECOND
from pigou.wire.prefill_decode_legs import ticket

OFFER = "/v1/kv/offer"
#: What says, beside its tokens, which blocks a prompt has.
_NAMES = ("model", "cache_salt", "resume_tokens")


async def lent(
    source: Upstream, body: Body, request_id: str, fetch: FetchKV, tenant: str = ""
) -> tuple[dict[str, Any] | None, str]:
    """Return the ticket for what a worker has cached of a prompt, and what came of asking.

    It is waited for until computing the prompt would have been as quick. The answer's second part
    is "offered" with a ticket, "nothing" where none of it is cached (any more), or why it failed:
    "late", or a reason of `WorkerFailed`.

    Args:
        source: who is asked.
        body: of the request, as whoever computes it is sent it.
        request_id: as its legs have it.
        fetch: what is expected of it.
        tenant: whose request it is.
    """
    try:
        async with asyncio.timeout(fetch.wait_ns / SECOND):
            with source.busy():
                reply = await source.whole(OFFER, _asked(body), request_id, tenant)
        params = ticket(reply)
    except TimeoutError:
        return None, "late"
    except WorkerFailed as failure:
        return None, failure.reason
    except Rejected:
        return None, "refused"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, "garbage"
    return params, "nothing" if params is None else "offered"


def _asked(body: Body) -> Body:
    """Return what the worker needs to find the prompt's blocks; its ids alone where there are."""
    ids = body.get("prompt_token_ids")
    if ids is None:
        return body
    return {name: body[name] for name in _NAMES if name in body} | {"prompt": ids}
