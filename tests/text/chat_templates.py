"""Chat templates in the shapes that model families publish, in our own words and short.

Each has the constructs by which its family differs: how roles are marked, where the system's text
goes, how tools and their results are written, and what is trimmed.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"

TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted(_FOLDER.glob("*.jinja"))}
