"""Configuration of the gateway; unknown keys are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from pigou.config import ConfigError, check_fields, option
from pigou.control.degradation import Degradation, DegradedMode
from pigou.gateway.caches.layers import CacheLayer, read_caches
from pigou.tracing.config import TracingConfig
from pigou.wire.names import is_loopback
from pigou.wire.openai_requests import MODES

#: Addresses that only this machine reaches.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
#: Endings of files that are unpacked when they are read.
_PACKED = (".gz", ".zst")


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    """Fallback for requests of a model that cannot be served now.

    Refused requests go at once. Others wait as long as the fallback is worth, which costs at most
    twice the optimum (ski rental: Karlin, Manasse, Rudolph, Sleator 1988).
    """

    to: str  # name of another model here, or base URL of another fleet
    price_s: float = 1.0  # worth of the fallback, in seconds of waiting
    key: str = ""  # bearer key of the other fleet

    @property
    def is_url(self) -> bool:
        """True if the fallback is another fleet."""
        return self.to.startswith(("http://", "https://"))


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one gateway."""

    host: Annotated[str, option("Address that the gateway listens on.", "Gateway")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on; 0 picks a free one.", "Gateway")] = 8000
    max_body: Annotated[int, option("Maximum size of a request body, in bytes.", "Gateway")] = (
        16 * 1024 * 1024
    )
    max_line: int = 8190  # most bytes of the request line; more is answered 431
    max_header: int = 8190  # most bytes of one header; more is answered 431
    max_headers: int = 100  # most headers; more is answered 431
    max_connections: Annotated[
        int, option("Maximum of client connections; 0 uses the limit of open files.")
    ] = 0
    max_peer_connections: Annotated[
        int, option("Maximum of connections from one address; 0 for no limit.")
    ] = 0
    head_timeout: float = 15.0  # seconds in which a request's head must have come
    keepalive: float = 120.0  # seconds for which an idle connection is kept
    cors_origins: Annotated[
        tuple[str, ...],
        option(
            "Origin whose pages may use the gateway (CORS), or *. Repeatable.", name="cors_origin"
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        option(
            "Further host name accepted by a gateway on a loopback address. Repeatable.",
            name="allowed_host",
        ),
    ] = ()
    api_keys_file: Annotated[
        str | None,
        option(
            "File with hashed API keys from `pigou key TENANT`, one per line, or .yaml with each "
            "key's permissions.",
            "Gateway",
        ),
    ] = None
    open_metrics: Annotated[
        bool,
        option("Serve /metrics without a key, without tenant names.", "Gateway"),
    ] = False
    allow_open: Annotated[bool, option("Listen beyond loopback without API keys.", "Gateway")] = (
        False
    )
    journal: Annotated[
        str | None,
        option(
            "File that decisions and their inputs are appended to, for `pigou replay`.", "Gateway"
        ),
    ] = None
    release: Annotated[
        str,
        option(
            "Name of the fleet's release (prompts, policies, applications); a new name voids all "
            "cached blocks.",
            "Gateway",
        ),
    ] = ""
    place_adapters: Annotated[
        bool,
        option(
            "Load LoRA adapters on the workers where further copies save most loads; workers must "
            "allow it.",
            "Gateway",
        ),
    ] = False
    prices: Annotated[
        str,
        option(
            "Prices of GPUs: default, or H100=2.5,... in dollars per GPU-hour; bills are at "
            "/costs and in /metrics.",
            "Costs",
        ),
    ] = ""
    gpu: Annotated[
        str,
        option(
            "With --prices: GPUs of a worker, H100:4 or prefill=H100:4,decode=H200:8.  [default: "
            "cpu for workers on the CPU]",
            "Costs",
        ),
    ] = ""
    priced_model: Annotated[
        str,
        option(
            "With --prices: the model, as llama-3.1-8b or a config.json, if the gateway cannot "
            "read its workers'; marginal dollars and energy need its sizes.",
            "Costs",
        ),
    ] = ""
    client_timeout: Annotated[
        float,
        option(
            "Seconds that a client may stop reading its stream before it is cut off; 0 for no "
            "limit.",
            "Gateway",
        ),
    ] = 60.0
    response_store: Annotated[
        int,
        option("Bytes of responses kept for each tenant (previous_response_id); 0 for none."),
    ] = 64 * 1024 * 1024
    response_ttl: Annotated[float, option("Seconds for which a response is kept.")] = 3600.0
    caches: Annotated[
        tuple[str, ...],
        option(
            "Cache above the engine, LAYER=SIZE[,ttl=SECONDS][,quota=SHARE][,quota.TENANT=FLOOR:"
            "CEILING][,policy=NAME], of answer, semantic, tool, retrieval, embedding, context. "
            "Repeatable.",
            "Gateway",
            name="cache",
        ),
    ] = ()
    degrade: Annotated[
        tuple[DegradedMode, ...],
        option(
            "Answer with less under load: cached, model,to=NAME or max_tokens,limit=N, with "
            "wait_s=S or shed=SHARE to begin [,leave_wait_s=S][,leave_shed=SHARE][,hold_s=S]"
            "[,classes=NAME+NAME]. Repeatable.",
            "Gateway",
            form="entries",
        ),
    ] = ()
    key_budgets: Annotated[
        tuple[str, ...],
        option(
            "Budget of each API key that has none in its file, PERIOD.UNIT=LIMIT: minute, day or "
            "session; requests, tokens, seconds or price. Repeatable.",
            "Gateway",
            name="key_budget",
        ),
    ] = ()
    kv_quotas: Annotated[
        tuple[str, ...],
        option(
            "Shares of each worker's KV blocks and tiers, TENANT=FLOOR:CEILING from 0 to 1; tenant "
            "* is each other one. Repeatable.",
            "Gateway",
            name="kv_quota",
        ),
    ] = ()
    # judge the fields of request bodies here; off in front of stock workers, which know fields that
    # Pigou does not.
    strict: bool = True
    allow_special_tokens: Annotated[
        bool,
        option(
            "Let special tokens that clients type in chats become control tokens, as vLLM does; "
            "by default they stay text."
        ),
    ] = False
    token_endpoint: Annotated[
        bool,
        option(
            "Send token ids to vLLM servers started with --enable-scale-out, and take token ids: "
            "a prompt is tokenized once.",
            "Gateway",
        ),
    ] = True
    unknown_fields: Annotated[
        str,
        option(
            "Unknown request fields: warn (log once and name them in a response header) or "
            "refuse. With --attach, stock servers judge fields themselves.",
            "Gateway",
        ),
    ] = "warn"
    tracing: TracingConfig = TracingConfig()  # where traces of requests go, and which

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be in [0, 65535]")
        check_fields(self, "max_body", "max_line", "max_header", "max_headers", ge=1)
        check_fields(self, "response_store", "response_ttl", ge=0)
        if not 0 <= self.client_timeout < float("inf"):
            raise ConfigError(
                f"client_timeout is {self.client_timeout}; it must be 0 or more seconds"
            )
        if self.unknown_fields not in MODES:
            raise ConfigError(
                f"unknown_fields is {self.unknown_fields!r}; it must be {' or '.join(MODES)}"
            )
        layers = read_caches(self.caches)
        if "cached" in Degradation(self.degrade).modes and CacheLayer.ANSWER not in layers:
            raise ConfigError(
                "degrade has cached, and no cache of answers; give --cache answer=1GiB"
            )
        self._check_connections()
        if self.journal is not None and (packing := Path(self.journal).suffix) in _PACKED:
            raise ConfigError(
                f"journal is {self.journal!r}, and journals are written plain; leave {packing} "
                "away, and pack the file afterwards"
            )
        if not is_loopback(self.host) and self.api_keys_file is None and not self.allow_open:
            raise ConfigError(
                f"host is {self.host!r}, which other machines reach, and there are no API keys; "
                "give --api-keys-file FILE, or --allow-open if the network is trusted"
            )

    def _check_connections(self) -> None:
        check_fields(self, "max_connections", "max_peer_connections", ge=0)
        for name in ("head_timeout", "keepalive"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in (0, 86400]")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}; an origin is SCHEME://HOST[:PORT], without a "
                    "path, or *"
                )
