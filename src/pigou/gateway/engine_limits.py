"""Keeps the engines of live workers at the limits that regimes and planners set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from pigou.background import Background
from pigou.config import KVQuota
from pigou.gateway.failure import WorkerFailed
from pigou.gateway.proxy.upstream import Upstream
from pigou.request import EngineLimits
from pigou.wire.bodies import REPLIES
from pigou.wire.errors import DECODING_ERRORS, APIError

PATH = "/limits"
#: Bytes of a worker's answer, and seconds for it and until it is asked again.
_MAX_BYTES, _TIMEOUT_S, _RETRY_S = 4096, 5.0, 2.0


class EngineLimiter:
    """Sets limits at workers, and again at those that join or restart; the plane learns them.

    The fleet's limits are those of workers that decode; a planner's go before them. Engines that
    are not Pigou's keep their tokens per step, and the plane sends them fewer streams. `classes`
    are the limits of workload classes, under all others.
    """

    classes = EngineLimits()

    def __init__(self, background: Background, resize: Callable[[Upstream, int], None]) -> None:
        self.in_force: dict[str, EngineLimits] = {}  # as workers answered
        self.refused: dict[str, str] = {}  # why a worker has other limits than wanted
        self._background, self._resize = background, resize
        self._fleet = EngineLimits()
        self.kv_quotas: dict[str, KVQuota] | None = None  # by the tenants' marks; None for none
        self._planned: dict[str, EngineLimits] = {}
        self._upstreams: dict[str, tuple[Upstream, int]] = {}  # with max_seqs at its start
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def up(self, upstream: Upstream) -> None:
        """Take in a worker that came up with its own limits."""
        id = upstream.worker.id
        self.down(id)
        self._upstreams[id] = upstream, upstream.worker.max_seqs
        self.follow(id)

    def down(self, id: str) -> None:
        """Forget a worker."""
        self._upstreams.pop(id, None)
        for known in (self.in_force, self._planned):
            known.pop(id, None)
        self.refused.pop(id, None)
        if (task := self._tasks.pop(id, None)) is not None:
            task.cancel()

    def set_fleet(self, limits: EngineLimits) -> None:
        """Set the limits of all workers that decode, later ones too."""
        self._fleet = limits
        for id in self._upstreams:
            self.follow(id)

    def plan(self, id: str, limits: EngineLimits) -> None:
        """Set a planner's limits of a worker; None keeps one."""
        old = self._planned.get(id, EngineLimits())
        planned = limits.over(old)
        if id in self._upstreams and planned != old:
            self._planned[id] = planned
            self.follow(id)

    def view(self, id: str) -> dict[str, Any] | None:
        """Return a worker's limits, and why others are not in force; None if never set."""
        if id not in self.in_force and id not in self.refused:
            return None
        limits = self.in_force.get(id, EngineLimits())
        quotas = None if limits.kv_quotas is None else len(limits.kv_quotas)  # no tenants' names
        refused = self.refused.get(id)
        return {**msgspec.structs.asdict(limits), "kv_quotas": quotas, "refused": refused}

    def _wanted(self, id: str) -> EngineLimits:
        decodes = self._upstreams[id][0].worker.role.decodes
        fleet = self._fleet.over(self.classes) if decodes else EngineLimits()
        planned = self._planned.get(id, EngineLimits()).over(fleet)
        return planned.over(EngineLimits(kv_quotas=self.kv_quotas))

    def follow(self, id: str) -> None:
        """Let a worker have what is wanted of its present role."""
        task, known = self._tasks.get(id), id in self.in_force or id in self.refused
        if (task is not None and not task.done()) or (
            not known and self._wanted(id) == EngineLimits()
        ):
            return  # it is followed, or has its own
        follow = self._follow(*self._upstreams[id])
        self._tasks[id] = self._background.start(f"limits of {id}", follow)

    def _follow(self, upstream: Upstream, own_max_seqs: int) -> Callable[[], Any]:
        """Return what asks a worker until it has the limits that are wanted."""
        id = upstream.worker.id

        async def follow() -> None:
            answered: EngineLimits | None = None
            while (wanted := self._wanted(id)) != answered:
                self.refused.pop(id, None)
                try:
                    limits = await _ask(upstream, wanted)
                except (WorkerFailed, TimeoutError, *DECODING_ERRORS) as error:
                    self.refused[id] = str(error) or type(error).__name__
                    await asyncio.sleep(_RETRY_S)
                    continue
                except APIError as error:  # it would refuse again: the plane sends fewer streams
                    if wanted != EngineLimits():
                        self.refused[id] = str(error)
                    known = [limit for limit in (wanted.max_seqs, own_max_seqs) if limit]
                    limits = EngineLimits(min(known, default=None))
                answered, self.in_force[id] = wanted, limits
                self._resize(upstream, limits.max_seqs or 0)

        return follow


async def _ask(upstream: Upstream, wanted: EngineLimits) -> EngineLimits:
    """Return the limits that a worker has set; raises `APIError` where it sets none."""
    if upstream.engine.stock:
        raise APIError(404, "its engine keeps the limits that it was started with")
    if wanted.kv_quotas and not upstream.knows_secret:
        raise APIError(409, "it has no fleet secret, by which it would believe tenants' marks")
    async with asyncio.timeout(_TIMEOUT_S):
        with REPLIES.reserve() as held:
            body = msgspec.to_builtins(wanted)
            reply = await upstream.whole(PATH, body, "limits", held=held, max_bytes=_MAX_BYTES)
    return msgspec.json.decode(reply, type=EngineLimits)
