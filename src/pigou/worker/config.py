"""WorkerConfig: validated settings of a worker; unknown keys are refused."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Literal

import msgspec

from pigou.config import (
    LANE_HELP,
    NEVER,
    ConfigError,
    EngineConfig,
    EplbConfig,
    EvictionConfig,
    LaneConfig,
    QueueOrder,
    SpeculativeConfig,
    check_bounds,
    check_fields,
    key_values,
    option,
    read_eplb,
    read_speculation,
)
from pigou.kv.tier_config import HOST, StoreTier, check_names
from pigou.logs import AccessLogOption, LogFormatOption, LogLevelOption
from pigou.placement.topology import read_location
from pigou.request import Role
from pigou.text.reasoning import FAMILIES
from pigou.text.tool_calls import ParserName
from pigou.tracing.config import TracingConfig

ExecutorKind = Literal["torch", "sleep"]
ModelImpl = Literal["auto", "pigou", "transformers"]
JsonWhitespace = Literal["compact", "flexible"]
KVCacheDtype = Literal["auto", "bf16", "fp32", "int8_per_token_head", "fp8_e4m3"]
Quantization = Literal["auto", "int8", "fp8", "none"]
ToolCallParser = Literal["auto", "none", ParserName]
Pooling = Literal["auto", "last", "mean", "none"]
UnknownFieldsMode = Literal["warn", "refuse"]
#: Backends of KV transfer (`kv_transfer.transfer_config`).
_KV_BACKENDS = ("nixl", "shm", "tcp")
#: Option headings.
_EVENTS = "KV transfer and events"
_TIMING = "Timing in place of a model"
_LORA, _EXPERT_PARALLEL = "LoRA adapters", "enable_expert_parallel"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one worker process."""

    model: Annotated[str, option("Folder, Hugging Face hub id, or 'bundled'.", "Model")] = "bundled"
    served_model_name: Annotated[
        str, option("Name that requests use; by default the model's own.", "Model")
    ] = ""
    role: Annotated[Role, option("Role in the fleet.", "Model")] = Role.BOTH
    deployment_version: Annotated[
        str, option("Deployment version; workers of different versions exchange no KV.", "Model")
    ] = ""
    location: Annotated[
        str, option("Node labels for routing by distance: host=H[,rack=R][,zone=Z].", "Model")
    ] = ""
    device: Annotated[str, option("cpu, cuda or cuda:N.", "Model")] = "cpu"
    dtype: Annotated[str, option("auto, bf16 or fp32.", "Model")] = "auto"
    model_impl: Annotated[
        ModelImpl,
        option(
            "Who computes the model: pigou, transformers, or auto (pigou where it knows the "
            "family).",
            "Model",
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        option(
            "Weight format: auto keeps the checkpoint's, int8 or fp8 quantise per channel when "
            "loading, none dequantises.",
            "Model",
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, option("Compute each decode step anew on CUDA, without CUDA graphs.", "Model")
    ] = False
    threads: Annotated[int, option("Compute threads.", "Model")] = 1
    tensor_parallel_size: Annotated[
        int,
        option(
            "Processes that share the model, each with its heads and --threads; on CUDA with "
            "consecutive GPUs from --device.",
            "Model",
        ),
    ] = 1
    enable_expert_parallel: Annotated[
        bool, option("Share experts whole over the processes of --tensor-parallel-size.", "Model")
    ] = False
    enable_eplb: Annotated[
        bool, option("Move and copy experts between processes by their load.", "Model")
    ] = False
    eplb_config: Annotated[
        str,
        option(
            "Balancing of experts, as vLLM's JSON: window_size, step_interval, "
            "num_redundant_experts.",
            "Model",
        ),
    ] = ""
    host: Annotated[str, option("Address that the HTTP server listens on.", "Server")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on; 0 picks a free one.", "Server")] = 8100
    json_whitespace: Annotated[
        JsonWhitespace,
        option(
            "Whitespace in structured JSON: compact writes none, flexible lets the model choose. "
            "Requests may override it.",
            "Server",
        ),
    ] = "compact"
    max_body: Annotated[int, option("Maximum size of a request body.", "Server", form="size")] = (
        16 * 2**20
    )
    unknown_fields: Annotated[
        UnknownFieldsMode,
        option(
            "Unknown request fields: warn (log once and name them in a response header) or refuse.",
            "Server",
        ),
    ] = "warn"
    drain: Annotated[
        float, option("Seconds for requests in flight to finish after SIGTERM.", "Server")
    ] = 30.0
    exit_with_parent: Annotated[bool, option("Exit when the parent process is gone.", "Server")] = (
        False
    )
    blocks: Annotated[int, option("KV blocks; 0 for as many as fit in --memory.", "KV memory")] = 0
    memory: Annotated[
        int,
        option("Memory for KV blocks, as 512MiB; 0 chooses by device.", "KV memory", form="size"),
    ] = 0
    block_size: Annotated[int, option("Tokens per KV block.", "KV memory")] = 16
    host_blocks: Annotated[
        int, option("Host memory blocks that preempted requests may swap to.", "KV memory")
    ] = 0
    tiers: Annotated[
        tuple[StoreTier, ...],
        option(
            "KV tier beyond the device, nearest first: NAME=SIZE[@PLACE][,policy=price], as "
            "host=8GiB, disk=100GiB@/DIR or bucket=1TiB@s3://BUCKET/PREFIX. Repeatable.",
            "KV memory",
            name="tier",
            form="entries",
        ),
    ] = ()
    tier_recall: Annotated[
        bool,
        option("Prefetch a session's blocks before its next request is expected.", "KV memory"),
    ] = True
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        option(
            "Format of keys and values: auto is the model's dtype, int8_per_token_head keeps a "
            "scale per token and head, fp8_e4m3 none.",
            "KV memory",
        ),
    ] = "auto"
    prefix_caching: Annotated[
        bool, option("Keep finished blocks for requests with the same prefix.", "KV memory")
    ] = True
    eviction: EvictionConfig = EvictionConfig(policy="")  # without a policy, none
    enable_lora: Annotated[bool, option("Serve LoRA adapters.", _LORA)] = False
    lora_modules: Annotated[
        tuple[str, ...], option("Adapter to serve: NAME=FOLDER of PEFT. Repeatable.", _LORA)
    ] = ()
    max_loras: Annotated[int, option("Maximum of adapters in a batch.", _LORA)] = 1
    max_lora_rank: Annotated[
        int, option("Maximum rank: 1, 8, 16, 32, 64, 128, 256, 320 or 512.", _LORA)
    ] = 16
    max_cpu_loras: Annotated[
        int, option("Adapters kept in host memory; 0 for --max-loras.", _LORA)
    ] = 0
    max_seqs: Annotated[int, option("Maximum of running sequences.", "Scheduling")] = 256
    max_batched_tokens: Annotated[int, option("Maximum of tokens per step.", "Scheduling")] = 2048
    max_background_tokens: Annotated[
        int,
        option(
            "Maximum of tokens per step of prompts whose priority is above 0; 0 for no limit.",
            "Scheduling",
        ),
    ] = 0
    max_model_len: Annotated[
        int, option("Maximum of tokens per sequence; 0 uses the model's context.", "Scheduling")
    ] = 0
    max_waiting: Annotated[
        int, option("Maximum of waiting requests; 0 for no limit.", "Scheduling")
    ] = 1024
    order: Annotated[
        QueueOrder,
        option(
            "Scheduling order: fcfs, priority, edf or shortest (fewest predicted and "
            "uncached tokens); with priority, lower numbers overtake prompts under way.",
            "Scheduling",
        ),
    ] = "priority"
    ageing: Annotated[
        float,
        option("Tokens by which --order shortest favours each second of waiting.", "Scheduling"),
    ] = 125.0
    input_weight: Annotated[
        float,
        option("Output tokens that --order shortest counts an uncached one as.", "Scheduling"),
    ] = 0.05
    long_lane: Annotated[str, option(LANE_HELP, "Scheduling")] = ""
    repeat: Annotated[int, option("Maximum of steps planned at once.", "Scheduling")] = 8
    speculative_config: Annotated[
        str,
        option(
            "Draft tokens to verify, as vLLM's JSON: method (ngram or draft_model), "
            "num_speculative_tokens, prompt_lookup_max, prompt_lookup_min, model.",
            "Scheduling",
        ),
    ] = ""
    rehearse: Annotated[
        float,
        option(
            "Seconds of startup profiling before the worker is ready; 0 for none.", "Scheduling"
        ),
    ] = 0.5
    kv_events: Annotated[bool, option("Publish KV events.", _EVENTS)] = True
    kv_events_endpoint: Annotated[
        str, option("ZMQ address that KV events are published on.", _EVENTS)
    ] = "tcp://127.0.0.1:*"
    kv_replay_endpoint: Annotated[
        str, option("ZMQ address that replays past KV events.", _EVENTS)
    ] = "tcp://127.0.0.1:*"
    kv_transfer: Annotated[
        str,
        option(
            "KV transfer backends: auto (shm and tcp), none, or some of nixl, shm and tcp with "
            "commas; the fastest measured one is used.",
            _EVENTS,
        ),
    ] = "auto"
    kv_lease: Annotated[float, option("Seconds that offered blocks are kept.", _EVENTS)] = 30.0
    prefiller_networks: Annotated[
        str,
        option(
            "Networks, with commas, of the prefill workers that an endpoint picker may name by "
            "x-prefiller-host-port, as 10.0.0.0/8; by default the header is refused.",
            _EVENTS,
        ),
    ] = ""
    executor: Annotated[
        ExecutorKind, option("torch, or sleep: no model, a timing law, made-up tokens.", _TIMING)
    ] = "torch"
    timing: Annotated[
        str,
        option(
            "Timing model; the worker sleeps instead of computing: roofline, profile:FOLDER, "
            "law:KEY=VALUE,..., or FILE.json of `pigou profile`.",
            _TIMING,
        ),
    ] = ""
    timing_model: Annotated[
        str, option("For --timing: the timed model; by default --model.", _TIMING)
    ] = ""
    timing_gpu: Annotated[str, option("For --timing roofline and profile: the GPU.", _TIMING)] = ""
    timing_tp: Annotated[int, option("For --timing: GPUs that share the model.", _TIMING)] = 1
    timing_link: Annotated[
        str,
        option(
            "For --timing: link of KV transfers, as gbps=400,latency_us=200; by default they take "
            "no time.",
            _TIMING,
        ),
    ] = ""
    sleep_base: Annotated[int, option("For --executor sleep: nanoseconds per step.", _TIMING)] = (
        2_000_000
    )
    sleep_per_seq: Annotated[
        int, option("For --executor sleep: nanoseconds added per decoding sequence.", _TIMING)
    ] = 100_000
    sleep_prefill_rate: Annotated[
        float, option("For --executor sleep: prompt tokens per second.", _TIMING)
    ] = 100_000.0
    sleep_lora_read: Annotated[
        int, option("For a mock worker: nanoseconds to read an adapter.", _TIMING)
    ] = 100_000_000
    log_format: LogFormatOption = "text"
    log_level: LogLevelOption = "info"
    access_log: AccessLogOption = False
    tracing: TracingConfig = TracingConfig()  # where traces of requests go, and which
    tool_call_parser: Annotated[
        ToolCallParser,
        option(
            "Format of the model's own tool calls: hermes, llama3_json, mistral, deepseek_v3, "
            "kimi_k2, pythonic, qwen3_coder, glm45, none, or auto (by its chat template)."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        option(
            "Family that marks the model's reasoning, by vLLM's names (qwen3, deepseek_r1, "
            "mistral, openai_gptoss, ...), none, or auto (by its chat template)."
        ),
    ] = "auto"
    pooling: Annotated[
        Pooling,
        option(
            "Hidden states that make embeddings: last token's, mean, none, or auto (by the model's "
            "1_Pooling/config.json)."
        ),
    ] = "auto"
    fleet_secret_file: Annotated[
        str,
        option(
            "File with the fleet secret that peers must know; by default PIGOU_FLEET_SECRET from "
            "the environment, or none."
        ),
    ] = ""
    allow_special_tokens: Annotated[
        bool,
        option(
            "Let special tokens that clients type in chats become control tokens, as vLLM does; "
            "by default they stay text."
        ),
    ] = False
    allow_open: Annotated[bool, option("Listen beyond loopback without a fleet secret.")] = False

    def __post_init__(self) -> None:
        read_location(self.location)
        check_fields(
            self, "threads", "tensor_parallel_size", "block_size", "max_seqs", "max_batched_tokens",
            "repeat", "max_body", ge=1,
        )  # fmt: skip
        check_fields(
            self, "blocks", "memory", "host_blocks", "max_model_len", "max_waiting", "drain",
            "max_background_tokens", ge=0,
        )  # fmt: skip
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 (any free port) to 65535")
        check_bounds("kv_lease", self.kv_lease, gt=0, unit=" seconds")
        check_bounds("rehearse", self.rehearse, ge=0, unit=" seconds")
        kinds = self.kv_transfer.split(",")
        if kinds not in (["auto"], ["none"]) and set(kinds) - set(_KV_BACKENDS):
            raise ConfigError(
                f"kv_transfer is {self.kv_transfer!r}; give auto, none, or some of: "
                f"{', '.join(_KV_BACKENDS)} (with commas)"
            )
        if self.dtype not in ("auto", "bf16", "fp32"):
            raise ConfigError(f"dtype is {self.dtype!r}; give auto, bf16 or fp32")
        if self.reasoning_parser not in ("auto", "none", *FAMILIES):
            raise ConfigError(
                f"reasoning_parser is {self.reasoning_parser!r}; give auto, none, or one of "
                f"{', '.join(sorted(FAMILIES))}"
            )
        prefiller_networks(self.prefiller_networks)
        self._check_tiers()
        self._check_lora()
        self._check_eviction()
        self._check_tensor_parallel()
        _ = self.expert_parallel
        self._check_timing()
        self.engine_config(self.blocks or NEVER, self.max_model_len or 1)
        for name in ("quantization", "kv_cache_dtype"):
            if self.sleeps and (value := getattr(self, name)) != "auto":
                raise ConfigError(f"{name} is {value!r}, and the worker only takes time; give auto")
        if self.speculation is not None and (self.sleeps or self.eviction.policy):
            other = "the worker only takes time" if self.sleeps else "eviction is given"
            raise ConfigError(
                f"speculative_config is {self.speculative_config!r}, and {other}; leave one out"
            )

    def engine_config(self, blocks: int, max_tokens: int) -> EngineConfig:
        """Return the engine's limits; a sequence of `max_tokens` is cut to what `blocks` hold."""
        cache_tokens, drafting = blocks * self.block_size, self.speculation
        if self.max_model_len > cache_tokens:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; {blocks} blocks of {self.block_size} "
                f"tokens hold {cache_tokens}: lower it, or give more blocks or memory"
            )
        return EngineConfig(
            blocks=blocks, block_size=self.block_size, host_blocks=self.host_blocks,
            max_seqs=self.max_seqs, max_batched_tokens=self.max_batched_tokens,
            max_background_tokens=self.max_background_tokens,
            max_model_len=min(max_tokens, cache_tokens), order=self.order, ageing=self.ageing,
            input_weight=self.input_weight, lane=LaneConfig.parse(self.long_lane),
            prefix_caching=self.prefix_caching, max_repeat=self.repeat,
            max_waiting=self.max_waiting,
            eviction=self.eviction if self.eviction.policy else None,
            num_speculative_tokens=drafting.num_speculative_tokens if drafting is not None else 0,
            max_loras=self.max_loras if self.enable_lora else 0,
        )  # fmt: skip

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of `lora_modules` by name."""
        return key_values("lora_modules", self.lora_modules, "NAME=FOLDER")

    @property
    def expert_parallel(self) -> EplbConfig | None:
        """How experts are shared over processes; None if they are not."""
        for name, needed in (("eplb_config", "enable_eplb"), ("enable_eplb", _EXPERT_PARALLEL)):
            if getattr(self, name) and not getattr(self, needed):
                option = f"--{needed.replace('_', '-')}"
                raise ConfigError(f"{name} is given, and {needed} is not; give {option}")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(f"{_EXPERT_PARALLEL} needs tensor_parallel_size above 1, not 1")
        if not self.enable_expert_parallel:
            return None
        return read_eplb(self.eplb_config) if self.enable_eplb else EplbConfig(step_interval=NEVER)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Parsed `speculative_config`; None without."""
        return read_speculation(self.speculative_config) if self.speculative_config else None

    @property
    def sleeps(self) -> bool:
        """True for the mock backend."""
        return self.executor == "sleep" or bool(self.timing)

    def _check_tiers(self) -> None:
        check_names(self.tiers)
        if any(tier.name == HOST for tier in self.tiers[1:]):
            raise ConfigError(f"tier {HOST} is not the first; it is the nearest: give it first")
        if self.tiers and not self.prefix_caching:
            raise ConfigError(
                "prefix_caching is off, and tiers are given; there is nothing that they could "
                "keep: leave one of them out"
            )

    def _check_lora(self) -> None:
        check_fields(self, "max_loras", ge=1)
        _ = self.adapters
        host, rank = self.max_cpu_loras, self.max_lora_rank
        if rank not in _RANKS:
            raise ConfigError(f"max_lora_rank is {rank}; give one of {_RANKS}")
        if host and host < self.max_loras:
            raise ConfigError(f"max_cpu_loras is {host}; give 0, or at least max_loras")
        given = {"lora_modules": (), "max_loras": 1, "max_lora_rank": 16, "max_cpu_loras": 0}
        for name, default in given.items() if not self.enable_lora else ():
            if getattr(self, name) != default:
                raise ConfigError(f"{name} is given, and enable_lora is not; give --enable-lora")

    def _check_eviction(self) -> None:
        given = self.eviction
        if not given.policy:
            for name, default in msgspec.structs.asdict(EvictionConfig(policy="")).items():
                if (value := getattr(given, name)) != default:
                    raise ConfigError(
                        f"eviction.{name} is {value}, and eviction is not given; give a policy"
                    )
            return
        if self.sleeps:
            raise ConfigError(
                f"eviction.policy is {given.policy!r}, and the worker only takes time: it has no "
                "cache entries; leave one out"
            )
        given.check_interval(self.block_size)

    def _check_tensor_parallel(self) -> None:
        size = self.tensor_parallel_size
        if size > 1 and self.sleeps:
            raise ConfigError(
                f"tensor_parallel_size is {size}, and the worker only takes time; give timing_tp"
            )
        for name, value in (
            ("eviction.policy", self.eviction.policy), ("enable_lora", self.enable_lora),
        ):  # fmt: skip
            if size > 1 and value:
                raise ConfigError(
                    f"tensor_parallel_size is {size}, and {name} is {value!r}, which one process "
                    "alone can do; leave one of them out"
                )
        if size > 1 and self.device != "cpu" and (self.tiers or self.kv_transfer != "none"):
            raise ConfigError(
                f"tensor_parallel_size is {size}, and device is {self.device!r}, where each rank "
                "has a cache of its own: give kv_transfer none, and no tier"
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


def prefiller_networks(text: str) -> list[IPv4Network | IPv6Network]:
    """Return the networks of `--prefiller-networks`. Raises ConfigError."""
    try:
        return [ip_network(part.strip()) for part in text.split(",") if text]
    except ValueError as error:
        raise ConfigError(f"prefiller_networks is {text!r}: {error}; give 10.0.0.0/8") from error
