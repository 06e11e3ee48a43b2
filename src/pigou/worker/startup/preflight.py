"""Checks a worker's configuration before a process starts, without importing torch."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes.util import find_library
from functools import partial
from pathlib import Path

from pigou.config import ConfigError, check_all
from pigou.kv.tier_config import HOST, STORES
from pigou.models import ModelError, model_folder
from pigou.models.hf_config import HfConfig, read_config
from pigou.models.read import choose_implementation
from pigou.models.weight_files import find_weight_files
from pigou.registry import named
from pigou.worker.config import WorkerConfig
from pigou.worker.kv_transfer.nixl import load_nixl

#: Drivers of torch's `cuda` devices.
_DRIVERS = ("cuda", "amdhip64")
_CUDA_DEVICE = re.compile(r"cuda(?::(\d+))?")


def check_worker(config: WorkerConfig) -> None:
    """Check that model, device and tiers are usable; raises ConfigError, a line per problem."""
    checks: list[Callable[[], object]] = [
        partial(named, STORES, tier.name, "tier") for tier in config.tiers if tier.name != HOST
    ]
    checks += [partial(_check_adapter, *item) for item in config.adapters.items()]
    if "nixl" in config.kv_transfer.split(","):
        checks.append(load_nixl)
    if not config.sleeps:
        checks += [
            partial(_check_model, config),
            partial(_check_device, config.device),
        ]
    check_all(*checks)


def _check_model(config: WorkerConfig) -> None:
    """Reject a folder without configuration or weights; hub ids and GGUF are checked on load."""
    model = config.model
    if model == "bundled" or (model.endswith(".gguf") and Path(model).is_file()):
        return
    try:
        folder = model_folder(model)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    if folder is None:
        return
    files = [path.name for path in sorted(folder.iterdir())]
    if "config.json" not in files:
        if any(name.endswith(".gguf") for name in files):
            return
        raise ConfigError(
            f"model is {model!r}, a folder without config.json; give one in Hugging Face's format"
        )
    try:
        kind = choose_implementation(HfConfig(folder, read_config(folder)), config.model_impl)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"model is {model!r}: {error}") from None
    if kind == "transformers" and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and model is {model!r}, which "
            "transformers' modules compute, in one process alone; give 1"
        )
    try:
        find_weight_files(folder)
    except ModelError as error:
        raise ConfigError(f"model is {model!r}, and its weights cannot be read: {error}") from None


def _check_adapter(name: str, folder: str) -> None:
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ConfigError(
            f"lora_modules has {name}={folder}, and no {folder}/adapter_config.json is there; give "
            "a folder of PEFT"
        )


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    match = _CUDA_DEVICE.fullmatch(device)
    if match is None:
        raise ConfigError(f"device is {device!r}; give cpu, cuda or cuda:N")
    if not any(find_library(name) for name in _DRIVERS):
        raise ConfigError(f"device is {device!r}, and this machine has no CUDA driver; give cpu")
    count = _cuda_devices()
    if count is not None and int(match[1] or 0) >= count:
        raise ConfigError(
            f"device is {device!r}, and CUDA has {count} devices here; give cpu, or cuda:N with N "
            f"below {count}"
        )


def _cuda_devices() -> int | None:
    """Return the number of CUDA devices, honouring CUDA_VISIBLE_DEVICES; None if unknown."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
