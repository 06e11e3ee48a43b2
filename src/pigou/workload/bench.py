"""One run of the load client: prepare, warm up, load, sum up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

import aiohttp
import msgspec
import numpy as np
from rich.table import Table

from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.arrival_rate import renewal_times
from pigou.small_file import FileRefused, read_text
from pigou.workload.bench_config import BenchConfig
from pigou.workload.bench_summary import LatencyDistribution, Summary, summarize
from pigou.workload.endpoint import (
    ApiFlavour,
    EndpointClient,
    EndpointError,
    find_flavour,
    find_model,
    open_session,
    tokenize,
    until_stopped,
)
from pigou.workload.load_generator import LoadGenerator
from pigou.workload.prompts import (
    WORDS,
    PromptJob,
    PromptSource,
    Shape,
    jobs,
    make_prefixes,
    pieces,
)
from pigou.workload.request_log import sent_rows
from pigou.workload.trace import Trace
from pigou.workload.trace_formats import TraceRow, read_trace, session_names

_OPEN_WARMUP_SLOTS = 8
_TEXT_LIMIT = 8 * 2**20
_TOKENIZE_CHARACTERS = 1 << 17
_ARRIVALS, _PROMPTS, _WARMUP, _PREFIXES = range(4)
#: Caveats on how tokens per chunk were counted.
_COUNTED_BY = {
    "usage_per_chunk": "by a usage that tells each chunk's own, not a running total",
    "token_ids": "by its token ids; no running usage was told",
    "chunks": "one each, as no running usage or token ids were told",
    "mixed": "told in different ways by different streams",
}
#: Changes when a key of the document changes its meaning or goes.
VERSION = 1
_SPREADS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "End-to-end",
    "queue_wait": "Client queue wait",
    "server_ttft": "Server TTFT",
    "server_e2e": "Server end-to-end",
}


@dataclass(frozen=True)
class TraceReplay:
    """Sessions to send, and how."""

    trace: Trace  # as replayed, scaled and cut
    dropped: int  # turns left out as too long for the model

    def jobs(self, vocabulary: Sequence[int]) -> Iterator[list[tuple[PromptJob, float]]]:
        """Yield each session's jobs, with the seconds of thinking before each."""
        names = session_names(self.trace)
        for session, name in zip(self.trace.sessions, names, strict=True):
            yield [
                (
                    PromptJob(
                        self.trace.prompt(session, turn, vocabulary), turn.output, session=name,
                        think_s=turn.think if number else None, tenant=session.tenant,
                    ),
                    turn.think,
                )
                for number, turn in enumerate(session.turns)
            ]  # fmt: skip


def plan(config: BenchConfig, max_model_len: int | None) -> TraceReplay:
    """Read the configured trace, scale it, and leave out what does not fit the model."""
    whole = read_trace(config.trace, config.trace_block, config.trace_unit).scaled(
        config.trace_scale, config.trace_speed
    )
    if config.seed:
        order = np.random.default_rng(config.seed).permutation(len(whole.sessions))
        if all(session.start == 0 for session in whole.sessions):
            whole = replace(whole, sessions=tuple(whole.sessions[i] for i in order.tolist()))
    chosen = replace(whole, sessions=whole.sessions[: config.sessions])
    fitting = chosen if max_model_len is None else chosen.fitting(max_model_len)
    if not fitting.sessions:
        raise ConfigError(
            f"--trace: no request fits the model's {max_model_len} tokens; lower --trace-scale"
        )
    return TraceReplay(fitting, chosen.request_count - fitting.request_count)


async def run(
    config: BenchConfig, replay: TraceReplay, vocabulary: Sequence[int], drive: LoadGenerator,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Send the sessions: at their recorded starts, at a rate, or at a concurrency."""
    sessions = list(replay.jobs(vocabulary))
    starts = [session.start for session in replay.trace.sessions]
    if config.concurrency is not None:
        await drive.sessions(sessions, [0.0] * len(sessions), config.concurrency)
        return
    if config.arrivals is not None:
        cv = 1.0 if config.cv is None else config.cv
        times = islice(renewal_times(config.arrivals, cv, rng), len(sessions))
        starts = [at / SECOND for at in times]
    else:
        replay.trace.check_timed("give --rate or --concurrency")
    await drive.sessions(sessions[: len(starts)], starts)  # a schedule may end before them


@dataclass(frozen=True)
class BenchResult:
    """Result of `bench`."""

    model: str
    prompts: str  # "token ids" or "text"
    flavour: ApiFlavour  # request fields sent
    interrupted: bool  # whether `stop` ended the run
    summary: Summary  # counts, rates and latencies
    notes: list[str] = field(default_factory=list)  # caveats on the figures
    rows: list[TraceRow] = field(default_factory=list)  # requests in order, where asked for


@dataclass(frozen=True)
class _Prepared:
    client: EndpointClient
    source: PromptSource
    shape: Shape
    replay: TraceReplay | None = None


async def bench(
    config: BenchConfig,
    stop: asyncio.Event | None = None,
    watch: Callable[[LoadGenerator], None] | None = None,
    keep_rows: bool = False,
) -> BenchResult | None:
    """Load an endpoint until the end or `stop`; None if nothing was measured. EndpointError.

    `keep_rows` keeps prompts in memory to the end, and returns the requests as rows of a trace.
    """
    stop = stop or asyncio.Event()
    _raise_file_limit()
    async with open_session(config.api_key) as session:
        ready = await until_stopped(stop, _prepare(config, session))
        if ready is None:
            return None
        drive = LoadGenerator(ready.client.send, watch)
        drive.jobs = [] if keep_rows else None
        load = _load(config, ready, drive)
        finished = await until_stopped(stop, load) is not None
        took = time.monotonic_ns() - drive.began
    summary = summarize(
        drive.outcomes, offered_requests=drive.offered_requests, nanoseconds=took,
        slo=config.objective,
    )  # fmt: skip
    ids = not isinstance(ready.source.units[0], str)
    return BenchResult(
        model=ready.client.model,
        prompts="token ids" if ids else "text",
        flavour=ready.client.flavour,
        interrupted=not finished,
        summary=summary,
        notes=[*_replayed(ready.replay), *_notes(config, ready.client.flavour, summary)],
        rows=[] if drive.jobs is None else sent_rows(drive.jobs, drive.outcomes, drive.began),
    )


async def _prepare(config: BenchConfig, session: aiohttp.ClientSession) -> _Prepared:
    shape = Shape(config.inputs, config.outputs, config.prefixes, config.prefix_length)
    text = _read(config.text) if config.text else None
    card = await find_model(session, config.base, config.model)
    replay = plan(config, card.max_model_len) if config.trace else None
    if (
        replay is None
        and card.max_model_len is not None
        and shape.max_sequence_tokens > card.max_model_len
    ):
        raise ConfigError(
            f"prompt and output can be {shape.max_sequence_tokens} tokens long, and {card.id} "
            f"takes {card.max_model_len}; lower --input, --output or --prefix-length"
        )
    client = EndpointClient(
        session, config.base, card.id, ApiFlavour(), chat=config.chat, timeout=config.timeout
    )
    source = await _source(client, text)
    if replay is not None and isinstance(source.units[0], str):
        raise EndpointError(f"{config.base} has no /tokenize: a --trace is sent as token ids")
    probe = PromptJob("Hello" if config.chat else "Hello there", 1)
    flavour = await find_flavour(client, probe, config.ignore_eos)
    ready = _Prepared(replace(client, flavour=flavour), source, shape, replay)
    await _warm_up(config, ready)
    return ready


def _read(path: str) -> str:
    try:
        text = read_text(path, _TEXT_LIMIT)
    except FileRefused as error:
        raise ConfigError(f"--text {path}: {error.strerror}; an excerpt will do") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"--text {path} has no words; give a file with text")
    return text


async def _source(client: EndpointClient, text: str | None) -> PromptSource:
    # Every piece begins with white space, so that a passage may go round at the end.
    words = [f" {word}" for word in WORDS] if text is None else pieces(f" {text.strip()}")
    tokens: list[int] = []
    for part in _parts(words):
        token_ids = await tokenize(client.session, client.base, client.model, part)
        if token_ids is None:
            return PromptSource(words, running=text is not None)
        tokens += token_ids
    if client.chat:  # the template wants text
        return PromptSource(words, text is not None, len(tokens) / len(words))
    return PromptSource(tokens, running=text is not None)


def _parts(words: list[str]) -> Iterator[str]:
    part: list[str] = []
    size = 0
    for word in words:
        if part and size + len(word) > _TOKENIZE_CHARACTERS:
            yield "".join(part)
            part, size = [], 0
        part.append(word)
        size += len(word)
    yield "".join(part)


def _jobs(config: BenchConfig, ready: _Prepared, stream: int) -> Iterator[PromptJob]:
    # The prefixes are the same for warm-up and run; the rest of a prompt is not.
    prefixes = make_prefixes(ready.source, ready.shape, _rng(config, _PREFIXES))
    return jobs(ready.source, ready.shape, prefixes, _rng(config, stream))


def _rng(config: BenchConfig, stream: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, stream])


async def _warm_up(config: BenchConfig, ready: _Prepared) -> None:
    slots = config.slots if config.rate is None else _OPEN_WARMUP_SLOTS
    drive = LoadGenerator(ready.client.send)
    await drive.closed(islice(_jobs(config, ready, _WARMUP), config.warmup), slots)
    if drive.failed:
        reason = summarize(
            drive.outcomes, offered_requests=drive.offered_requests, nanoseconds=0
        ).failures[0]
        raise EndpointError(
            f"{drive.failed} of {config.warmup} warm-up requests failed, the first with "
            f"{reason.reason}: {reason.example}"
        )


async def _load(config: BenchConfig, ready: _Prepared, drive: LoadGenerator) -> bool:
    if ready.replay is not None:
        vocabulary = sorted({int(unit) for unit in ready.source.units})
        await run(config, ready.replay, vocabulary, drive, _rng(config, _ARRIVALS))
        return True
    endless = _jobs(config, ready, _PROMPTS)
    if config.arrivals is None:
        # Requests are made up front, so that the client is not busy with it.
        made = endless if config.count is None else iter(list(islice(endless, config.count)))
        await drive.closed(made, config.slots, config.duration)
        return True
    cv = 1.0 if config.cv is None else config.cv
    arrivals = renewal_times(config.arrivals, cv, _rng(config, _ARRIVALS))
    if config.duration is None:
        times = list(islice(arrivals, config.count))
    else:
        end = round(config.duration * SECOND)
        times = list(takewhile(lambda at: at < end, arrivals))
    await drive.open(list(islice(endless, len(times))), times, config.max_inflight)
    return True


def _replayed(replay: TraceReplay | None) -> list[str]:
    if replay is None:
        return []
    trace = replay.trace
    what = f"The trace: {len(trace.sessions)} sessions with {trace.request_count} requests"
    cut = f"; {replay.dropped} are too long for the model, and were left out"
    return [what + (cut if replay.dropped else "") + "."]


def _notes(config: BenchConfig, flavour: ApiFlavour, summary: Summary) -> list[str]:
    notes = []
    if config.ignore_eos is None and not flavour.ignore_eos:
        notes.append("The endpoint refuses ignore_eos: outputs end where the model ends them.")
    if summary.output_tokens < summary.output_tokens_asked:
        notes.append(
            f"Outputs have {summary.output_tokens} tokens of {summary.output_tokens_asked} asked."
        )
    if summary.counted_by == "chunks" and summary.prompt_tokens is None:
        notes.append("The endpoint tells no token counts: a chunk with text counts as one token.")
    elif summary.counted_by == "chunks" and summary.tokens_per_chunk != 1:
        notes.append(
            "The endpoint does not tell the tokens of a chunk: ITL is between chunks, of which "
            f"each holds {summary.tokens_per_chunk:.2f} tokens."
        )
    elif summary.counted_by in _COUNTED_BY:
        notes.append(f"Tokens of a chunk: {_COUNTED_BY[summary.counted_by]}.")
    wait = summary.queue_wait
    if config.max_inflight is None and config.rate is not None and wait and wait.p99 > 50:
        notes.append("The client itself was late: its queue wait is part of TTFT and end-to-end.")
    return notes


def _raise_file_limit() -> None:
    """Let the process open as many connections as the system allows it to."""
    try:
        import resource
    except ImportError:  # not on every platform
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems bound it below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def document(config: BenchConfig, result: BenchResult) -> dict[str, Any]:
    """Return the JSON document: latencies in milliseconds under keys that end in `_ms`."""
    summary: dict[str, Any] = msgspec.to_builtins(result.summary)
    load = {key: value for key, value in msgspec.to_builtins(config).items() if key != "api_key"}
    return {
        "version": VERSION,
        "load": load | {"model": result.model},
        "prompts": result.prompts,
        "fields": msgspec.to_builtins(result.flavour),
        "interrupted": result.interrupted,
        "notes": result.notes,
        **{f"{key}_ms" if key in _SPREADS else key: value for key, value in summary.items()},
    }


def tables(result: BenchResult) -> list[Table]:
    """Return the table of counts and rates, and that of latencies."""
    return [_counts(result), _latencies(result.summary)]


def describe(config: BenchConfig, model: str) -> str:
    """Return a one-line description."""
    if config.trace:
        return f"{model}: {_replay(config)}"
    if config.rate is None:
        loop = f"closed loop, {config.slots} at once"
    else:
        cv = 1.0 if config.cv is None else config.cv
        gaps = "Poisson" if cv == 1 else f"gamma, CV {cv:g}"
        loop = f"open loop, {_rate(config)} requests/s ({gaps})"
        loop += f", at most {config.max_inflight} in flight" if config.max_inflight else ""
    front = f"{config.prefixes} x {config.prefix_length} + " if config.prefixes else ""
    return f"{model}: {loop}, prompts {front}{config.inputs}, outputs {config.outputs} tokens"


def _rate(config: BenchConfig) -> str:
    return config.rate if isinstance(config.rate, str) else f"{config.rate:g}"


def _replay(config: BenchConfig) -> str:
    changes = f"lengths x {config.trace_scale:g}, times / {config.trace_speed:g}"
    if config.concurrency is not None:
        pace = f"{config.concurrency} sessions at once"
    elif config.rate is not None:
        pace = f"{_rate(config)} sessions/s"
    else:
        pace = "sessions at their recorded starts"
    return f"replay of {config.trace} ({changes}), {pace}"


def _counts(result: BenchResult) -> Table:
    summary = result.summary
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "Offered": summary.offered_requests,
        "Completed": summary.completed,
        "Failed": summary.failed,
        **({"Cut off": summary.cancelled} if summary.cancelled else {}),
        "Seconds": f"{summary.seconds:.2f}",
        **({} if summary.attained is None else {"Inside the objective": f"{summary.attained:.1%}"}),
        "Requests/s": f"{summary.requests_per_second:.2f}",
        "Output tokens/s": f"{summary.output_tokens_per_second:.1f}",
        "Output tokens": summary.output_tokens,
        f"Prompt tokens ({result.prompts})": _or_dash(summary.prompt_tokens),
        "  cached, it says": _or_dash(summary.cached_tokens),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _latencies(summary: Summary) -> Table:
    table = Table()
    for column in ("Milliseconds", "mean", "p50", "p90", "p95", "p99"):
        table.add_column(column, justify="left" if column == "Milliseconds" else "right")
    for key, name in _SPREADS.items():
        spread: LatencyDistribution | None = getattr(summary, key)
        values = (
            ["-"] * 5 if spread is None else [f"{v:.2f}" for v in msgspec.structs.astuple(spread)]
        )
        table.add_row(name, *values, end_section=key == "e2e")
    return table


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
