"""`pigou worker`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from typer.main import get_command

from pigou.cli.config_options import CommandConfigs
from pigou.cli.option_values import check_port
from pigou.config import ConfigError, check_all
from pigou.fleet.config import LocalWorker
from pigou.fleet.prefill_queue.messages import PullingConfig
from pigou.fleet.registry.registration import RegistrationConfig
from pigou.models import ModelError
from pigou.registry import require, uncollected
from pigou.worker.config import WorkerConfig

if TYPE_CHECKING:
    from pigou.wire.fleet_secret import FleetSecret
    from pigou.worker.process import Registrar

#: Options of vLLM and SGLang by their name here, or by what to do in their place.
_ELSEWHERE = {
    "--api-key": "give --api-keys-file FILE (`pigou key TENANT` makes a line of it)",
    "--context-length": "give --max-model-len",
    "--data-parallel-size": "start more workers: --decode N or --both N",
    "--enable-auto-tool-choice": "leave it out: --tool-call-parser chooses, auto by default",
    "--enable-prefix-caching": "leave it out: it is on, and --no-prefix-caching turns it off",
    "--gpu-memory-utilization": "give --memory, as 20GiB, for KV blocks",
    "--max-num-batched-tokens": "give --max-batched-tokens",
    "--max-num-seqs": "give --max-seqs",
    "--mem-fraction-static": "give --memory, as 20GiB, for KV blocks",
    "--model-path": "give the model as `pigou serve MODEL`",
    "--swap-space": "give --tier host=4GiB",
    "--trust-remote-code": "leave it out: no code of a model's folder is run",
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "give --tensor-parallel-size"),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp"),
        "layers are not split: give --tensor-parallel-size, or put vLLM or SGLang servers behind "
        "the gateway (--attach URL)",
    ),
}

#: Options of a worker that the fleet gives each of them.
_OWN = {"--host", "--port", "--role", "--exit-with-parent"}


def split_model(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the model among the arguments of `pigou serve`, and the options for its workers."""
    given = {word.partition("=")[0] for word in words}
    if own := sorted(given & _OWN):
        raise ConfigError(f"{own[0]} is each worker's own, and pigou serve gives it; leave it out")
    context = _context(words)
    models = list(context.args)
    if len(models) > 1:
        raise ConfigError(f"{' '.join(models[1:])!r} is no option; give one MODEL, then options")
    options = list(words)
    if models:
        options.remove(models[0])
    return (models[0] if models else ""), options


def check_workers(workers: Iterable[LocalWorker]) -> None:
    """Refuse options, models and devices that no worker could start with; starts none."""
    distinct = {(worker.role, worker.model, worker.device): worker for worker in workers}
    check_all(*(partial(_check, worker) for worker in distinct.values()))


def _check(local: LocalWorker) -> None:
    from pigou.worker.startup.preflight import check_worker

    typed = _context(["--role", local.role.value, *local.arguments]).params
    config = CommandConfigs(worker).read(typed)["config"]
    assert isinstance(config, WorkerConfig)
    check_worker(config)


def _context(words: Sequence[str]) -> Any:
    """Parse the arguments of a worker; positional ones are left in `args`."""
    from pigou.cli import build

    root: Any = get_command(build(["worker"]))
    command = root.commands["worker"]
    try:
        return command.make_context("pigou serve", list(words), allow_extra_args=True)
    except typer.Exit:
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        name = getattr(error, "option_name", None)
        if isinstance(name, str) and hasattr(error, "possibilities"):
            raise ConfigError(_unknown(name)) from None
        raise ConfigError(error.format_message()) from None


def _unknown(name: str) -> str:
    """Return the remedy for an unknown option."""
    if (remedy := _ELSEWHERE.get(name)) is not None:
        return f"{name} is an option of another engine; {remedy}"
    from pigou.cli import build

    known = {
        option
        for command in ("serve", "worker")
        for parameter in get_command(build([command])).commands[command].params  # type: ignore[attr-defined]
        for option in parameter.opts
    }
    near = difflib.get_close_matches(name, known, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see pigou serve --help"
    return f"{name} is no option; {hint}"


def worker(config: WorkerConfig, registration: RegistrationConfig, pulling: PullingConfig) -> None:
    """Run one worker: an OpenAI-compatible server over one model."""
    check_port(config.host, config.port)
    if not config.sleeps:
        require("worker", "a worker that computes")
    from pigou.worker.startup.preflight import check_worker

    check_worker(config)
    with uncollected():
        from pigou.text.tokenizer import TokenizerError
        from pigou.worker.process import run

    address = pulling.address(config.role) if pulling.prefill_queue else None

    def registrar(secret: FleetSecret | None) -> Registrar:
        known: Registrar | None = None
        if registration.registry:
            from pigou.fleet.registry.registration import WorkerRegistrar

            tp = max(config.timing_tp, config.tensor_parallel_size)
            gpus = tp if config.device.startswith("cuda") else 0
            known = WorkerRegistrar(registration, secret, gpus, tp)
        if address is not None:
            from pigou.fleet.prefill_queue.puller import PullingWorker

            return PullingWorker(address, secret, known)
        assert known is not None
        return known

    if registration.registry:
        from pigou.fleet.registry.registry import open_store

        open_store(registration.registry)  # refused before a model is loaded
    try:
        known = registrar if registration.registry or address else None
        status = run(config, known, registration.advertise)
    except (ConfigError, ModelError, TokenizerError) as error:
        raise ConfigError(str(error)) from None
    except (OSError, ValueError) as error:
        typer.echo(f"pigou worker: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
