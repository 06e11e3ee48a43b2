"""Laws of `pigou serve` and `pigou key`: what cannot work is refused in one line at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lib.local_workers import local_workers

from pigou.cli import main
from pigou.cli.worker import split_model
from pigou.fleet.config import (
    AttachedWorker,
    FleetError,
    LocalWorker,
    ModelPoolConfig,
    WorkersConfig,
)
from pigou.fleet.member import check_fit
from pigou.fleet.serve import workers_of
from pigou.gateway.auth.keys import Keys
from pigou.gateway.proxy.upstream import Engine
from pigou.request import Role


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--allow-open"),
        (["--policy", "nope"], "least-loaded"),
        (["--decode", "0"], "nobody to decode"),
        (["--attach", "here"], "no base URL"),
        (["--attach", "http://[::1"], "no base URL"),
        (["--attach", "http://h:1,rôle=x"], "not understood"),
        (["--attach", "http://h:1,role=x"], "prefill, decode or both"),
        (["--api-keys-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--port", "70000"], "--port is 70000"),
        (["--softmax", "x"], "--softmax is 'x'; give one of: raw, min-max"),
        (["--hang-timeout", "-1"], "--hang-timeout is -1.0; it must be at least 0"),
        (["--drain", "nan"], "--drain is nan; it must be finite, at least 0"),
        (["--prefill-ahead", "-1"], "--prefill-ahead is -1; it must be at least 0"),
        (["--queue-timeout", "-1"], "--queue-timeout is -1.0; it must be finite, at least 0"),
        (["--queue-timeout", "nan"], "--queue-timeout is nan; it must be finite"),
        (["--index-max-blocks", "0"], "--index-max-blocks is 0; it must be at least 1"),
        (["--index-ttl", "inf"], "--index-ttl is inf; it must be finite"),
        (["--tenant-weights", "a=x"], "--tenant-weights is {'a': 'x'}: expected `float`"),
        (["--detector", "x"], "--detector is 'x'; it must be one of: config-variance"),
        (["--tp", "2"], "give --tensor-parallel-size"),
        (["--gpu-memory-utilization=0.9"], "give --memory, as 20GiB, for KV blocks"),
        (["--max-model-lne", "3"], "--max-model-lne is no option; did you mean --max-model-len"),
        (["--polcy", "toll"], "--polcy is no option; did you mean --policy"),
        (["--max-seqs", "x"], "Invalid value for '--max-seqs'"),
        (["--", "--max-seqs", "0"], "--max-seqs is 0; it must be at least 1"),
        (["--tier", "disk=1GiB"], "tier disk has no place; write disk=SIZE@PLACE"),
        (["--disk-cache", "1GiB"], "--disk-cache is no option any more; give --tier, as host=8GiB"),
        (["--", "--port=8100"], "--port is each worker's own, and pigou serve gives it"),
        (["--role", "decode"], "--role is each worker's own"),
        (["./nowhere"], "--model './nowhere' is no folder; give a folder or a Hugging Face hub id"),
        (["a/b", "c/d"], "'c/d' is no option; give one MODEL"),
        (["a/b", "--model", "c/d"], "'a/b' is given, and --model"),
        (["--device", "gpu"], "--device is 'gpu'; give cpu, cuda or cuda:N"),
        (["--slo", "ttft=500"], "--slo is 'ttft=500': ttft is 500, without a unit seconds"),
        (["--model-pool", "a"], "--model-pool 'a' has nobody to decode"),
        (["--model-pool", "a,both=1"], "--model-pool 'a' has workers to start, and no model="),
        (["--model-pool", "a b,model=m"], "--model-pool is named 'a b'; a name has letters"),
        (["--model-pool", "x.attached,model=m"], "does not end in 'attached'"),
        (["--model-pool", "a,model=m,decode=-1"], "--model-pool 'a' has fewer than 0 workers"),
        (["--model-pool", "a,model=m,size=1"], "unknown field `size`"),
        (["--model-pool", "a,model=m", "--model-pool", "a,model=n"], "have 'a' 2 times"),
        (["--model-pool", "a,model=m", "--decode", "1"], "--decode is 1, and --model-pool says it"),
        (["--model-pool", "a,model=m", "--model", "m"], "--model is 'm', and --model-pool says"),
        (["--model-pool", "a,model=m,overflow=b"], "has overflow=b; name another model pool"),
        (["--model-pool", "a,model=m,overflow=a"], "has overflow=a; name another model pool"),
        (["--model-pool", "a,model=m,overflow_price_s=-1"], "it must be 0 to 86400 seconds"),
        (["--model-pool", "a,model=m,overflow_key=k"], "overflow_key, and no URL as overflow"),
        (["--model-alias", "b=a"], "--model-alias is 'b=a', and there is no --model-pool"),
        (["--model-pool", "a,model=m", "--model-alias", "b=c"], "write ALIAS=NAME with a name of"),
        (["--model-pool", "a,model=m", "--model-alias", "a=a"], "have 'a' 2 times"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_all_that_is_wrong_is_said_at_once_a_line_each_before_a_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pigou.fleet.serve.Serving.__init__", None)  # it would start workers
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path), "--device", "gpu", "--policy", "nope", "--slo", "ttft=0",
              "--port", "1"])  # fmt: skip
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    heads = ("--model is", "--device is 'gpu'", "--policy is 'nope'", "--slo is 'ttft=0'")
    assert all(
        line.startswith(f"pigou serve: {head}") for line, head in zip(lines[:4], heads, strict=True)
    )


def test_the_model_and_workers_options_need_no_separator() -> None:
    assert split_model(["m", "--max-model-len", "512"]) == ("m", ["--max-model-len", "512"])
    assert split_model(["--tier=host=1GiB", "o/m"]) == ("o/m", ["--tier=host=1GiB"])
    assert split_model(["--eviction-param", "a=1"]) == ("", ["--eviction-param", "a=1"])


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_journal_is_not_written_plain_under_a_packed_name(
    packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"x.journal{packing}"
    with pytest.raises(SystemExit) as end:
        main(["serve", "--journal", str(path)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"--journal is '{path}', and journals are written plain; leave {packing} away" in error
    assert error.count("\n") == 1
    assert not path.exists()


@pytest.mark.parametrize(("name", "head"), [("keys", ""), ("keys.yaml", "keys:\n")])
def test_a_new_key_opens_the_door_that_its_line_guards(
    name: str, head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["key", "ann", *(["--yaml"] if head else [])])
    assert end.value.code == 0
    out, err = capsys.readouterr()
    path = tmp_path / name
    path.write_text(head + out)
    secret = err.split()[-1]
    keys = Keys.read(path)
    found = keys.find(f"Bearer {secret}")
    assert found is not None
    assert found.tenant == "ann"
    assert keys.find(f"Bearer {secret}x") is None
    assert keys.find(None) is None


def test_local_workers_are_named_by_role_and_take_devices_in_turn() -> None:
    workers = local_workers(1, 2, 1, ["--dtype", "bf16"], ["cuda:0", "cuda:1"])
    assert [worker.id for worker in workers] == ["prefill-0", "decode-0", "decode-1", "both-0"]
    assert [worker.arguments[1] for worker in workers] == ["cuda:0", "cuda:1"] * 2


def test_no_two_local_workers_keep_their_caches_in_one_place() -> None:
    options = [
        "--tier",
        "host=1G",
        "--tier",
        "disk=1G@/d/,policy=lru",
        "--tier=bucket=1G@s3://b/p?region=x",
    ]
    first, second = (w.arguments[2:] for w in local_workers(0, 2, 0, options, ["cpu"]))
    assert first == ("--tier", "host=1G", "--tier", "disk=1G@/d/decode-0,policy=lru",
                     "--tier=bucket=1G@s3://b/p/decode-0?region=x")  # fmt: skip
    assert second[3:] == ("disk=1G@/d/decode-1,policy=lru",
                          "--tier=bucket=1G@s3://b/p/decode-1?region=x")  # fmt: skip


def test_an_attached_worker_is_read_from_one_word() -> None:
    text = "http://h:8000/v1,role=decode,events=tcp://h:5557,replay=tcp://h:5558,topic=kv,key=s"
    found = AttachedWorker.parse(text, 3)
    assert (found.id, found.url, found.role) == ("attached-3", "http://h:8000", Role.DECODE)
    assert (found.events, found.replay, found.topic, found.key) == (
        "tcp://h:5557", "tcp://h:5558", "kv", "s",
    )  # fmt: skip


def test_workers_that_do_not_fit_are_refused() -> None:
    ours, other = Engine(stock=False, model="m"), Engine(stock=True, model="m")
    check_fit([(Role.BOTH, ours), (Role.BOTH, other)])
    with pytest.raises(FleetError, match="blocks"):
        check_fit([(Role.PREFILL, ours), (Role.DECODE, other)])
    with pytest.raises(FleetError, match="different models"):
        check_fit([(Role.BOTH, ours), (Role.BOTH, Engine(model="n"))])


def test_the_workers_of_several_models_are_told_their_model_and_share_devices() -> None:
    pools = (
        ModelPoolConfig(name="org/a", model="/m/a", prefill=1, decode=2),
        ModelPoolConfig(name="b", model="/m/b"),
        ModelPoolConfig(name="c"),
    )
    config = WorkersConfig(
        model_pool=pools, model_alias=("x=b", "y=b"), device="cuda:0,cuda:1",
        attach=("http://h:1",), threads=2,
    )  # fmt: skip
    *local, attached = workers_of(config, ["--executor", "sleep"])
    assert [(w.id, w.model, w.device) for w in local if isinstance(w, LocalWorker)] == [
        ("prefill-0", "org/a", "cuda:0"), ("decode-0", "org/a", "cuda:1"),
        ("decode-1", "org/a", "cuda:0"), ("both-0", "b", "cuda:1"),
    ]  # fmt: skip
    assert isinstance(attached, AttachedWorker)
    named = [" ".join(w.arguments) for w in local if isinstance(w, LocalWorker)]
    assert "--model /m/a" in named[0]
    assert "--served-model-name org/a" in named[2]
    assert "--served-model-name b" in named[3]
    assert [(model.name, model.aliases) for model in config.models] == [
        ("org/a", ()), ("b", ("x", "y")), ("c", ())
    ]  # fmt: skip
    assert config.counts == (1, 2, 1)
