"""EngineCore: what one worker computes next."""

from __future__ import annotations

from pigou.config import EngineConfig
from pigou.engine.plan import Effects, Plan, Result
from pigou.request import NEVER, Ints, Request


class EngineCore:
    """Continuous batching over paged, shared blocks; a state machine without a clock."""

    #: Device block ids of each row, shape (max_seqs, blocks of the longest sequence).
    tables: Ints

    def __init__(self, config: EngineConfig) -> None:
        raise AssertionError("signature only")

    def add(self, request: Request) -> None:
        raise AssertionError("signature only")

    def abort(self, request: str) -> Effects:
        raise AssertionError("signature only")

    def schedule(self, now: int, horizon: int = NEVER) -> Plan:
        raise AssertionError("signature only")

    def apply(self, plan: Plan, result: Result) -> Effects:
        raise AssertionError("signature only")

    def loaded(self, request: str, tokens: int) -> Effects:
        raise AssertionError("signature only")

    def release(self, request: str) -> Effects:
        raise AssertionError("signature only")

    def clear_cache(self) -> Effects:
        raise AssertionError("signature only")

    def check_integrity(self) -> None:
        raise AssertionError("signature only")
