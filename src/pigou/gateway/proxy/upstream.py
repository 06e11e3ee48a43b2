"""Connections to one worker, for the worker's lifetime."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from pigou.gateway.failure import Rejected, WorkerFailed, is_request_failure
from pigou.gateway.proxy.connection import (
    CONNECT_S,
    KEEPALIVE_S,
    HTTPConnection,
    HTTPConnectionError,
    HTTPConnectionPool,
)
from pigou.gateway.request import Body
from pigou.lifecycle.messages import FetchKV
from pigou.lifecycle.suspicion import WorkerEnd
from pigou.request import SECOND, Worker
from pigou.wire.bodies import REPLIES, ByteReservation, OverBudget, read_page
from pigou.wire.errors import APIError
from pigou.wire.fleet_secret import TENANT, tenant_mark
from pigou.wire.json_limits import MAX_DEPTH, MAX_FIELDS, SMALL, is_deep, measure
from pigou.wire.prefill_decode_legs import ticket

_READ_BUFFER = 256 * 1024
#: Errors by which the other side says that nobody is there. Others may be this process's own,
#: such as descriptors that have run out.
GONE = (
    errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.EHOSTUNREACH,
    errno.ENETUNREACH, errno.ENOENT,
)  # fmt: skip
#: Bytes of a reply that is not streamed, of one to a prefill leg, and of an error.
MAX_REPLY_BYTES = 2**27
MAX_TICKET_BYTES = 2**20
MAX_ERROR_BYTES = 2**20
_HEADERS = {"content-type": "application/json"}
OFFER = "/v1/kv/offer"
END, END_S = "/v1/kv/end", 5.0
#: Fields that identify a prompt's blocks, besides its tokens.
_PROMPT_FIELDS = ("model", "cache_salt", "resume_tokens")


class WorkerReport(NamedTuple):
    """A worker's report of load and speed; None for missing values."""

    at_ns: int
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # share of its KV blocks in use, 0 to 1
    itl_s: float | None = None  # sum and number of the seconds between tokens, since its start
    itl_count: float | None = None
    prefill_s: float | None = None  # seconds in which it computed prompts, since its start
    # tokens computed in them, also of prompts that were given up.
    prefill_tokens: float | None = None
    joules: float | None = None
    tiers: tuple[tuple[str, float], ...] = ()  # bytes that each of its tiers may hold, by name
    rank_imbalance: float | None = None  # (max - mean) / mean of its ranks' tokens for experts


@dataclass(frozen=True, slots=True)
class ServedName:
    """An entry of a server's `/v1/models`: weights, and base model of an adapter."""

    root: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Names that requests may use at a server, besides its model's first one."""

    aliases: tuple[str, ...] = ()  # further names of its model: those with the same root
    # all others: LoRA adapters, and models of other roots.
    adapters: Mapping[str, ServedName] = field(default_factory=dict)

    @classmethod
    def listed(cls, model: str, cards: Mapping[str, ServedName]) -> ServedNames:
        """Build from a list of models, `model` being the first name."""
        root = cards[model].root if model in cards else ""
        others = {name: card for name, card in cards.items() if name != model}
        aliases = [name for name, card in others.items() if root and card == ServedName(root)]
        adapters = {name: card for name, card in others.items() if name not in set(aliases)}
        return cls(tuple(aliases), adapters)


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine and model of a worker."""

    stock: bool = False  # it is not Pigou's own, and knows no `resume_tokens`
    model: str = ""  # first name of its model
    max_model_len: int = 0  # context in tokens, 0 when it did not say
    version: str = ""  # as `GET /version` says
    root: str = ""  # where its model is, as it says: a folder or a hub id
    dynamo: bool = False
    ranks: bool = False  # it honours `priority`, and a lower one overtakes what was begun
    deadlines: bool = False  # it honours `deadline_ms`
    pin: str = ""  # worker id behind a Dynamo frontend; empty lets its router choose
    release: str = ""  # release of weights or engine; empty if not reported
    incarnation: str = ""  # id of the process; empty for stock servers
    tensor_parallel_size: int = 1  # ranks that share the model; 1 if not reported
    family: str = ""  # `sglang` or `trtllm`, whose fields differ; empty for vLLM's
    bootstrap: tuple[str, int] | None = None  # host and port where SGLang's prefill legs are met
    # default `sampling_params` of its generate endpoint, for completions and (True) for chats.
    generate_defaults: Mapping[bool, Body] = field(default_factory=dict, hash=False)
    # further names that requests may use.
    served: ServedNames = field(default=ServedNames(), hash=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name and aliases."""
        return self.model, *self.served.aliases

    def named(self, name: str) -> Engine:
        """Return a copy with another of the model's names first."""
        aliases = tuple(alias for alias in self.names if alias != name)
        return replace(self, model=name, served=replace(self.served, aliases=aliases))

    def serves(self, name: str) -> bool:
        """True if requests may use a name."""
        return name in self.names or name in self.served.adapters

    def addressed(self, body: Body, name: str | None) -> Body:
        """Return a body for `name`, or for the engine's own name if not listed."""
        if self.family == "sglang" and name in self.served.adapters:
            return {**body, "lora_path": name}  # by `model` alone it would serve the base model
        if name is None or self.serves(name):
            return body
        return {**body, "model": self.model}

    def fitted(self, body: Body, *, chat: bool) -> Body:
        """Return a body without the gateway's wish for token ids, which some engines refuse."""
        if not self.family or (self.family == "sglang" and not chat):
            return body
        return {name: value for name, value in body.items() if name != "return_token_ids"}

    def ranked(self, body: Body, priority: int | None) -> Body:
        """Return a body with the gateway's `priority`, if the engine takes one; None keeps it."""
        if priority is None or body.get("priority") == priority:
            return body
        rest = {name: value for name, value in body.items() if name != "priority"}
        return {**rest, "priority": priority} if self.ranks and priority else rest

    def dated(self, body: Body, left_ms: int) -> Body:
        """Return a body with the remaining deadline, if the engine uses one; else without."""
        rest = {name: value for name, value in body.items() if name != "deadline_ms"}
        return {**rest, "deadline_ms": left_ms} if self.deadlines else rest


class Upstream:
    """A worker's HTTP client, without a connection limit."""

    def __init__(self, worker: Worker, engine: Engine, secret: str = "") -> None:
        self.worker = worker
        self.engine = engine
        self.inflight = 0  # requests under way
        self.paused = 0  # requests with a slow client: the worker is not read
        self.unstreamed = 0  # requests whose reply comes in one piece
        self.bytes_read = 0  # bytes of the worker's streams so far
        self.tokens = 0
        self.report: WorkerReport | None = None  # last report; None before
        self._closed = False
        self._end: asyncio.Future[WorkerEnd] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sent_away: set[asyncio.Task[Any]] = set()
        self.bearer = bearer = {"authorization": f"Bearer {secret}"} if secret else {}
        self._headers = _HEADERS | bearer
        if engine.pin:
            self._headers["x-dynamo-worker-instance-id"] = engine.pin
        # whether it is a worker of Pigou that asks for the fleet's secret
        self.knows_secret = bool(secret) and not engine.stock
        self._connections = HTTPConnectionPool(worker.url, self._headers)
        self._session = aiohttp.ClientSession(
            headers=bearer,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def closed(self) -> bool:
        """True if the worker went down."""
        return self._closed

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark the task as using this worker (context); raise `WorkerFailed` if it goes down."""
        task = asyncio.current_task()
        assert task is not None
        if self.closed():
            raise self._gone()
        cancelling = task.cancelling()
        self.inflight += 1
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            gone = self.closed() or task in self._sent_away
            if gone and task.uncancel() <= cancelling:
                raise self._gone() from None
            raise
        finally:
            self._tasks.discard(task)
            self._sent_away.discard(task)
            self.inflight -= 1

    @property
    def owed(self) -> int:
        """Requests waiting for the worker's next bytes."""
        return self.inflight - self.paused - self.unstreamed

    def forget(self, adapter: str) -> None:
        """Drop an adapter until the next list of models."""
        served = self.engine.served
        adapters = {name: card for name, card in served.adapters.items() if name != adapter}
        self.engine = replace(self.engine, served=replace(served, adapters=adapters))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a request in `busy` as waiting for its client (context)."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """Mark a request in `busy` as waiting for a whole reply (context)."""
        self.unstreamed += 1
        try:
            yield
        finally:
            self.unstreamed -= 1

    def mark(self, tenant: str) -> str:
        """Return a tenant's mark for the worker; empty for none."""
        return tenant_mark(tenant) if tenant and self.knows_secret else ""

    async def ask(
        self, path: str, body: Body, request_id: str, tenant: str = "", trace: str = ""
    ) -> HTTPConnection:
        """Send a request; return the connection to read its 200 answer from, then to `give_back`.

        A closed idle connection is replaced once. Raises Rejected for 4xx, WorkerFailed for no
        connection, no answer, or 5xx.
        """
        pool, mark = self._connections, self.mark(tenant)
        headers = f"x-request-id: {request_id}\r\n{trace}"
        if mark:
            headers += f"{TENANT}: {mark}\r\n"
        request = pool.post(path, msgspec.json.encode(body), headers)
        connection, head = pool.take_idle(), None
        try:
            if connection is not None:
                try:
                    head = await connection.ask(request)
                except HTTPConnectionError as error:
                    if not error.fresh:
                        raise
                    pool.give_back(connection)
                    connection = await self._reopen()
            if connection is None:
                connection = await pool.open()
            if head is None:
                head = await connection.ask(request)
            if head.status == 200:
                return connection
            with REPLIES.reserve() as held:
                answer = await self._rest(connection, held, MAX_ERROR_BYTES)
        except BaseException as error:
            if connection is not None:
                pool.give_back(connection)
            if isinstance(error, HTTPConnectionError):  # the request was sent
                raise self.broke("broke", error) from error
            if isinstance(error, OSError):  # or `TimeoutError`
                raise self.broke("connect", error) from error
            raise
        pool.give_back(connection)
        raise self._refusal(head.status, answer)

    async def _reopen(self) -> HTTPConnection:
        """Replace a connection that was closed before the request was read."""
        try:
            return await self._connections.open()
        except (OSError, TimeoutError) as error:
            raise HTTPConnectionError(f"it ended with the request: {error}", fresh=True) from error

    def give_back(self, connection: HTTPConnection) -> None:
        """Keep a connection for the next request, or cut it within an answer."""
        self._connections.give_back(connection)

    async def _rest(
        self, connection: HTTPConnection, held: ByteReservation, max_bytes: int
    ) -> bytes:
        """Return the rest of an answer; `held` keeps its bytes reserved."""
        answer = bytearray()
        failure: WorkerFailed | APIError | None = None
        try:
            held.check(min(connection.declared, max_bytes))
            if connection.declared > max_bytes:
                failure = self._too_long(max_bytes)
            while failure is None and (data := await connection.read()):
                held.grow(len(data))
                answer += data
                if len(answer) > max_bytes:
                    failure = self._too_long(max_bytes)
        except OverBudget as error:
            failure = _no_room(error)
        except OSError as error:
            failure = self.broke("broke", error)
        except asyncio.CancelledError:
            held.shrink(len(answer))
            raise
        if failure is None and _is_unfit(answer):
            failure = self.broke("garbage", ValueError("a reply nested too deeply or too wide"))
        if failure is not None:
            held.shrink(len(answer))
            answer.clear()
            connection.abort()
            raise failure
        return bytes(answer)

    def _too_long(self, max_bytes: int) -> WorkerFailed:
        return self.broke("garbage", ValueError(f"a reply of over {max_bytes} bytes"))

    def broke(self, reason: str, error: BaseException) -> WorkerFailed:
        """Return the exception for a failed connection to this worker."""
        words = str(error) or type(error).__name__
        me = frozenset({self.worker.id})
        return WorkerFailed(reason, f"{self.worker.id}: {words}", me, fate=self.fate)

    def _refusal(self, status: int, answer: bytes) -> Rejected | WorkerFailed:
        if 400 <= status < 500 and status not in (408, 429):
            return Rejected(status, answer)
        if status == 501:  # a field that this engine does not implement: vLLM says so
            return Rejected(400, answer)
        if status == 500 and is_request_failure(answer):
            return Rejected(status, answer)
        worker = self.worker.id
        return WorkerFailed(
            "refused", f"{worker} answered {status}", frozenset({worker}), status=status,
            body=answer, fate=self.fate,
        )  # fmt: skip

    async def whole(
        self, path: str, body: Body, request_id: str, tenant: str = "", trace: str = "",
        *, held: ByteReservation, max_bytes: int | None = None,
    ) -> bytes:  # fmt: skip
        """Send a request; return the body of its answer, whose bytes stay with `held`; as `ask`."""
        connection = await self.ask(path, body, request_id, tenant, trace)
        try:
            return await self._rest(connection, held, max_bytes or MAX_REPLY_BYTES)
        finally:
            self._connections.give_back(connection)

    async def get(
        self, path: str, timeout_s: float, method: str = "GET", body: Body | None = None
    ) -> tuple[int, bytes]:
        """Return a page's status and body; raises `aiohttp.ClientError`, `TimeoutError`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, self.worker.url + path, timeout=timeout, json=body
        ) as response:
            return response.status, await read_page(response)

    async def page(self, path: str, timeout_s: float) -> bytes | None:
        """Return a page; None if it is not there, or not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                status, page = await self.get(path, timeout_s)
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            return None
        return page if status == 200 else None

    async def end_tenures(self, salts: list[str]) -> None:
        """Let a worker free what tenures have cached; one that does not answer frees it later."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            await self.get(END, END_S, "POST", {"salts": salts})

    @asynccontextmanager
    async def passing(
        self, method: str, path: str, headers: dict[str, str], data: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Forward a request of any route; raises WorkerFailed, aiohttp.ClientError or OSError."""
        own = {name: value for name, value in self._headers.items() if name != "content-type"}
        url = URL(self.worker.url + path, encoded=True)
        with self.busy(), self.in_one_piece():
            async with self._session.request(
                method, url, headers=headers | own, data=data, allow_redirects=False
            ) as response:
                yield response

    async def fate(self, timeout_s: float = 1.0) -> WorkerEnd:
        """Return how the worker ended, waiting up to `timeout_s`; `LIVES` while it answers."""
        if not self._closed:
            try:
                status, body = await self.get("/health", timeout_s)
            except TimeoutError:
                return self._known(WorkerEnd.LIVES)
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                number = getattr(error, "errno", None)
                if number is not None and number not in GONE and not self._closed:
                    return WorkerEnd.LIVES  # this process cannot ask
            else:
                if status < 500 or b'"closing"' in body[:256]:
                    return self._known(WorkerEnd.LIVES)
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._end)
        except TimeoutError:
            return WorkerEnd.LOST

    def _known(self, otherwise: WorkerEnd) -> WorkerEnd:
        known = self._end is not None and self._end.done() and not self._end.cancelled()
        return self._end.result() if known and self._end is not None else otherwise

    def send_away(self) -> int:
        """Fail the requests here, so that they move; return how many. The worker stays."""
        leaving = self._tasks - self._sent_away
        self._sent_away |= leaving
        for task in leaving:
            task.cancel()
        return len(leaving)

    async def close(self, end: WorkerEnd = WorkerEnd.LOST) -> None:
        """Cut all connections; requests here fail with `WorkerFailed`."""
        self._closed = True
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        if not self._end.done():
            self._end.set_result(end)
        for task in self._tasks:
            task.cancel()
        self._connections.close()
        await self._session.close()

    def _gone(self) -> WorkerFailed:
        worker = self.worker.id
        if not self.closed():
            return WorkerFailed("drained", f"{worker} was drained", frozenset({worker}))
        return WorkerFailed("down", f"{worker} went down", frozenset({worker}), fate=self.fate)


def _no_room(error: OverBudget) -> APIError:
    return APIError(
        502, f"The replies under way leave no room for this one ({error}). Try again later, or "
        "stream it.", retry_after=1,
    )  # fmt: skip


def _is_unfit(reply: bytes | bytearray) -> bool:
    """True if a JSON reply is nested too deeply or has too many fields."""
    if len(reply) <= SMALL:
        return is_deep(reply)
    shape = measure(reply)
    return shape.depth > MAX_DEPTH or shape.items > MAX_FIELDS


async def fetch_kv(
    source: Upstream, body: Body, request_id: str, fetch: FetchKV, tenant: str = "", trace: str = ""
) -> tuple[dict[str, Any] | None, str]:
    """Return the transfer params of a worker's cached prefix, and the outcome.

    Waits no longer than computing the prompt would take. Outcomes: "offered", "nothing", "late", or
    a reason of `WorkerFailed`.
    """
    try:
        async with asyncio.timeout(fetch.wait_ns / SECOND):
            with source.busy(), REPLIES.reserve() as held:
                reply = await source.whole(
                    OFFER, _prompt_of(body), request_id, tenant, trace,
                    held=held, max_bytes=MAX_TICKET_BYTES,
                )  # fmt: skip
        params = ticket(reply)
    except TimeoutError:
        return None, "late"
    except WorkerFailed as failure:
        return None, failure.reason
    except APIError:
        return None, "refused"
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, "garbage"
    return params, "nothing" if params is None else "offered"


def _prompt_of(body: Body) -> Body:
    """Return the fields by which the worker finds the prompt's blocks."""
    ids = body.get("prompt_token_ids")
    if ids is None:
        return body
    return {name: body[name] for name in _PROMPT_FIELDS if name in body} | {"prompt": ids}
