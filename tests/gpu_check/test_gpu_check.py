"""The GPU check says what it found, and its exit code says the same; here on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pigou.runtime.models.model_config import parse_config
from pigou_lab.gpu_check import sections
from pigou_lab.gpu_check.__main__ import FAILED, NO_CUDA, OK, main
from pigou_lab.gpu_check.equal_outputs import compare, decode_alone, decode_elsewhere
from pigou_lab.gpu_check.random_model import QWEN3_600M, TINY, random_model
from pigou_lab.gpu_check.speed import Peaks, measure_speed, parameters

ON_CPU = ["--device", "cpu", "--small", "--skip-tests"]


def test_without_cuda_it_says_so_and_exits_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == NO_CUDA == 3
    assert "no CUDA device" in capsys.readouterr().out


def test_without_torch_it_says_so_and_exits_with_3() -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "from pigou_lab.gpu_check.__main__ import main; sys.exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "torch is not installed" in done.stdout


SECTIONS = ("path       compiled kernels", "equality   fp32", "formats    weights int8", "streams:",
            "MBU", "MFU", "launches a step", "peaks")  # fmt: skip


@pytest.mark.slow
def test_every_section_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ON_CPU) == OK
    text = capsys.readouterr().out
    assert [part for part in (*SECTIONS, "P/D") if part not in text] == []
    assert "FAILED" not in text


def test_a_section_that_fails_fails_the_check_and_not_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object, **__: object) -> tuple[list[int], int]:
        return [1] * 32, 12

    monkeypatch.setattr(sections, "decode_elsewhere", wrong)
    assert main(ON_CPU) == FAILED
    text = capsys.readouterr().out
    assert "P/D        FAILED: decoding after a transfer gives other tokens" in text
    assert [part for part in SECTIONS if part not in text] == []
    assert text.count("FAILED") == 1


def test_what_there_is_no_time_for_is_named_and_is_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*ON_CPU, "--budget", "0"]) == FAILED
    assert capsys.readouterr().out.count("NOT RUN") >= 5


def test_decoding_elsewhere_gives_the_tokens_of_one_engine_and_moves_the_prompt_s_blocks() -> None:
    model = random_model(TINY, "cpu", torch.float32)
    prompt = [3 + 7 * i % 300 for i in range(70)]
    tokens, blocks = decode_elsewhere(model, prompt, 20)
    assert tokens == decode_alone(model, prompt, 20)
    assert blocks == 4


def test_a_comparison_tells_other_weights_from_the_same() -> None:
    first, same = (random_model(TINY, "cpu", torch.float32) for _ in range(2))
    alike = compare(first, same, gap=1e-3)
    assert alike.divergences == alike.ties == 0
    assert alike.difference == 0.0
    other = random_model(TINY | {"rope_theta": 10.0}, "cpu", torch.float32)
    assert compare(first, other, gap=1e-3).divergences > 0


def test_utilizations_follow_from_the_peaks() -> None:
    model = random_model(TINY, "cpu", torch.float32)
    speed = measure_speed(model, Peaks(bandwidth=1e9, flops=1e9), 3, prompt=8, output=16)
    assert speed.streams == 3
    assert speed.tokens_per_s == pytest.approx(3 / speed.step_s)
    assert speed.mfu == pytest.approx(2 * 3 * parameters(model.config) / speed.step_s / 1e9)
    assert speed.mbu > 4 * parameters(model.config) / speed.step_s / 1e9
    assert 590e6 < parameters(parse_config(QWEN3_600M)) < 600e6
