"""Bursts on an engine whose requests give up entries: no cap is exceeded, and nothing leaks."""

from __future__ import annotations

import os
import time
from random import Random

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, make_config, write_checkpoint

from pigou.config import EngineConfig, EvictionConfig
from pigou.engine.plan import Plan, Rates
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.token_eviction.predictor import PAPER, PaperModel

#: Seconds of the long version.
LONG = float(os.environ.get("PIGOU_BURST_SECONDS", "600"))
BLOCKS, HOST, SIZE = 60, 40, 16
#: Least entries of a request with which giving entries up does not always suffice, so that rows
#: are preempted as well.
FULL = 144


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a tiny model with a predictor for `paper` that nobody trained."""
    folder = write_checkpoint(tmp_path_factory.mktemp("bursts") / "llama", make_config("llama"))
    torch.manual_seed(0)
    into, out = torch.randn(VOCAB, 256) * 0.1, torch.randn(256, 2) * 0.1
    PaperModel(into, torch.zeros(256), out, torch.tensor([-3.0, -6.0])).save(folder / PAPER)
    return load(folder, "fp32")


class Burst:
    """An engine that is looked at while each plan runs, and after each step."""

    def __init__(self, model: LoadedModel, policy: str, least: int) -> None:
        eviction = EvictionConfig(
            policy=policy, sinks=2, recent=16, least=least, interval=16, floors={"floored": 12}
        )
        config = EngineConfig(
            blocks=BLOCKS, block_size=SIZE, host_blocks=HOST, max_seqs=10, max_model_len=384,
            max_batched_tokens=96, max_repeat=4, eviction=eviction,
        )  # fmt: skip
        self.engine = LocalEngine(model, config)
        self.engine.core.rates = Rates(prefill=1e3, swap=1e9, block_bytes=4096)
        self.engine.on_plan = self.during
        self.rows: dict[int, str] = {}
        self.outputs: list[Output] = []
        self.counts = {"plans": 0, "compactions": 0, "revivals": 0, "swaps": 0}

    def during(self, plan: Plan) -> None:
        """Look at the pool while the plan has all that it needs."""
        core = self.engine.core
        assert 0 <= core.free_blocks <= BLOCKS
        core.check_integrity()
        self.counts["plans"] += 1
        self.counts["compactions"] += len(plan.compactions)
        self.counts["revivals"] += len(plan.recomputations)
        self.counts["swaps"] += len(plan.swap_out) > 0
        gone = set(plan.preempted)
        self.rows = {row: request for row, request in self.rows.items() if request not in gone}
        for started in plan.started:
            self.rows[started.row] = started.request

    def step(self) -> None:
        """Do a plan; then each row has each of its entries once, and none of the future."""
        before = self.plan_rows()
        self.engine.step()
        core, evictor = self.engine.core, self.engine.executor.evictor
        assert evictor is not None
        core.check_integrity()
        for row, request in before.items():
            if self.rows.get(row) != request or request not in core:
                continue
            entries = int(evictor.entries[row])
            positions = np.sort(evictor.positions(core.tables[row], entries), axis=-1)
            assert (np.diff(positions, axis=-1) > 0).all(), "an entry is there twice"
            assert not entries or 0 <= positions.min() <= positions.max() < evictor.next[row]
            assert (positions[..., 0] == 0).all(), "a sink was given up"

    def plan_rows(self) -> dict[int, str]:
        return dict(self.rows)

    def ask(self, random: Random) -> None:
        prompt = [random.randrange(3, 300) for _ in range(random.randrange(4, 200))]
        params = SamplingParams(
            max_tokens=random.randrange(1, 160), temperature=0.0, ignore_eos=True
        )
        tenant = random.choice(["floored", "other", "third"])
        self.outputs.append(self.engine.add(prompt, params, tenant=tenant))

    def leave(self, random: Random) -> None:
        """Abort somebody."""
        running = [o for o in self.outputs if o.reason is None and o.request in self.engine.core]
        if running:
            request = random.choice(running).request
            self.engine.core.abort(request)
            self.engine.executor.drop(request)
            self.outputs = [o for o in self.outputs if o.request != request]


def burst(
    model: LoadedModel, policy: str, seconds: float, seed: int, least: int = 32
) -> dict[str, int]:
    run, random = Burst(model, policy, least), Random(seed)
    end = time.monotonic() + seconds
    core = run.engine.core
    while time.monotonic() < end or not run.counts["compactions"]:
        assert time.monotonic() < end + 120, "nothing was given up"
        for _ in range(random.randrange(1, 14)):
            run.ask(random)
        for _ in range(random.randrange(1, 120)):
            if not core.running and not core.waiting:
                break
            run.step()
            if random.random() < 0.01:
                run.leave(random)
        if len(run.outputs) > 40 or random.random() < 0.2:
            while core.running or core.waiting:
                run.step()
            assert all(o.reason is not None for o in run.outputs)
            run.outputs.clear()
    while core.running or core.waiting:
        run.step()
    core.check_integrity()
    assert core.free_blocks == BLOCKS
    assert core.missing_entries == 0
    return run.counts


@pytest.mark.parametrize("policy", ["pigou", "paper", "paper-lossy", "h2o", "fifo"])
def test_bursts_exceed_no_cap_and_leave_nothing(model: LoadedModel, policy: str) -> None:
    burst(model, policy, 1.0, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(LONG + 300)
@pytest.mark.parametrize("policy", ["pigou"])
def test_long_bursts_exceed_no_cap_and_leave_nothing(model: LoadedModel, policy: str) -> None:
    counts = burst(model, policy, LONG, seed=int(time.time()), least=FULL)
    assert counts["compactions"] > counts["swaps"] > 0, counts
