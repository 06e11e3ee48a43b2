"""Alert rules of Prometheus, out of the definitions of the failure modes."""

from __future__ import annotations

import re
from typing import Any

import yaml

from pigou.diagnosis.mode import FailureMode
from pigou.diagnosis.modes import MODES

_HEAD = """\
# Alerts for the failure modes of `pigou diagnose`; made by `python -m tools.diagnosis_pages`.
# Modes without a rule here have no metric that shows them: docs/guide/playbooks.md says which.
"""
_PAGE = "docs/guide/playbooks.md"


def alert_name(mode: FailureMode) -> str:
    """Return the name of a mode's alert: PigouKvExhaustion."""
    return "Pigou" + "".join(word.capitalize() for word in re.split(r"[^a-zA-Z0-9]+", mode.name))


def alert_rules() -> str:
    """Return a file of rules for Prometheus: an alert for each mode that metrics show."""
    rules = [_rule(mode) for mode in MODES.values() if mode.alert]
    groups = {"groups": [{"name": "pigou-failure-modes", "rules": rules}]}
    text: str = yaml.safe_dump(groups, sort_keys=False, width=100)
    return _HEAD + text


def _rule(mode: FailureMode) -> dict[str, Any]:
    return {
        "alert": alert_name(mode),
        "expr": mode.text(mode.alert),
        "for": mode.alert_for,
        "labels": {"severity": "warning", "mode": str(mode.number)},
        "annotations": {
            "summary": f"{mode.name}: {mode.symptom}",
            "description": f"Smallest fix: {mode.text(mode.smallest_fix)} "
            f"Then: pigou diagnose URL, and {_PAGE}#{anchor(mode)}.",
        },
    }


def anchor(mode: FailureMode) -> str:
    """Return the anchor of a mode's playbook: 2-kv-exhaustion."""
    return re.sub(r"[^\w\- ]", "", f"{mode.number} {mode.name}".lower()).replace(" ", "-")
