"""Checks of what an engine is asked to take in, before anything changes."""

from __future__ import annotations

import numpy as np

from pigou.engine.errors import DuplicateRequest, QueueFull, RequestTooLarge
from pigou.engine.plan import Plan, Result
from pigou.engine.state import EngineState
from pigou.request import Request


def check_request(state: EngineState, request: Request) -> None:
    """Check that a request can be computed here, and may wait.

    Raises:
        ValueError: a length is below 1, or the hashes have a wrong shape or type.
        RequestTooLarge: it could not run here even alone.
        DuplicateRequest: its id is in use.
        QueueFull: `max_waiting` requests wait already.
    """
    config = state.config
    for name in ("prompt", "max_tokens"):
        if getattr(request, name) < 1:
            raise ValueError(f"{name} is {getattr(request, name)}; it must be at least 1")
    check_hashes(request)
    tokens = request.prompt + request.max_tokens
    if tokens > config.max_model_len:
        raise RequestTooLarge(
            f"prompt {request.prompt} + max_tokens {request.max_tokens} = {tokens} tokens; "
            f"max_model_len is {config.max_model_len}"
        )
    blocks = -(-(tokens - 1) // config.block_size)
    if blocks > config.blocks:
        raise RequestTooLarge(
            f"prompt {request.prompt} + max_tokens {request.max_tokens} need {blocks} blocks "
            f"of {config.block_size} tokens; there are {config.blocks}"
        )
    check_id(state, request)
    if config.max_waiting and len(state.queue) >= config.max_waiting:
        raise QueueFull(f"{len(state.queue)} requests wait; max_waiting is the limit")


def check_id(state: EngineState, request: Request) -> None:
    """Check that nobody here has a request's id.

    Raises:
        DuplicateRequest: somebody has.
    """
    name = request.id
    if name in state.sequences or name in state.held or name in state.draining:
        raise DuplicateRequest(f"request id {request.id!r} is in use")


def check_hashes(request: Request) -> None:
    """Check the shape and type of a request's hashes.

    Raises:
        ValueError: one of them is wrong.
    """
    if request.hashes.ndim != 2 or request.hashes.shape[1] != 2:
        raise ValueError(f"hashes have shape {request.hashes.shape}; it must be (blocks, 2)")
    if request.hashes.dtype != np.uint64:
        raise ValueError(f"hashes are {request.hashes.dtype}; they must be uint64")


def check_result(plan: Plan, result: Result) -> None:
    """Check that a result may be one of a plan.

    Raises:
        ValueError: it has too many steps, or none, or ends what the plan has not.
    """
    if not 1 <= result.steps <= plan.repeat:
        raise ValueError(f"{result.steps} steps were done; it must be 1 to {plan.repeat}")
    for finish in result.finished:
        if not 0 <= finish.entry < len(plan.rows):
            raise ValueError(f"entry {finish.entry} finished; the plan has {len(plan.rows)}")
        if not 1 <= finish.steps <= result.steps:
            raise ValueError(f"entry finished after {finish.steps} of {result.steps} steps")
