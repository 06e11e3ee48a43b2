"""Fleets in short form and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pigou.config import ConfigError
from pigou.request import Role
from pigou.sim.fleet_config import read_fleet


def test_fleets_are_read_in_short_and_from_files(tmp_path: Path) -> None:
    short = read_fleet("1p+2d")
    assert [(each.role, each.count) for each in short.workers] == [
        (Role.PREFILL, 1), (Role.DECODE, 2)
    ]  # fmt: skip
    assert read_fleet("4xboth").workers[0].count == 4
    file = tmp_path / "fleet.yaml"
    file.write_text("workers:\n  - {role: both, count: 3, slow: [{factor: 2, start: 5}]}\n")
    assert read_fleet(str(file)).workers[0].slow[0].factor == 2
    file.write_text("workers:\n  - {role: both, colour: red}\n")
    with pytest.raises(ConfigError, match="colour"):
        read_fleet(str(file))
    for text in ("4", "2q", "4xp", "0p+1d", "1p", ""):
        with pytest.raises(ConfigError, match="fleet"):
            read_fleet(text)
