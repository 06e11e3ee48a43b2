"""The memory map that a live worker measured."""

from __future__ import annotations

from typing import Any

import pytest

from pigou.capacity.vram import measured_map
from pigou.config import ConfigError

ABOUT: dict[str, Any] = {
    "blocks": 100, "block_size": 16,
    "memory": {
        "device": "cuda:0", "memory": 10_000, "weights": 5000, "cache": 1600, "activations": 300,
        "adapters": 0, "runtime": 400, "graphs": 50, "scratch": 20,
    },
}  # fmt: skip


def test_the_six_terms_add_up() -> None:
    memory = measured_map(ABOUT)
    assert memory.usable == 7370
    assert memory.runtime == 450
    assert memory.tokens == 1600


def test_a_worker_that_does_not_tell_is_said() -> None:
    with pytest.raises(ConfigError, match="tells of no memory"):
        measured_map({"blocks": 100, "memory": None})
    with pytest.raises(ConfigError, match="weights is None"):
        measured_map({**ABOUT, "memory": {**ABOUT["memory"], "weights": None}})
