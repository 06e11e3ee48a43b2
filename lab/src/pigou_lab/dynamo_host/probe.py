"""Probe: does the installed Dynamo honour per-request overrides of its router?

Every Dynamo 1.x accepts `router_config_override`; 1.4.2 applies it, 1.6.1 ignores it. The probe
routes a cached prompt many times, query only, with and without an override. Temperature 0 keeps all
calls at the worker with the prefix; with m workers temperature 5 keeps each there with probability
1 / (1 + (m - 1) exp(-1/5)).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pigou_lab.dynamo_host import binding
from pigou_lab.dynamo_host.binding import KvRouter

_log = logging.getLogger("pigou_lab.dynamo_host")

TEMPERATURE = "router_temperature"
#: Names of the weight of the prefill load, newest first: the old one is an alias in 1.x.
WEIGHTS = ("prefill_load_scale", "overlap_score_weight")
_HOT = 5.0
_POLL_S = 0.05
#: Difference of the greatest shares of calls that is no accident in 100 calls, and one that is.
_MIN_DIFFERENCE, _MAX_ACCIDENT = 0.25, 0.15
#: Token ids that any vocabulary has, none of them special in a common one.
_LOW_ID, _HIGH_ID = 300, 1200


class Honoured(StrEnum):
    """Verdict of a controlled test on an override."""

    YES = "honoured"
    NO = "ignored"
    UNKNOWN = "inconclusive"


@dataclass(frozen=True, slots=True)
class Finding:
    """A controlled test of one override."""

    verdict: Honoured
    override: dict[str, float] = field(default_factory=dict)
    # baseline of the comparison: another override, or none.
    reference: dict[str, float] = field(default_factory=dict)
    control: dict[int, int] = field(default_factory=dict)  # calls with the reference, by worker
    treated: dict[int, int] = field(default_factory=dict)  # calls with the override, by worker
    why: str = ""  # the verdict in words

    def __str__(self) -> str:
        counts = (
            f"{_shares(self.control)} with {_named(self.reference)}, {_shares(self.treated)} with "
            f"{_named(self.override)}"
        )
        return f"{_named(self.override)} is {self.verdict.value} ({self.why}; {counts})"


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """Verdict of the probe, with evidence."""

    version: str  # Dynamo's version; empty when unknown
    workers: int
    overlap: int  # blocks of the test's prompt that its holder had cached
    temperature: Finding
    weight: Finding  # the test of the overlap weight

    @property
    def honoured(self) -> bool:
        """Whether the temperature of a single request can be set."""
        return self.temperature.verdict is Honoured.YES

    def status(self) -> dict[str, Any]:
        """Return the state for JSON; worker ids as strings, as they exceed a double."""
        fields = asdict(self)
        for test in ("temperature", "weight"):
            for counts in ("control", "treated"):
                held = fields[test][counts]
                fields[test][counts] = {str(worker): count for worker, count in held.items()}
        return {"honoured": self.honoured, **fields}

    def __str__(self) -> str:
        return (
            f"Dynamo {self.version or 'of unknown version'}, {self.workers} workers, "
            f"{self.overlap} blocks cached: {self.temperature}; {self.weight}"
        )


async def probe(
    router: KvRouter,
    model: str,
    *,
    block_size: int,
    blocks: int = 16,
    calls: int = 100,
    patience_s: float = 5.0,
    seed: int | None = None,
) -> ProbeVerdict:
    """Find out which overrides a router honours; the overlap weight needs idle workers."""
    generator = random.Random(seed)
    prompt = [generator.randrange(_LOW_ID, _HIGH_ID) for _ in range(blocks * block_size)]
    overlap = await _warm(router, model, prompt, patience_s)
    loads = await router.get_potential_loads(prompt)
    workers = len({(load["worker_id"], load.get("dp_rank", 0)) for load in loads})
    version = binding.version()
    obstacle = ""
    if workers < 2:
        obstacle = "there is one worker, and nothing to choose"
    elif overlap == 0:
        obstacle = "no worker was seen to hold the prompt; are KV events on?"
    if obstacle:
        nothing = Finding(Honoured.UNKNOWN, why=obstacle)
        return _logged(ProbeVerdict(version, workers, overlap, nothing, nothing))
    base = await _counts(router, prompt, {}, calls // 4)
    hot, cold = {TEMPERATURE: _HOT}, {} if len(base) == 1 else {TEMPERATURE: 0.0}
    temperature = judge(*await _both(router, prompt, cold, hot, calls), hot, cold)
    weight = await _weight(router, prompt, calls, cold=len(base) == 1, workers=workers)
    return _logged(ProbeVerdict(version, workers, overlap, temperature, weight))


def judge(
    control: Mapping[int, int],
    treated: Mapping[int, int],
    override: Mapping[str, float],
    reference: Mapping[str, float],
) -> Finding:
    """Return the finding, from calls by worker with the reference and with the override."""
    given, before, after = dict(override), dict(control), dict(treated)

    def said(verdict: Honoured, why: str) -> Finding:
        return Finding(verdict, given, dict(reference), before, after, why)

    if reference:
        apart = _top(control) - _top(treated)
        if apart > _MIN_DIFFERENCE:
            return said(Honoured.YES, "it spreads what the reference gathers")
        if apart < _MAX_ACCIDENT:
            return said(Honoured.NO, "reference and override spread alike")
        return said(Honoured.UNKNOWN, "reference and override differ by too little to tell")
    if len(control) > 1:
        return said(Honoured.UNKNOWN, "the calls were spread already")
    if len(treated) > 1:
        return said(Honoured.YES, "it spreads what was gathered")
    same = control.keys() == treated.keys()
    return said(
        Honoured.NO if same else Honoured.UNKNOWN,
        "all calls go where they went" if same else "all calls changed the worker at once",
    )


async def _weight(
    router: KvRouter, prompt: Sequence[int], calls: int, *, cold: bool, workers: int
) -> Finding:
    """Test the prefill load weight, visible only on otherwise equal workers."""
    if not cold:
        return Finding(Honoured.UNKNOWN, why="the router's own temperature spreads the calls")
    loads = await router.get_potential_loads(prompt)
    decode = {load["potential_decode_blocks"] for load in loads}
    if len(decode) > 1:
        return Finding(Honoured.UNKNOWN, why=f"the {workers} workers are not equally loaded")
    finding = Finding(Honoured.UNKNOWN)
    for name in WEIGHTS:
        zero = {name: 0.0}
        finding = judge(*await _both(router, prompt, {}, zero, calls), zero, {})
        if finding.verdict is Honoured.YES:
            break
    return finding


async def _warm(router: KvRouter, model: str, prompt: Sequence[int], patience_s: float) -> int:
    """Have a worker compute the prompt; return its cached blocks."""
    stream = await router.generate(
        list(prompt), model, stop_conditions={"max_tokens": 1, "ignore_eos": True}
    )
    async for _ in stream:
        pass
    overlap = 0
    for _ in range(max(1, int(patience_s / _POLL_S))):
        overlap = (await router.best_worker(prompt))[2]
        if overlap:
            break
        await asyncio.sleep(_POLL_S)
    return overlap


async def _both(
    router: KvRouter,
    prompt: Sequence[int],
    reference: Mapping[str, float],
    override: Mapping[str, float],
    calls: int,
) -> tuple[Counter[int], Counter[int]]:
    """Alternate (reference, override) calls, so that load changes meet both alike."""
    control: Counter[int] = Counter()
    treated: Counter[int] = Counter()
    for _ in range(calls):
        control += await _counts(router, prompt, reference, 1)
        treated += await _counts(router, prompt, override, 1)
    return control, treated


async def _counts(
    router: KvRouter, prompt: Sequence[int], override: Mapping[str, float], calls: int
) -> Counter[int]:
    counts: Counter[int] = Counter()
    for _ in range(calls):
        counts[(await router.best_worker(prompt, dict(override) or None))[0]] += 1
    return counts


def _named(override: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in override.items()) or "no override"


def _top(counts: Mapping[int, int]) -> float:
    return max(counts.values()) / sum(counts.values())


def _shares(counts: Mapping[int, int]) -> str:
    return "/".join(str(count) for count in sorted(counts.values(), reverse=True)) or "none"


def _logged(verdict: ProbeVerdict) -> ProbeVerdict:
    _log.info("%s", verdict)
    return verdict
