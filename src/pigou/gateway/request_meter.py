"""The request meter: what clients offered and what they got, by workload class."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pigou.control.admission.queue_order import QueuedRequest
from pigou.gateway.failure import Rejected
from pigou.gateway.proxy.relay import Relay
from pigou.gateway.request import GatewayRequest
from pigou.objectives import AttainmentCounter, Objectives, Slo, class_label
from pigou.request import SECOND, Request
from pigou.windows.builder import ComputedPrompt, MeteredRequest, MeteredWindow
from pigou.wire.errors import APIError

#: Nanoseconds of the requests that the recent attainment is of, and the most of them.
RECENT_NS, _MAX_RECENT = 300 * SECOND, 65_536
_TOO_MANY = 429
#: Half-life of the work that a tenant asked for.
_WORK_HALF_LIFE_NS = 60 * SECOND


class MeteredCall:
    """A request of a client, from its arrival to its end.

    Once it has ended, nothing of the request itself is remembered: windows may be long.

    Attributes:
        first_token_ns: when its first token was passed on; 0 before.
        computed_ns: when the prefill worker had computed its prompt; 0 before, or without one.
        computed: its prompt, once that was computed; None where that is not known.
        moves: attempts that failed.
    """

    __slots__ = (
        "_call", "_counted", "_ended", "_headers", "computed", "computed_ns", "error",
        "first_token_ns", "moves", "relays",
    )  # fmt: skip

    def __init__(self, call: GatewayRequest, headers: Mapping[str, str]) -> None:
        self._call = call
        self.first_token_ns = 0
        self.computed_ns = 0
        self.computed: ComputedPrompt | None = None
        self.moves = 0
        self.relays: list[Relay] = []
        self.error: APIError | Rejected | None = None
        self._headers = headers
        self._counted = 0
        self._ended: MeteredRequest | None = None

    def begun(self, worker: str, uncached: int | None) -> None:
        """Note the first token, and what the worker that computed the prompt had to compute."""
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()
        if self.computed is None and uncached is not None and not self.moves:
            at_ns = self.computed_ns or self.first_token_ns
            self.computed = ComputedPrompt(worker, self._call.prompt, max(uncached, 1), at_ns)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended is not None

    @property
    def tokens(self) -> int:
        """Tokens that it got so far."""
        if self._ended is not None:
            return self._ended.output_tokens
        if self.relays:
            return sum(relay.counted for relay in self.relays)
        return self._call.stats.completion_tokens

    @property
    def tenant(self) -> str:
        """Tenant of an open request."""
        return self._call.tenant

    @property
    def work(self) -> int:
        """Prompt and output tokens of an open request so far."""
        return self._call.prompt + self.tokens

    def name(self, objectives: Objectives, model: str) -> str:
        """Return the name of its class."""
        if self._ended is not None:
            return self._ended.workload
        call = self._call
        return objectives.name_of(call.tenant, call.prompt, self._headers, model)

    def end(self, now: int, objectives: Objectives, model: str, *, done: bool) -> MeteredRequest:
        """Note the end; return it as a window counts it."""
        open_request = self.metered(objectives, model)
        self._ended = open_request._replace(
            ended_ns=now, is_done=done,
            is_attained=done and self._is_inside(objectives.slo_of(open_request.workload), now),
        )  # fmt: skip
        self.relays.clear()
        del self._call
        return self._ended

    def fresh_tokens(self) -> int:
        """Return the tokens that it got since this was asked last."""
        tokens, counted = self.tokens, self._counted
        self._counted = tokens
        return tokens - counted

    def metered(self, objectives: Objectives, model: str) -> MeteredRequest:
        """Return it as a planner's window counts it."""
        if self._ended is not None:
            return self._ended
        call = self._call
        return MeteredRequest(
            self.name(objectives, model), call.prompt, call.arrival, call.arrival,
            self.first_token_ns if call.stream else 0, 0, self.tokens, self._itl_ns(),
            computed=self.computed,
        )  # fmt: skip

    def _is_inside(self, slo: Slo | None, now: int) -> bool:
        """Whether it is inside its objective, as it ends.

        A reply in one piece is inside where it took no longer than a stream inside may take.
        """
        call, itl_ns = self._call, self._itl_ns()
        if slo is None:
            return True
        if not call.stream:
            gaps = max(self.tokens - 1, 0)
            limit_s = slo.ttft_s + (gaps * slo.itl_s if gaps else 0.0)
            return (now - call.arrival) / SECOND <= limit_s
        if not self.first_token_ns:
            return False
        ttft_s = (self.first_token_ns - call.arrival) / SECOND
        return slo.attained(ttft_s, None if itl_ns is None else itl_ns / SECOND)

    def _itl_ns(self) -> float | None:
        """Return the mean nanoseconds between tokens of its streams."""
        gaps = [
            (relay.last_token_ns - self.first_token_ns) / (relay.counted - 1)
            for relay in self.relays
            if relay.counted > 1
        ]
        return sum(gaps) / len(gaps) if gaps else None


class RequestMeter:
    """Counts offered requests, and those that attained their objective.

    Refused and failed requests are offered ones; bad ones (4xx) are not, nor are those above the
    limits of their own key. A request whose client left counts by what it got until then. Where it
    got nothing, it counts as outside once the objective of TTFT has passed, and else not at all.

    Attributes:
        model: returns the name of the served model.
        is_windowed: whether requests are remembered for `take`.
    """

    def __init__(self, objectives: Objectives, model: Callable[[], str] = str) -> None:
        self.objectives = objectives
        self.attainment = AttainmentCounter(objectives)
        self.model = model
        self.is_windowed = False
        self._header_names = {
            entry.header.partition("=")[0] for entry in objectives.classes if entry.header
        }
        self._open: dict[str, MeteredCall] = {}
        self._arrived: list[MeteredCall] = []
        self._first: list[MeteredCall] = []
        self._ended: list[MeteredCall] = []
        self._work: dict[str, float] = {}
        self._work_ns = time.monotonic_ns()
        self._recent: deque[tuple[int, str, bool]] = deque(maxlen=_MAX_RECENT)

    @contextmanager
    def metering(self, call: GatewayRequest, headers: Mapping[str, str]) -> Iterator[None]:
        """Within it, a request is served; what it raises says how it ended."""
        named = {name: headers[name] for name in self._header_names if name in headers}
        metered = call.metered = MeteredCall(call, named)
        self._open[call.id] = metered
        if self.is_windowed:
            self._arrived.append(metered)
        try:
            yield
        except (APIError, Rejected) as error:
            self._end(call, metered, done=False, counts=_is_offered(error))
            raise
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            self._leave(call, metered)
            raise
        except BaseException:
            self._end(call, metered, done=False, counts=True)
            raise
        failure = metered.error
        counts = failure is None or _is_offered(failure)
        self._end(call, metered, done=failure is None, counts=counts)

    def _leave(self, call: GatewayRequest, metered: MeteredCall) -> None:
        """Note the end of a request whose client left."""
        slo = self.objectives.slo_of(metered.name(self.objectives, self.model()))
        waited_s = (time.monotonic_ns() - call.arrival) / SECOND
        late = slo is not None and waited_s > slo.ttft_s
        got = metered.tokens > 0
        self._end(call, metered, done=got, counts=got or late)

    def _end(self, call: GatewayRequest, metered: MeteredCall, *, done: bool, counts: bool) -> None:
        now, tenant = time.monotonic_ns(), call.tenant
        ended = metered.end(now, self.objectives, self.model(), done=done)
        self._open.pop(call.id, None)
        self._forget_work(now)
        work = ended.prompt_tokens + ended.output_tokens
        self._work[tenant] = self._work.get(tenant, 0.0) + work
        if self.is_windowed:
            self._ended.append(metered)
        if counts and self.objectives.known:
            self.attainment.add(ended.workload, ended.is_attained)
            self._recent.append((now, ended.workload, ended.is_attained))

    def _forget_work(self, now: int) -> None:
        """Let what tenants asked for fade; a tenant that is silent for long is forgotten."""
        if now - self._work_ns < SECOND:
            return
        keep = 0.5 ** ((now - self._work_ns) / _WORK_HALF_LIFE_NS)
        self._work = {tenant: keep * work for tenant, work in self._work.items() if work > 1e-3}
        self._work_ns = now

    def work_by_tenant(self) -> dict[str, float]:
        """Return prompt and output tokens that each tenant asked for lately, open requests too."""
        self._forget_work(time.monotonic_ns())
        work = dict(self._work)
        for metered in self._open.values():
            work[metered.tenant] = work.get(metered.tenant, 0.0) + metered.work
        return work

    def class_of(self, request: Request) -> str:
        """Return the name of the class of a request of the control plane."""
        open_call = self._open.get(request.group or request.id)
        if open_call is not None:
            return open_call.name(self.objectives, self.model())
        return self.objectives.name_of(request.tenant, request.prompt, model=self.model())

    def begun(self, call: GatewayRequest, worker: str, uncached: int | None) -> None:
        """A request had its first token.

        Args:
            call: the request, or one sequence of it.
            uncached: tokens of it that were computed; None where not known.
        """
        metered = call.metered
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
        """Return objectives and attainment as JSON builtins; None without objectives.

        `recent` is of the last five minutes; its share is None where nothing was offered.
        """
        if not self.objectives.known:
            return None
        recent = {
            class_label(name): {
                "offered": count,
                "attained": inside / count if count else None,
            }
            for name, (count, inside) in self.recent().items()
        }
        return self.attainment.document() | {"recent": recent}

    # --- windows ------------------------------------------------------------------------------

    def take(self, queue: Iterable[QueuedRequest]) -> MeteredWindow:
        """Return the requests since the last call; `queue` has those that wait at the gateway."""
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


def _is_offered(error: APIError | Rejected) -> bool:
    """Whether a request that ended so was the fleet's to serve."""
    return error.status >= 500 or error.status == _TOO_MANY
