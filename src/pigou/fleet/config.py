"""Configuration of a fleet: models behind one gateway, and the workers that serve them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

import msgspec

from pigou.config import ConfigError, check_bounds, check_fields, is_http_url, key_values, option
from pigou.gateway.config import Overflow
from pigou.placement.gang import Pack
from pigou.placement.topology import TopologyLevel
from pigou.request import Location, Role

#: Maximum worth of a fallback, in seconds: a day.
_MAX_PRICE_S = 86_400.0
#: Reserved suffixes of pool names.
_KINDS = ("attached", "registered")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}", re.ASCII)
#: Heading of options.
_GROUP = "Model and workers"
#: Default workers of a local fleet: prefill, decode.
_LOCAL = (1, 2)
_ATTACH_OPTIONS = ("role", "events", "replay", "topic", "load", "key", "pin", *Location._fields)
#: Address that a worker's load is pushed from; `curve+` where the fleet's secret encrypts it.
_LOAD = re.compile(r"(curve\+)?(tcp|ipc)://\S+")


class ModelPoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several models behind a gateway, and its local workers: one for both by default."""

    name: str
    model: str = ""  # folder, hub id or 'bundled'; empty if attached servers alone serve it
    prefill: int = 0
    decode: int = 0
    both: int = 0
    device: str = ""  # device of the workers; empty for the fleet's default
    tokenizer: str = ""  # folder or hub id; by default the workers' model folder
    # another model pool, or the base URL of another fleet, for requests that find no worker free;
    # empty for none.
    overflow: str = ""
    overflow_price_s: float = 1.0  # worth of a worker there, in seconds of waiting here
    overflow_key: str = ""  # bearer key of the other fleet

    def __post_init__(self) -> None:
        if not 0 <= self.overflow_price_s <= _MAX_PRICE_S:
            raise ConfigError(
                f"model_pool {self.name!r} has overflow_price_s={self.overflow_price_s}; it must "
                f"be 0 to {_MAX_PRICE_S:g} seconds"
            )
        if self.overflow_key and not self.overflow.startswith("http"):
            raise ConfigError(
                f"model_pool {self.name!r} has overflow_key, and no URL as overflow; leave it out"
            )
        if not _MODEL_NAME.fullmatch(self.name) or self.name.split(".")[-1] in _KINDS:
            raise ConfigError(
                f"model_pool is named {self.name[:80]!r}; a name has letters, digits and ._:/@-, "
                "and does not end in 'attached' or 'registered'"
            )
        if min(self.prefill, self.decode, self.both) < 0:
            raise ConfigError(f"model_pool {self.name!r} has fewer than 0 workers")
        if not self.model and (self.prefill or self.decode or self.both or self.device):
            raise ConfigError(
                f"model_pool {self.name!r} has workers to start, and no model=; give one, or "
                "attach servers that report it"
            )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Local workers to start for prefill, for decode, and for both."""
        given = self.prefill, self.decode, self.both
        return given if any(given) or not self.model else (0, 0, 1)


class DeclaredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a gateway serves."""

    name: str = ""  # name its workers must report; empty accepts any single name
    aliases: tuple[str, ...] = ()  # further names that requests may use
    tokenizer: str = ""  # folder or hub id; empty asks the workers
    overflow: Overflow | None = None  # fallback for requests it cannot serve now


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Ray cluster of a fleet."""

    address: str = "auto"  # address of the head, or `auto`
    # how near to each other the workers must be; None for the cheapest nodes.
    pack: Pack | None = None
    cpus: int = 1
    gpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """What a worker takes, as Ray names it."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    @property
    def units(self) -> int:
        """A worker's demand for the resource that nodes are packed by."""
        return self.gpus or self.cpus


def ray_config(address: str, pack: str, device: str, threads: int) -> RayConfig:
    """Return the cluster as the options of `pigou serve` say it. Raises ConfigError."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"device is {device!r}; with --on ray give cpu or cuda: Ray chooses which"
        )
    must, _, level = pack.rpartition(":")
    if must not in ("", "required") or (pack and level not in list(TopologyLevel)):
        raise ConfigError(
            f"pack is {pack!r}; give host, rack or zone, or for example required:rack"
        )
    packed = Pack(level=TopologyLevel(level), required=bool(must)) if pack else None
    return RayConfig(address=address, pack=packed, cpus=max(1, threads), gpus=int(device == "cuda"))


class WatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How closely workers are watched; all in seconds."""

    every: float = 1.0  # seconds between two checks of a worker
    timeout: float = 3.0  # seconds to wait for `/health`
    failures: int = 3  # consecutive failed checks before a worker counts as down
    hang: Annotated[
        float,
        option(
            "Seconds without engine progress, by the worker's own report, after which it is "
            "restarted; 0 for never.",
            "Gateway",
            name="hang_timeout",
        ),
    ] = 60.0
    start: float = 600.0
    drain: Annotated[
        float, option("Seconds for requests in flight to finish at shutdown.", "Gateway")
    ] = 30.0
    min_backoff_s: float = 0.25  # seconds before the first restart; doubled by each further one
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(
            self, "every", "timeout", "start", "min_backoff_s", "max_backoff_s", gt=0,
            unit=" seconds",
        )  # fmt: skip
        check_fields(self, "hang", "drain", ge=0)
        check_bounds("failures", self.failures, ge=1)


class WorkersConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which workers a fleet has: local ones, all told the same, and running servers to attach."""

    model: Annotated[str, option("Folder, Hugging Face hub id, or 'bundled'.", _GROUP)] = "bundled"
    served_model_name: Annotated[
        str, option("Name that requests use; by default the model's own.", _GROUP)
    ] = ""
    prefill: Annotated[
        int | None,
        option("Prefill workers to start.  [default: 1; 0 with --attach or --registry]", _GROUP),
    ] = None
    decode: Annotated[
        int | None,
        option("Decode workers to start.  [default: 2; 0 with --attach or --registry]", _GROUP),
    ] = None
    both: Annotated[int, option("Workers for both to start.", _GROUP)] = 0
    device: Annotated[
        str, option("cpu, cuda or cuda:N; several with commas, given out in turn.", _GROUP)
    ] = "cpu"
    dtype: Annotated[str, option("auto, bf16 or fp32.", _GROUP)] = "auto"
    model_impl: Annotated[
        Literal["auto", "pigou", "transformers"],
        option("Who computes the model, as in `pigou worker`.", _GROUP),
    ] = "auto"
    threads: Annotated[
        int, option("Compute threads of each worker; 0 splits the cores.", _GROUP)
    ] = 0
    prefill_tensor_parallel_size: Annotated[
        int,
        option("Processes of each prefill worker; 0 for --tensor-parallel-size as all.", _GROUP),
    ] = 0
    kv_transfer: Annotated[
        str, option("How KV blocks move between workers, as in `pigou worker`.", _GROUP)
    ] = "auto"
    timing: Annotated[
        str,
        option(
            "Timing model: workers sleep instead of computing, as in `pigou worker`, with its "
            "--timing-... options.",
            _GROUP,
        ),
    ] = ""
    on: Annotated[
        Literal["local", "ray", "kubernetes"],
        option(
            "Where workers are started: on this machine, on a Ray cluster, or as pods of the "
            "PigouFleet of --registry k8s://...",
            _GROUP,
        ),
    ] = "local"
    ray_address: Annotated[
        str, option("Address of the Ray cluster; auto for this machine's.", _GROUP)
    ] = "auto"
    pack: Annotated[
        str,
        option(
            "With --on ray: pack the workers into one host, rack or zone; required:rack refuses "
            "anything else. By default the cheapest nodes for their KV.",
            _GROUP,
        ),
    ] = ""
    attach: Annotated[
        tuple[str, ...],
        option(
            "Running server to use: URL[,role=prefill|decode|both][,events=tcp://..|poll]"
            "[,replay=tcp://..][,topic=T][,load=tcp://..][,key=K][,pin=ID][,host=H][,rack=R]"
            "[,zone=Z]. "
            "Repeatable.",
            _GROUP,
        ),
    ] = ()
    registry: Annotated[
        str,
        option(
            "Registry whose workers are used: file:///FOLDER, etcd://HOST:PORT/PREFIX, "
            "nats://HOST:PORT[/BUCKET] or k8s://NAMESPACE?selector=LABELS.",
            _GROUP,
        ),
    ] = ""
    prefill_queue: Annotated[
        str,
        option(
            "Queue that prefill workers pull prompts from: nats://HOST:PORT/NAME[?storage=memory]"
            "[&lease_s=10]; by default prompts are routed to a worker.",
            _GROUP,
        ),
    ] = ""
    tokenizer: Annotated[
        str,
        option(
            "Folder or hub id of the model's tokenizer; by default that of the workers' model.",
            _GROUP,
        ),
    ] = ""
    model_pool: Annotated[
        tuple[ModelPoolConfig, ...],
        option(
            "One of several models, in place of --model and its workers: NAME[,model=FOLDER]"
            "[,prefill=N][,decode=N][,both=N][,device=D][,tokenizer=T][,overflow=NAME|URL]"
            "[,overflow_price_s=S][,overflow_key=K]. Without model= attached servers serve it. "
            "Repeatable.",
            _GROUP,
            form="entries",
        ),
    ] = ()
    model_alias: Annotated[
        tuple[str, ...],
        option("Further name of a --model-pool: ALIAS=NAME. Repeatable.", _GROUP),
    ] = ()
    fleet_secret_file: Annotated[
        str,
        option(
            "File with the secret that workers on other hosts share; by default "
            "PIGOU_FLEET_SECRET from the environment, or a new one for local workers."
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_fields(self, "prefill_tensor_parallel_size", ge=0)
        if self.ray is None and (self.pack or self.ray_address != "auto"):
            raise ConfigError("pack and ray_address are for --on ray; leave them out")
        if self.ray is not None and any(pool.device for pool in self.model_pool):
            raise ConfigError("model_pool has a device of its own; on Ray all models share one")
        if self.ray is not None and not sum(self.counts):
            raise ConfigError("on is 'ray', and no worker is started; give --decode or --both")
        if self.on == "kubernetes" and (any(self.counts) or not self.registry):
            raise ConfigError(
                "on is 'kubernetes', whose pods the PigouFleet counts: give --registry k8s://..., "
                "and no --prefill, --decode or --both"
            )
        if self.model_pool:
            self._check_models()
            return
        if self.model_alias:
            raise ConfigError(
                f"model_alias is {self.model_alias[0]!r}, and there is no model_pool; give the "
                "model that it stands for as one"
            )
        _, decode, both = self.counts
        others = self.attach or self.registry
        if min(self.counts) < 0 or not (others or decode + both):
            raise ConfigError("there is nobody to decode; start --decode or --both workers")

    @property
    def ray(self) -> RayConfig | None:
        """The Ray cluster that workers are started on; None for this machine."""
        if self.on != "ray":
            return None
        return ray_config(self.ray_address, self.pack, self.device, self.threads)

    def _check_models(self) -> None:
        for field in ("served_model_name", "prefill", "decode", "both", "tokenizer"):
            if value := getattr(self, field):
                raise ConfigError(f"{field} is {value!r}, and model_pool says it for each model")
        if self.model != "bundled":
            raise ConfigError(f"model is {self.model!r}, and model_pool says it for each model")
        names = Counter([*(pool.name for pool in self.model_pool), *self.aliases])
        for name, times in names.items():
            if times > 1:
                raise ConfigError(f"model_pool and model_alias have {name!r} {times} times")
        known = {pool.name for pool in self.model_pool}
        for pool in self.model_pool:
            to = Overflow(to=pool.overflow)
            if pool.overflow and not to.is_url and to.to not in known - {pool.name}:
                raise ConfigError(
                    f"model_pool {pool.name!r} has overflow={pool.overflow}; name another model "
                    "pool, or give the URL of a fleet"
                )
            _, decode, both = pool.counts
            if not (self.attach or self.registry or decode + both):
                raise ConfigError(
                    f"model_pool {pool.name!r} has nobody to decode; start decode= or both= workers"
                )

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of model pools by alias. Raises ConfigError."""
        names = sorted(pool.name for pool in self.model_pool)
        form = f"ALIAS=NAME with a name of: {', '.join(names)}"
        aliases = key_values("model_alias", self.model_alias, form)
        for alias, name in aliases.items():
            if name not in names:
                raise ConfigError(f"model_alias has {alias}={name[:80]}; write {form}")
        return aliases

    @property
    def models(self) -> tuple[DeclaredModel, ...]:
        """The models of `model_pool`; none without."""
        aliases = self.aliases.items()
        return tuple(
            DeclaredModel(
                name=pool.name, tokenizer=pool.tokenizer,
                aliases=tuple(alias for alias, name in aliases if name == pool.name),
                overflow=Overflow(
                    to=pool.overflow, price_s=pool.overflow_price_s, key=pool.overflow_key
                ) if pool.overflow else None,
            )
            for pool in self.model_pool
        )  # fmt: skip

    @property
    def counts(self) -> tuple[int, int, int]:
        """Local workers to start for prefill, for decode, and for both."""
        prefill, decode, both = zip(*self.model_counts.values(), strict=True)
        return sum(prefill), sum(decode), sum(both)

    @property
    def model_counts(self) -> Mapping[str, tuple[int, int, int]]:
        """Worker counts by model name ("" in a fleet of one model)."""
        if self.model_pool:
            return {pool.name: pool.counts for pool in self.model_pool}
        prefill, decode = self.prefill, self.decode
        all_local = not (self.attach or self.registry)
        if prefill is None:
            prefill = _LOCAL[0] * (all_local and not self.both)
        if decode is None:
            decode = _LOCAL[1] * (all_local and not self.both)
        return {"": (prefill, decode, self.both)}

    def arguments(self, threads: int, pool: ModelPoolConfig | None = None) -> list[str]:
        """Return the options of `pigou worker`; a `pool` replaces the fleet's model and name."""
        model = self.model if pool is None else pool.model
        arguments = ["--model", model, "--dtype", self.dtype]
        if self.model_impl != "auto":
            arguments += ["--model-impl", self.model_impl]
        arguments += ["--kv-transfer", self.kv_transfer, "--threads", str(self.threads or threads)]
        if name := self.served_model_name if pool is None else pool.name:
            arguments += ["--served-model-name", name]
        if self.timing:
            arguments += ["--timing", self.timing]
        return arguments


def threads_each(workers: int) -> int:
    """Return compute threads per worker, so that together they fill the cores."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def values_of(arguments: Sequence[str], option: str) -> list[str]:
    """Return an option's values: those of `OPTION VALUE`, then those of `OPTION=VALUE`."""
    apart = [value for name, value in pairwise(arguments) if name == option]
    return apart + [t.partition("=")[2] for t in arguments if t.startswith(f"{option}=")]


def threads_of(arguments: Sequence[str]) -> int:
    """Return a worker's compute threads by its arguments; 1 by default."""
    given = values_of(arguments, "--threads")
    return max(int(given[-1]), 1) if given and given[-1].isdecimal() else 1


def sleeps(arguments: Sequence[str]) -> bool:
    """True if the arguments let workers sleep instead of computing."""
    return any(text.startswith(("--timing", "--executor=sleep")) for text in arguments) or (
        ("--executor", "sleep") in pairwise(arguments)
    )


class LocalWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process to start."""

    id: str  # name in the fleet
    role: Role
    arguments: tuple[str, ...] = ()  # `pigou worker` arguments besides role, address and port
    device: str = "cpu"  # compute device, also among the arguments
    model: str = ""  # model it serves; empty in a fleet of one model


class AttachedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A running server to attach."""

    id: str  # name in the fleet
    url: str  # base address, without a trailing slash
    role: Role = Role.BOTH
    # ZMQ address of its KV events, or `poll` (TensorRT-LLM's, over HTTP); empty asks the server.
    events: str = ""
    replay: str = ""  # ZMQ address where past events can be asked for; empty asks the server
    topic: str = ""  # topic of the events; empty subscribes to all
    load: str = ""  # [curve+]ZMQ address that its load is pushed from; empty polls /metrics alone
    key: str = ""  # sent as bearer key
    # worker id behind a frontend of NVIDIA Dynamo; empty for other servers.
    pin: str = ""
    host: str = ""  # labels of its node; empty uses the server's own
    rack: str = ""
    zone: str = ""

    @classmethod
    def parse(cls, text: str, number: int) -> Self:
        """Read `URL[,role=R][,events=ZMQ]...`, with `_ATTACH_OPTIONS`. Raises ConfigError."""
        url, *rest = text.split(",")
        if not is_http_url(url) or urlsplit(url).query:
            raise ConfigError(f"attach: {url!r} is no base URL; write for example http://HOST:8000")
        form = f"after the URL {', '.join(f'{option}=' for option in _ATTACH_OPTIONS)}"
        options = key_values("attach", rest, form)
        if unknown := options.keys() - set(_ATTACH_OPTIONS):
            raise ConfigError(f"attach: {min(unknown)!r} is not understood; write {form}")
        role = options.pop("role", Role.BOTH.value)
        if role not in list(Role):
            raise ConfigError(f"attach: role is {role!r}; it must be prefill, decode or both")
        if (load := options.get("load")) is not None and not _LOAD.fullmatch(load):
            raise ConfigError(
                f"attach: load is {load!r}; write tcp://HOST:PORT as PIGOU_LOAD of that server "
                "says, or curve+tcp://HOST:PORT where it has the fleet's secret"
            )
        if not options.get("host") and (options.get("rack") or options.get("zone")):
            raise ConfigError(f"attach: {text!r} has labels of a node without its host=")
        url = url.rstrip("/").removesuffix("/v1")
        return cls(id=f"attached-{number}", url=url, role=Role(role), **options)


class FleetError(RuntimeError):
    """The fleet cannot do what was asked; the message says why."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status  # exit status of the command: 2 if its input is wrong
