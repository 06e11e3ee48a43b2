"""`pigou profile` before a real vLLM: what it measures is a timing, and simulations take it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from pigou.cli import main
from pigou.sim.timing_measured import WorkerProfile

if TYPE_CHECKING:
    from tests.peers.conftest import VllmWorker

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_vllm_is_profiled_as_it_is(
    vllm_plain_two: list[VllmWorker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "timing.json"
    with pytest.raises(SystemExit) as ended:
        main(["profile", vllm_plain_two[0].url, "--out", str(file), "--repeats", "1",
              "--steps", "8", "--max-seqs", "4", "--longest", "512"])  # fmt: skip
    assert ended.value.code == 0, capsys.readouterr().err
    found = msgspec.json.decode(file.read_bytes(), type=WorkerProfile)
    assert [n for n, _ in found.decodes] == [1, 2, 4]
    assert found.decodes[0][1] > 0.0005
    assert found.prompts[-1][1] + found.prompt > 0.0
    assert found.about["limits"]["block"] == vllm_plain_two[0].block_size
    assert found.about["limits"]["room"] > 512
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--timing", str(file), "--blocks", "512",
              "--workload", "poisson:rate=2,in=64,out=16,n=20"])  # fmt: skip
    assert ended.value.code == 0
    assert "20 completed" in capsys.readouterr().out
