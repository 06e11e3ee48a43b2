"""LMCache's adapter: its laws with fakes, and with a real LMCache (PIGOU_PEER_LMCACHE)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lmcache_laws import LAWS
from test_store_server import running

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WITH_FAKES = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
import lmcache_fakes
lmcache_fakes.install()
import lmcache_laws
for number, law in enumerate(lmcache_laws.LAWS):
    law(Path(sys.argv[1]) / str(number))
    print(law.__name__)
from pigou.config import ConfigError
for wrong in ({{"tiers": []}}, {{"color": 1}}, {{"page": "1MiB"}}):
    try:
        lmcache_laws.open_l2(Path(sys.argv[1]) / "wrong", **wrong)
    except ConfigError as error:
        print("refused", error)
"""


def test_the_adapter_keeps_its_laws(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_FAKES, str(tmp_path)]
    lines = subprocess.check_output(command, text=True).splitlines()
    assert lines[: len(LAWS)] == [law.__name__ for law in LAWS]
    assert len(lines) == len(LAWS) + 3


def with_lmcache(argument: str) -> None:
    home = os.environ.get("PIGOU_PEER_LMCACHE", "")
    if not home:
        pytest.skip("PIGOU_PEER_LMCACHE names no venv with LMCache")
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [f"{home}/bin/python", str(HERE / "lmcache_laws.py"), argument],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "ok"


def test_a_real_lmcache_stores_and_prefetches(tmp_path: Path) -> None:
    with_lmcache(str(tmp_path))


@pytest.mark.parametrize("scheme", ["redis", "resp"])
def test_connectors_of_lmcache_use_the_store_without_a_plug_in(scheme: str, tmp_path: Path) -> None:
    with running(tmp_path, "--max-value", "1MiB", size="40MiB") as (port, _):
        with_lmcache(f"{scheme}://127.0.0.1:{port}")
