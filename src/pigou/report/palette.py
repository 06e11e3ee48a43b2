"""Colours, told apart by those who see few of them; strokes and the legend help."""

from __future__ import annotations

from typing import Final, Literal

from pigou.report.figure import Stroke

Theme = Literal["light", "dark"]

#: By name: what is drawn on, text, quiet text, grid, lines in the order of their use, and the
#: scale of maps from least to most.
COLOURS: Final[dict[Theme, dict[str, str]]] = {
    "light": {
        "paper": "#ffffff", "ink": "#1c2024", "muted": "#6f767e", "grid": "#e7e9ec",
        "c0": "#2366b8", "c1": "#d9591c", "c2": "#0f8f63", "c3": "#8a5cc2",
        "c4": "#b8860b", "c5": "#c9377f", "c6": "#2a9cb0", "c7": "#5f6b3a",
        "h0": "#f1f5fa", "h1": "#7fb0e6", "h2": "#0c3c78",
    },
    "dark": {
        "paper": "#16191d", "ink": "#e6e8eb", "muted": "#98a0a9", "grid": "#2b3036",
        "c0": "#6aa5f0", "c1": "#f0884f", "c2": "#3fbf8f", "c3": "#b592ea",
        "c4": "#dcb13c", "c5": "#ee74ab", "c6": "#5cc5d8", "c7": "#a8b574",
        "h0": "#1c222a", "h1": "#346fb5", "h2": "#cfe4ff",
    },
}  # fmt: skip
#: Different colours of lines.
LINES: Final = 8
STROKES: Final[tuple[Stroke, ...]] = ("solid", "dash", "dot")


def line(place: int) -> str:
    """Return the name of a line's colour; -1 is that of what others found."""
    return "muted" if place < 0 else f"c{place % LINES}"
