"""`pigou worker` refuses bad options with their names and remedies."""

from __future__ import annotations

from pathlib import Path

import pytest

from pigou.cli import main
from pigou.models import ModelError

SLEEP = ("--executor", "sleep", "--model", "bundled", "--blocks", "64")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--order", "lifo"], "--order is 'lifo'; give one of: fcfs, priority, edf"),
        (["--kv-transfer", "rdma"], "give auto, none, or some of: nixl, shm, tcp (with commas)"),
        (["--port", "99999"], "--port is 99999; give 0 (any free port) to 65535"),
        (["--drain", "nan"], "--drain is nan; it must be finite, at least 0"),
        (["--dtype", "fp8"], "give auto, bf16 or fp32"),
        (["--tier", "disk=1G"], "tier disk has no place; write disk=SIZE@PLACE"),
        (["--tier", "host=1G@/d"], "tier host has place '/d'; leave it out"),
        (["--tier", "disk=1G@/d", "--tier", "host=1G"], "tier host is not the first"),
        (["--tier", "host=1G", "--tier", "host=2G"], "give each a name of its own"),
        (["--tier", "host,gib=1"], "--tier is 'host,gib=1': a tier is 'host,gib=1'; write NAME=S"),
        (["--tier", "host=1G,gbps=3"], "unknown field `gbps`"),
        (["--tier", "host=1G,gib=3"], "gib is not written so; give NAME=SIZE[@PLACE]"),
        ([*SLEEP, "--tier", "tape=1G@/d"], "tier is 'tape'; it must be one of: bucket, disk, host"),
        (["--bucket-region", "x"], "--bucket-region is no option any more; give --tier bucket="),
        (["--tier-policy", "arc"], "--tier-policy is no option any more; give --tier NAME=SIZE,po"),
        (
            [*SLEEP, "--tier", "host=1M,policy=nonsense"],
            "eviction policy is 'nonsense'; it must be one of: arc, ",
        ),
        ([*SLEEP, "--tier", "host=1K"], "tier host has 1024 bytes; blocks of 4096 bytes need"),
        ([*SLEEP, "--tier", "disk=1K@PLACE"], "tier disk has 1024 bytes, room for 0 blocks of 4"),
        ([*SLEEP, "--tier", "disk=1M@/proc/nowhere"], "/proc/nowhere cannot"),
        ([*SLEEP, "--tier", "bucket=1M@s3://b?key=x"], "has 'key' after '?'; give endpoint="),
        (["--no-prefix-caching", "--tier", "host=1M"], "--prefix-caching is off"),
        (["--eviction-recent", "9"], "--eviction-recent is 9, and eviction is not given"),
        (["--eviction-param", "x=1"], "--eviction-param is {'x': 1.0}, and eviction is not given"),
        (["--eviction", "h2o", "--eviction-recent", "0"], "--eviction-recent is 0; it must be at"),
        (
            ["--eviction", "h2o", "--eviction-least", "8"],
            "--eviction-least is 8; it must be at least 36 (sinks + recent)",
        ),
        (["--eviction", "h2o", "--eviction-interval", "8"], "at least the block size, 16"),
        (["--eviction", "h2o", "--eviction-floor", "a"], "--eviction-floor: 'a' is not underst"),
        (
            ["--eviction", "h2o", "--eviction-floor", "a=0.5"],
            "--eviction-floor is {'a': 0.5}: exp",
        ),
        ([*SLEEP, "--eviction", "h2o"], "it has no cache entries; leave one out"),
        ([*SLEEP, "--kv-events-endpoint", "zz"], "--kv-events-endpoint is 'zz', which cannot be"),
        ([*SLEEP, "--kv-replay-endpoint", "tcp://x:99999"], "--kv-replay-endpoint is 'tcp://x:"),
        (["--tier", "host=much"], "'much' is no size; write for example 512MiB"),
        (["--model", "./nowhere", "--executor", "sleep"], "has no config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_option_is_named_with_its_remedy(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["worker", *(option.replace("PLACE", str(tmp_path)) for option in options)])
    assert caught.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert words in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--long-lane", "min_prompt=9"], "--long-lane: Object missing required field `tokens`"),
        (["--long-lane", "min_prompt=9,tokens"], "--long-lane: 'tokens' is not understood; write"),
        (["--long-lane", "min_prompt=9,tokens=4,min_prompt=9"], "min_prompt is given twice"),
        (["--long-lane", "min_prompt=9,tokens=9999"], "tokens is 9999; it must be at most 2"),
        (["--long-lane", "min_prompt=9,tokens=4,seqs=4096"], "seqs is 4096; it must be below"),
        (["--ageing", "0"], "--ageing is 0.0; it must be above 0 tokens a second"),
        (
            ["--order", "fcfs", "--max-background-tokens", "64"],
            "only the order priority knows who is in the backgr",
        ),
        (["--max-model-len", "4096"], "--max-model-len is 4096; 64 blocks of 16 tokens hold 1024"),
        (["--enable-lora", "--lora-modules", "a"], "'a' is not understood; write NA"),
        (["--enable-lora", "--lora-modules", "a=PLACE"], "PLACE/adapter_config.json is there; giv"),
        (["--kv-transfer", "nixl"], "has nixl, and NIXL cannot be loaded"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_option_is_refused_before_a_model_loads(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def run(*_: object) -> int:
        raise AssertionError("a model loads")

    monkeypatch.setattr("pigou.worker.process.run", run)
    monkeypatch.setattr("pigou.worker.kv_transfer.nixl._PACKAGES", ("no_such_package",))
    given = [option.replace("PLACE", str(tmp_path)) for option in options]
    with pytest.raises(SystemExit) as caught:
        main(["worker", "--model", "bundled", "--blocks", "64", *given])
    assert caught.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert words.replace("PLACE", str(tmp_path)) in shown


def test_a_model_that_cannot_be_run_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> int:
        raise ModelError("model_type 'bloom' is not supported")

    monkeypatch.setattr("pigou.worker.process.run", run)
    with pytest.raises(SystemExit) as ended:
        main(["worker", *SLEEP])
    assert ended.value.code == 2
    assert "model_type 'bloom'" in capsys.readouterr().err
