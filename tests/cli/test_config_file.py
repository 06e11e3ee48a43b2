"""Laws of options from a file and from the environment, and of the help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pigou.cli import build, main
from pigou.cli.config_options import COMMON

#: Sample of a trace, whose options tell where a value came from.
ARGUMENTS = ["trace", "sample", "FROM", "TO"]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "environment", "typed", "shown"),
    [
        ("speed: -1", "", [], "--speed is -1.0"),
        ("speed: -1", "-2", [], "--speed is -2.0"),
        ("speed: -1", "-2", ["--speed", "-3"], "--speed is -3.0"),
        ("", "-2", [], "--speed is -2.0"),
        ("speed: no-number", "", [], "--speed"),
    ],
)
def test_what_is_typed_goes_before_the_environment_and_that_before_the_file(
    file: str, environment: str, typed: list[str], shown: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "options.yaml"
    path.write_text(file)
    if environment:
        monkeypatch.setenv("PIGOU_TRACE_SAMPLE_SPEED", environment)
    assert shown in refusal([*ARGUMENTS, "--config", str(path), *typed], capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "'prot', which is no option; did you mean 'port'?"),
        ("config: other.yaml", "'config', which is no option"),
        ("help: true", "'help', which is no option"),
        ("port: {a: 1}", "give a text, a number"),
        ("port: null", "give a text, a number"),
        ("- port", "must hold options by name"),
        ("port: [", "is not YAML"),
        ("port: 1\nhost: a\nport: 2", "is not YAML: line 3 gives 'port' again; give it once"),
        ("port: 70000", "--port is 70000"),
        ("max-queued: -1", "--max-queued is -1"),
        ("max_queued: -1", "--max-queued is -1"),
        ("peer-reads: maybe", "--peer-reads"),
        ("attach: [here]", "no base URL"),
    ],
)
def test_a_file_is_honoured_or_refused_by_name(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    error = refusal(["serve", "--config", str(path)], capsys)
    assert words in error
    assert "Traceback" not in error


def test_a_file_may_begin_with_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("port: 70000", encoding="utf-8-sig")
    assert "--port is 70000" in refusal(["serve", "--config", str(path)], capsys)


def test_a_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in refusal(["serve", "--config", "/nowhere/x.yaml"], capsys)


def test_the_environment_can_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("port: 70000")
    monkeypatch.setenv("PIGOU_SERVE_CONFIG", str(tmp_path / "x.yaml"))
    assert "--port is 70000" in refusal(["serve"], capsys)


def test_a_variable_that_names_no_option_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIGOU_SERVE_PROT", "1")
    monkeypatch.setenv("PIGOU_SERVE_PORT", "70000")
    error = refusal(["serve"], capsys)
    assert "PIGOU_SERVE_PROT is set, and names no option; did you mean PIGOU_SERVE_PORT?" in error


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (["--gateway-lag", "1"], "give --gateways COUNT,lag_s=SECONDS"),
        (["--gateway-loss", "0.1"], "give --gateways COUNT,loss=SHARE"),
        (["--gateway-split", "tenant"], "give --gateways COUNT,split=tenant"),
        (
            ["--gateway-exchange"],
            "leave it out, or turn it off by --gateways COUNT,exchanges=false",
        ),
        (["--no-gateway-exchange"], "give --gateways COUNT,exchanges=false"),
    ],
)
def test_a_former_option_says_what_to_give_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    typed: list[str], remedy: str,
) -> None:  # fmt: skip
    name = typed[0].removeprefix("--")
    error = refusal(["simulate", *typed], capsys)
    assert f"{typed[0]} is no option any more; {remedy}" in " ".join(error.split())
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: 1")
    error = refusal(["simulate", "--config", str(file)], capsys)
    assert f"has '{name}', no option any more; {remedy}" in " ".join(error.split())
    variable = f"PIGOU_SIMULATE_{name.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, "1")
    error = refusal(["simulate"], capsys)
    assert f"{variable} is set, and names no option any more; {remedy}" in error


def parsers() -> dict[str, Any]:
    root: Any = get_command(build())
    return dict(root.commands)


def test_at_80_columns_the_help_has_every_option_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    wrong = []
    for command, parser in parsers().items():
        with pytest.raises(SystemExit):
            main([command, "--help-all" if command in COMMON else "--help"])
        text = capsys.readouterr().out
        widest = max(map(len, text.splitlines()))
        options = [
            option
            for parameter in parser.params
            if parameter.param_type_name == "option"
            for option in parameter.opts
        ]
        missing = [option for option in options if option not in text]
        if "…" in text or widest > 80 or missing:
            wrong.append(f"{command}: {widest} columns, without {missing}")
    assert not wrong


def test_the_help_shows_defaults_under_headings() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pigou", "serve", "--help-all"],
        env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    text = " ".join(done.stdout.split())
    assert "Prefill workers to start. [default: 1; 0 with --attach or --registry]" in text
    assert "[default: 8000]" in text
    headings = [
        line[:-1] for line in done.stdout.splitlines() if line[:1].isupper() and line[-1] == ":"
    ]
    assert headings == ["Arguments", "Model and workers", "Gateway", "Costs", "Traces", "Routing",
                        "Admission", "Planner", "Logs", "Peers", "Options"]  # fmt: skip
