"""Decisions as JSON: why a request went where it went."""

from __future__ import annotations

import re
import time
from itertools import islice
from typing import Any

from pigou.control.decisions import Explanation
from pigou.control.messages import Read
from pigou.control.plane import ControlPlane
from pigou.gateway.game import plain
from pigou.request import SECOND
from pigou.wire.errors import APIError, bad_request

MOST = 1000
_USUAL = 20
_ID = re.compile(r"[0-9a-f]{32}")


class Decisions:
    """The last decisions of a control plane."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def one(self, id: str, tenant: str | None = None) -> dict[str, Any]:
        """Return a decision, with each candidate's cost, part by part.

        Args:
            id: of the decision.
            tenant: who asks, to whom the decisions of others do not exist; None knows all.

        Raises:
            APIError: 404, it is not known.
        """
        why = self._plane.decision(id)
        if why is None or tenant not in (None, why.tenant):
            kept = self._plane.config.max_decisions
            what = "is not known" if _ID.fullmatch(id) else "is no decision's id"
            raise APIError(
                404,
                f"The decision {id[:64]!r} {what}: ids are in the header X-Pigou-Decision of "
                f"replies, and the last {kept} are kept.",
                "id",
            )
        return _summary(why) | {"candidates": _candidates(why)}

    def latest(self, limit: str | None, tenant: str | None = None) -> dict[str, Any]:
        """Return the latest decisions, newest first, without their candidates.

        Args:
            limit: at most so many.
            tenant: of this tenant only; None for all.

        Raises:
            APIError: 400, the limit is no number within range.
        """
        count = _USUAL
        if limit is not None:
            count = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 9 else 0
            if not 1 <= count <= MOST:
                raise bad_request(
                    f"limit is {limit[:40]!r}; it must be a number from 1 to {MOST}.", "limit"
                )
        latest = self._plane.router.ledger.latest()
        own = (why for why in latest if tenant in (None, why.tenant))
        return {"decisions": [_summary(why) for why in islice(own, count)]}


def _summary(why: Explanation) -> dict[str, Any]:
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
        "read": _read(choice.read),
        "cost": plain(why.costs[index]),
        "toll_seconds": plain(why.toll[index]),
        "regret_seconds": plain(why.regret),
        "choices": len(why.candidates),
    }


def _read(read: Read | None) -> dict[str, Any] | None:
    """Return what is read from another worker's cache, and its price."""
    if read is None:
        return None
    return {
        "worker": read.worker,
        "depth_tokens": read.depth,
        "tokens": read.tokens,
        "seconds": plain(read.seconds),
        "saves_seconds": plain(read.saves),
    }


def _candidates(why: Explanation) -> list[dict[str, Any]]:
    price, toll = why.price, why.toll
    return [
        {
            "prefill": prefill or None,
            "decode": decode,
            "chosen": index == why.chosen,
            "cached_tokens": int(why.cached[index]),
            "read_tokens": int(why.read[index]),
            "cost": plain(why.costs[index]),
            "parts": {name: plain(part[index]) for name, part in why.parts.items()},
            "price_seconds": plain(price[index]),
            "toll_seconds": plain(toll[index]),
        }
        for index, (prefill, decode) in enumerate(zip(why.prefill, why.decode, strict=True))
    ]
