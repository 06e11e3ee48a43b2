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

GANG: dict[str, Any] = {
    "hostsPerReplica": 2, "gpusPerReplica": 16, "parallelism": {"tp": 8, "pp": 2},
    "engine": "vllm", "image": "vllm:1", "shmSize": "64Gi", "loadSeconds": 7200,
    "topology": {"pack": "rack", "mode": "required"},
}  # fmt: skip


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


def test_a_gang_is_one_unit_with_probes_and_memory_for_its_size() -> None:
    changes = reconcile(observed(fleet(pool("both", 1, **GANG)), gangs=True))
    (gang,) = made(changes, "LeaderWorkerSet")
    template = gang["spec"]["leaderWorkerTemplate"]
    assert (gang["spec"]["replicas"], template["size"]) == (1, 2)
    spec = template["workerTemplate"]["spec"]
    container = spec["containers"][0]
    assert container["resources"]["limits"] == {GPU: 8}
    probe = container["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 7200
    assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert spec["terminationGracePeriodSeconds"] > 120
    (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/rack"


def test_where_only_grove_is_installed_a_gang_is_a_replica_of_a_clique_set() -> None:
    body = fleet(pool("both", 2, **GANG), name="chat-of-a-name-that-is-long-00")
    assert not made(reconcile(observed(body, gangs=True, grove=True)), "PodCliqueSet")
    (gang,) = made(reconcile(observed(body, grove=True)), "PodCliqueSet")
    assert gang["spec"]["replicas"] == 2
    assert len(gang["metadata"]["name"]) <= 43  # with its clique's name 45
    (clique,) = gang["spec"]["template"]["cliques"]
    assert (clique["spec"]["replicas"], clique["spec"]["minAvailable"]) == (2, 2)
    assert clique["labels"] == gang["metadata"]["labels"]
    assert clique["spec"]["podSpec"]["containers"][0]["resources"]["limits"] == {GPU: 8}
    there = observed(body, grove=True, workloads=[gang])
    assert free_gpus(there, GPU) == 64 - 2 * 16
    (more,) = [
        w for w in reconcile(
            observed(fleet(pool("both", 3, **GANG), name=body["metadata"]["name"]),
                     grove=True, workloads=[gang])
        ).writes if w.verb == "patch" and w.manifest["kind"] == "PodCliqueSet"
    ]  # fmt: skip
    assert more.manifest["spec"] == {"replicas": 3}
    gang["status"] = {"availableReplicas": 2}
    status = reconcile(observed(body, grove=True, workloads=[gang])).status
    assert status["models"][0]["pools"][0]["ready"] == 2


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


def test_manifests_have_no_field_that_kubernetes_refuses() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is absent")
    topology = {"pack": "host"}
    pools = [pool("both", 1, topology=topology, env=[{"name": "A", "value": "b"}])]
    body = fleet(*pools, modelCache="models", gateway={"apiKeysSecret": "keys"})
    changes = reconcile(observed(body))
    for manifest in [*made(changes, "Deployment"), *made(changes, "Service")]:
        validator.validate(manifest, "1.34", strict=True)


def test_a_leftover_of_any_version_or_model_goes() -> None:
    """A version that no status remembers is seen by the labels of its workloads."""
    body = fleet(pool("both", 1))
    first = reconcile(observed(body))
    workloads = made(first, "Deployment")
    for workload in workloads:
        workload["status"] = {"readyReplicas": 1, "availableReplicas": 1}
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
