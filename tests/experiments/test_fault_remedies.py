"""Laws of remedies: what a playbook advises ends its fault, by the option's production code."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import msgspec
import pytest

from pigou.diagnosis.diagnose import diagnose
from pigou.gateway.caches.context import Context, Passage, compile_context
from pigou.request import SECOND
from pigou.sim.setup import Setup, TierConfig
from pigou.sim.simulation import unlimited
from pigou.sim.workload import RequestSession, RequestSpec
from pigou_lab.experiments.fault_trials import TRIALS, run_trial

LANE = Setup(model="llama-3.1-8b", gpu="H100", max_batched_tokens=512,
             long_lane="min_prompt=8192,tokens=64,idle_tokens=512")  # fmt: skip
#: Remedy by name: its mode, and fields of the mode's trial.
REMEDIES: dict[str, tuple[int, dict[str, Any]]] = {
    "--long-lane": (8, {"setup": LANE}),
    "--admission fair": (11, {"control": unlimited(max_inflight=64, admission={"order": "fair"})}),
    "--admission drf": (11, {"control": unlimited(max_inflight=64, admission={"order": "drf"})}),
    "fair for the long": (9, {"control": unlimited(max_inflight=48, admission={"order": "fair"})}),
    "ageing=5000": (9, {"control": unlimited(
        max_inflight=48, admission={"order": "shortest", "ageing": 5000})}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("remedy", REMEDIES)
def test_an_advised_option_ends_its_fault(remedy: str) -> None:
    mode, fields = REMEDIES[remedy]
    assert diagnose(run_trial(mode, seed=2, **fields)).findings == ()


def test_release_during_tools_makes_agents_quicker_and_a_tier_brings_kv_back() -> None:
    held = run_trial(14, seed=2)
    group = TRIALS[14](Random("14/2")).group
    tier = TierConfig(name="host", gib=64.0)
    released = run_trial(14, 2, prepare=None, group=msgspec.structs.replace(group, tiers=(tier,)))
    (cause,) = [one for one in diagnose(held).findings if not one.follows_from]
    assert cause.number == 14
    assert diagnose(released).findings == ()
    waits = [max(w.ttft_p50_s or 0.0 for w in windows) for windows in (held, released)]
    assert waits[0] > 10 * waits[1]
    ratios = [sum(v.hit_tokens for w in windows for v in w.workers)
              / sum(v.queried_tokens for w in windows for v in w.workers)
              for windows in (held, released)]  # fmt: skip
    assert ratios[1] > 1.5 * ratios[0]


def storm(*, compiled: bool) -> list[RequestSession]:
    """Return prompts of rules, news and a question; from 70 s on news come first, or compiled."""
    rng = Random(4)
    rules = "The rules of the house are many, and all of them are to be kept. " * 30
    sessions, at = [], 0.0
    while (at := at + rng.expovariate(3.0)) < 150.0:
        news = f"News {rng.random()}: " + "it rains in Rome. " * 10
        asked = f"What of {rng.random()}?"
        context = Context(system=rules, evidence=[Passage(id="1", text=news)], user=asked)
        messages = compile_context(context).messages
        text = "".join(message["content"] for message in messages)
        if at > 70.0 and not compiled:
            text = news + rules + asked
        ends = range(64, len(text) + 64, 64)
        ids = tuple(
            int.from_bytes(hashlib.blake2b(text[:end].encode(), digest_size=7).digest())
            for end in ends
        )
        spec = RequestSpec(len(text) // 4, 64, ids, 1, 16.0, tenant="anna")
        sessions.append(RequestSession(round(at * SECOND), (spec,)))
    return sessions


def test_a_context_that_the_compiler_orders_ends_a_prefix_miss_storm() -> None:
    stormy = diagnose(run_trial(4, 1, sessions=storm(compiled=False))).findings
    assert [one.number for one in stormy if not one.follows_from] == [4]
    assert diagnose(run_trial(4, 1, sessions=storm(compiled=True))).findings == ()
