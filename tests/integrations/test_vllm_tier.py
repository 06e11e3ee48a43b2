"""Laws of the tier that vLLM loads: with fakes, and under a real vLLM's tiering manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integrations import vllm_fakes, vllm_tier_laws
from tests.integrations.test_vllm_policy import run_in_vllm
from tests.integrations.vllm_tier_laws import ENGINE_LAWS, LAWS

vllm_fakes.install()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_tier(law: Callable[[Path], None], tmp_path: Path) -> None:
    law(tmp_path)


@pytest.mark.vllm
def test_tier_under_a_real_vllm_s_manager(tmp_path: Path) -> None:
    said = run_in_vllm(tmp_path, "-m", vllm_tier_laws.__name__)
    assert f"{len(LAWS + ENGINE_LAWS)} laws hold" in said
