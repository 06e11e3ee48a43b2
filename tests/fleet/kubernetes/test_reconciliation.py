"""One round of the operator: what it writes for what it sees."""

from __future__ import annotations

import io
import time
import urllib.request
from typing import Any

import pytest
from tests.fleet.kubernetes.fleets import GPU, Manifest, fleet, node, pool
from typer.main import get_command

from pigou.cli import build
from pigou.fleet.kubernetes.manifests import GATEWAY_PORT
from pigou.fleet.kubernetes.reconciliation import (
    Observation,
    Reconciliation,
    free_gpus,
    reconcile,
)


def observed(body: Manifest, gpus: int = 64, **fields: Any) -> Observation:
    meta = {**body["metadata"], "uid": "u1", "generation": 1}
    fields = {"nodes": [node("n", gpus)], "pods": [], **fields}
    return Observation(fleet={**body, "metadata": meta}, now="now", **fields)


def made(changes: Reconciliation, kind: str) -> list[Manifest]:
    return [w.manifest for w in changes.writes if w.verb == "create" and w.manifest["kind"] == kind]


def pod(gpus: object, phase: str = "Running", **labels: str) -> Manifest:
    limits = {"resources": {"limits": {GPU: gpus}}}
    return {"metadata": {"name": "p", "labels": labels}, "spec": {"containers": [limits]},
            "status": {"phase": phase}}  # fmt: skip


def test_gpus_of_others_and_of_what_is_about_to_start_are_taken() -> None:
    workload = made(reconcile(observed(fleet(pool("both", 3)))), "Deployment")[1]
    full = observed(
        fleet(pool("both", 3)), nodes=[node("a", 8), node("b", 8)], workloads=[workload],
        pods=[pod("2"), pod("4", "Succeeded"), pod("1", **{"pigou.dev/fleet": "chat"})],
    )  # fmt: skip
    assert free_gpus(full, GPU) == 16 - 2 - 3
    cordoned = node("a", 8) | {"spec": {"unschedulable": True}}
    unready = node("b", 8)
    unready["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert free_gpus(observed(fleet(), nodes=[cordoned, unready]), GPU) == 0


def test_gpus_that_cannot_be_counted_are_not_taken_but_cpu_fleets_run() -> None:
    blind: list[dict[str, Any]] = [
        {"nodes": None}, {"pods": None}, {"pods": [pod("two")]}, {"nodes": [node("n", "many")]},
    ]  # fmt: skip
    for fields in blind:
        changes = reconcile(observed(fleet(pool("both", 1)), **fields))
        assert changes.status["conditions"][0]["reason"] == "GpuCountUnknown"
        assert [d["metadata"]["name"] for d in made(changes, "Deployment")] == ["chat-gateway"]
        cpu = reconcile(observed(fleet(pool("both", 1, gpusPerReplica=0)), **fields))
        assert len(made(cpu, "Deployment")) == 2


def test_workers_and_gateway_find_each_other_in_one_registry() -> None:
    slo = {"ttftSeconds": 0.5, "itlSeconds": 0.05}
    changes = reconcile(observed(fleet(pool("prefill", 1), pool("decode", 1), slo=slo)))
    gateway, *workers = made(changes, "Deployment")
    args = gateway["spec"]["template"]["spec"]["containers"][0]["args"]
    registry = args[args.index("--registry") + 1]
    assert args[args.index("--slo") + 1] == "ttft=0.5,itl=0.05,percentile=95"
    for worker in workers:
        container = worker["spec"]["template"]["spec"]["containers"][0]
        assert registry in container["args"]
        version = worker["metadata"]["labels"]["pigou.dev/version"]
        assert container["args"][container["args"].index("--deployment-version") + 1] == version
    (service,) = made(changes, "Service")
    pods = gateway["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pods.items()
    assert gateway["spec"]["template"]["spec"]["containers"][0]["ports"] == [
        {"name": "http", "containerPort": GATEWAY_PORT}
    ]


def test_pods_run_commands_with_options_that_they_have() -> None:
    slo = {"ttftSeconds": 0.5, "itlSeconds": 0.05}
    gateway = {"apiKeysSecret": "keys"}
    body = fleet(pool("prefill", 1), pool("decode", 1), slo=slo, gateway=gateway)
    for deployment in made(reconcile(observed(body)), "Deployment"):
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        program, command, *options = [*container["command"], *container["args"]]
        assert program == "pigou"
        root: Any = get_command(build([command]))
        known = {name for option in root.commands[command].params for name in option.opts}
        assert {option for option in options if option.startswith("--")} <= known


def test_a_leftover_of_any_version_or_model_goes() -> None:
    """A version that no status remembers is seen by the labels of its workloads."""
    body = fleet(pool("both", 1))
    first = reconcile(observed(body))
    workloads = made(first, "Deployment")
    for workload in workloads:
        workload["status"] = {"readyReplicas": 1, "availableReplicas": 1, "updatedReplicas": 1}
    stray = reconcile(observed(fleet(pool("both", 1), model="older")))
    leftover = made(stray, "Deployment")[1]
    other = reconcile(observed(body | {"spec": {"models": [
        {"name": "gone", "pools": [pool("both", 1)]}]}}))  # fmt: skip
    removed = made(other, "Deployment")[1]
    changes = reconcile(observed(body, workloads=[*workloads, leftover, removed]))
    deleted = {w.manifest["metadata"]["name"] for w in changes.writes if w.verb == "delete"}
    assert deleted == {leftover["metadata"]["name"], removed["metadata"]["name"]}
    done = reconcile(observed(body, workloads=workloads, services=made(first, "Service")))
    assert (done.writes, done.status["conditions"][0]["status"]) == ((), "True")


def test_a_gateway_is_ready_once_its_pods_are_of_its_template() -> None:
    body = fleet(pool("both", 1))
    first = reconcile(observed(body))
    workloads, services = made(first, "Deployment"), made(first, "Service")
    whole = {"availableReplicas": 1, "updatedReplicas": 1, "observedGeneration": 2}
    for workload in workloads:
        workload["status"], workload["metadata"]["generation"] = dict(whole), 2

    def reason(body: Manifest) -> str:
        changes = reconcile(observed(body, workloads=workloads, services=services))
        return str(changes.status["conditions"][0]["reason"])

    assert reason(body) == "Ready"
    other = fleet(pool("both", 1), gateway={"image": "broken"})
    assert reason(other) == "WaitingForGateway"  # it is only written now
    gateway = workloads[0]
    gateway["status"]["observedGeneration"] = 1
    assert reason(body) == "WaitingForGateway"  # nobody has looked at it yet
    gateway["status"] = whole | {"updatedReplicas": 0}
    assert reason(body) == "WaitingForGateway"  # the old pod serves, the new one does not


def test_a_worker_counts_once_gateways_can_know_it() -> None:
    """Else the last old one goes while gateways still look at the new one."""
    body = fleet(pool("both", 1))
    workloads = made(reconcile(observed(body)), "Deployment")
    for workload in workloads:
        workload["status"] = {"readyReplicas": 1}
    assert workloads[1]["spec"]["minReadySeconds"] >= 5
    changes = reconcile(observed(body, workloads=workloads))
    assert changes.status["conditions"][0]["reason"] == "WaitingForReady"


def test_vllm_ends_when_its_requests_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"engine": "vllm", "image": "vllm:1"}
    changes = reconcile(observed(fleet(pool("both", 1, **engine))))
    spec = made(changes, "Deployment")[1]["spec"]["template"]["spec"]
    _, _, code = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    now, counts = [0.0], [2, 1, 0, 5]

    def page(url: str, timeout: float) -> io.BytesIO:
        labels = '{engine="0",model_name="m"}'
        running = f"vllm:num_requests_running{labels} {float(counts.pop(0))}"
        return io.BytesIO(f"{running}\nvllm:num_requests_waiting{labels} 0.0\n".encode())

    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(urllib.request, "urlopen", page)
    exec(code, {})
    assert (counts, now[0]) == ([5], 7.0)
    counts[:] = [1] * 1000
    exec(code, {})
    assert 120 <= now[0] - 7.0 < spec["terminationGracePeriodSeconds"]


def test_a_fleet_of_the_same_name_elsewhere_is_left_alone() -> None:
    body = fleet(pool("both", 1))
    foreign = made(reconcile(observed(fleet(pool("both", 1), model="x"))), "Deployment")[1]
    foreign["metadata"]["namespace"] = "elsewhere"
    changes = reconcile(observed(body, workloads=[foreign]))
    assert {w.verb for w in changes.writes} == {"create"}
