"""Probe: reads a worker's model, limits and sources from its server's pages."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pigou.config import ConfigError, LaneConfig
from pigou.gateway.proxy.upstream import Engine, ServedName, ServedNames, Upstream
from pigou.request import UNKNOWN_LOCATION, Location, Rehearsed, Role
from pigou.wire import metrics_text
from pigou.wire.bodies import read_page
from pigou.wire.errors import DECODING_ERRORS
from pigou.wire.fleet_secret import NONCE, PROOF, FleetSecret
from pigou.wire.names import MAX_TEXT, deployment_version, reachable, text

#: Block size of a server that reports none: vLLM's default on a GPU.
_BLOCK_SIZE = 16
#: Least seconds of a startup profile's step. Entries outside of the bounds would spoil the latency
#: model, which all workers share.
_MIN_STEP_S = 1e-6
#: Tokens, streams, steps and seconds of a startup profile's entry.
_ProfileEntry = tuple[
    Annotated[int, msgspec.Meta(ge=0, le=2**20)],
    Annotated[int, msgspec.Meta(ge=0, le=2**20)],
    Annotated[int, msgspec.Meta(ge=1, le=2**20)],
    Annotated[float, msgspec.Meta(le=3600.0)],
]
#: Bounds of what else a server says: tokens and blocks, publishers of KV events.
_MAX_NUMBER, _MAX_SOURCES = 2**31 - 1, 64
#: Names of `/v1/models` that are used; the rest of a longer list is left out.
_MAX_SERVED = 1024
#: Endpoint of events that are polled over HTTP, as TensorRT-LLM has them.
POLL = "poll"
#: A completion and a chat, as a vLLM server's render routes take them.
_RENDERED: dict[bool, dict[str, Any]] = {
    False: {"prompt": "x"}, True: {"messages": [{"role": "user", "content": "x"}]},
}  # fmt: skip
_ENDPOINT = re.compile(r"(tcp|ipc)://\S+$")
#: Engines by the owner of their models; further names of pages and fields are theirs.
_FAMILIES = {"sglang": "sglang", "tensorrt_llm": "trtllm"}
#: Role by SGLang's `--disaggregation-mode`.
_MODES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.BOTH, "": Role.BOTH}
_TRTLLM_BLOCK_SIZE = 32  # TensorRT-LLM's `tokens_per_block`


class ProbeFailed(Exception):
    """A server does not answer as a worker does."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """ZMQ addresses of KV events, and their CURVE `secret`."""

    endpoint: str
    replay: str = ""  # address for replays
    topic: str = ""
    encrypted: bool = False
    secret: FleetSecret | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe read of a worker."""

    engine: Engine
    block_size: int  # tokens in a block
    blocks: int  # KV blocks; 0 if unknown
    max_seqs: int  # maximum of concurrent sequences; 0 if unknown
    sources: tuple[EventSource, ...]
    layout: str = ""  # layout id of its cache; empty if others may not read it
    # own speed measured at startup; empty if unknown.
    startup_profile: tuple[Rehearsed, ...] = ()
    version: str = ""  # deployment version; empty if none
    location: Location = UNKNOWN_LOCATION  # labels of its node
    role: Role | None = None  # the only role that the server was started for; None for any
    long_lane: str = ""  # lane for long prompts; empty for none


class _ModelCard(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    root: str | None = None
    parent: str | None = None


class _ModelCards(msgspec.Struct):
    data: list[_ModelCard]


class _Rendered(msgspec.Struct):
    """A request that a vLLM server made of a text: for its generate endpoint."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    output_mode: Literal["tokens"]
    reasoning_parser_kwargs: dict[str, Any] | None = None


async def probe(url: str, key: str = "", timeout_s: float = 10.0) -> ProbeResult:
    """Probe a worker. Raises ProbeFailed."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            status, body = await _get(session, url + "/v1/models")
            if status != 200:
                raise ProbeFailed(f"{url}/v1/models answered {status}")
            cards = _cards(url, body)
            version = _json((await _get(session, url + "/version"))[1]).get("version", "")
            cache = metrics_text.cache_config((await _get(session, url + "/metrics"))[1])
            sources = _json((await _get(session, url + "/kv_event_sources"))[1])
            about = _json((await _get(session, url + "/server_info"))[1])
            card = next((card for card in cards if not card.parent), cards[0])
            generate = await _generate_defaults(session, url, card)
    except (
        aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError,
        RecursionError,
    ) as error:  # fmt: skip
        raise ProbeFailed(f"{url}: {error or type(error).__name__}") from error
    family, host = _FAMILIES.get(card.owned_by, ""), urlsplit(url).hostname or ""
    role = _MODES.get(text(about.get("disaggregation_mode"))) if family == "sglang" else None
    if family == "sglang":
        version, card.root = about.get("version"), text(about.get("model_path")) or card.root
        cache = _sglang_cache(about)
        sources = _sglang_sources(about.get("kv_events"))
    elif family == "trtllm":
        cache["block_size"] = cache.get("block_size") or _TRTLLM_BLOCK_SIZE
    engine = Engine(
        stock=card.owned_by != "pigou",
        model=card.id,
        max_model_len=_number(card.max_model_len),
        version=text(version),
        root=text(card.root),
        dynamo=card.owned_by == "nvidia",
        ranks=card.owned_by == "pigou" and about.get("order") == "priority",
        deadlines=card.owned_by == "pigou" and about.get("order") == "edf",
        release=text(about.get("release")) or text(version),
        incarnation="" if card.owned_by != "pigou" else text(about.get("incarnation")),
        tensor_parallel_size=_number(about.get("tensor_parallel_size") or about.get("tp_size"))
        or 1,
        family=family,
        bootstrap=(host, _number(about.get("disaggregation_bootstrap_port")))
        if family == "sglang" and role is Role.PREFILL
        else None,
        generate_defaults=generate,
        served=_served(card.id, cards),
    )
    return ProbeResult(
        engine,
        cache.get("block_size") or _BLOCK_SIZE,
        cache.get("num_gpu_blocks", 0),
        _number(about.get("max_running_requests" if family == "sglang" else "max_seqs")),
        tuple(_source(value, host) for value in sources.values() if _publishes(value))[
            :_MAX_SOURCES
        ],
        "" if engine.stock else text(about.get("kv_layout")),
        () if engine.stock else read_startup_profile(about.get("rehearsed")),
        deployment_version(about),
        _location(about.get("location")),
        role,
        "" if engine.stock else _lane(about.get("long_lane")),
    )


def _lane(value: Any) -> str:
    """Return a lane that can be parsed; empty for everything else."""
    try:
        return text(value) if LaneConfig.parse(text(value)) else ""
    except ConfigError:
        return ""


def _sglang_cache(about: dict[str, Any]) -> dict[str, int]:
    """Return the cache of SGLang's `/server_info`; blocks are those of KV events."""
    events = about.get("kv_events")
    published = events.get("block_size") if isinstance(events, dict) else None
    size = _number(published) or _number(about.get("page_size")) or 1
    return {
        "block_size": size,
        "num_gpu_blocks": _number(about.get("max_total_num_tokens")) // size,
    }


def _sglang_sources(events: Any) -> dict[str, Any]:
    """Return the publishers of SGLang's `kv_events`: one a rank, at consecutive ports."""
    if not isinstance(events, dict) or not isinstance(events.get("endpoint_host"), str):
        return {}
    base, replay = (
        _number(events.get(f"{name}_port_base")) for name in ("endpoint", "replay_endpoint")
    )
    ranks = range(min(_number(events.get("dp_size")) or 1, _MAX_SOURCES))
    address = f"tcp://{events['endpoint_host']}"
    return {
        str(rank): {
            "endpoint": f"{address}:{base + rank}",
            "replay_endpoint": f"{address}:{replay + rank}" if replay else None,
            "topic": events.get("topic"),
        }
        for rank in ranks
        if base
    }


async def _generate_defaults(
    session: aiohttp.ClientSession, url: str, card: _ModelCard
) -> dict[bool, dict[str, Any]]:
    """Return the default sampling parameters of vLLM's generate endpoint, where it is enabled.

    Chats are left out where a reasoning parser would take their text apart; everything is where the
    server bounds output by more than its context.
    """
    defaults: dict[bool, dict[str, Any]] = {}
    for chat, body in _RENDERED.items() if card.owned_by == "vllm" else ():
        path = f"/v1/{'chat/' * chat}completions/render"
        try:
            async with session.post(url + path, json=body | {"model": card.id}) as response:
                page = await read_page(response) if response.status == 200 else b""
            rendered = msgspec.json.decode(page, type=_Rendered | tuple[_Rendered])
        except (aiohttp.ClientError, OSError, TimeoutError, *DECODING_ERRORS):
            continue
        one = rendered[0] if isinstance(rendered, tuple) else rendered
        left = (card.max_model_len or 0) - len(one.token_ids)
        if chat and one.sampling_params.pop("max_tokens", left) != left:
            return {}
        if not one.reasoning_parser_kwargs:
            names = one.sampling_params.keys() - {"output_kind", "skip_clone"}  # the server's own
            defaults[chat] = {name: one.sampling_params[name] for name in names}
    return defaults


async def read_served(upstream: Upstream, timeout_s: float) -> ServedNames | None:
    """Return a server's additional model names, or None."""
    page = await upstream.page("/v1/models", timeout_s)
    try:
        cards = [] if page is None else _cards(upstream.worker.url, page)
        return _served(upstream.engine.model, cards) if cards else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ProbeFailed):
        return None


def _cards(url: str, body: bytes) -> list[_ModelCard]:
    """Return the cards of a list of models, the first `_MAX_SERVED` of them. Raises ProbeFailed."""
    cards = msgspec.json.decode(body, type=_ModelCards).data[:_MAX_SERVED]
    if not cards:
        raise ProbeFailed(f"{url}/v1/models lists no model")
    characters = max(len(card.id) for card in cards)
    if characters > MAX_TEXT:
        raise ProbeFailed(f"{url}/v1/models names a model of {characters} characters")
    return cards


def _served(model: str, cards: list[_ModelCard]) -> ServedNames:
    by_name = {card.id: ServedName(text(card.root), text(card.parent)) for card in cards}
    return ServedNames.listed(model, by_name)


async def fleet_key(url: str, secret: FleetSecret, timeout_s: float = 10.0) -> str:
    """Return the fleet's token if the server proves the secret, else ""."""
    nonce = secrets.token_hex(16)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url + "/v1/models", headers={NONCE: nonce}) as response,
        ):
            shown = response.headers.get(PROOF, "") if response.status == 401 else ""
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""  # the next probe reports the cause
    return secret.token if shown and secret.proves(nonce, shown) else ""


def read_startup_profile(entries: Any) -> tuple[Rehearsed, ...]:
    """Return a worker's startup profile, without impossible entries."""
    profile = map(_measured, entries) if isinstance(entries, list) else ()
    return tuple(load for load in profile if load is not None)


def _measured(entry: Any) -> Rehearsed | None:
    try:
        load = Rehearsed(*msgspec.convert(entry, _ProfileEntry))
    except msgspec.ValidationError:
        return None
    is_load = load.tokens + load.streams > 0 and load.seconds >= _MIN_STEP_S * load.steps
    return load if is_load else None


def _publishes(value: Any) -> bool:
    """True if a description names an event endpoint."""
    if not isinstance(value, dict) or not _ENDPOINT.match(text(value.get("endpoint"))):
        return False
    replay, topic = value.get("replay_endpoint"), value.get("topic")
    reachable = not replay or bool(_ENDPOINT.match(text(replay)))
    return reachable and (topic is None or isinstance(topic, str))


def _source(value: dict[str, Any], host: str) -> EventSource:
    return EventSource(
        reachable(text(value.get("endpoint")), host),
        reachable(text(value.get("replay_endpoint")), host),
        text(value.get("topic")),
        value.get("encryption") == "curve",
    )


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with session.get(url) as response:
        return response.status, await read_page(response)


def _json(body: bytes) -> dict[str, Any]:
    """Return an optional page's object; empty where a server has no such page."""
    try:
        value = msgspec.json.decode(body)
    except DECODING_ERRORS:
        return {}
    return value if isinstance(value, dict) else {}


def _location(value: Any) -> Location:
    """Return a node's labels; unknown without a host."""
    labels = value if isinstance(value, dict) else {}
    location = Location(*(text(labels.get(field)) for field in Location._fields))
    return location if location.host else UNKNOWN_LOCATION


def _number(value: Any) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and 0 <= value <= _MAX_NUMBER else 0
