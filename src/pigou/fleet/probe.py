"""The probe: learns of a worker what its server tells."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pigou.control.messages import LoadReport
from pigou.gateway.upstream import Engine
from pigou.request import Rehearsed

#: Block size that is assumed of a server that does not tell: vLLM's default on a GPU.
_BLOCK_SIZE = 16
#: What a worker tells of its speed is believed within these: tokens, streams and steps, seconds of
#: a step, and seconds. What is beyond them would spoil the fleet's laws, which all share.
_MOST, _LEAST_S, _MOST_S = 2**20, 1e-6, 3600.0
_SAMPLE = re.compile(rb"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


class ProbeFailed(Exception):
    """A server does not answer as a worker does."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where KV events come from: ZMQ addresses; `replay` is empty where there is none."""

    endpoint: str
    replay: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What a worker told.

    Attributes:
        engine: what it runs.
        block_size: tokens in a block.
        blocks: KV blocks, 0 when it did not say.
        max_seqs: most sequences at once, 0 when it did not say.
        sources: of KV events, one a data parallel rank.
        layout: of its cache, for others that may read it; empty where it lends nothing.
        rehearsed: what it measured of its own speed; empty where it did not say.
    """

    engine: Engine
    block_size: int
    blocks: int
    max_seqs: int
    sources: tuple[Source, ...]
    layout: str = ""
    rehearsed: tuple[Rehearsed, ...] = ()


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def probe(url: str, key: str = "", timeout_s: float = 10.0) -> Found:
    """Ask a worker who it is.

    Raises:
        ProbeFailed: it does not answer, or not as a vLLM server does.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            status, body = await _get(session, url + "/v1/models")
            if status != 200:
                raise ProbeFailed(f"{url}/v1/models answered {status}")
            cards = msgspec.json.decode(body, type=_Cards).data
            version = _json((await _get(session, url + "/version"))[1]).get("version", "")
            cache = cache_info((await _get(session, url + "/metrics"))[1])
            sources = _json((await _get(session, url + "/kv_event_sources"))[1])
            about = _json((await _get(session, url + "/server_info"))[1])
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
        raise ProbeFailed(f"{url}: {error or type(error).__name__}") from error
    if not cards:
        raise ProbeFailed(f"{url}/v1/models lists no model")
    card = cards[0]
    engine = Engine(
        stock=card.owned_by != "pigou",
        model=card.id,
        max_model_len=card.max_model_len or 0,
        version=str(version),
        root=card.root or "",
        dynamo=card.owned_by == "nvidia",
        ranks=card.owned_by == "pigou" and about.get("order") == "priority",
        deadlines=card.owned_by == "pigou" and about.get("order") == "edf",
        release=str(about.get("release") or version),
    )
    host = urlsplit(url).hostname or ""
    return Found(
        engine,
        cache.get("block_size") or _BLOCK_SIZE,
        cache.get("num_gpu_blocks", 0),
        _number(about.get("max_seqs")),
        tuple(_source(value, host) for value in sources.values() if _publishes(value)),
        "" if engine.stock else str(about.get("kv_layout") or ""),
        () if engine.stock else rehearsed(about.get("rehearsed")),
    )


def loads(page: bytes, worker: str) -> LoadReport:
    """Return what a metrics page says of a worker's load; zero for what it does not say."""
    sums: dict[bytes, float] = {}
    for name, _, value in _SAMPLE.findall(page):
        sums[name] = sums.get(name, 0.0) + _float(value)
    usage = sums.get(b"vllm:kv_cache_usage_perc", sums.get(b"vllm:gpu_cache_usage_perc", 0.0))
    return LoadReport(
        worker,
        int(sums.get(b"vllm:num_requests_running", 0)),
        int(sums.get(b"vllm:num_requests_waiting", 0)),
        usage,
    )


def cache_info(page: bytes) -> dict[str, int]:
    """Return `block_size` and `num_gpu_blocks` of a metrics page, as far as it tells them."""
    for name, labels, _ in _SAMPLE.findall(page):
        if name == b"vllm:cache_config_info":
            found = {key.decode(): value for key, value in _LABEL.findall(labels)}
            wanted = ("block_size", "num_gpu_blocks")
            return {key: int(found[key]) for key in wanted if found.get(key, b"").isdigit()}
    return {}


def rehearsed(told: Any) -> tuple[Rehearsed, ...]:
    """Return what a worker told of its speed, without what cannot be a measurement."""
    if not isinstance(told, list):
        return ()
    return tuple(
        Rehearsed(int(each[0]), int(each[1]), int(each[2]), float(each[3]))
        for each in told
        if _measured(each)
    )


def _measured(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 4:
        return False
    if not all(isinstance(each, int | float) and _finite(each) for each in entry):
        return False
    tokens, streams, steps, seconds = entry
    whole = all(each == int(each) for each in (tokens, streams, steps))
    return bool(
        whole and 0 <= tokens <= _MOST and 0 <= streams <= _MOST and tokens + streams > 0
        and 1 <= steps <= _MOST and _LEAST_S * steps <= seconds <= _MOST_S
    )  # fmt: skip


def _finite(value: float) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _publishes(value: Any) -> bool:
    return isinstance(value, dict) and bool(value.get("endpoint"))


def _source(value: dict[str, Any], host: str) -> Source:
    return Source(
        _reachable(str(value["endpoint"]), host),
        _reachable(str(value.get("replay_endpoint") or ""), host),
        str(value.get("topic") or ""),
    )


def _reachable(endpoint: str, host: str) -> str:
    """Put the worker's host in place of a wildcard address."""
    shown = f"[{host}]" if ":" in host else host
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\])(?=:)", f"tcp://{shown}", endpoint)


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url) as response:
        return response.status, await response.read()


def _json(body: bytes) -> dict[str, Any]:
    """Return an optional page's object; empty where a server has no such page."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
