"""Estimates the GPU FLOPs and memory bytes of a worker's steps, and reads energy counters."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil

from pigou.config import ConfigError
from pigou.engine.plan import Plan
from pigou.models.architecture import Architecture
from pigou.models.gpus import Gpu, gpu

log = logging.getLogger(__name__)
#: Where Linux shows the energy counters of processors.
RAPL = Path("/sys/class/powercap")
_MICRO, _MILLI = 1e-6, 1e-3


class WorkEstimate:
    """Counts estimated FLOPs and bytes for each GPU, as vLLM's metrics of the same names do.

    FLOPs are those of `Architecture.flops`. Read are the weights once a step, of experts those
    that are expected to be chosen, and the KV entries of each sequence once a step; written are
    the entries of each computed token. Activations are left out.

    Example:
        work = WorkEstimate(architecture("llama-3.1-8b"), device=gpu("h100"))
        work.count(plan, steps=1)
    """

    def __init__(self, model: Architecture, tp: int = 1, device: Gpu | None = None) -> None:
        self.flops = self.read_bytes = self.write_bytes = 0.0
        #: From the data sheet; None if unknown.
        self.peak_flops = None if device is None else device.peak(model.compute_dtype)
        self.peak_bytes_per_second = None if device is None else device.bandwidth
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
        """Count `steps` steps of a plan, whose contexts grow with each."""
        counts = plan.counts.astype(np.float64)
        entries = plan.kv_lens.astype(np.float64)
        tokens = float(counts.sum())
        growth = steps * (steps - 1) / 2  # entries added by the plan's own steps
        pairs = (
            steps * (counts * entries + counts * (counts + 1) / 2).sum()
            + growth * (counts * counts).sum()
        )
        self.flops += float(
            steps * tokens * self._token_flops
            + steps * (np.count_nonzero(plan.samples) + plan.drafts.sum()) * self._head_flops
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
    """Return an estimate for a named device; without peaks if it is unknown."""
    device = None
    if device_name:
        try:
            device = gpu(device_name)
        except ConfigError as error:
            log.info("MFU and MBU have no peaks: %s", error)
    return WorkEstimate(model, tp, device)


class NvmlEnergy:
    """Energy counter of one NVIDIA GPU (Volta and later), in mJ, shared by all its users."""

    source = "nvml"

    def __init__(self, nvml: Any, device: int) -> None:
        nvml.nvmlInit()
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        name = visible[device].strip() if device < len(visible) else str(device)
        self._nvml = nvml
        if name.isdigit():
            self._gpu = nvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            self._gpu = nvml.nvmlDeviceGetHandleByUUID(name)
        self._began = self._read()

    def _read(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu)) * _MILLI

    def joules(self) -> float:
        """Return the joules since construction."""
        return max(self._read() - self._began, 0.0)


class RaplEnergy:
    """Energy counters of all processor packages, scaled by this process's share of CPU time."""

    source = "rapl"

    def __init__(self, packages: Iterable[Path]) -> None:
        """Start counting; raises OSError if a counter is unreadable."""
        self._packages = list(packages)
        self._ranges = [_number(path / "max_energy_range_uj") for path in self._packages]
        self._process = psutil.Process()
        self._total = 0.0
        self._last = self._read()

    def _read(self) -> tuple[list[float], float, float]:
        mine, host = self._process.cpu_times(), psutil.cpu_times()
        busy = sum(host) - host.idle - getattr(host, "iowait", 0.0)
        energies = [_number(path / "energy_uj") for path in self._packages]
        return energies, mine.user + mine.system, busy

    def joules(self) -> float:
        """Return the joules since construction; unreadable counters add nothing."""
        try:
            energies, mine, busy = self._read()
        except OSError:
            return self._total
        before, mine_before, busy_before = self._last
        self._last = energies, mine, busy
        used = sum(
            now - then + (self._ranges[i] if now < then else 0.0)  # the counter wraps
            for i, (then, now) in enumerate(zip(before, energies, strict=True))
        )
        share = (mine - mine_before) / max(busy - busy_before, 1e-9)
        self._total += used * _MICRO * min(max(share, 0.0), 1.0)
        return self._total


EnergyCounter: TypeAlias = NvmlEnergy | RaplEnergy


def open_energy_counter(device: str, rapl: Path = RAPL) -> EnergyCounter | None:
    """Return a device's energy counter; None if unavailable."""
    if device.startswith("cuda"):
        try:
            nvml = import_module("pynvml")
            return NvmlEnergy(nvml, int(device.partition(":")[2] or 0))
        except Exception:  # no module, driver or counter: NVML has its own errors
            return None
    packages = sorted(path for path in rapl.glob("intel-rapl:*") if path.name.count(":") == 1)
    try:
        return RaplEnergy(packages) if packages else None
    except OSError:
        return None


def _number(path: Path) -> float:
    return float(path.read_text())
