from __future__ import annotations

import pytest

from pigou.cost.energy import PowerModel, joules_per_token, kwh_per_million


@pytest.mark.parametrize(
    ("watts", "tok_s", "joules", "kwh"), [(700, 5333, 0.1313, 0.0365), (2800, 8000, 0.35, 0.0972)]
)
def test_energy_of_tokens_is_the_known_answer(
    watts: float, tok_s: float, joules: float, kwh: float
) -> None:
    of_token = joules_per_token(watts, tok_s)
    assert round(of_token, 4) == joules
    assert round(kwh_per_million(of_token), 4) == kwh


def test_power_rises_from_idle_to_its_maximum_and_never_beyond() -> None:
    power = PowerModel(400.0, idle_share=0.2, gamma=0.75, full_mfu=0.5)
    assert power.watts(0.0) == pytest.approx(80.0)
    assert power.watts(1.0) == power.watts(1.7) == pytest.approx(400.0)
    assert power.watts(0.2) < power.watts(0.3)
    assert power.prefill_watts(0.5) == pytest.approx(400.0)
    assert power.decode_watts(0.5) == pytest.approx(80.0 + 320.0 * 0.5**0.75)
