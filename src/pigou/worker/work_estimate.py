"""Estimates what a worker's steps take of its GPUs: FLOPs, and bytes of their memory."""

from __future__ import annotations

import logging

import numpy as np

from pigou.config import ConfigError
from pigou.engine.plan import Plan
from pigou.models.architecture import Architecture
from pigou.sim.gpus import Gpu, gpu

log = logging.getLogger(__name__)


class WorkEstimate:
    """Counts estimated FLOPs and bytes for each GPU, as vLLM's metrics of the same names do.

    FLOPs are those of `Architecture.flops`. Read are the weights once a step, of experts those
    that are expected to be chosen, and the KV entries of each sequence once a step; written are
    the entries of each computed token. Activations are left out.

    Attributes:
        peak_flops, peak_bytes_per_second: of a GPU's data sheet; 0 where they are not known.

    Example:
        work = WorkEstimate(architecture("llama-3.1-8b"), device=gpu("h100"))
        work.count(plan, steps=1)
    """

    def __init__(self, model: Architecture, tp: int = 1, device: Gpu | None = None) -> None:
        self.flops = self.read_bytes = self.write_bytes = 0.0
        self.peak_flops = 0.0 if device is None else device.peak(model.compute_dtype)
        self.peak_bytes_per_second = 0.0 if device is None else device.bandwidth
        head = model.vocab * model.hidden
        self._head_flops = 2.0 * head / tp
        self._token_flops = 2.0 * (model.active_parameters - head) / tp
        self._pair_flops = model.pair_flops / tp
        self._entry_bytes = model.token_bytes(tp)
        look_up = 0.0 if model.tied else head * model.embedding.size
        self._weight_bytes = (model.weight_bytes - look_up) / tp
        self._expert_bytes = model.expert_bytes / tp
        self._model = model

    def count(self, plan: Plan, steps: int) -> None:
        """Count so many steps of a plan; entries decode further with each."""
        counts = plan.counts.astype(np.float64)
        entries = plan.kv_lens.astype(np.float64)
        tokens = float(counts.sum())
        growth = steps * (steps - 1) / 2  # entries that the plan's own steps add
        pairs = (
            steps * (counts * entries + counts * (counts + 1) / 2).sum()
            + growth * (counts * counts).sum()
        )
        self.flops += float(
            steps * tokens * self._token_flops
            + steps * np.count_nonzero(plan.samples) * self._head_flops
            + pairs * self._pair_flops
        )
        read_entries = steps * (entries + counts).sum() + growth * tokens
        weights = self._weight_bytes
        if self._expert_bytes:
            idle = self._model.experts - self._model.expected_experts(tokens)
            weights -= idle * self._expert_bytes
        self.read_bytes += float(steps * weights + read_entries * self._entry_bytes)
        self.write_bytes += steps * tokens * self._entry_bytes


def estimate_of(model: Architecture, device_name: str, tp: int = 1) -> WorkEstimate:
    """Return an estimate for a device of this name; without peaks where it is not known."""
    device = None
    if device_name:
        try:
            device = gpu(device_name)
        except ConfigError as error:
            log.info("MFU and MBU have no peaks: %s", error)
    return WorkEstimate(model, tp, device)
