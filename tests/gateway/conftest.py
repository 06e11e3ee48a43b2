"""What all tests of the gateway share."""

from __future__ import annotations

import pytest

from pigou.control.admission import admission_controller
from pigou.request import SECOND


@pytest.fixture(autouse=True)
def _quick_forgiveness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a retry return to a failed worker after 50 ms in place of a second."""
    monkeypatch.setattr(admission_controller, "EXCLUDED_FOR", SECOND // 20)
