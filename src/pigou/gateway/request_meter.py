"""Request meter: offered load and attainment, by workload class."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client.core import Metric

from pigou.control.admission.queue_order import QueuedRequest
from pigou.control.planner.config import CLASS_HEADER
from pigou.control.planner.tenant_load import TenantWork
from pigou.gateway.request import GatewayRun, MeteredRun
from pigou.metric_rows import counter_family, gauge_family
from pigou.objectives import AttainmentCounter, Objectives, class_label
from pigou.request import SECOND, Request
from pigou.windows.builder import MeteredWindow
from pigou.wire.errors import APIError, bad_request

#: Nanoseconds of the requests that the recent attainment is of, and the most of them.
RECENT_NS, _MAX_RECENT = 300 * SECOND, 65_536
_TOO_MANY = 429


class RequestMeter:
    """Counts offered requests, and those that met their objective.

    Refused and failed requests count as offered; 4xx and requests over their key's limits do not. A
    cancelled request counts by its progress, and not at all before the TTFT objective.
    """

    def __init__(self, objectives: Objectives, model: Callable[[], str] = str) -> None:
        self.objectives = objectives
        self.attainment = AttainmentCounter(objectives)
        self.model = model
        self.is_windowed = False  # whether requests are remembered for `take`
        self._header_names = {
            entry.header.partition("=")[0] for entry in objectives.classes if entry.header
        }
        self._open: dict[str, MeteredRun] = {}
        self._arrived: list[MeteredRun] = []
        self._first: list[MeteredRun] = []
        self._ended: list[MeteredRun] = []
        self._work = TenantWork(time.monotonic_ns())
        self._recent: deque[tuple[int, str, bool]] = deque(maxlen=_MAX_RECENT)

    @contextmanager
    def metering(self, run: GatewayRun, headers: Mapping[str, str]) -> Iterator[None]:
        """Meter a request by the exception that ended it (context)."""
        named = {name: headers[name] for name in self._header_names if name in headers}
        metered = run.metered = MeteredRun(run, named)
        self._open[run.parsed.id] = metered
        if self.is_windowed:
            self._arrived.append(metered)
        try:
            yield
        except APIError as error:
            self._end(run, metered, done=False, counts=_is_offered(error))
            raise
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            self._leave(run, metered)
            raise
        except BaseException:
            self._end(run, metered, done=False, counts=True)
            raise
        failure = metered.error
        counts = failure is None or _is_offered(failure)
        self._end(run, metered, done=failure is None, counts=counts)

    def _leave(self, run: GatewayRun, metered: MeteredRun) -> None:
        slo = self.objectives.slo_of(metered.name(self.objectives, self.model()))
        waited_s = (time.monotonic_ns() - run.parsed.arrival) / SECOND
        late = slo is not None and waited_s > slo.ttft_s
        got = metered.tokens > 0
        self._end(run, metered, done=got, counts=got or late)

    def _end(self, run: GatewayRun, metered: MeteredRun, *, done: bool, counts: bool) -> None:
        now, tenant = time.monotonic_ns(), run.account
        ended = metered.end(now, self.objectives, self.model(), done=done, counts=counts)
        self._open.pop(run.parsed.id, None)
        self._work.add(tenant, ended.prompt_tokens + ended.output_tokens, now)
        if self.is_windowed:
            self._ended.append(metered)
        if counts and self.objectives.known:
            self.attainment.add(ended.workload, ended.is_attained)
            self._recent.append((now, ended.workload, ended.is_attained))

    def work_by_tenant(self) -> dict[str, float]:
        """Return recent prompt and output tokens by payer or tenant, open requests included."""
        running = ((metered.account, metered.work) for metered in self._open.values())
        return self._work.recent(time.monotonic_ns(), running)

    def class_named(self, run: GatewayRun, headers: Mapping[str, str]) -> str:
        """Return the class of a client's request; raise `APIError` 400 for an unknown name."""
        objectives, name = self.objectives, headers.get(CLASS_HEADER)
        known = objectives.values_of(CLASS_HEADER)
        if name is not None and name not in known:
            names = f"it may be {', '.join(known)}" if known else "no class here is named so"
            raise bad_request(f"{CLASS_HEADER} is {name[:40]!r}; {names}.", CLASS_HEADER)
        return objectives.name_of(run.parsed.tenant, run.prompt_tokens, headers, self.model())

    def class_of(self, request: Request) -> str:
        """Return a control plane request's class."""
        open_call = self._open.get(request.group or request.id)
        if open_call is not None:
            return open_call.name(self.objectives, self.model())
        return self.objectives.name_of(request.tenant, request.prompt, model=self.model())

    def begun(self, run: GatewayRun, worker: str, uncached: int | None) -> None:
        """Record a first token of a request with `uncached` prompt tokens."""
        metered = run.metered
        if metered is None or metered.first_token_ns or metered.is_over:
            return
        metered.begun(worker, uncached)
        if self.is_windowed:
            self._first.append(metered)

    # --- what is shown ------------------------------------------------------------------------

    def recent(self) -> dict[str, tuple[int, int]]:
        """Return requests of the last five minutes by class, and those that attained."""
        since = time.monotonic_ns() - RECENT_NS
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        count, inside = Counter[str](), Counter[str]()
        for _, name, attained in self._recent:
            count[name] += 1
            inside[name] += attained
        return {name: (count[name], inside[name]) for name in self.objectives.names}

    def view(self) -> dict[str, Any] | None:
        """Return objectives and attainment as JSON builtins (`recent`: 5 minutes), or None."""
        if not self.objectives.known:
            return None
        recent = {
            class_label(name): {"offered": count, "attained": inside / count if count else None}
            for name, (count, inside) in self.recent().items()
        }
        return self.attainment.document() | {"recent": recent}

    # --- windows ------------------------------------------------------------------------------

    def take(self, queue: Iterable[QueuedRequest]) -> MeteredWindow:
        """Return the requests since the last call; `queue` has the waiting ones."""
        objectives, model = self.objectives, self.model()
        arrived, self._arrived = self._arrived, []
        first, self._first = self._first, []
        ended, self._ended = self._ended, []
        generated: Counter[str] = Counter()
        in_flight: Counter[str] = Counter()
        for metered in (*self._open.values(), *ended):
            generated[metered.name(objectives, model)] += metered.fresh_tokens()
        for metered in self._open.values():
            in_flight[metered.name(objectives, model)] += 1
        queued: dict[str, list[int]] = {}
        for waiting in queue:
            request = waiting.request
            queued.setdefault(self.class_of(request), []).append(request.prompt)
        return MeteredWindow(
            [metered.metered(objectives, model) for metered in arrived],
            [metered.metered(objectives, model) for metered in first],
            [metered.metered(objectives, model) for metered in ended],
            generated, in_flight, queued,
        )  # fmt: skip


def _is_offered(error: APIError) -> bool:
    """True if a request with this end counts as offered."""
    return error.status >= 500 or error.status == _TOO_MANY


def attainment_families(meter: RequestMeter) -> Iterator[Metric]:
    """Yield `pigou_slo_*`: requests by class, and the objectives; nothing without objectives."""
    objectives, attainment = meter.objectives, meter.attainment
    if not objectives.known:
        return
    recent = meter.recent()
    labels = {name: class_label(name) for name in recent}
    slos = {label: slo for name, label in labels.items() if (slo := objectives.slo_of(name))}
    yield counter_family(
        "pigou_slo_requests", "Requests offered, refused and failed ones among them.",
        [([label], attainment.requests[name]) for name, label in labels.items()], "class",
    )  # fmt: skip
    yield counter_family(
        "pigou_slo_attained", "Requests inside their objective.",
        [([label], attainment.inside[name]) for name, label in labels.items()], "class",
    )  # fmt: skip
    yield gauge_family(
        "pigou_slo_attained_ratio",
        "Share of the requests offered in the last five minutes that attained.",
        [([labels[name]], inside / count) for name, (count, inside) in recent.items() if count],
        "class",
    )
    yield gauge_family(
        "pigou_slo_limit_seconds", "Objectives of latencies.",
        [
            ([label, latency], limit_s)
            for label, slo in slos.items()
            for latency, limit_s in (("ttft", slo.ttft_s), ("itl", slo.itl_s))
            if math.isfinite(limit_s)
        ],
        "class", "latency",
    )  # fmt: skip
    yield gauge_family(
        "pigou_slo_target_ratio", "Share of offered requests that shall attain.",
        [([label], slo.share) for label, slo in slos.items()], "class",
    )  # fmt: skip
