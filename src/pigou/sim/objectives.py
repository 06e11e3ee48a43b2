"""Objectives of a simulation's requests, and the share of offered requests that attain them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pigou.objectives import AttainmentCounter, Objectives
from pigou.request import SECOND
from pigou.sim.request_run import RequestRun, RunOutcome

#: Of a simulation without any.
NO_OBJECTIVES = Objectives()


def class_name(objectives: Objectives, run: RequestRun) -> str:
    """Return the name of a request's class."""
    return objectives.name_of(run.spec.tenant, run.spec.prompt_tokens)


def is_attained(objectives: Objectives, run: RequestRun, since_ns: int) -> bool:
    """Whether a request is done, and inside its objective."""
    if run.outcome is not RunOutcome.DONE:
        return False
    itl_ns = request_itl_ns(run)
    itl_s = None if itl_ns is None else itl_ns / SECOND
    ttft_s = (run.first_token_ns - since_ns) / SECOND
    return objectives.attained(class_name(objectives, run), ttft_s, itl_s)


def objectives_document(objectives: Objectives, runs: Sequence[RequestRun]) -> dict[str, Any]:
    """Return the objectives, and the shares of offered requests that attained them.

    TTFT counts from the intention to send.
    """
    attainment = AttainmentCounter(objectives)
    for run in runs:
        inside = is_attained(objectives, run, run.intended_ns)
        attainment.add(class_name(objectives, run), inside)
    return attainment.document()


def request_itl_ns(run: RequestRun) -> float | None:
    """Return the mean nanoseconds of a request between its tokens; None where it has only one."""
    if run.output_tokens < 2:
        return None
    return (run.last_token_ns - run.first_token_ns) / (run.output_tokens - 1)
