"""Write the pages that are made of the definitions of the failure modes.

python -m tools.diagnosis_pages
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pigou.diagnosis.alert_rules import alert_rules
from pigou.diagnosis.playbooks import playbooks

ROOT = Path(__file__).parents[1]


def pages() -> Mapping[Path, str]:
    """Return the text of each page, by its path."""
    return {
        ROOT / "docs" / "guide" / "playbooks.md": playbooks(),
        ROOT / "deploy" / "prometheus-alerts.yml": alert_rules(),
    }


def main() -> None:
    """Write them."""
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
