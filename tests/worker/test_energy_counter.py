from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pigou.worker import device_use as energy_counter
from pigou.worker.device_use import RaplEnergy, open_energy_counter
from pigou.worker.metrics import WorkerMetrics


def package(folder: Path, name: str, energy_uj: int) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text("1000000\n")
    return path


def test_a_process_has_the_part_of_its_cpu_time_and_counters_wrap_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"mine": 0.0, "host": 0.0}
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=times["mine"], system=0.0))

    class HostTimes(tuple[float, ...]):
        idle, iowait = 50.0, 0.0

    monkeypatch.setattr(energy_counter.psutil, "Process", lambda: process)
    monkeypatch.setattr(
        energy_counter.psutil, "cpu_times", lambda: HostTimes((times["host"], 50.0))
    )
    package(tmp_path, "intel-rapl:0", 900_000)
    package(tmp_path, "intel-rapl:0:0", 5)  # a part of the package
    counter = open_energy_counter("cpu", tmp_path)
    assert isinstance(counter, RaplEnergy)
    times |= {"mine": 1.0, "host": 4.0}
    package(tmp_path, "intel-rapl:0", 300_000)  # 0.4 J later
    assert counter.joules() == pytest.approx(0.1)
    assert counter.joules() == pytest.approx(0.1)


def test_without_a_counter_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_energy_counter("cpu", tmp_path) is None
    assert open_energy_counter("cuda:1") is None


def test_a_gpu_is_that_of_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules = {"GPU-b": 7000.0}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: millijoules[gpu],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    counter = open_energy_counter("cuda:1")
    assert counter is not None
    millijoules["GPU-b"] += 2500.0
    metrics = WorkerMetrics("m", 2048, {}, 0)
    metrics.show_energy(counter)
    labels = {"model_name": "m", "engine": "0", "source": "nvml"}
    value = metrics.registry.get_sample_value("pigou_device_energy_joules_total", labels)
    assert value == pytest.approx(2.5)
