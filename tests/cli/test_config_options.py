"""Laws of options that are made from configuration classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from pigou.cli import build
from pigou.cli.config_options import Override, config_options, configured, in_flags
from pigou.config import ConfigError, ControlConfig, Option, option
from pigou.fleet.config import WatchConfig, WorkersConfig
from pigou.gateway.config import GatewayConfig
from pigou.logs import LogConfig
from pigou.sim.setup import Setup
from pigou.worker.config import WorkerConfig

CONFIGS = (ControlConfig, WatchConfig, WorkersConfig, GatewayConfig, LogConfig, Setup, WorkerConfig)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_defaults_of_the_options_make_the_default_configuration(
    config: type[msgspec.Struct],
) -> None:
    values: dict[str, Any] = {}
    for entry in config_options(config):
        entry.put(values, entry.parameter().default)
    assert msgspec.convert(values, config) == config()


@pytest.mark.parametrize("command", ["serve", "worker", "bench", "simulate", "profile"])
def test_no_two_fields_are_one_option(command: str) -> None:
    parser: Any = get_command(build([command]))
    parameters = parser.commands[command].params
    flags = [flag for each in parameters for flag in [*each.opts, *each.secondary_opts]]
    assert len(flags) == len(set(flags))


class Inner(msgspec.Struct, frozen=True):
    size: Annotated[int, option("Of it.", form="size")] = 2**20


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout: Annotated[int, option("Of it.", "Times", form="seconds")] = 2_000_000_000
    colour: Annotated[Literal["red", "blue"], option("Of it.")] = "red"
    names: Annotated[tuple[str, ...], option("Of it.", name="label")] = ()
    shares: Annotated[dict[str, float], option("Of it.", form="numbers")] = {}
    rule: Annotated[dict[str, Any], option("Of it.", form="named", key="kind")] = msgspec.field(
        default_factory=lambda: {"kind": "plain"}
    )
    inner: Inner = Inner()
    hidden: int = 7

    def __post_init__(self) -> None:
        if self.timeout == 0:
            raise ConfigError(f"timeout is {self.timeout}; give more")


def run(
    arguments: list[str], environment: dict[str, str] | None = None, override: Any = None
) -> tuple[int, str, list[Sample]]:
    """Run a command with this class; return its status, what it wrote, and what it was given."""
    import typer

    given: list[Sample] = []
    kind: Any = Annotated[Sample, override or Override()]

    def command(config: Any) -> None:
        given.append(config)

    command.__annotations__ = {"config": kind, "return": None}
    app = typer.Typer()
    app.command()(configured(command, "sample"))
    done = CliRunner().invoke(app, arguments, env=environment)
    return done.exit_code, done.output, given


def test_each_form_is_read_as_it_is_written() -> None:
    status, _, given = run(
        ["--timeout", "1.5", "--colour", "blue", "--label", "a", "--label", "b", "--shares", "x=2",
         "--rule", "steep,a=1,b.c=word", "--inner-size", "3KiB"]
    )  # fmt: skip
    assert status == 0
    assert given == [
        Sample(timeout=1_500_000_000, colour="blue", names=("a", "b"), shares={"x": 2},
               rule={"kind": "steep", "a": 1, "b": {"c": "word"}}, inner=Inner(3072))
    ]  # fmt: skip


def test_file_and_environment_name_the_same_options(tmp_path: Path) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text("timeout: 3\nlabel: [a, b]\ninner-size: 1KiB\n")
    environment = {"PIGOU_SAMPLE_TIMEOUT": "4", "PIGOU_SAMPLE_CONFIG": str(path)}
    assert run(["--colour", "blue"], environment)[2] == [
        Sample(timeout=4_000_000_000, colour="blue", names=("a", "b"), inner=Inner(1024))
    ]


def test_a_refusal_names_the_option() -> None:
    status, output, given = run(["--timeout", "0"])
    assert (status, given) == (2, [])
    assert "pigou sample: --timeout is 0; give more" in output
    status, output, given = run(["--colour", "green"])
    assert (status, given) == (2, [])
    assert "pigou sample: --colour is 'green'; give one of: red, blue" in output


def test_a_command_chooses_and_replaces_options() -> None:
    override = Override("timeout hidden", hidden=Option(help="Of it.", default=9))
    assert run([], None, override)[2] == [Sample(hidden=9)]
    assert run(["--hidden", "1"], None, override)[2] == [Sample(hidden=1)]
    assert run(["--colour", "blue"], None, override)[0] == 2


def test_fields_are_named_as_they_are_typed() -> None:
    flags = {"port": "--port", "max_body": "--max-body", "index.ttl": "--index-ttl"}
    assert in_flags("port is 0; as port 1", flags) == "--port is 0; as port 1"
    assert in_flags("give max_body or index.ttl", flags) == "give --max-body or --index-ttl"
