"""GPUs by the names that their drivers give them."""

from __future__ import annotations

import pytest

from pigou.config import ConfigError
from pigou.models.gpus import GPUS, gpu


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
    ],
)
def test_a_device_is_found_by_what_its_driver_calls_it(name: str, key: str) -> None:
    assert gpu(name) is GPUS[key]


@pytest.mark.parametrize(
    "name", ["RTX 4090 D", "RTX 4090 Laptop GPU", "H20-3e", "H100 96GB", "A100X", "A1000", ""]
)
def test_a_device_is_never_taken_for_its_neighbour(name: str) -> None:
    with pytest.raises(ConfigError, match="gpu is"):
        gpu(name)
