"""Configuration of the cores: checked values, unknown keys refused, and options of fields."""

from __future__ import annotations

import operator
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

#: How an option is written, where the field holds something else than what is typed.
#: `size`: bytes, as 512MiB. `seconds`: the field is in nanoseconds. `numbers`: NAME=NUMBER,
#: repeatable. `named`: NAME[,key=value]... `weights`: NAME=weight[,NAME=weight]...
#: `entries`: NAME,key=value... (tiers: NAME=SIZE[@PLACE],key=value...), repeatable; each is a
#: struct. `rate`: a number, or a text.
Form = Literal[
    "plain", "size", "sizes", "seconds", "numbers", "named", "weights", "entries", "rate", "file"
]  # fmt: skip
#: Heading of options that belong to no group; it comes last.
OTHER_OPTIONS = "Options"
_EXTRA = "option"
QueueOrder = Literal["fcfs", "priority", "edf", "shortest"]
#: Policies under which requests give up entries whose return is below the price, also unasked.
BY_PRICE = ("paper", "paper-lossy")
LANE_HELP = (
    "Lane for long prompts in each worker: min_prompt=TOKENS,tokens=PER_STEP[,idle_tokens=N]"
    "[,halved_at=CONTEXT][,yields=STEPS][,seqs=ROWS][,kv_share=SHARE]."
)
#: Heading of options.
_EVICTION = "Token eviction"


class ConfigError(ValueError):
    """A configuration value that cannot be honoured; names the field, the value, the remedy."""


class RunError(Exception):
    """A command cannot do what it was asked; the message says what failed, and what to do."""


def check_bounds(
    name: str, value: float, *, ge: float | None = None, gt: float | None = None,
    le: float | None = None, lt: float | None = None, unit: str = "", infinite: bool = False,
) -> None:  # fmt: skip
    """Refuse a value outside bounds named as those of `msgspec.Meta`, or not finite by default."""
    bounds = [
        (word, bound, inside)
        for word, bound, inside in (
            ("at least", ge, operator.ge), ("above", gt, operator.gt),
            ("at most", le, operator.le), ("below", lt, operator.lt),
        )
        if bound is not None
    ]  # fmt: skip
    finite = infinite or value - value == 0
    if finite and all(inside(value, bound) for _, bound, inside in bounds):
        return
    text = ", ".join(f"{word} {bound}" for word, bound, _ in bounds)
    text = f"{ge} to {le}" if ge is not None and le is not None else text
    raise ConfigError(f"{name} is {value}; it must be {'' if finite else 'finite, '}{text}{unit}")


def check_fields(config: object, *names: str, **bounds: Any) -> None:
    """Check several fields with `check_bounds`."""
    for name in names:
        check_bounds(name, getattr(config, name), **bounds)


def is_http_url(text: str) -> bool:
    """True for an `http://` or `https://` address with a host, and a port that can be one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        return False


def check_all(*checks: Callable[[], object]) -> None:
    """Run all checks; what several refuse is one error, a line for each.

    Raises:
        ConfigError: at least one check refused.
    """
    lines = list[str]()
    for check in checks:
        try:
            check()
        except ConfigError as error:
            lines += str(error).splitlines()
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def key_values(option: str, items: str | Iterable[str], form: str = "key=value") -> dict[str, str]:
    """Read `key=value,...`, or items of it; `form` is how messages tell to write one."""
    values: dict[str, str] = {}
    if isinstance(items, str):
        items = items.split(",") if items else ()
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise ConfigError(f"{option}: {item!r} is not understood; write {form}")
        if key in values:
            raise ConfigError(f"{option}: {key} is given twice ({item!r} again); give it once")
        values[key] = value
    return values


def wrong(error: Exception, kind: type[msgspec.Struct], values: Any) -> str:
    """Return an error message: the field, its value, and the values allowed.

    Args:
        error: from `msgspec.convert(values, kind)`; another says it all by itself.
    """
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").removeprefix(".").partition("[...]")[0]
    hint, value = _at(field, kind, values)
    if text.startswith("Object "):
        keyed = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
        text += f"; its keys are: {', '.join(hint.__struct_fields__) or 'none'}" if keyed else ""
    elif text.startswith("Invalid enum value"):
        choices = get_args(hint) or [member.value for member in hint]
        return f"{field} is {value!r}; give one of: {', '.join(map(str, choices))}"
    elif text.startswith("Expected ") and field:
        return f"{field} is {reprlib.repr(value)}: {text[:1].lower()}{text[1:]}"
    elif "." not in field and "[" not in field:
        return text  # from a struct's own check, which names the field
    return f"{field}: {text}" if field else text


def _at(path: str, kind: Any, values: Any) -> tuple[Any, Any]:
    """Return the type, and the value, of the field at a path like `workers[0].role`."""
    for name, number in re.findall(r"(\w+)|\[(\d+)\]", path.replace("[", ".[")):
        if name:
            kind, values = get_type_hints(kind)[name], values[name]
        else:
            kind, values = get_args(kind)[0], values[int(number)]
    return kind, values


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a command, made from a field of a configuration class."""

    help: str
    group: str = OTHER_OPTIONS  # heading that it stands under in the help
    name: str = ""  # with underscores; empty for the field's own
    form: Form = "plain"
    # `named` form: key of the field's dictionary that the name goes to; `file`: key in a JSON file.
    key: str = ""
    params: str = ""  # `named` form without key: field that the parameters go to
    flags: tuple[str, ...] = ()  # as they are typed, such as `--chat`; empty for `--name`
    # whether the parser checks the values of a Literal, and the help lists them.
    choices: bool = False
    argument: bool = False  # whether it is given by its position
    variables: tuple[str, ...] = ()  # further variables of the environment that set it
    show_default: bool = True  # whether the help shows the default
    # in place of the field's own, as it is typed; only where a command overrides it.
    default: Any = msgspec.NODEFAULT


def option(help: str, group: str = OTHER_OPTIONS, **rest: Any) -> msgspec.Meta:
    """Return the annotation that makes an option of a field.

    Args:
        help: effect of the option, shown by `--help`; the field's description, too.
        group: heading in the help.
        rest: further attributes of `Option`.

    For example:
        port: Annotated[int, option("Port to listen on; 0 picks a free one.", "Server")] = 8100
    """
    return msgspec.Meta(description=help, extra={_EXTRA: Option(help=help, group=group, **rest)})


def option_of(metadata: tuple[Any, ...]) -> Option | None:
    """Return the option among the annotations of a field; None where it has none."""
    for entry in metadata:
        if isinstance(entry, msgspec.Meta) and entry.extra and _EXTRA in entry.extra:
            value = entry.extra[_EXTRA]
            assert isinstance(value, Option)
            return value
    return None


class EvictionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which cache entries running requests give up when device blocks run short."""

    policy: Annotated[
        str,
        option(
            "Token eviction policy of running requests when blocks run short: pigou, h2o, snapkv, "
            "...; by default requests are preempted instead.",
            _EVICTION,
            name="eviction",
            default="",
        ),
    ] = "pigou"
    params: Annotated[
        dict[str, float],
        option(
            "Parameter of the eviction policy: NAME=VALUE. Repeatable.",
            _EVICTION,
            name="eviction_param",
            form="numbers",
        ),
    ] = {}
    sinks: Annotated[
        int, option("First tokens of a request that are never evicted.", _EVICTION)
    ] = 4
    recent: Annotated[
        int, option("Last tokens of a request that are never evicted.", _EVICTION)
    ] = 32
    least: Annotated[int, option("Minimum of cache entries that a request keeps.", _EVICTION)] = 64
    interval: Annotated[
        int, option("Tokens after which a request's entries are scored again.", _EVICTION)
    ] = 64
    ceiling: Annotated[
        float,
        option(
            "Maximum loss of return per evicted block, in the policy's unit; beyond it requests "
            "wait or are preempted.",
            _EVICTION,
        ),
    ] = float("inf")
    slack: Annotated[
        float,
        option("Blocks evicted beyond the need, per running request.", _EVICTION),
    ] = 0.25
    # (Token-PD, Eq. 5)
    rate: Annotated[
        float,
        option(
            "Learning rate of the price of a block; policy paper begins at ten times it, and falls "
            "with the square root of steps.",
            _EVICTION,
        ),
    ] = 0.1
    floors: Annotated[
        dict[str, int],
        option(
            "Minimum of blocks that a tenant's requests keep: TENANT=BLOCKS. Repeatable.",
            _EVICTION,
            name="eviction_floor",
            form="numbers",
        ),
    ] = {}

    def __post_init__(self) -> None:
        check_bounds("eviction.sinks", self.sinks, ge=0)
        check_bounds("eviction.recent", self.recent, ge=1)
        least = self.sinks + self.recent
        check_bounds("eviction.least", self.least, ge=least, unit=" (sinks + recent)")
        check_bounds("eviction.interval", self.interval, ge=1)
        check_bounds("eviction.ceiling", self.ceiling, gt=0, infinite=True)
        check_bounds("eviction.rate", self.rate, gt=0, infinite=True)
        check_bounds("eviction.slack", self.slack, ge=0)
        for tenant, blocks in self.floors.items():
            check_bounds(f"eviction.floors of {tenant!r}", blocks, ge=0)

    def check_interval(self, block_size: int) -> None:
        """Refuse an interval below the block size."""
        if self.interval < block_size:
            raise ConfigError(
                f"eviction.interval is {self.interval}; it must be at least the block size, "
                f"{block_size}"
            )

    @property
    def by_price(self) -> bool:
        """Whether entries are given up, and computed again, as the price says (Token-PD)."""
        return self.policy in BY_PRICE


#: A `step_interval` that never ends.
NEVER = 1 << 62


class EplbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Balancing of experts, by vLLM's names."""

    window_size: int = 1000  # last steps whose loads count
    step_interval: int = 3000  # steps between placements
    num_redundant_experts: int = 0  # copies beyond one of each expert

    def __post_init__(self) -> None:
        check_fields(self, "window_size", "step_interval", ge=1)
        check_fields(self, "num_redundant_experts", ge=0)

    def slots(self, experts: int, ranks: int) -> int:
        """Return the slots of a layer; raises ConfigError unless all ranks have as many."""
        slots = experts + self.num_redundant_experts
        if slots % ranks:
            raise ConfigError(
                f"num_redundant_experts is {self.num_redundant_experts}; {experts} experts and "
                f"it must divide by {ranks} ranks: add {-slots % ranks}"
            )
        return slots


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding, with vLLM's keys (`read_speculation`)."""

    num_speculative_tokens: int  # most draft tokens that a sequence verifies in a step
    method: Literal["ngram", "draft_model"] = "draft_model"
    model: str = ""  # the draft model's folder or hub id
    prompt_lookup_max: int | None = None  # tokens of the longest match looked for
    prompt_lookup_min: int | None = None  # and of the shortest

    def __post_init__(self) -> None:
        check_bounds("num_speculative_tokens", self.num_speculative_tokens, ge=1, le=64)
        min_n, max_n = self.ngram
        if not 1 <= min_n <= max_n:
            raise ConfigError(
                f"prompt_lookup_min is {min_n}, and prompt_lookup_max {max_n}; give 1 <= "
                "prompt_lookup_min <= prompt_lookup_max"
            )
        if self.method == "draft_model" and not self.model:
            raise ConfigError("model is missing; method draft_model needs the draft model's folder")
        lookups = self.prompt_lookup_max is not None or self.prompt_lookup_min is not None
        if (self.model and self.method == "ngram") or (lookups and self.method != "ngram"):
            raise ConfigError(f"method {self.method} knows no other method's keys; leave them out")

    @property
    def ngram(self) -> tuple[int, int]:
        """Tokens of the shortest and longest match."""
        max_n = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return max_n if self.prompt_lookup_min is None else self.prompt_lookup_min, max_n


def read_speculation(text: str) -> SpeculativeConfig:
    """Read vLLM's `--speculative-config`, a JSON object; raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=SpeculativeConfig)
    except (msgspec.ValidationError, msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(
            f"speculative_config is {text!r}: {error}; methods are ngram and draft_model, not "
            "eagle, medusa or mtp"
        ) from None


def read_eplb(text: str) -> EplbConfig:
    """Read vLLM's `--eplb-config`, a JSON object; raises ConfigError."""
    try:
        return msgspec.json.decode(text or "{}", type=EplbConfig)
    except (msgspec.ValidationError, msgspec.DecodeError, ConfigError) as error:
        raise ConfigError(
            f"eplb_config is {text!r}: {error}; keys are {', '.join(EplbConfig.__struct_fields__)}"
        ) from None


class LaneConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A lane for long prompts beside the short ones in each engine (`pigou.engine.lanes`)."""

    min_prompt: int  # tokens from which a prompt is long
    tokens: int  # most tokens of long prompts per step beside other sequences
    idle_tokens: int = 0  # the same for one alone; 0 for the whole budget
    # context tokens at which attention doubles a token's time, and a chunk has half the tokens:
    # about 2 x parameters / (4 x hidden size x layers); 0 for chunks of one size.
    halved_at: int = 0
    yields: int = 0  # most successive steps that give the tokens to short prompts
    seqs: int = 1  # rows reserved for long prompts
    kv_share: float = (
        0.5  # share of KV blocks reserved for long prompts; the rest is for short ones
    )

    def __post_init__(self) -> None:
        for name in ("min_prompt", "tokens", "seqs"):
            check_bounds(name, getattr(self, name), ge=1)
        for name in ("idle_tokens", "halved_at", "yields"):
            check_bounds(name, getattr(self, name), ge=0)
        check_bounds("kv_share", self.kv_share, gt=0, lt=1)

    def is_long(self, prompt: int) -> bool:
        """True if a prompt of `prompt` tokens belongs in the lane."""
        return prompt >= self.min_prompt

    @classmethod
    def parse(cls, text: str) -> LaneConfig | None:
        """Read `min_prompt=32768,tokens=256[,...]`; None for "". Raises ConfigError."""
        if not text:
            return None
        form = f"key=value with a key of: {', '.join(cls.__struct_fields__)}"
        values = key_values("long_lane", text, form)
        try:
            return msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"long_lane: {wrong(error, cls, values)}") from None


_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class KVQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant's shares of a worker's KV blocks on the device, and of each tier's bytes."""

    floor: _Share = 0.0  # share that is not evicted for others
    ceiling: _Share = 1.0  # above, it goes first, and its requests wait for those of others


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits and policies of one EngineCore."""

    blocks: int  # KV blocks on the device
    block_size: int = 16  # tokens in a block
    host_blocks: int = 0  # blocks of host memory that preempted requests may be swapped to
    max_seqs: int = 256  # most sequences that run at once
    max_batched_tokens: int = 2048  # most tokens computed in one step (the token budget)
    max_model_len: int = 2048  # most tokens, prompt and output, of one sequence
    # order of admission, reversed for preemption. With `priority`, prompts of lower numbers are
    # also computed before those of higher ones continue (`pigou.engine.scheduler`).
    # `shortest` takes the fewest predicted output tokens to go, less `ageing` for each second.
    order: QueueOrder = "fcfs"
    ageing: float = 125.0  # tokens a second
    input_weight: float = 0.05  # output tokens that `shortest` counts an uncached prompt token as
    # most prompt tokens per step of requests whose priority is above 0, so that urgent requests
    # wait for a short step only; 0 for no limit but the budget. Needs the order `priority`.
    max_background_tokens: int = 0
    prefix_caching: bool = True  # keep finished blocks for requests with the same prefix
    max_repeat: int = 1  # most steps that one plan may hold
    # whether these may compute equal chunks of a prompt, beside the decodes.
    repeat_chunks: bool = False
    max_waiting: int = 0  # most requests that may wait; 0 for no limit
    # blocks left free for each running sequence when another one is admitted, so that it does not
    # make them preempt one another; 0 is what vLLM does.
    headroom: int = 1
    eviction: EvictionConfig | None = None  # token eviction from running requests; None for none
    max_loras: int = 0  # most LoRA adapters (`Request.model`) that compute at once; 0 for none
    num_speculative_tokens: int = 0  # most draft tokens that a sequence verifies in a step
    lane: LaneConfig | None = None  # lane for long prompts; None for one queue
    # by tenant, `*` for each other one; empty for no quotas (`pigou.kv.quotas`).
    kv_quotas: dict[str, KVQuota] = {}

    def __post_init__(self) -> None:
        check_fields(
            self, "blocks", "block_size", "max_seqs", "max_batched_tokens", "max_model_len",
            "max_repeat", ge=1,
        )  # fmt: skip
        check_fields(
            self, "host_blocks", "max_waiting", "headroom", "max_background_tokens", "max_loras",
            "num_speculative_tokens", ge=0,
        )  # fmt: skip
        if self.eviction is not None:
            self.eviction.check_interval(self.block_size)
            if self.num_speculative_tokens:
                raise ConfigError(
                    f"num_speculative_tokens is {self.num_speculative_tokens}, and eviction is "
                    "given; entries written for rejected drafts have no scores: leave one out"
                )
        check_bounds("ageing", self.ageing, gt=0, unit=" tokens a second")
        check_bounds("input_weight", self.input_weight, ge=0)
        if self.lane is not None:
            if self.eviction is not None:
                raise ConfigError(
                    "long_lane and eviction are given; scores of entries know no lanes: leave one "
                    "out"
                )
            check_bounds("long_lane: seqs", self.lane.seqs, lt=max(2, self.max_seqs))
            check_bounds("long_lane: tokens", self.lane.tokens, le=self.max_batched_tokens)
        if self.kv_quotas and self.eviction is not None:
            raise ConfigError(
                "kv_quotas and eviction are given; entries are evicted by return, not by tenant: "
                "leave one out, or give eviction floors"
            )
        if self.max_background_tokens and self.order != "priority":
            raise ConfigError(
                f"max_background_tokens is {self.max_background_tokens}, and order {self.order}; "
                "only the order priority knows who is in the background"
            )


class IndexConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of the prefix index (`pigou.control.prefix_index`)."""

    max_blocks: Annotated[
        int, option("Maximum of blocks per worker in the prefix index.", "Routing")
    ] = 2**20
    max_total: Annotated[
        int, option("Maximum of blocks over all workers in the prefix index.", "Routing")
    ] = 2**22
    ttl: Annotated[
        int,
        option(
            "Seconds that a worker without KV events is assumed to keep a prompt.",
            "Routing",
            form="seconds",
        ),
    ] = 120_000_000_000

    def __post_init__(self) -> None:
        for name in ("max_blocks", "max_total", "ttl"):
            check_bounds(f"index.{name}", getattr(self, name), ge=1)


#: Lane that a class waits in; `background` yields inside workers. "" leaves it to the prompt.
ClassLane = Literal["", "short", "long", "background"]


class QueueClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A workload class as admission knows it."""

    concurrency: int = 0  # most streams for each worker that decodes; 0 for no limit
    lane: ClassLane = ""
    ttft_ms: int = 0  # due time of requests without a deadline, in order `edf`; 0 for none


class ControlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits and policies of one ControlPlane."""

    policy: Annotated[
        str,
        option(
            "Routing policy: NAME[,parameter=value]... (entry points `pigou.routing`).",
            "Routing",
            form="named",
            params="params",
        ),
    ] = "toll"
    # parameters of the policy, by name; those left out keep their defaults.
    params: dict[str, Any] = {}
    temperature: Annotated[
        float,
        option("Softmax temperature over candidates' costs; 0 takes the cheapest.", "Routing"),
    ] = 0.0
    softmax: Annotated[
        Literal["raw", "min-max"],
        option(
            "Costs in the softmax: raw, or min-max (divided by their range, as in Dynamo).",
            "Routing",
        ),
    ] = "min-max"
    saturation: Annotated[
        dict[str, Any],
        option(
            "Saturation detector: cusum, paper, second-difference or config-variance, "
            "[,parameter=value]...",
            "Routing",
            name="detector",
            form="named",
            key="detector",
        ),
    ] = msgspec.field(default_factory=lambda: {"detector": "cusum"})
    controller: Annotated[
        dict[str, Any],
        option(
            "Controller of temperature and overlap weight: static, regime, interpolated or "
            "bandit, [,parameter=value]...",
            "Routing",
            form="named",
            key="controller",
        ),
    ] = msgspec.field(default_factory=lambda: {"controller": "static"})
    operating_points: Annotated[
        dict[str, Any],
        option(
            "File of `pigou frontier --json`: settings of router and engines by load regime, "
            "applied as it changes.",
            "Routing",
            form="file",
            key="operating_points",
        ),
    ] = {}
    max_decisions: int = 1000  # decisions that are kept for the status API
    index: IndexConfig = msgspec.field(default_factory=IndexConfig)  # limits of the prefix index
    peer_reads: Annotated[
        bool,
        option(
            "Let workers read prompt prefixes from other workers' caches where that is cheaper "
            "than prefill or a lower tier.",
            "Routing",
        ),
    ] = True
    admission: Annotated[
        dict[str, Any],
        option(
            "Order of waiting requests: fcfs, priority, edf, shortest, shortest-remaining, fair, "
            "priority-fair, drf, karma, dlpm, d2lpm or market, [,parameter=value]... (entry points "
            "`pigou.admission`).",
            "Admission",
            form="named",
            key="order",
        ),
    ] = msgspec.field(default_factory=lambda: {"order": "fcfs"})
    lengths: Annotated[
        dict[str, Any],
        option(
            "Predictor of output lengths: mean, online, or oracle (simulator), "
            "[,parameter=value]... (entry points `pigou.lengths`).",
            "Admission",
            form="named",
            key="predictor",
        ),
    ] = msgspec.field(default_factory=lambda: {"predictor": "mean"})
    length_model: Annotated[
        dict[str, Any],
        option(
            "File of `pigou trace train`, which the online predictor begins with.",
            "Admission",
            form="file",
            key="length_model",
        ),
    ] = {}
    long_lane: Annotated[
        str,
        option(
            "Lane for long prompts in each worker, which routing and the queue go by.  [default: "
            "as workers report it]",
            "Routing",
        ),
    ] = ""
    classes: dict[str, QueueClass] = {}  # by name, as `PlannerConfig.classes` has them
    tenant_weights: Annotated[
        dict[str, float],
        option(
            "Fair shares by tenant, or payer: TENANT=weight[,TENANT=weight]...; 1 for the "
            "others, or together the weight of *.",
            "Admission",
            form="weights",
        ),
    ] = {}
    max_queued: Annotated[
        int,
        option("Maximum of requests that wait for a worker; further ones get 503.", "Admission"),
    ] = 1024
    max_queued_tokens: Annotated[
        int, option("Maximum of tokens that waiting requests ask for; 0 for no limit.", "Admission")
    ] = 0
    max_inflight: Annotated[
        int, option("Maximum of streams per decode worker; 0 asks the worker.", "Admission")
    ] = 0
    preemption_cap: Annotated[
        bool,
        option(
            "Send a worker fewer streams while it preempts: a cap falls by one a preemption, and "
            "rises again as KV is free.",
            "Admission",
        ),
    ] = False
    max_request_inflight: Annotated[
        int,
        option(
            "Maximum of concurrent sequences of one request (n, prompts); 0 takes as many as at "
            "most double a worker's step.",
            "Admission",
        ),
    ] = 0
    max_inflight_tokens: Annotated[
        int,
        option("Maximum of tokens held per decode worker; 0 uses its KV capacity.", "Admission"),
    ] = 0
    prefill_ahead_ms: Annotated[
        int,
        option(
            "Milliseconds of prompts sent ahead to a worker; 0 means 50 if the admission order "
            "holds requests back, else no limit.",
            "Admission",
            name="prefill_ahead",
        ),
    ] = 0
    queue_timeout: Annotated[
        int,
        option("Seconds that a request may wait before it gets 503.", "Admission", form="seconds"),
    ] = 60_000_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self, "max_queued", "max_queued_tokens", "max_inflight", "max_inflight_tokens",
            "max_request_inflight", "prefill_ahead_ms", "queue_timeout", "seed", "max_decisions",
            ge=0,
        )  # fmt: skip
        for tenant, weight in self.tenant_weights.items():
            check_bounds(f"tenant_weights of {tenant!r}", weight, gt=0)
        if self.operating_points and self.controller != {"controller": "static"}:
            raise ConfigError(
                f"controller is {self.controller['controller']!r}, and operating_points are given, "
                "which a controller of their own applies; give one of the two"
            )
        check_bounds("temperature", self.temperature, ge=0)
