"""Start the real servers that Pigou is measured and tested against.

Each peer lives in its own virtual environment, named by an environment variable:

| variable                   | what it names                                        |
|----------------------------|------------------------------------------------------|
| `PIGOU_PEER_VLLM`          | a venv with vLLM for CPU and NIXL                    |
| `PIGOU_PEER_SGLANG`        | a folder with SGLang's package (`pip install -t`)    |
| `PIGOU_PEER_SGLANG_ROUTER` | a venv with sglang-router                            |
| `PIGOU_PEER_VLLM_ROUTER`   | a venv with vllm-router                              |
| `PIGOU_PEER_KVPRESS`       | a venv with kvpress (and transformers below 5.3)     |
| `PIGOU_PEER_AICONFIGURATOR` | a venv with aiconfigurator                          |
| `PIGOU_SHARED`             | the folder with `tools/peer-vllm.sh` and its siblings |
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Self

import pigou
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    ServerFailed,
    available_cores,
    free_ports,
    get_json,
)
from benchmarks.lib.shared_folder import shared_folder

EVENTS_TOPIC = "kv"


class PeerMissing(RuntimeError):
    """A peer is not installed; the message says how to make it."""


def shared() -> Path:
    """The folder of peer scripts and data: $PIGOU_SHARED, else `../shared` beside the checkout."""
    folder = shared_folder()
    if not (folder / "tools").is_dir():
        raise PeerMissing(f"{folder}/tools is absent; set PIGOU_SHARED to the folder that has it")
    return folder


def _venv(variable: str, program: str, remedy: str) -> Path:
    named = os.environ.get(variable)
    if not named:
        raise PeerMissing(f"{variable} is not set; {remedy}, then set {variable}=DIR")
    if not (Path(named) / "bin" / program).exists():
        raise PeerMissing(f"{variable}={named} has no bin/{program}; {remedy}")
    return Path(named).resolve()


def vllm_home() -> Path:
    """The venv with vLLM; raises PeerMissing with the way to make it."""
    return _venv("PIGOU_PEER_VLLM", "vllm", "run $PIGOU_SHARED/tools/peer-vllm.sh DIR")


def sglang_router_home() -> Path:
    """The venv with sglang-router; raises PeerMissing with the way to make it."""
    remedy = "run `python3 -m venv DIR && DIR/bin/pip install sglang-router`"
    return _venv("PIGOU_PEER_SGLANG_ROUTER", "sglang-router", remedy)


def vllm_router_home() -> Path:
    """The venv with vllm-router; raises PeerMissing with the way to make it."""
    remedy = "run `python3 -m venv DIR && DIR/bin/pip install vllm-router`"
    return _venv("PIGOU_PEER_VLLM_ROUTER", "vllm-router", remedy)


def kvpress_home() -> Path:
    """The venv with kvpress; raises PeerMissing with the way to make it."""
    wanted = "torch==2.13.0 kvpress==0.5.5 'transformers<5.3'"
    remedy = f"run `python3 -m venv DIR && DIR/bin/pip install {wanted}`"
    return _venv("PIGOU_PEER_KVPRESS", "python", remedy)


def aiconfigurator_home() -> Path:
    """The venv with AIConfigurator; raises PeerMissing with the way to make it."""
    remedy = "run `python3 -m venv DIR && DIR/bin/pip install aiconfigurator==0.12.0`"
    return _venv("PIGOU_PEER_AICONFIGURATOR", "aiconfigurator", remedy)


@dataclass(frozen=True)
class EventPorts:
    """Where a vLLM server publishes its KV events, and where it replays them (ZMQ, loopback)."""

    publish: int
    replay: int

    @property
    def endpoint(self) -> str:
        """What a subscriber connects to; the topic is ``EVENTS_TOPIC``."""
        return f"tcp://{LOOPBACK}:{self.publish}"

    @property
    def replay_endpoint(self) -> str:
        """What a consumer with a gap connects to."""
        return f"tcp://{LOOPBACK}:{self.replay}"

    def config(self) -> str:
        """The value of vLLM's ``--kv-events-config``; a `*` is what makes vLLM bind."""
        return json.dumps(
            {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{self.publish}",
                "replay_endpoint": f"tcp://*:{self.replay}",
                "topic": EVENTS_TOPIC,
            }
        )


def core_list(cores: Sequence[int]) -> str:
    """Cores as vLLM's thread binding wants them: ``0,2,3``."""
    return ",".join(str(core) for core in cores)


def _preload(home: Path) -> str:
    """LD_PRELOAD that vLLM advises on x86: Intel OpenMP, and tcmalloc where it is installed."""
    cache = subprocess.run(
        ["ldconfig", "-p"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/sbin:/usr/sbin"},
    ).stdout
    tcmalloc = [
        line.rpartition(" ")[2]
        for line in cache.splitlines()
        if "libtcmalloc_minimal.so.4" in line and "x86-64" in line
    ]
    openmp = home / "lib" / "libiomp5.so"
    return ":".join([str(openmp)] * openmp.exists() + tcmalloc[:1])


def start_vllm(
    model: Path,
    *,
    log: Path,
    cores: Sequence[int] | None = None,
    port: int | None = None,
    events: EventPorts | None = None,
    block_size: int | None = None,
    max_model_len: int = 2048,
    kv_gib: int = 1,
    eager: bool = True,
    extra: Sequence[str] = (),
) -> Server:
    """Start one plain vLLM server; the caller waits with ``wait_healthy``.

    The served name is the folder's name. ``cores`` (default: all) bound threads and processes,
    one OpenMP thread a core. ``block_size`` must be a multiple of 32 on CPU (vLLM's default
    there is 128 tokens). ``eager=False`` lets vLLM compile, which makes the start slower.
    """
    home = vllm_home()
    cores = available_cores() if cores is None else cores
    port = free_ports(1)[0] if port is None else port
    argv = [str(home / "bin" / "vllm"), "serve", str(model), "--served-model-name", model.name]
    argv += ["--host", LOOPBACK, "--port", str(port), "--max-model-len", str(max_model_len)]
    argv += ["--enforce-eager"] * eager
    argv += ["--block-size", str(block_size)] if block_size else []
    argv += ["--kv-events-config", events.config()] if events else []
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": core_list(cores),
        "LD_PRELOAD": _preload(home),
    }
    return Server([*argv, *extra], url=f"http://{LOOPBACK}:{port}", log=log, env=env, cores=cores)


#: Libraries of Pigou's that vLLM does not require.
_PIGOU_NEEDS = ("xxhash",)


def python_path(links: Path) -> str:
    """PYTHONPATH with which vLLM's Python imports this Pigou; `links` gets what it lacks."""
    links.mkdir(parents=True, exist_ok=True)
    for name in _PIGOU_NEEDS:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and not (links / name).exists():
            (links / name).symlink_to(Path(spec.origin).parent)
    site = Path(str(distribution("pigou").locate_file("")))
    for info in site.glob("pigou-*.dist-info"):  # entry points, by which tiers are found
        if not (links / info.name).exists():
            (links / info.name).symlink_to(info)
    return os.pathsep.join([str(Path(pigou.__file__).parents[1]), str(links)])


def pigou_connector(**extra: object) -> str:
    """Arguments of `vllm serve` that load PigouConnector; `extra` is its own configuration."""
    config = {
        "kv_connector": "PigouConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "pigou.integrations.vllm.connector",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "recompute",
    }
    return "--kv-transfer-config " + json.dumps(config, separators=(",", ":"))


@dataclass(frozen=True)
class VllmPair:
    """A running prefill and decode pair of vLLM servers with KV transfer and KV events."""

    prefill: str
    decode: str
    prefill_events: str
    decode_events: str
    model: str
    home: Path
    run_dir: Path

    @classmethod
    def start(
        cls,
        model: Path,
        run_dir: Path,
        extra: str = "",
        timeout_s: float = 400.0,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Run ``run-vllm-pair.sh`` on free ports; returns when the pair is up and warm.

        ``extra`` holds more ``vllm serve`` arguments for both, which win over the script's NIXL
        ones. Raises PeerMissing, or ServerFailed with the script's words.
        """
        home = vllm_home()
        names = ("P_PORT", "D_PORT", "P_EVENTS", "D_EVENTS", "P_SIDE", "D_SIDE")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        run_dir.mkdir(parents=True, exist_ok=True)
        env = {name: str(port) for name, port in ports.items()}
        pair = cls(
            prefill=f"http://{LOOPBACK}:{ports['P_PORT']}",
            decode=f"http://{LOOPBACK}:{ports['D_PORT']}",
            prefill_events=f"tcp://{LOOPBACK}:{ports['P_EVENTS']}",
            decode_events=f"tcp://{LOOPBACK}:{ports['D_EVENTS']}",
            model=model.name,
            home=home,
            run_dir=run_dir,
        )
        try:
            pair._script([str(model)], timeout_s, {**(environment or {}), **env, "EXTRA": extra})
        except BaseException:
            pair.stop()
            raise
        return pair

    def check(self) -> str:
        """Run the script's own two-leg check; returns its verdict, raises ServerFailed."""
        return self._script(["--check"], 120.0, self._ports())

    def stop(self) -> None:
        """End exactly the processes of this pair."""
        self._script(["--stop"], 120.0, {})

    def _ports(self) -> dict[str, str]:
        return {
            "P_PORT": self.prefill.rpartition(":")[2],
            "D_PORT": self.decode.rpartition(":")[2],
        }

    def _script(self, arguments: Sequence[str], timeout_s: float, env: dict[str, str]) -> str:
        # Output goes to a file: the servers inherit it, and a pipe would not close before them.
        log = self.run_dir / "script.log"
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [str(shared() / "tools" / "run-vllm-pair.sh"), str(self.home), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, "RUN_DIR": str(self.run_dir)},
                timeout=timeout_s,
                check=False,
            )
        text = log.read_text(encoding="utf-8", errors="replace")
        if done.returncode != 0:
            raise ServerFailed(f"run-vllm-pair.sh {arguments[0]}: {text}; logs in {self.run_dir}")
        return text.strip()


def start_sglang_router(
    upstreams: Sequence[str],
    *,
    log: Path,
    policy: str = "round_robin",
    cores: Sequence[int] | None = None,
) -> Server:
    """Start sglang-router in front of ``upstreams`` and return it ready to route to them all."""
    port, metrics = free_ports(2)
    argv = [str(sglang_router_home() / "bin" / "python"), "-m", "sglang_router.launch_router"]
    argv += ["--host", LOOPBACK, "--port", str(port), "--policy", policy]
    argv += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics)]
    argv += ["--log-level", "warn", "--worker-urls", *upstreams]
    server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=log, cores=cores)
    try:
        server.wait_healthy(timeout_s=60)
        _wait_for_workers(server, len(upstreams))
    except BaseException:
        server.stop()
        raise
    return server


def start_vllm_router(
    upstreams: Sequence[str],
    *,
    log: Path,
    policy: str = "cache_aware",
    events: Sequence[str] = (),
    model: Path | None = None,
    block_size: int = 16,
) -> Server:
    """Start vllm-router in front of ``upstreams`` and return it ready to route to them all.

    ``events`` are the workers' KV events (ZMQ), in their order; ``kv_aware`` needs them, and the
    ``model``'s name.
    """
    port, metrics = free_ports(2)
    argv = [str(vllm_router_home() / "bin" / "vllm-router"), "--host", LOOPBACK]
    argv += ["--port", str(port), "--policy", policy, "--log-level", "warning"]
    argv += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics)]
    for url, endpoint in zip(upstreams, events, strict=False):
        argv += ["--kv-event-source", f"{url}={endpoint}"]
    if events and model is not None:
        argv += ["--kv-event-block-size", str(block_size), "--kv-event-model", model.name]
    argv += ["--worker-urls", *upstreams]
    server = Server(argv, url=f"http://{LOOPBACK}:{port}", log=log)
    try:
        return server.wait_healthy(timeout_s=60)
    except BaseException:
        server.stop()
        raise


def _wait_for_workers(router: Server, count: int, timeout_s: float = 60.0) -> None:
    # The router is healthy before it has registered its upstreams; they appear one by one.
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        workers = get_json(router.url + "/workers")["workers"]
        if sum(worker["is_healthy"] for worker in workers) == count:
            return
        time.sleep(0.2)
    raise ServerFailed(f"{router.url} did not find {count} workers\n{router.log_tail()}")
