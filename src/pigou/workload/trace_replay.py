"""The replay of a trace: its sessions as jobs for an endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from pigou.config import ConfigError
from pigou.request import SECOND
from pigou.sim.arrival_rate import renewal_times
from pigou.workload.bench_config import BenchConfig
from pigou.workload.load_generator import LoadGenerator
from pigou.workload.prompts import PromptJob
from pigou.workload.trace import Trace, TraceSession
from pigou.workload.trace_formats import read_trace


@dataclass(frozen=True)
class TraceReplay:
    """Sessions to send, and how."""

    trace: Trace  # as it is replayed, scaled and cut
    dropped: int  # turns that were left out since they do not fit the model

    @property
    def turns(self) -> int:
        """How many requests there are."""
        return sum(len(session.turns) for session in self.trace.sessions)

    def jobs(self, vocabulary: Sequence[int]) -> Iterator[list[tuple[PromptJob, float]]]:
        """Yield each session's jobs, with the seconds of thinking before each."""
        for session in self.trace.sessions:
            yield [(self._job(session, at, vocabulary), turn.think)
                   for at, turn in enumerate(session.turns)]  # fmt: skip

    def _job(self, session: TraceSession, at: int, vocabulary: Sequence[int]) -> PromptJob:
        turn = session.turns[at]
        return PromptJob(self.trace.prompt(session, turn, vocabulary), turn.output)


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
    before = sum(len(session.turns) for session in chosen.sessions)
    replay = TraceReplay(fitting, 0)
    return replace(replay, dropped=before - replay.turns)


async def run(
    config: BenchConfig, replay: TraceReplay, vocabulary: Sequence[int], drive: LoadGenerator,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Send the sessions: at their recorded starts, at a rate, or so many at once."""
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
