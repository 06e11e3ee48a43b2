"""The command line loads what it runs, and nothing else."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from pigou import __version__
from pigou.cli import COMMANDS, build, main
from pigou.cli.config_options import COMMON
from pigou.cli.progress import WorkProgress


def test_importing_the_command_line_imports_neither_torch_nor_a_command() -> None:
    code = (
        "import sys, pigou.cli;"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('pigou.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_names_pigou_torch_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["version"])
    assert end.value.code == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["pigou", "torch", "python"]


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["version", "--nope"])
    assert end.value.code == 2
    assert "--nope" in capsys.readouterr().err


def commands(root: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_a_variable_of_a_command_sets_its_own_options_alone() -> None:
    prefixes = {"_".join(("PIGOU", *path)).upper().replace("-", "_") + "_": path
                for path, _ in commands(get_command(build()))}  # fmt: skip
    for _ in range(2):  # building again adds nothing
        for path, command in commands(get_command(build())):
            for parameter in command.params:
                given = parameter.envvar or []
                names = [given] if isinstance(given, str) else given
                owners = {owner for name in names for prefix, owner in prefixes.items()
                          if name.startswith(prefix)}  # fmt: skip
                assert owners <= {path}, f"{' '.join(path)}: {parameter.name} reads {names}"


@pytest.mark.parametrize("command", COMMANDS)
def test_required_options_are_first_in_the_help(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    sections = re.findall(r"^(\w[\w ]*):$", capsys.readouterr().out, re.M)
    if "Required" in sections:
        assert set(sections[: sections.index("Required")]) <= {"Arguments"}


def test_the_help_shows_twenty_options_and_help_all_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path, parser in commands(get_command(build())):
        name = " ".join(path)
        options = {each.name for each in parser.params if each.param_type_name == "option"}
        own = options - {"config", "help_all"}
        if name not in COMMON:
            assert len(own) <= 20, f"{name}: choose twenty in COMMON"
            continue
        common = set(COMMON[name].split())
        assert common <= own
        assert len(common) <= 20
        shown = {}
        for flag in ("--help", "--help-all"):
            with pytest.raises(SystemExit) as end:
                main([name, flag])
            assert end.value.code == 0
            shown[flag] = set(re.findall(r"^ +(?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.M))
        flags = {each.name: set(each.opts) for each in parser.params}
        hidden = {option for option in own - common if shown["--help"] & flags[option]}
        assert not hidden
        assert all(shown["--help"] & flags[option] for option in common)
        assert all(shown["--help-all"] & flags[option] for option in options)


def test_long_work_tells_how_far_it_is_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with WorkProgress(line_every_s=0.02) as progress:
        progress.add_task("simulating", total=4, completed=1)
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(re.fullmatch(r"\[ +\d\.\d s\] simulating \(25%\)", line) for line in lines)


#: Runs a command for each argument, and prints the modules that it was the first to load.
LOADS = """
import sys, pigou.cli
seen = set()
for line in sys.argv[2:]:
    try: pigou.cli.main(line.split())
    except SystemExit: pass
    new = [name for name in sys.modules if name not in seen]
    print("loaded", line, [name for name in new if name.startswith(tuple(sys.argv[1].split()))])
    seen.update(new)
"""


def loaded(modules: str, *lines: str) -> list[str]:
    """Return what command lines load of modules; one process runs all, as a start takes seconds."""
    command = [sys.executable, "-c", LOADS, modules, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert len(told) == len(lines)
    return [line for line in told if not line.endswith(" []")]


def test_the_list_of_commands_loads_none_of_them() -> None:
    heavy = "torch numba numpy aiohttp scipy pigou.cli."
    assert not loaded(heavy, "--help", "", "nope", "--version")


def test_the_help_of_a_command_loads_nothing_heavy() -> None:
    heavy = "torch numba aiohttp scipy matplotlib plotly tokenizers"
    assert not loaded(heavy, *(f"{command} --help" for command in COMMANDS))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_of_each_what_its_own_help_says(command: str) -> None:
    parser = get_command(build([command]))
    own: Any = parser.commands[command]  # type: ignore[attr-defined]
    assert own.help.splitlines()[0] == COMMANDS[command]


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pigou {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_taken_port_is_said_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as end:
            main([command, "--port", str(port)])
    assert end.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == (
        f"pigou {command}: --port is {port}, and another process listens there; "
        "give another --port, or 0 for a free one\n"
    )
