"""The board: what the gateway shows of itself and of the fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from pigou.control.status import Status
from pigou.gateway import game
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prompt_reader import TokenizationMode
from pigou.request import SECOND


class Row(msgspec.Struct, kw_only=True):
    """What whoever runs the fleet says of a worker.

    Attributes:
        id: name in the fleet.
        url: base address; empty while it has none.
        role: prefill, decode or both.
        state: starting, up, down, backoff or stopped.
        kind: local (started here) or attached.
        pid: of its process, 0 when it is not ours.
        restarts: times that it was started anew.
        note: why it is not up.
        gaps: times that KV events were missed for good.
    """

    id: str
    url: str
    role: str
    state: str
    kind: str
    pid: int = 0
    restarts: int = 0
    note: str = ""
    gaps: int = 0


Rows = Callable[[], list[Row]]


class Board:
    """Joins what the fleet's keeper, the control plane and the upstreams know.

    `tokens_per_second` is measured between two looks at least half a second apart.

    Attributes:
        rows: what whoever runs the fleet says of its workers.
    """

    def __init__(self, plane_driver: PlaneDriver, rows: Rows) -> None:
        self._plane_driver = plane_driver
        self.rows = rows
        self._last: dict[str, tuple[int, int, float]] = {}

    def view(self) -> dict[str, Any]:
        """Return the fleet's table, for `/workers`."""
        status, prices = self.prices()
        priced = {each.worker: each for each in prices}
        workers = [
            msgspec.to_builtins(row) | self._load(row.id) | _priced(priced.get(row.id))
            for row in self.rows()
        ]
        return {
            "workers": workers,
            "game": game.view(status),
            "tokenized": self._modes(),
            "queued": self._plane_driver.queued,
            "held_sequences": self._plane_driver.held,
            "shed": self._plane_driver.shed,
            "background": self._plane_driver.background.view(),
            "tokens_per_second": round(sum(w["tokens_per_second"] for w in workers), 1),
        }

    def _modes(self) -> dict[str, str]:
        """Return how prompts of each route are tokenized: none, here or worker."""
        prompts = self._plane_driver.prompts
        modes = (
            prompts.mode(chat=chat) if prompts else TokenizationMode.NONE for chat in (False, True)
        )
        return dict(
            zip(("completions", "chats"), (mode.name.lower() for mode in modes), strict=True)
        )

    def prices(self) -> tuple[Status, list[game.Price]]:
        """Return what the control plane says of itself, and each worker's prices."""
        plane = self._plane_driver.plane
        status = self._whole(plane.status(time.monotonic_ns()))
        streams = plane.state.columns.decode_requests.tolist()
        return status, game.prices(status, streams)

    def _whole(self, status: Status) -> Status:
        """Return the status without a Price of Anarchy where the fleet is not complete."""
        away = [row.id for row in self.rows() if row.state not in ("up", "stopped")]
        if not away:
            return status
        why = f"the fleet is incomplete: {', '.join(away)} is not up"
        return replace(status, assessment=None, unknown=why)

    def gauges(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Return the numbers of the table, for `/metrics`."""
        for row in self.rows():
            load = self._load(row.id)
            load.pop("tokens_per_second")
            load.pop("model")
            up = float(row.state == "up")
            yield row.id, row.role, {"up": up, "restarts": row.restarts, **load}

    def _load(self, worker: str) -> dict[str, Any]:
        state, upstream = self._plane_driver.plane.state, self._plane_driver.upstreams.get(worker)
        cache = self._plane_driver.plane.index.cache(worker)
        return {
            **state.figures(worker),
            "model": "" if upstream is None else upstream.engine.model,
            "cached_blocks": cache.blocks,
            "kv_events": cache.events,
            "tokens": 0 if upstream is None else upstream.tokens,
            "tokens_per_second": self._speed(worker, 0 if upstream is None else upstream.tokens),
        }

    def _speed(self, worker: str, tokens: int) -> float:
        now = time.monotonic_ns()
        then, before, speed = self._last.get(worker, (now, tokens, 0.0))
        if now - then >= SECOND // 2:
            speed = max(0, tokens - before) * SECOND / (now - then)
            then, before = now, tokens
        self._last[worker] = (then, before, round(speed, 1))
        return round(speed, 1)


def _priced(price: game.Price | None) -> dict[str, Any]:
    """Return the columns of a worker's prices; null while it is away."""
    names = ("toll", "itl", "social_ratio", "prefill_token", "busy", "poa", "rho")
    return {name: None if price is None else game.plain(getattr(price, name)) for name in names}
