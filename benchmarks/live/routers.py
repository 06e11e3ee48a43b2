"""Pigou beside the routers that a user would pick, before the same real vLLM workers.

    python -m benchmarks.live.routers --load agents [--rounds 3] [--contender NAME ...]

Each round plays one load through each contender, in a shuffled order, from cold: the router is
started anew, prefix caches are reset, and prompts are new. Prompts are text, of words that are one
token each, since routers that know no tokenizer read text. `agents` are closed-loop agent sessions;
`conversation` are whole conversations of Mooncake's trace, at their recorded times. Each round has
its own sample; all contenders of a round play it.

| contender | what it is | needs |
|---|---|---|
| `toll`, `least-loaded`, `llm-d` | `pigou serve --attach`, by policy; `llm-d` is our copy | - |
| `sglang` | sglang-router, `cache_aware` | PIGOU_PEER_SGLANG_ROUTER |
| `vllm-cache` | vllm-router, `cache_aware` | PIGOU_PEER_VLLM_ROUTER |
| `vllm-kv` | vllm-router, `kv_aware`: by KV events | the same |
| `vllm-hash` | vllm-router, `consistent_hash`: the client sends it alone a session id | the same |
| `dynamo` | Dynamo's frontend in KV mode, before its own workers of that vLLM | PIGOU_PEER_DYNAMO |

A contender whose peer is absent is left out, and named. Requests
arrive at a share of what `least-loaded` serves at most, which is measured first.
Hits are prompt tokens that vLLM read from its cache, of all. CPU seconds are the router's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from benchmarks.lib.dynamo_vllm import DynamoVllm
from benchmarks.lib.peers import (
    EventPorts,
    PeerMissing,
    shared,
    start_sglang_router,
    start_vllm_router,
    vllm_home,
)
from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    free_ports,
    get_text,
    machine,
    unwind_on_terminate,
)
from benchmarks.live.routing import LLAMA_75M
from pigou.workload.endpoint import ApiFlavour, EndpointClient, open_session
from pigou.workload.load_generator import LoadGenerator
from pigou.workload.prompts import PromptJob
from pigou.workload.token_counter import Failure, SentRequest, Stream
from pigou.workload.trace import Trace, TraceSession, Turn
from pigou.workload.trace_formats import read_trace
from tools.make_random_checkpoint import Shape, write_checkpoint

PIGOU = {"toll": "toll", "least-loaded": "least-loaded", "llm-d": "llm-d"}
VLLM_ROUTER = {
    "vllm-cache": "cache_aware",
    "vllm-kv": "kv_aware",
    "vllm-hash": "consistent_hash",
}
CONTENDERS = [*PIGOU, "sglang", *VLLM_ROUTER, "dynamo"]
MODELS = {
    "75m": LLAMA_75M,
    "0.5b": Shape(hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab=8192,
                  max_len=2048),
}  # fmt: skip
#: Tokens of prompt and output that fit a worker.
CONTEXT = 2000
#: A block in more prompts than this share is a system prompt, and no sign of a conversation.
_COMMON = 0.01
_MAX_THINK_S = 2.0
#: Sessions at once where capacity is measured, and the seed of their samples.
_SLOTS, _WARM = 8, 990


@dataclass(frozen=True)
class Load:
    """A trace, scaled to the machine."""

    trace: str
    scale: float  # factor on prompt lengths
    output_scale: float
    turns: int  # most turns of a session
    spread: float  # share of a round in which sessions start; 1: at recorded times
    speed: float = 200.0  # divisor of think times


LOADS = {
    "agents": Load("agent-sessions.tar.zst", 1 / 64, 1 / 64, 12, 0.6),
    "conversation": Load("mooncake/conversation_trace.jsonl.zst", 1 / 16, 1 / 32, 1, 1.0),
}


@dataclass(frozen=True)
class Run:
    """One contender's turn in one round."""

    contender: str
    round: int
    looked: float  # prompt tokens looked up in prefix caches
    hit: float  # prompt tokens found there
    cpu_s: float  # CPU seconds of the router
    engine_s: float  # CPU seconds of the engines
    seconds: float  # from the first start to the last end
    errors: int
    ttft_ms: list[float]  # from when a request was due
    tpot_ms: list[float]

    def figures(self) -> dict[str, float]:
        """Return what the tables show: shares and milliseconds by column."""
        return {
            "hits %": 100.0 * self.hit / self.looked,
            "TTFT mean": float(np.mean(self.ttft_ms)),
            "P50": float(np.percentile(self.ttft_ms, 50)),
            "P99": float(np.percentile(self.ttft_ms, 99)),
            "TPOT P99": float(np.percentile(self.tpot_ms, 99)),
            "CPU s": self.cpu_s,
            "engine s": self.engine_s,
            "errors": self.errors,
        }


@dataclass(frozen=True)
class SessionFlavour(ApiFlavour):
    """Names the session in the body, as `user`."""

    def body(self, model: str, job: PromptJob, *, chat: bool) -> dict[str, Any]:
        """Return the body of a streamed request."""
        return super().body(model, job, chat=chat) | {"user": job.session}


@dataclass
class Fleet:
    """The engines: plain vLLM servers, and Dynamo's workers of the same engine."""

    folder: Path
    model: Path
    block_size: int
    plain: list[Server] = field(default_factory=list)
    events: list[EventPorts] = field(default_factory=list)
    dynamo: DynamoVllm | None = None

    def engines(self, contender: str) -> list[Server]:
        """Return the engines that a contender routes to."""
        if contender == "dynamo":
            assert self.dynamo is not None
            return self.dynamo.workers
        return self.plain

    def start(self, stack: ExitStack, args: argparse.Namespace) -> None:
        """Start what the contenders need, and wait for all of it."""
        engine = ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048"]
        engine += ["--block-size", str(self.block_size)]
        engine += ["--num-gpu-blocks-override", str(args.blocks)]
        env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1",
               "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}  # fmt: skip
        for _ in range(args.workers):
            (port,) = free_ports(1)
            events = EventPorts(*free_ports(2))
            argv = [str(vllm_home() / "bin" / "vllm"), "serve", str(self.model), *engine]
            argv += ["--served-model-name", self.model.name, "--host", LOOPBACK]
            argv += ["--port", str(port), "--kv-events-config", events.config()]
            argv += ["--enable-scale-out"]  # Pigou then sends token ids (docs/guide/vllm.md)
            server = Server(
                argv, url=f"http://{LOOPBACK}:{port}", log=self.folder / f"{port}.log", env=env
            )
            self.plain.append(stack.enter_context(server))
            self.events.append(events)
        if "dynamo" in args.contender:
            self.dynamo = DynamoVllm(self.model, self.folder / "dynamo", self.block_size)
            self.dynamo.start(stack, args.workers, engine, env)
        for server in self.plain:
            server.wait_healthy()
        if self.dynamo is not None:
            self.dynamo.wait()

    def router(self, contender: str, log: Path) -> Server:
        """Start a contender before its engines; it answers when it is returned."""
        urls = [server.url for server in self.plain]
        if contender == "dynamo":
            assert self.dynamo is not None
            return self.dynamo.frontend(log)
        if contender == "sglang":
            return start_sglang_router(urls, log=log, policy="cache_aware")
        if contender in VLLM_ROUTER:
            policy = VLLM_ROUTER[contender]
            events = [each.endpoint for each in self.events] if policy == "kv_aware" else []
            return start_vllm_router(
                urls, log=log, policy=policy, events=events, model=self.model,
                block_size=self.block_size,
            )  # fmt: skip
        (port,) = free_ports(1)
        argv = [sys.executable, "-m", "pigou", "serve", "--policy", PIGOU[contender]]
        argv += ["--host", LOOPBACK, "--port", str(port)]
        for url, each in zip(urls, self.events, strict=True):
            argv += ["--attach", f"{url},events={each.endpoint},topic=kv"]
        server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=log)
        try:
            return server.wait_healthy()
        except BaseException:
            server.stop()
            raise


def main() -> None:
    """Run the benchmark and print its tables."""
    args = _arguments()
    unwind_on_terminate()
    print("machine:", machine())
    load = LOADS[args.load]
    trace = read_trace(shared() / "traces" / load.trace)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = folder / args.model
        write_checkpoint(model, MODELS[args.model], "bfloat16", 0)
        words = vocabulary(model)
        fleet = Fleet(folder, model, args.block_size)
        fleet.start(stack, args)
        warm(fleet, load, trace, words)
        rate = args.rate or args.utilization * capacity(fleet, load, trace, words)
        print(f"{rate:.2f} requests/s for {args.seconds:g} s a turn", flush=True)
        requests = round(rate * args.seconds)
        for number, contender in shuffled_rounds(args.contender, args.rounds, args.seed):
            chosen = sample(load, trace, args.seed + number, requests, args.seconds)
            runs.append(play(fleet, contender, chosen, words, f"{number}-{contender}", number))
            shown = {name: round(value, 1) for name, value in runs[-1].figures().items()}
            print(number, contender, json.dumps(shown), flush=True)
    report(runs, args.contender)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", choices=LOADS, default="agents")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, default=None)
    parser.add_argument("--model", choices=MODELS, default="75m")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=300, help="KV blocks of a worker")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=26.0, help="arrivals of a turn")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: measured")
    parser.add_argument(
        "--utilization", type=float, default=0.8, help="of what least-loaded serves at most"
    )
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    needs = {"sglang": "PIGOU_PEER_SGLANG_ROUTER", "dynamo": "PIGOU_PEER_DYNAMO"}
    needs |= dict.fromkeys(VLLM_ROUTER, "PIGOU_PEER_VLLM_ROUTER")
    absent = [name for name, variable in needs.items() if variable not in os.environ]
    if args.contender and (lost := [name for name in args.contender if name in absent]):
        raise PeerMissing(f"{', '.join(lost)}: set {', '.join(sorted({needs[n] for n in lost}))}")
    if not args.contender and absent:
        print("left out, as their peers are not named:", ", ".join(absent))
    args.contender = args.contender or [name for name in CONTENDERS if name not in absent]
    return args


def vocabulary(model: Path) -> list[str]:
    """Return words, with the space before, that are one token each wherever they stand."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = sorted(
        f" {word[1:]}" for word in tokenizer.get_vocab()
        if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha() and word[1:].islower()
    )  # fmt: skip
    single = [word for word in words if len(tokenizer.encode(word).ids) == 1]
    text = "".join(single * 2)
    if len(tokenizer.encode(text).ids) != 2 * len(single) or len(single) < 30:
        raise RuntimeError(f"{model}: words do not stay single tokens")
    return single


def warm(fleet: Fleet, load: Load, trace: Trace, words: Sequence[Any]) -> None:
    """Let each engine compute before it is measured."""
    chosen = sample(load, trace, _WARM, 10, 0.0)
    for contender in ("least-loaded", *["dynamo"] * (fleet.dynamo is not None)):
        play(fleet, contender, chosen, words, f"warm-{contender}", -1, _SLOTS)


def capacity(fleet: Fleet, load: Load, trace: Trace, words: Sequence[Any]) -> float:
    """Return the requests a second that `least-loaded` serves at most, eight sessions at once."""
    chosen = sample(load, trace, _WARM + 1, 60, 0.0)
    run = play(fleet, "least-loaded", chosen, words, "capacity", -1, _SLOTS)
    return len(run.ttft_ms) / run.seconds


def sample(load: Load, trace: Trace, seed: int, requests: int, seconds: float) -> Trace:
    """Return a load's sessions, drawn by the seed, that start within some seconds."""
    rng = np.random.default_rng(seed)
    scaled = trace.scaled(load.scale, load.speed)
    groups = _groups(scaled)
    picked: list[TraceSession] = []
    count = 0
    for index in rng.permutation(len(groups)).tolist():
        for session in groups[index]:
            turns = tuple(_turn(turn, load) for turn in session.turns[: load.turns])
            fits = Trace(scaled.block, (replace(session, turns=turns),)).fitting(CONTEXT)
            picked += fits.sessions
            count += fits.request_count
        if count >= requests:
            break
    if load.spread < 1.0:
        starts = sorted((rng.random(len(picked)) * load.spread * seconds).tolist())
    else:
        picked.sort(key=lambda session: session.start)
        begin, end = picked[0].start, picked[-1].start
        starts = [(each.start - begin) / (end - begin) * seconds for each in picked]
    timed = [replace(each, start=at) for each, at in zip(picked, starts, strict=True)]
    return replace(scaled, sessions=tuple(timed))


def _turn(turn: Turn, load: Load) -> Turn:
    output = max(2, round(turn.output / load.scale * load.output_scale))
    return replace(turn, output=output, think=min(turn.think, _MAX_THINK_S))


def _groups(trace: Trace) -> list[list[TraceSession]]:
    """Return sessions that share blocks beyond a common system prompt: conversations."""
    count = Counter((each.scope, b) for each in trace.sessions for b in set(each.turns[0].blocks))
    groups: dict[Any, list[TraceSession]] = defaultdict(list)
    for number, session in enumerate(trace.sessions):
        own = [
            (session.scope, block) for block in session.turns[0].blocks
            if count[session.scope, block] <= _COMMON * len(trace.sessions)
        ]  # fmt: skip
        groups[own[0] if own else number].append(session)
    return list(groups.values())


def play(
    fleet: Fleet, contender: str, trace: Trace, words: Sequence[Any], tag: str, number: int,
    slots: int | None = None,
) -> Run:  # fmt: skip
    """Start a contender, play a load through it, and end it.

    The engines of the others idle meanwhile: Dynamo's leave its discovery if they are stopped.
    """
    engines = fleet.engines(contender)
    if contender != "dynamo":  # Dynamo's workers have no such route: new prompts make them cold
        for server in engines:
            _post(server.url + "/reset_prefix_cache")
    with fleet.router(contender, fleet.folder / f"{tag}.log") as router:
        looked, hit = _cached(engines)
        before = _cpu_seconds([router]), _cpu_seconds(engines)
        flavour = SessionFlavour() if contender == "vllm-hash" else ApiFlavour()
        outcomes = asyncio.run(
            _send(router.url, fleet.model.name, trace, words, tag, flavour, slots)
        )
        cpu_s, engine_s = _cpu_seconds([router]) - before[0], _cpu_seconds(engines) - before[1]
        looked, hit = (now - old for now, old in zip(_cached(engines), (looked, hit), strict=True))
    failures = Counter(o.result.detail for o in outcomes if isinstance(o.result, Failure))
    for failure, count in failures.items():
        print(f"{contender}: {count} of {len(outcomes)} failed: {failure}", flush=True)
    ends = [o.result.last for o in outcomes if isinstance(o.result, Stream)]
    seconds = (max(ends) - min(o.intended for o in outcomes)) / 1e9
    done = [(o.intended, o.result) for o in outcomes if isinstance(o.result, Stream)]
    return Run(
        contender, number, looked, hit, cpu_s, engine_s, seconds, failures.total(),
        [(stream.first - due) / 1e6 for due, stream in done],
        [(s.last - s.first) / (s.tokens - 1) / 1e6 for _, s in done if s.tokens > 1],
    )  # fmt: skip


async def _send(
    url: str,
    model: str,
    trace: Trace,
    words: Sequence[Any],
    tag: str,
    flavour: ApiFlavour,
    slots: int | None,
) -> list[SentRequest]:
    sessions = []
    for number, session in enumerate(trace.sessions):
        renamed = replace(session, scope=f"{tag}/{session.scope}")
        sessions.append([
            (PromptJob("".join(map(str, trace.prompt(renamed, turn, words))).lstrip(), turn.output,
                       session=f"{tag}/{number}"), turn.think)
            for turn in session.turns
        ])  # fmt: skip
    async with open_session() as http:
        drive = LoadGenerator(EndpointClient(http, url, model, flavour).send)
        await drive.sessions(sessions, [session.start for session in trace.sessions], slots)
        return drive.outcomes


def _post(url: str) -> None:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=30):
        pass


def _cached(engines: Sequence[Server]) -> tuple[float, float]:
    """Return prompt tokens looked up in the engines' prefix caches, and found."""
    totals = {"vllm:prefix_cache_queries_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for server in engines:
        for line in get_text(server.url + "/metrics").splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in totals:
                totals[name] += float(line.rsplit(" ", 1)[1])
    looked, hit = totals.values()
    return looked, hit


def _cpu_seconds(servers: Sequence[Server]) -> float:
    """Return the CPU seconds of servers and their descendants."""
    total = 0.0
    for server in servers:
        leader = psutil.Process(server.pid)
        for process in [leader, *leader.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    return total


def pooled(runs: Sequence[Run]) -> Run:
    """Return the runs of one contender as one: sums, and all requests."""
    return Run(
        runs[0].contender, -1, sum(r.looked for r in runs), sum(r.hit for r in runs),
        sum(r.cpu_s for r in runs), sum(r.engine_s for r in runs), sum(r.seconds for r in runs),
        sum(r.errors for r in runs),
        [ms for run in runs for ms in run.ttft_ms], [ms for run in runs for ms in run.tpot_ms],
    )  # fmt: skip


def report(runs: Sequence[Run], contenders: Sequence[str]) -> None:
    """Print each contender's figures over the requests of all rounds, and ratios to `toll`."""
    rows = {
        name: pooled([run for run in runs if run.contender == name]).figures()
        for name in contenders
    }
    columns = list(next(iter(rows.values())))
    print(f"\n{'ms':14}" + "".join(f"{column:>11}" for column in columns))
    for name, row in rows.items():
        print(f"{name:14}" + "".join(f"{row[column]:11.1f}" for column in columns))
    own = rows.get("toll")
    if own is None:
        return
    print(f"\n{'over toll':14}" + "".join(f"{column:>11}" for column in columns[:-1]))
    for name, row in rows.items():
        ratios = (row[column] / own[column] for column in columns[:-1])
        print(f"{name:14}" + "".join(f"{ratio:11.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
