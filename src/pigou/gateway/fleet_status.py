"""The gateway's view of its fleet: workers, models, registry and operators' changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from prometheus_client.core import Metric

from pigou.control.plane import Status
from pigou.gateway.plane_driver import PlaneDriver
from pigou.gateway.prices import PRICES, Price, game_view, json_number, worker_prices
from pigou.gateway.prompt_reader import TokenizationMode
from pigou.metric_rows import counter_family, gauge_family
from pigou.request import SECOND, Role

#: Where prompts are tokenized, as `/workers` names it.
_MODE_NAMES = {
    TokenizationMode.NONE: "none",
    TokenizationMode.GATEWAY: "here",
    TokenizationMode.WORKER: "worker",
}


class ChangeRefused(Exception):
    """The fleet cannot make a change now; the message says why."""


class UnknownWorker(Exception):
    """There is no worker of this id."""


class FleetChanges(Protocol):
    """Applies operators' changes to a fleet; calls return at once with the workers' rows."""

    def start(self, role: Role, count: int, model: str = "") -> tuple[list[WorkerRow], str]:
        """Start workers; return their rows and errors; raise `ChangeRefused`."""
        ...

    def attach(self, text: str) -> WorkerRow:
        """Attach a server, as by `--attach`; raise `ConfigError`, `ChangeRefused`."""
        ...

    def drain(self, id: str, limit_s: float | None) -> WorkerRow:
        """Drain a worker for up to `limit_s`; raise `UnknownWorker`, `ChangeRefused`."""
        ...

    def flip(self, id: str, role: Role, limit_s: float | None) -> WorkerRow:
        """Drain a worker and change its role; raises as `drain`."""
        ...

    def restart(self, id: str, limit_s: float | None) -> WorkerRow:
        """Drain and restart a local worker; raises as `drain`."""
        ...

    def remove(self, id: str) -> WorkerRow:
        """Remove a worker at once, migrating its streams; raises as `drain`."""
        ...


class RegistryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A registry's state as seen by a gateway."""

    stale: bool  # whether it does not answer; the last view is served then
    why: str  # the reason that it does not answer; empty while it does
    age_s: float | None  # age of the last snapshot; None before one
    entries: int  # workers of the view, suspects too
    suspects: list[str]  # workers that are not registered any more, and get nothing new
    ignored: int  # records that are no entries of this fleet
    outages: int  # times that it stopped answering

    def health(self) -> dict[str, Any]:
        """Return its entry in `/health`, without names."""
        return {"stale": self.stale, "entries": self.entries, "suspects": len(self.suspects)}


def registry_families(status: RegistryStatus) -> Iterator[Metric]:
    """Yield `pigou_registry_*`."""
    for name, help, value in (
        ("stale", "1 while the registry does not answer.", status.stale),
        ("entries", "Workers of the view, suspects too.", status.entries),
        ("suspects", "Workers that are not registered any more.", len(status.suspects)),
        ("ignored", "Records that are no entries of this fleet.", status.ignored),
    ):
        yield gauge_family(f"pigou_registry_{name}", help, float(value))
    text = "Times that the registry stopped answering."
    yield counter_family("pigou_registry_outages", text, status.outages)


class WorkerRow(msgspec.Struct, kw_only=True):
    """A worker's row from the supervisor."""

    id: str  # name in the fleet
    url: str  # base address; empty while it has none
    role: str  # prefill, decode or both
    state: str  # starting, up, draining, down, backoff or stopped
    kind: str  # local (started here) or attached
    pool: str = ""  # workers of one role on like hardware; planners go by it
    epoch: int = 0  # how often its role has changed
    unplaceable: bool = False
    pid: int = 0  # 0 when the process is not ours
    restarts: int = 0  # times that it was started anew
    out_of_memory: int = 0  # times that it ended for want of memory
    note: str = ""  # why it is not up
    last_end: str = ""  # why it went down the last time; empty while it never has
    gaps: int = 0  # times that KV events were missed for good
    host: str = ""  # labels of its node; empty where they are not known
    rack: str = ""
    zone: str = ""
    model: str = ""  # served model; empty while unknown

    @property
    def away(self) -> bool:
        """True if it is down and expected back."""
        return not (self.unplaceable or self.state in ("up", "draining", "stopped"))


Rows = Callable[[], list[WorkerRow]]


class FleetStatus:
    """Joins the supervisor's, control plane's and upstreams' views of the workers."""

    def __init__(self, plane_driver: PlaneDriver, rows: Rows) -> None:
        self._plane_driver = plane_driver
        self.rows = rows
        self._last: dict[str, tuple[int, int, float]] = {}

    def view(self) -> dict[str, Any]:
        """Return the fleet's table, for `/workers`."""
        status, prices = self.prices()
        waiting, held = self._plane_driver.tenant_loads()
        priced = {price.worker: price for price in prices}
        workers = [
            msgspec.to_builtins(row) | self._load(row) | _priced(priced.get(row.id))
            for row in self.rows()
        ]
        return {
            "workers": workers,
            "game": game_view(status),
            "tokenized": self._modes(),
            "queued": self._plane_driver.queued,
            "held_sequences": self._plane_driver.held,
            "waiting_by_tenant": waiting,
            "held_tokens_by_tenant": held,
            "tenant_weights": dict(self._plane_driver.plane.config.tenant_weights),
            "shed": self._plane_driver.shed,
            "adapter_copies": self._plane_driver.plane.tracker.adapters.placement(
                time.monotonic_ns()
            ),
            "slo": self._plane_driver.meter.view(),
            "background": self._plane_driver.background.view(),
            "tokens_per_second": round(sum(w["tokens_per_second"] for w in workers), 1),
        }

    def _modes(self) -> dict[str, str]:
        prompts = self._plane_driver.prompts
        modes = (
            prompts.mode(chat=chat) if prompts else TokenizationMode.NONE for chat in (False, True)
        )
        return dict(
            zip(("completions", "chats"), (_MODE_NAMES[mode] for mode in modes), strict=True)
        )

    def prices(self) -> tuple[Status, list[Price]]:
        """Return the control plane's status, and each worker's prices."""
        plane = self._plane_driver.plane
        status = self._whole(plane.status(time.monotonic_ns()))
        streams = plane.state.columns.decode_requests.tolist()
        return status, worker_prices(status, streams)

    def _whole(self, status: Status) -> Status:
        """Return the status, without a Price of Anarchy if workers are missing."""
        away = [row.id for row in self.rows() if row.away]
        if not away:
            return status
        why = f"the fleet is incomplete: {', '.join(away)} is not up"
        return replace(status, poa=None, unknown=why)

    def gauges(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Return the table's numbers for `/metrics`."""
        for row in self.rows():
            load = self._load(row)
            load.pop("tokens_per_second")
            limits = load.pop("limits") or {}
            for name in ("model", "adapters"):
                load.pop(name)
            load |= {k: v for k, v in limits.items() if isinstance(v, int)}
            up = float(row.state in ("up", "draining"))
            changes = {"draining": float(row.state == "draining"), "epoch": row.epoch}
            counts = {"restarts": row.restarts, "out_of_memory": row.out_of_memory}
            yield row.id, row.role, {"up": up, **counts, **changes, **load}

    def _load(self, row: WorkerRow) -> dict[str, Any]:
        worker = row.id
        state, upstream = self._plane_driver.plane.state, self._plane_driver.upstreams.get(worker)
        cache = self._plane_driver.plane.index.cache(worker)
        return {
            **state.figures(worker),
            "model": row.model if upstream is None else upstream.engine.model,
            "tensor_parallel_size": 0 if upstream is None else upstream.engine.tensor_parallel_size,
            "adapters": [] if upstream is None else sorted(upstream.engine.served.adapters),
            "limits": self._plane_driver.limits.view(worker),
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


def _priced(price: Price | None) -> dict[str, Any]:
    """Return a worker's price columns; null while it is away."""
    names = [gauge.name for gauge in PRICES if gauge.name != "memory"]
    return {name: None if price is None else json_number(getattr(price, name)) for name in names}
