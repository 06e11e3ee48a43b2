"""How a worker runs: checked values, unknown keys refused."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pigou.config import ConfigError, EvictionConfig, QueueOrder
from pigou.logs import LogFormat, LogLevel
from pigou.request import SECOND, Role

ExecutorKind = Literal["torch", "sleep"]
JsonWhitespace = Literal["compact", "flexible"]
ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "mistral"]
TransferKind = Literal["auto", "shm", "tcp", "none"]
UnknownFieldsMode = Literal["warn", "refuse"]
#: Values of eviction where nobody says.
_EVICTION = EvictionConfig()
_EVICTION_FIELDS = tuple(name for name in EvictionConfig.__struct_fields__ if name != "policy")


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker process.

    Attributes:
        model: folder, hub id, or "bundled".
        served_model_name: name that requests use; empty for the model's own.
        role: what it is asked to do; it is able to do both.
        host: address of the HTTP server.
        port: its port; 0 takes a free one.
        device: "cpu", "cuda" or "cuda:N".
        dtype: "auto", "bf16" or "fp32".
        threads: compute threads.
        blocks: KV blocks; 0 takes as many as fit `memory`.
        memory: bytes for KV blocks; 0 chooses by the device.
        block_size: tokens in a block.
        host_blocks: blocks of host memory for preempted requests.
        host_cache: bytes of host memory for blocks that leave the device; 0 for none.
        disk_cache: bytes of a disk for blocks, with `disk_path`; 0 for none.
        disk_path: folder of the disk's blocks, of this worker alone; made where it is missing.
        bucket_cache: bytes of an object storage for blocks, with `bucket_url`; 0 for none.
        bucket_url: of the object storage, as s3://BUCKET/PREFIX.
        bucket_endpoint: of an S3-compatible server; empty for what the environment says.
        bucket_region: of an S3 bucket; empty for what the environment says.
        tier_policy: eviction policy of these tiers, as registered under `pigou.eviction`.
        tier_params: parameters of that policy, by name.
        tier_recall: bring back what a session needs before it is expected to go on.
        eviction: policy by which running requests give up cache entries when blocks run short, as
            registered under `pigou.token_eviction`; empty for none.
        eviction_params: parameters of that policy, by name.
        eviction_sinks: first tokens of a request that are never given up.
        eviction_recent: last tokens of a request that are never given up.
        eviction_least: fewest entries that a request keeps.
        eviction_interval: tokens after which a request's entries are appraised again.
        eviction_ceiling: highest loss of return per block that is accepted.
        eviction_slack: blocks given up beyond what is needed, for each running request.
        eviction_rate: learning rate of the price.
        eviction_floors: blocks that a tenant's requests keep together, by tenant.
        max_seqs: most sequences that run at once.
        max_batched_tokens: most tokens computed in one step.
        max_background_tokens: of those, most tokens of prompts whose priority is above 0; 0 for no
            limit of their own.
        max_model_len: most tokens of a sequence; 0 for the model's context.
        max_waiting: most requests that may wait; one more is answered with 503.
        order: who is admitted first.
        prefix_caching: keep finished blocks for requests with the same prefix.
        repeat: most steps that are planned at once.
        kv_events: publish KV events.
        kv_events_endpoint: ZMQ address that they are published on.
        kv_replay_endpoint: ZMQ address that past ones can be asked for on.
        kv_transfer: how blocks move between workers.
        kv_lease: seconds for which offered blocks are kept.
        json_whitespace: "compact" writes structured JSON without white space between its parts,
            "flexible" lets the model choose; a request may say otherwise.
        tool_call_parser: format of the tool calls that the model makes of its own accord; "auto"
            takes what its chat template asks for, "none" reads none.
        fleet_secret_file: file with the secret that whoever speaks to this worker must know; empty
            for the environment's, PIGOU_FLEET_SECRET, or none.
        allow_special_tokens: let special tokens that clients type in chats become control tokens.
        allow_open: listen beyond loopback although there is no secret.
        max_body: most bytes of a request's body.
        unknown_fields: what is done with fields of requests that are unknown: "warn", once in
            the log and in a header of each reply, or "refuse".
        drain: seconds that requests in flight are given after SIGTERM.
        rehearse: seconds in which it may measure its own speed before it is ready; 0 for none.
        exit_with_parent: end when the process that started this one is gone.
        log_format: of the lines on stderr.
        log_level: least level of them.
        access_log: log each HTTP request once it is answered.
        executor: "torch" computes; "sleep" has no model, and takes time by a law.
        timing: timing model of the simulator by which the worker sleeps, in place of computing.
        timing_model: whose timing that is; empty for `model`.
        timing_gpu: GPU that it is timed on.
        timing_tp: GPUs that share it.
        timing_link: link over which KV blocks come from other workers; empty takes no time.
        sleep_base: nanoseconds of a step, for `executor="sleep"`.
        sleep_per_seq: nanoseconds more for every decoding sequence.
        sleep_prefill_rate: prompt tokens computed in a second.
    """

    model: str = "bundled"
    served_model_name: str = ""
    role: Role = Role.BOTH
    host: str = "127.0.0.1"
    port: int = 8100
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 1
    blocks: int = 0
    memory: int = 0
    block_size: int = 16
    host_blocks: int = 0
    host_cache: int = 0
    disk_cache: int = 0
    disk_path: str = ""
    bucket_cache: int = 0
    bucket_url: str = ""
    bucket_endpoint: str = ""
    bucket_region: str = ""
    tier_policy: str = "price"
    tier_params: dict[str, Any] = {}
    tier_recall: bool = True
    eviction: str = ""
    eviction_params: dict[str, float] = {}
    eviction_sinks: int = _EVICTION.sinks
    eviction_recent: int = _EVICTION.recent
    eviction_least: int = _EVICTION.least
    eviction_interval: int = _EVICTION.interval
    eviction_ceiling: float = _EVICTION.ceiling
    eviction_slack: float = _EVICTION.slack
    eviction_rate: float = _EVICTION.rate
    eviction_floors: dict[str, int] = {}
    max_seqs: int = 256
    max_batched_tokens: int = 2048
    max_background_tokens: int = 0
    max_model_len: int = 0
    max_waiting: int = 1024
    order: QueueOrder = "priority"
    prefix_caching: bool = True
    repeat: int = 8
    kv_events: bool = True
    kv_events_endpoint: str = "tcp://127.0.0.1:*"
    kv_replay_endpoint: str = "tcp://127.0.0.1:*"
    kv_transfer: TransferKind = "auto"
    kv_lease: float = 30.0
    json_whitespace: JsonWhitespace = "compact"
    tool_call_parser: ToolCallParser = "auto"
    fleet_secret_file: str = ""
    allow_special_tokens: bool = False
    allow_open: bool = False
    max_body: int = 16 * 2**20
    unknown_fields: UnknownFieldsMode = "warn"
    drain: float = 30.0
    rehearse: float = 0.5
    exit_with_parent: bool = False
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    access_log: bool = False
    executor: ExecutorKind = "torch"
    timing: str = ""
    timing_model: str = ""
    timing_gpu: str = ""
    timing_tp: int = 1
    timing_link: str = ""
    sleep_base: int = 2_000_000
    sleep_per_seq: int = 100_000
    sleep_prefill_rate: float = 100_000.0

    def __post_init__(self) -> None:
        """Refuse values that no worker could work with."""
        for name in ("threads", "block_size", "max_seqs", "max_batched_tokens", "repeat",
                     "max_body"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("blocks", "memory", "host_blocks", "max_model_len", "max_waiting", "drain",
                     "max_background_tokens", "host_cache", "disk_cache",
                     "bucket_cache"):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 (any free port) to 65535")
        if self.kv_lease <= 0:
            raise ConfigError(f"kv_lease is {self.kv_lease}; it must be above 0 seconds")
        if not 0 <= self.rehearse < float("inf"):
            raise ConfigError(f"rehearse is {self.rehearse}; it must be finite, at least 0 seconds")
        if self.dtype not in ("auto", "bf16", "fp32"):
            raise ConfigError(f"dtype is {self.dtype!r}; give auto, bf16 or fp32")
        self._check_tiers()
        self._check_eviction()
        self._check_timing()

    @property
    def sleeps(self) -> bool:
        """Whether it has no model, and only takes time."""
        return self.executor == "sleep" or bool(self.timing)

    @property
    def tiered(self) -> bool:
        """Whether blocks have somewhere to go beyond the device."""
        return bool(self.host_cache or self.disk_cache or self.bucket_cache)

    def _check_tiers(self) -> None:
        for size, place in (("disk_cache", "disk_path"), ("bucket_cache", "bucket_url")):
            if bool(getattr(self, size)) != bool(getattr(self, place)):
                raise ConfigError(
                    f"{size} is {getattr(self, size)} and {place} {getattr(self, place)!r}; "
                    "give both or neither"
                )
        for name in ("bucket_endpoint", "bucket_region"):
            if getattr(self, name) and not self.bucket_url:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, and bucket_url is missing")
        if (self.tier_params or self.tier_policy != "price") and not self.tiered:
            raise ConfigError(
                f"tier_policy is {self.tier_policy!r}, and there is no cache beyond the device; "
                "give host_cache, disk_cache or bucket_cache"
            )
        if self.tiered and not self.prefix_caching:
            raise ConfigError(
                "prefix_caching is off, and a cache beyond the device is given; there is nothing "
                "that it could keep: leave one of them out"
            )

    @property
    def token_eviction(self) -> EvictionConfig | None:
        """What the core is told of eviction; None where no entries are given up."""
        if not self.eviction:
            return None
        fields = {name: getattr(self, f"eviction_{name}") for name in _EVICTION_FIELDS}
        return EvictionConfig(policy=self.eviction, **fields)

    def _check_eviction(self) -> None:
        given = self.token_eviction  # refuses values out of range
        if given is None:
            for name in _EVICTION_FIELDS:
                value = getattr(self, f"eviction_{name}")
                if value != getattr(_EVICTION, name):
                    raise ConfigError(
                        f"eviction_{name} is {value}, and eviction is not given; give a policy"
                    )
        elif self.sleeps:
            raise ConfigError(
                f"eviction is {self.eviction!r}, and the worker only takes time: it has no cache "
                "entries; leave one out"
            )
        elif given.interval < self.block_size:
            raise ConfigError(
                f"eviction_interval is {given.interval}; it must be at least the block size, "
                f"{self.block_size}"
            )

    def _check_timing(self) -> None:
        if not self.timing:
            for name in ("timing_model", "timing_gpu", "timing_link"):
                if value := getattr(self, name):
                    raise ConfigError(f"{name} is {value!r}, and timing is not given; give it")
        if self.timing_tp < 1 or (self.timing_tp > 1 and not self.timing):
            raise ConfigError(f"timing_tp is {self.timing_tp}; it is at least 1, and of a timing")
        laws = (("sleep_base", 2_000_000), ("sleep_per_seq", 100_000),
                ("sleep_prefill_rate", 100_000.0))  # fmt: skip
        for name, default in laws:
            if self.timing and getattr(self, name) != default:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, and timing is {self.timing!r}: a worker "
                    "sleeps by one law; leave one out"
                )


_POSITIVE = ("lease", "timeout", "threads", "copy_threads", "max_pending", "max_connections")
#: Backends by name, the preferred one first.
BACKENDS = ("shm", "tcp")


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one worker's Sender and Receiver; all times in nanoseconds.

    Attributes:
        host: address that the side channel binds to.
        port: its port; 0 takes a free one.
        advertise: address that receivers are told; empty for `host`.
        backends: those allowed, the preferred one first.
        lease: how long offered blocks are kept for a receiver that shows no sign of life.
        max_hold: longest time that blocks are kept, whatever a receiver does.
        timeout: longest silence of a peer during a pull or a handshake.
        threads: pulls that a Receiver runs at once.
        copy_threads: threads that copy one large pull from shared memory.
        max_pending: pulls that may wait for a thread; one more is refused.
        max_connections: receivers that a Sender serves at once; one more is turned away.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    backends: tuple[str, ...] = BACKENDS
    lease: int = 30 * SECOND
    max_hold: int = 300 * SECOND
    timeout: int = 5 * SECOND
    threads: int = 2
    copy_threads: int = 2
    max_pending: int = 1024
    max_connections: int = 128

    def __post_init__(self) -> None:
        """Refuse values that no transfer could work with."""
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_hold < self.lease:
            raise ConfigError(f"max_hold is {self.max_hold}; it must be at least lease")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 (any free port) to 65535")
        if not self.backends or set(self.backends) - set(BACKENDS):
            known = ", ".join(BACKENDS)
            raise ConfigError(f"backends is {list(self.backends)}; give one or more of: {known}")
        if self.host in ("", "0.0.0.0", "::") and not self.advertise:
            raise ConfigError(
                f"host is {self.host!r}, which no receiver can connect to; also give `advertise`"
            )
