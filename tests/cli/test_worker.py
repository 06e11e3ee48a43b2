"""`pigou worker` refuses bad options with their names and remedies."""

from __future__ import annotations

from pathlib import Path

import pytest

from pigou.cli import main

SLEEP = ("--executor", "sleep", "--model", "bundled", "--blocks", "64")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--order", "lifo"], "--order is 'lifo'; give one of: fcfs, priority, edf"),
        (["--kv-transfer", "rdma"], "give auto, none, or some of: nixl, shm, tcp (with commas)"),
        (["--port", "99999"], "--port is 99999; give 0 (any free port) to 65535"),
        (["--drain", "nan"], "--drain is nan; it must be at least 0"),
        (["--dtype", "fp8"], "give auto, bf16 or fp32"),
        (
            ["--disk-cache", "1G"],
            "--disk-cache is 1073741824 and --disk-path ''; give both or neither",
        ),
        (["--disk-path", "/d"], "--disk-cache is 0 and --disk-path '/d'; give both or neither"),
        (["--bucket-cache", "1G"], "and --bucket-url ''; give both or neither"),
        (["--bucket-region", "x"], "--bucket-region is 'x', and --bucket-url is missing"),
        (["--tier-policy", "arc"], "give --host-cache, --disk-cache or --bucket-cache"),
        (
            [*SLEEP, "--host-cache", "1M", "--tier-policy", "nonsense"],
            "eviction policy is 'nonsense'; it must be one of: arc, ",
        ),
        ([*SLEEP, "--host-cache", "1K"], "--host-cache is 1024 bytes; blocks of 4096 bytes need"),
        (
            [*SLEEP, "--disk-cache", "1K", "--disk-path", "PLACE"],
            "--disk-cache is 1024 bytes; blocks",
        ),
        ([*SLEEP, "--disk-cache", "1M", "--disk-path", "/proc/nowhere"], "/proc/nowhere cannot"),
        (["--no-prefix-caching", "--host-cache", "1M"], "--prefix-caching is off"),
        (["--eviction-recent", "9"], "--eviction-recent is 9, and eviction is not given"),
        (["--eviction-param", "x=1"], "--eviction-param is {'x': 1.0}, and eviction is not given"),
        (["--eviction", "h2o", "--eviction-recent", "0"], "--eviction-recent is 0; it must be at"),
        (
            ["--eviction", "h2o", "--eviction-least", "8"],
            "--eviction-least is 8; it must be at least",
        ),
        (["--eviction", "h2o", "--eviction-interval", "8"], "at least the block size, 16"),
        (["--eviction", "h2o", "--eviction-floor", "a"], "--eviction-floor 'a' is not NAME=NUMBER"),
        (
            ["--eviction", "h2o", "--eviction-floor", "a=0.5"],
            "--eviction-floor is {'a': 0.5}: exp",
        ),
        ([*SLEEP, "--eviction", "h2o"], "it has no cache entries; leave one out"),
        ([*SLEEP, "--kv-events-endpoint", "zz"], "--kv-events-endpoint is 'zz', which cannot be"),
        ([*SLEEP, "--kv-replay-endpoint", "tcp://x:99999"], "--kv-replay-endpoint is 'tcp://x:"),
        (["--host-cache", "much"], "'much' is no size; write for example 512MiB"),
        (["--model", "./nowhere", "--executor", "sleep"], "has no config.json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_option_is_named_with_its_remedy(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["worker", *(str(tmp_path) if option == "PLACE" else option for option in options)])
    assert caught.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert words in shown
