"""Recent routing decisions: summaries, and one with its candidates."""

from __future__ import annotations

import heapq
import re
import time
from itertools import islice
from typing import Any

from aiohttp import web

from pigou.control.messages import RemoteKVFetch
from pigou.control.router import Explanation
from pigou.gateway.api.page import APIPage, APIPages, json_response, number_parameter, seen_tenant
from pigou.gateway.gateway import Gateway
from pigou.gateway.prices import json_number
from pigou.request import SECOND
from pigou.wire.errors import APIError

MAX_DECISIONS, _DEFAULT_DECISIONS = 1000, 20
_ID = re.compile(r"[0-9a-f]{32}")


def pages(gateway: Gateway) -> APIPages:
    """Return `/decisions` and `/decisions/ID`; tenants see only their own."""
    planes = [model.plane_driver.plane for model in gateway.routing]

    async def latest(request: web.Request) -> web.Response:
        """Show the latest decisions, newest first, without their candidates."""
        count = number_parameter(request, "limit", _DEFAULT_DECISIONS, MAX_DECISIONS)
        tenant = seen_tenant()
        decisions = heapq.merge(
            *(plane.router.ledger.latest() for plane in planes), key=lambda why: -why.at
        )
        own = (why for why in decisions if tenant in (None, why.tenant))
        return json_response({"decisions": [summary(why) for why in islice(own, count)]})

    async def one(request: web.Request) -> web.Response:
        """Show a decision, with each candidate's cost, part by part."""
        id = request.match_info["id"]
        known = (plane.decision(id) for plane in planes)
        why = next((decision for decision in known if decision is not None), None)
        if why is None or seen_tenant() not in (None, why.tenant):
            what = "is not known" if _ID.fullmatch(id) else "is no decision's id"
            raise APIError(
                404,
                f"The decision {id[:64]!r} {what}: ids are in the header X-Pigou-Decision of "
                f"replies, and the last {planes[0].config.max_decisions} are kept.",
                "id",
            )
        return json_response(summary(why) | {"candidates": candidates(why)})

    return APIPages([
        APIPage("/decisions", latest, parameters=("limit",)),
        APIPage("/decisions/{id}", one),
    ])  # fmt: skip


def summary(why: Explanation) -> dict[str, Any]:
    """Return a decision without its candidates, as JSON builtins."""
    index, choice = why.chosen, why.choice
    age = time.monotonic_ns() - why.at
    return {
        "id": why.request,
        "at": round(time.time() - age / SECOND, 3),
        "age_seconds": round(age / SECOND, 3),
        "policy": why.policy,
        "temperature": why.temperature,
        "regime": why.regime,
        "prompt_tokens": why.prompt,
        "prefill": choice.prefill,
        "decode": choice.decode,
        "cached_tokens": choice.cached,
        "read": _remote_fetch(choice.read),
        "cost": json_number(why.costs[index]),
        "toll_seconds": json_number(why.toll[index]),
        "regret_seconds": json_number(why.regret),
        "choices": len(why.candidates),
    }


def _remote_fetch(read: RemoteKVFetch | None) -> dict[str, Any] | None:
    """Return the remote KV fetch and its price."""
    if read is None:
        return None
    return {
        "worker": read.worker,
        "depth_tokens": read.depth,
        "tokens": read.tokens,
        "seconds": json_number(read.seconds),
        "saves_seconds": json_number(read.saves),
    }


def candidates(why: Explanation) -> list[dict[str, Any]]:
    """Return a decision's candidates with their prices, as JSON builtins."""
    price, toll = why.price, why.toll
    return [
        {
            "prefill": prefill or None,
            "decode": decode,
            "chosen": index == why.chosen,
            "cached_tokens": int(why.cached[index]),
            "read_tokens": int(why.read[index]),
            "cost": json_number(why.costs[index]),
            "parts": {name: json_number(part[index]) for name, part in why.parts.items()},
            "price_seconds": json_number(price[index]),
            "toll_seconds": json_number(toll[index]),
        }
        for index, (prefill, decode) in enumerate(zip(why.prefill, why.decode, strict=True))
    ]
