"""The layers of caches above the engine: options, memory, and what they share."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any

import msgspec
from prometheus_client.core import Metric

from pigou.config import ConfigError, KVQuota, check_bounds
from pigou.gateway.caches.context import CompiledContext, Context, compile_context
from pigou.kv.manifest import SESSION, Bound, Manifest, ManifestEntry
from pigou.kv.quotas import EACH_OTHER, check_quotas, read_quotas
from pigou.kv.tenure import Purpose, Tenure
from pigou.kv.tenured_cache import TenuredCache
from pigou.kv.tier_config import parse_size
from pigou.metric_rows import counter_family, gauge_family
from pigou.registry import read_struct
from pigou.request import NEVER, SECOND
from pigou.wire.errors import bad_request, decoded
from pigou.wire.openai_requests import without_bom


class CacheLayer(StrEnum):
    """A cache above the engine."""

    ANSWER = "answer"
    SEMANTIC = "semantic"
    TOOL = "tool"
    RETRIEVAL = "retrieval"
    EMBEDDING = "embedding"
    CONTEXT = "context"


#: Header of replies that tells what a compiled context dropped.
CONTEXT_HEADER = "x-pigou-context"
#: Header of requests (`sampled`, `semantic`) and of replies (`hit`, `miss`, `bypass`).
CACHE_HEADER = "x-pigou-cache"
SAMPLED, SEMANTIC = "sampled", "semantic"
_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)
TENANT = "tenant"
_SESSION = re.compile(r"[\w.:-]{1,128}", re.ASCII)
#: Header that names an agent's session, and seconds that one lasts unless its tenure says, at most.
SESSION_HEADER = "x-pigou-session"
SESSION_TTL_S, MAX_SESSION_TTL_S = 3600, 86_400
_MAX_STREAM_BYTES, _MAX_SERVED = 2**21, 4096
#: Sessions whose salts are kept, and salts of each, at most.
_MAX_SESSIONS, _MAX_SALTS = 4096, 256
_context = msgspec.json.Decoder(Context)
_COUNTS = {
    "lookups": "Lookups in a cache above the engine.", "hits": "Lookups that hit.",
    "stored": "Artifacts stored.",
    "refused": "Artifacts not stored: changed meanwhile, over the quota, or not worth their bytes.",
    "stale_hits": "Hits after the source of an artifact had changed, before the gateway was told.",
}  # fmt: skip
_RATIOS = {
    CacheLayer.ANSWER: "answer_cache_hit_ratio", CacheLayer.TOOL: "tool_api_avoidance_rate",
    CacheLayer.EMBEDDING: "embedding_hit_ratio", CacheLayer.CONTEXT: "context_compile_hit_ratio",
}  # fmt: skip
_QUOTA = "quota."
#: Stands for all tenants in `tenants`.
EVERYBODY = "*"


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a request says of caches: `Cache-Control` (RFC 9111) and `X-Pigou-Cache`."""

    reads: bool = True  # False for no-cache
    stores: bool = True  # False for no-store
    max_age_s: float | None = None
    only: bool = False  # only-if-cached: 504 on a miss
    wants: frozenset[str] = frozenset()

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> CacheControl:
        """Parse a request's headers; raises APIError 400 for what `X-Pigou-Cache` does not know."""
        said: dict[str, str] = {}
        for item in headers.get("cache-control", "").split(","):
            name, _, value = item.strip().partition("=")
            said[name.lower()] = value.strip('"')
        wants = {item.strip().lower() for item in headers.get(CACHE_HEADER, "").split(",")} - {""}
        if unknown := sorted(wants - {SAMPLED, SEMANTIC}):
            raise bad_request(
                f"{CACHE_HEADER} has {unknown[0][:40]!r}; it may have {SAMPLED} and {SEMANTIC}. "
                "Send Cache-Control: no-cache or no-store against a cache.", CACHE_HEADER,
            )  # fmt: skip
        age = said.get("max-age")
        return cls(
            reads=not {"no-cache", "no-store"} & said.keys() and age != "0",
            stores="no-store" not in said,
            max_age_s=float(age) if age is not None and _SECONDS.fullmatch(age) else None,
            only="only-if-cached" in said,
            wants=frozenset(wants),
        )


@dataclass(slots=True)
class AnswerLookup:
    """A request's place in the answer cache; `None` in its run keeps a reply from being stored."""

    bound: Bound
    content: bytes
    control: CacheControl
    began: float  # seconds of the monotonic clock
    status: str = "miss"  # as the reply's header says
    semantic: Any = None  # place among similar questions; None if only equal ones count
    frames: list[bytes] = field(default_factory=list)  # recorded from the stream
    room: int = _MAX_STREAM_BYTES  # for further frames; a longer stream is not stored

    def record(self, data: bytes) -> None:
        """Keep frames of the stream that answers it."""
        self.room -= len(data)
        if self.room >= 0:
            self.frames.append(data)


class CacheOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A layer as `--cache LAYER=SIZE[,key=value]...` gives it."""

    layer: CacheLayer
    size: int  # bytes
    ttl: float = 3600.0  # seconds that an artifact lasts at most
    quota: float = 0.5  # share of the bytes above which a tenant's artifacts go first
    quotas: dict[str, KVQuota] = {}  # shares by tenant: `quota.TENANT=FLOOR:CEILING`
    policy: str = "price"  # eviction policy, as registered under `pigou.eviction`
    tenants: str = ""  # semantic: tenants answered without asking for it, with + between them; or *
    threshold: float = 0.7  # semantic: least cosine similarity of two prompts
    embedding: str = ""  # semantic: model at /v1/embeddings; empty for hashed n-grams

    def check(self) -> None:
        """Raise ConfigError for a value out of bounds."""
        check_bounds(f"cache {self.layer}: size", self.size, ge=1)
        check_bounds(f"cache {self.layer}: ttl", self.ttl, gt=0)
        for name, value in (("quota", self.quota), ("threshold", self.threshold)):
            if not 0 < value <= 1:
                raise ConfigError(f"cache {self.layer}: {name} is {value:g}; it must be in (0, 1]")
        if EACH_OTHER in self.quotas:
            raise ConfigError(
                f"cache {self.layer}: quota.{EACH_OTHER} is given; write quota=SHARE for each "
                "other tenant"
            )
        check_quotas(self.quotas, f"cache {self.layer}: quota")
        given = (self.tenants, self.embedding, self.threshold) != ("", "", 0.7)
        if self.layer is not CacheLayer.SEMANTIC and given:
            raise ConfigError(
                f"cache {self.layer}: tenants, threshold and embedding belong to semantic"
            )


def read_caches(texts: Iterable[str]) -> dict[CacheLayer, CacheOption]:
    """Read `LAYER=SIZE[,key=value]...` of each layer; raises ConfigError."""
    options: dict[CacheLayer, CacheOption] = {}
    for text in texts:
        head, *rest = text.split(",")
        layer, _, size = head.partition("=")
        if layer not in list(CacheLayer) or not size:
            raise ConfigError(
                f"cache is {text!r}; write LAYER=SIZE[,key=value]..., as answer=64MiB,ttl=600; "
                f"layers are {', '.join(CacheLayer)}"
            )
        quotas = [item.removeprefix(_QUOTA) for item in rest if item.startswith(_QUOTA)]
        values: dict[str, Any] = {
            "layer": layer, "size": parse_size(size),
            "quotas": read_quotas(quotas, f"cache {layer}: quota"),
        }  # fmt: skip
        for item in rest:
            key, _, value = item.partition("=")
            if item.startswith(_QUOTA):
                continue
            if key in values:
                raise ConfigError(f"cache {text!r}: {key} is given twice; give it once")
            values[key] = value
        option = read_struct(f"cache {text!r}", CacheOption, values)
        option.check()
        if option.layer in options:
            raise ConfigError(f"cache {layer} is given twice; give it once")
        options[option.layer] = option
    return options


def check_session(session: str) -> None:
    """Raise `APIError` 400 for a text that names no session."""
    if not _SESSION.fullmatch(session):
        raise bad_request(
            f"{SESSION_HEADER} is {session[:40]!r}; it must have 1 to 128 letters, digits or any "
            "of ._:-", SESSION_HEADER,
        )  # fmt: skip


class Caches:
    """All layers of a gateway, and the manifest that voids what they hold."""

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.options = read_caches(texts)
        self.manifest = Manifest()
        self.layers: dict[CacheLayer, TenuredCache[Any]] = {
            layer: TenuredCache(
                option.size,
                self.manifest,
                {EACH_OTHER: KVQuota(ceiling=option.quota), **option.quotas},
                option.policy,
            )
            for layer, option in self.options.items()
        }
        self.served: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by tenant and reply id
        self.distance = 0.0  # sum over hits of similar questions
        self.is_shared = False  # True if changes go to other gateways
        self.changed: list[ManifestEntry] = []  # those that are to be sent
        #: Salts of requests by tenant and session, and what is told them once it ends.
        self._salts: OrderedDict[tuple[str, str], dict[str, None]] = OrderedDict()
        self.on_session_end: Callable[[list[str]], None] = lambda _: None
        #: False while a change on another gateway could be missed: then every lookup misses.
        self.in_touch: Callable[[], bool] = lambda: True

    def in_session(self, tenure: Tenure, headers: Mapping[str, str]) -> Tenure:
        """Return the tenure of a request within its session, if its headers name one."""
        session = headers.get(SESSION_HEADER)
        if session is None:
            return tenure
        check_session(session)
        now = time.time_ns()
        if tenure.expiry == NEVER:
            tenure = tenure.lasting(SESSION_TTL_S * SECOND, now)
        if tenure.expiry > now + MAX_SESSION_TTL_S * SECOND:
            raise bad_request(
                f"{SESSION_HEADER} is given, and a tenure of over {MAX_SESSION_TTL_S} s; send a "
                "shorter X-Pigou-Tenure-TTL.", SESSION_HEADER,
            )  # fmt: skip
        tenure = replace(tenure, principal=f"{tenure.principal}{SESSION}{session}")
        return self.manifest.bind(tenure).tenure

    def note_salt(self, tenure: Tenure, salt: str) -> None:
        """Note the salt of a request, if it is of a session."""
        session = tenure.principal.partition(SESSION)[2]
        if not session:
            return
        key = (tenure.tenant, session)
        salts = self._salts[key] = self._salts.pop(key, {})
        salts[salt] = None
        if len(salts) > _MAX_SALTS:
            del salts[next(iter(salts))]
        if len(self._salts) > _MAX_SESSIONS:
            self._salts.popitem(last=False)

    def bind(self, layer: CacheLayer, tenure: Tenure) -> Bound:
        """Return a tenure for a layer, bound to the present manifest."""
        return self.manifest.bind(replace(tenure, purpose=Purpose[layer.name]))

    def get(
        self, layer: CacheLayer, bound: Bound, content: bytes, max_age_s: float | None = None
    ) -> Any:
        """Return an artifact; None on a miss, or while other gateways are out of touch."""
        if not self.in_touch():
            return None
        max_age = None if max_age_s is None else max(1, int(max_age_s * SECOND))
        return self.layers[layer].get(bound, content, time.time_ns(), max_age)

    def put(
        self, layer: CacheLayer, bound: Bound, content: bytes, artifact: Any, size: int,
        cost_s: float, ttl_s: float | None = None,
    ) -> bool:  # fmt: skip
        """Store an artifact made in `cost_s` seconds; False if its tenure changed meanwhile."""
        now, ttl_s = time.time_ns(), min(ttl_s or inf, self.options[layer].ttl)
        until = now + int(ttl_s * SECOND)
        return self.layers[layer].put(bound, content, artifact, size, cost_s, now, until)

    def compiled(self, bound: Bound, context: Context) -> bytes:
        """Return a compiled context as JSON, from its cache if it is there."""
        content = msgspec.json.encode(context, order="deterministic")
        began = time.monotonic()
        compiled: bytes | None = self.get(CacheLayer.CONTEXT, bound, content)
        if compiled is None:
            compiled = msgspec.json.encode(compile_context(context))
            size, cost_s = len(compiled) + len(content), time.monotonic() - began
            self.put(CacheLayer.CONTEXT, bound, content, compiled, size, cost_s)
        return compiled

    def with_context(self, tenure: Tenure, data: bytes) -> tuple[bytes, str]:
        """Return a chat's body with its `context` compiled, and what was dropped as a header."""
        if CacheLayer.CONTEXT not in self.layers or b'"context"' not in data:
            return data, ""
        from pigou.wire.json_limits import read_fields  # imports numba, which no help needs

        body = read_fields(without_bom(data))
        if "context" not in body:
            return data, ""
        for name in ("messages", "tools"):
            if name in body:
                raise bad_request(f"{name} is given, and context: leave one out.", name)
        context = decoded(_context, bytes(body.pop("context")))
        reply = self.compiled(self.bind(CacheLayer.CONTEXT, tenure), context)
        parts = msgspec.json.decode(reply, type=CompiledContext)
        body["messages"] = msgspec.Raw(msgspec.json.encode(parts.messages))
        if parts.tools:
            body["tools"] = msgspec.Raw(msgspec.json.encode(parts.tools))
        dropped = "; ".join(f"{part}={len(names)}" for part, names in parts.dropped.items())
        return msgspec.json.encode(body), dropped or "none"

    def note_served(self, tenant: str, reply_id: str, answer: bytes) -> None:
        """Remember which cached answer a reply was, for its user's rating."""
        self.served[tenant, reply_id] = answer
        if len(self.served) > _MAX_SERVED:
            self.served.popitem(last=False)

    def families(self) -> Iterator[Metric]:
        """Yield the metrics of all layers; ratios have the names of `throughput-mechanics`."""
        if not self.layers:
            return
        rows = [(layer.value, cache) for layer, cache in self.layers.items()]
        for name, about in _COUNTS.items():
            samples = [((layer,), cache.counts[name]) for layer, cache in rows]
            yield counter_family(f"pigou_cache_{name}", about, samples, "layer")
        about = "Seconds that hits of a cache saved."
        saved = [((layer,), cache.saved_s) for layer, cache in rows]
        yield counter_family("pigou_cache_saved_seconds", about, saved, "layer")
        about = "Price of a byte of a cache, in seconds saved per second."
        prices = [((layer,), cache.tier.price) for layer, cache in rows]
        yield gauge_family("pigou_cache_byte_price", about, prices, "layer")
        sizes = [((layer, tenant), float(size)) for layer, cache in rows
                 for tenant, size in cache.accounts.held().items()]  # fmt: skip
        yield gauge_family("pigou_cache_bytes", "Bytes of a tenant.", sizes, "layer", TENANT)
        for layer, name in _RATIOS.items():
            if (cache := self.layers.get(layer)) is not None:
                ratio = cache.counts["hits"] / max(1, cache.counts["lookups"])
                yield gauge_family(f"pigou_{name}", f"Hits of a lookup: {layer}.", ratio)
        if (cache := self.layers.get(CacheLayer.RETRIEVAL)) is not None:
            about = "Seconds of retrieval that hits saved."
            yield counter_family("pigou_retrieval_cache_latency_saved", about, cache.saved_s)
        if CacheLayer.SEMANTIC in self.layers:
            yield gauge_family(
                "pigou_semantic_cache_hit_distance", "Mean of 1 - cosine over hits.",
                self.distance / max(1, self.layers[CacheLayer.SEMANTIC].counts["hits"]),
            )  # fmt: skip

    def change(
        self, tenant: str, field: str, value: str, version: str, changed_at: int, until: int
    ) -> int | None:
        """Record a new version here and on all gateways; return the artifacts voided here."""
        entry = self.manifest.change(tenant, field, value, version, time.time_ns(), until)
        if entry is None:
            return None
        if self.is_shared:
            self.changed.append(entry)
        return self._sweep(entry, changed_at)

    def merge(self, entries: Iterable[ManifestEntry]) -> None:
        """Take another gateway's changes."""
        for entry in self.manifest.merge(entries):
            self._sweep(entry, time.time_ns())

    def _sweep(self, entry: ManifestEntry, changed_at: int) -> int:
        now = time.time_ns()
        if entry.field == "session" and (salts := self._salts.pop((entry.tenant, entry.value), {})):
            self.on_session_end([*salts])
        return sum(layer.sweep(entry, changed_at, now) for layer in self.layers.values())
