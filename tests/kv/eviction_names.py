"""The eviction policies of this source tree by name, whether or not it is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pigou.kv.tier_eviction.policy import EvictionPolicy, TierSetting, make

_ROOT = Path(__file__).parents[2]
KINDS: dict[str, Any] = {
    name: resolve_name(place)
    for file in (_ROOT / "pyproject.toml", _ROOT / "lab" / "pyproject.toml")
    for name, place in tomllib.loads(file.read_text())["project"]["entry-points"][
        "pigou.eviction"
    ].items()
}


def policy(name: str, cap: int, **params: Any) -> EvictionPolicy:
    return make(KINDS[name], TierSetting(cap), params, name)
