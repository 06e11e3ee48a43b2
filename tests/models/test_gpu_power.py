from __future__ import annotations

import pytest

from pigou.models.gpus import PowerModel


def test_power_rises_from_idle_to_its_maximum_and_never_beyond() -> None:
    power = PowerModel(400.0, idle_share=0.2, gamma=0.75, full_mfu=0.5)
    assert power.watts(0.0) == pytest.approx(80.0)
    assert power.watts(1.0) == power.watts(1.7) == pytest.approx(400.0)
    assert power.watts(0.2) < power.watts(0.3)
    assert power.prefill_watts(0.5) == pytest.approx(400.0)
    assert power.decode_watts(0.5) == pytest.approx(80.0 + 320.0 * 0.5**0.75)
