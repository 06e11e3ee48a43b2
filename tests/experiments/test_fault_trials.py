"""Laws of simulated faults: each sets its detector off, and no other as a cause."""

from __future__ import annotations

import pytest

from pigou.diagnosis.diagnose import diagnose
from pigou.diagnosis.modes import MODES
from pigou_lab.experiments.fault_trials import HEALTHY, TRIALS, run_trial

#: The quick ones, each with a mechanism of its own.
QUICK = (HEALTHY, 3, 8, 10, 16, 17)
SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in TRIALS if mode not in QUICK]


def test_each_mode_has_a_trial() -> None:
    assert list(TRIALS) == [HEALTHY, *MODES]


@pytest.mark.parametrize("mode", [*QUICK, *SLOW])
def test_a_fault_is_diagnosed_as_itself(mode: int) -> None:
    findings = diagnose(run_trial(mode, seed=1)).findings
    causes = [finding.number for finding in findings if not finding.follows_from]
    assert causes == ([mode] if mode != HEALTHY else [])
