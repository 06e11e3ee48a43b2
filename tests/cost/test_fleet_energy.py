"""Energy of a fleet by output token, against known answers."""

from __future__ import annotations

import pytest

from pigou.cost.fleet_bill import FleetBill
from pigou.cost.usage import Usage, UsageKey


@pytest.mark.parametrize(
    ("watts", "tok_s", "joules", "kwh"), [(700, 5333, 0.1313, 0.0365), (2800, 8000, 0.35, 0.0972)]
)
def test_energy_of_tokens_is_the_known_answer(
    watts: float, tok_s: int, joules: float, kwh: float
) -> None:
    usages = {UsageKey("", "", ""): Usage(output_tokens=tok_s)}
    bill = FleetBill(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, watts, 0.0, 0.0, usages)
    energy = bill.energy_document()
    assert round(energy["joules_per_output_token"], 4) == joules
    assert round(energy["kwh_per_million_output"], 4) == kwh
