"""What makes a pod is in its version; hosts of one worker have their parts; names are valid."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.kubernetes.fleets import GPU, Manifest, fleet, node, pool
from tests.lib.fake_kubernetes.schema import pruned
from tests.lib.fake_kubernetes.writing import merged

from pigou.config import ConfigError
from pigou.fleet.kubernetes.definitions import structural_schema
from pigou.fleet.kubernetes.fleet_spec import FleetSpec, read_fleet
from pigou.fleet.kubernetes.reconciliation import Observation, free_gpus, reconcile

REFERENCE = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
#: Fields of Kubernetes' pods: a value of each.
POD: dict[str, Any] = {
    "labels": {"team": "a"}, "annotations": {"note": "a"}, "env": [REFERENCE],
    "resources": {"limits": {"rdma/ib": 1}, "requests": {"cpu": "500m"}},
    "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [{
        "maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"team": "a"}}}],
    "imagePullSecrets": [{"name": "registry"}], "schedulerName": "kai-scheduler",
    "priorityClassName": "high", "runtimeClassName": "nvidia", "serviceAccountName": "other",
}  # fmt: skip
OTHER_POD: dict[str, Any] = {
    "labels": {"team": "b"}, "annotations": {"note": "b"},
    "env": [merged(REFERENCE, {"valueFrom": {"secretKeyRef": {"name": "other"}}})],
    "resources": {"requests": {"cpu": "600m"}}, "volumes": [{"name": "s", "emptyDir": {}}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/other"}],
    "securityContext": {"privileged": True}, "nodeSelector": {"gpu": "b200"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}], "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [], "imagePullSecrets": [{"name": "other"}],
    "schedulerName": "volcano", "priorityClassName": "low", "runtimeClassName": "kata",
    "serviceAccountName": "third",
}  # fmt: skip
POOL = {
    **pool("both", None, minReplicas=1, maxReplicas=3), "engine": "vllm", "image": "vllm:1",
    "gpusPerReplica": 8, "parallelism": {"tp": 8}, **POD,
}  # fmt: skip
BODY = fleet(POOL, gateway=POD, budget={"gpus": 64})
#: Each field of a pool and what takes its place; `hostsPerReplica` needs a gang.
OTHER_POOL: dict[str, Any] = {
    "role": {"role": "decode"}, "engine": {"engine": "pigou", "parallelism": {"tp": 1},
                                           "gpusPerReplica": 1},
    "image": {"image": "vllm:2"}, "args": {"args": ["--max-num-seqs", "8"]},
    "parallelism": {"parallelism": {"tp": 4, "pp": 2, "ep": True}},
    "gpusPerReplica": {"gpusPerReplica": 4, "parallelism": {"tp": 4}},
    "hostsPerReplica": {"hostsPerReplica": 2}, "memory": {"memory": "32Gi"},
    "shmSize": {"shmSize": "16Gi"}, "loadSeconds": {"loadSeconds": 60},
    "drainSeconds": {"drainSeconds": 60}, "topology": {"topology": {"pack": "rack"}},
    **{field: {field: value} for field, value in OTHER_POD.items()},
}  # fmt: skip
#: The same of the fleet; those below reach workers, a gateway, or none.
OTHER_FLEET: dict[str, Any] = {
    "image": {"image": "pigou:2"}, "fleetSecret": {"fleetSecret": "other"},
    "modelCache": {"modelCache": "models"}, "gpuResource": {"gpuResource": "amd.com/gpu"},
    "slo": {"slo": {"ttftSeconds": 1, "itlSeconds": 0.1}}, "budget": {"budget": {"gpus": 32}},
    **{f"gateway.{field}": {"gateway": {field: value}} for field, value in OTHER_POD.items()},
    "gateway.replicas": {"gateway": {"replicas": 2}},
    "gateway.image": {"gateway": {"image": "g:2"}},
    "gateway.args": {"gateway": {"args": ["--policy", "toll"]}},
    "gateway.apiKeysSecret": {"gateway": {"apiKeysSecret": "keys"}},
}  # fmt: skip
OF_NUMBERS = {"replicas", "minReplicas", "maxReplicas"}


def observed(body: Manifest, workloads: list[Manifest] | None = None, **fields: Any) -> Observation:
    meta = {**body["metadata"], "uid": "u1", "generation": 1}
    nodes = [node("n", 64) | {"status": node("n", 64)["status"] | {
        "allocatable": {GPU: "64", "amd.com/gpu": "64"}}}]  # fmt: skip
    return Observation(
        fleet={**body, "metadata": meta}, now="now", nodes=nodes, pods=[],
        workloads=workloads or [], **{"gangs": True, **fields},
    )  # fmt: skip


def made(body: Manifest, **fields: Any) -> dict[str, Manifest]:
    """Return the workloads of a fleet, ready, by `worker` or `gateway`."""
    workloads = {}
    for write in reconcile(observed(body, **fields)).writes:
        if write.verb == "create" and "labels" in write.manifest["metadata"]:
            part = write.manifest["metadata"]["labels"].get("pigou.dev/part")
            if "template" in str(write.manifest["spec"]).lower():
                workloads[part] = write.manifest | {
                    "status": {"availableReplicas": 9, "updatedReplicas": 9}}  # fmt: skip
    return workloads


def changed(**pool_fields: Any) -> Manifest:
    body = merged(BODY, {})
    body["spec"]["models"][0]["pools"][0] |= pool_fields
    return body


def test_each_field_of_the_definition_is_told_below() -> None:
    """A new field has a row there, or is one of numbers and limits."""
    schema = structural_schema(FleetSpec)["properties"]
    model = schema["models"]["items"]["properties"]
    assert set(model) == {"name", "model", "pools", "update"}
    assert set(model["pools"]["items"]["properties"]) == OTHER_POOL.keys() | OF_NUMBERS
    gateway = {f"gateway.{field}" for field in schema["gateway"]["properties"]}
    assert (set(schema) - {"models", "gateway"}) | gateway == OTHER_FLEET.keys()
    assert POD.keys() == OTHER_POD.keys()


def rolls(body: Manifest) -> tuple[bool, bool]:
    """Return whether a change makes other workers, and whether it is written to the gateway."""
    before = made(BODY)
    changes = reconcile(observed(body, list(before.values())))
    name = before["worker"]["metadata"]["name"]
    writes = [w for w in changes.writes if w.manifest["kind"] in ("Deployment", "LeaderWorkerSet")]
    workers = [w for w in writes if w.verb == "create" and w.manifest["metadata"]["name"] != name]
    if workers:
        assert changes.status["conditions"][0]["status"] == "False"
    return bool(workers), any(w.verb == "replace" for w in writes)


@pytest.mark.parametrize("field", OTHER_POOL)
def test_a_change_of_any_field_of_a_pool_makes_other_workers(field: str) -> None:
    assert rolls(changed(**OTHER_POOL[field])) == (True, False)
    emptied = changed()
    if field in POD:
        del emptied["spec"]["models"][0]["pools"][0][field]
        assert rolls(emptied) == (True, False)


@pytest.mark.parametrize("field", OTHER_FLEET)
def test_a_change_of_any_field_of_a_fleet_reaches_the_pods_that_it_is_of(field: str) -> None:
    body = merged(BODY, {"spec": OTHER_FLEET[field]})
    pool_image = changed(image="", engine="pigou", parallelism={}, gpusPerReplica=1)
    if field == "image":  # of those that name no other
        own, other = made(pool_image), made(merged(pool_image, {"spec": OTHER_FLEET[field]}))
        assert own["worker"]["metadata"]["name"] != other["worker"]["metadata"]["name"]
    workers = field in ("fleetSecret", "modelCache", "gpuResource")
    gateway = field in ("image", "fleetSecret", "slo") or field.startswith("gateway.")
    assert rolls(body) == (workers, gateway)
    if field.startswith("gateway.") and (name := field.partition(".")[2]) in POD:
        less = merged(BODY, {"spec": {"gateway": {name: None}}})
        assert rolls(less) == (False, True)  # what is taken out goes, too


def test_a_change_of_numbers_and_limits_makes_no_other_workers() -> None:
    numbers = changed(minReplicas=2, maxReplicas=5)
    numbers["spec"]["models"][0]["update"] = {"surge": 3}
    assert rolls(numbers) == (False, False)
    assert rolls(merged(BODY, {"spec": {"budget": {"gpus": 32}}})) == (False, False)
    schema = {"type": "object", "properties": {"spec": structural_schema(FleetSpec)}}
    served = pruned(BODY, schema, "", [])
    assert served["spec"] != BODY["spec"]  # a server fills in defaults
    assert rolls(served) == (False, False)
    other = merged(BODY, {})
    other["spec"]["models"][0]["model"] = "another"
    assert rolls(other) == (True, False)


def test_a_gateway_as_a_server_returns_it_is_not_written_again() -> None:
    """API servers drop what is empty, fill in defaults, and write quantities in their own way."""
    plain = made(fleet(POOL))
    for body, workloads in ((BODY, made(BODY)), (fleet(POOL), plain)):
        template = workloads["gateway"]["spec"]["template"]
        template["metadata"].pop("annotations", None)
        pod = template["spec"]
        container = pod["containers"][0]
        container["terminationMessagePath"] = "/dev/termination-log"
        for holder in (pod, container):
            for key in [key for key, value in holder.items() if value in ([], {}, "")]:
                del holder[key]
        if "resources" in container:
            container["resources"]["requests"]["cpu"] = "0.5"
            template["metadata"]["annotations"] = body["spec"]["gateway"]["annotations"]
        changes = reconcile(observed(body, list(workloads.values())))
        assert not [w for w in changes.writes if w.manifest["kind"] == "Deployment"]
        container["image"] = "somebody-else's"
        changes = reconcile(observed(body, list(workloads.values())))
        assert [w.verb for w in changes.writes if w.manifest["kind"] == "Deployment"] == ["replace"]


def test_pods_have_all_fields_and_kubernetes_knows_each() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is absent")
    topology = {"pack": "host"}
    body = changed(topology=topology, volumes=POD["volumes"])
    body["spec"] |= {"modelCache": "models", "gateway": {**POD, "apiKeysSecret": "keys"}}
    for part, workload in made(body).items():
        workload.pop("status")
        validator.validate(workload, "1.34", strict=True)
        template = workload["spec"]["template"]
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert template["metadata"]["labels"].items() >= POD["labels"].items()
        assert template["metadata"]["annotations"].items() >= POD["annotations"].items()
        assert REFERENCE in container["env"]
        for field in ("volumes", "volumeMounts"):
            assert POD[field][0] in (pod if field == "volumes" else container)[field]
        assert container["resources"]["requests"]["cpu"] == "500m"
        assert container["securityContext"] == POD["securityContext"]
        for field in ("nodeSelector", "tolerations", "topologySpreadConstraints",
                      "imagePullSecrets", "schedulerName", "priorityClassName",
                      "runtimeClassName", "serviceAccountName"):  # fmt: skip
            assert pod[field] == POD[field], field
        near = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert len(near) == (part == "worker")


# --- workers on several hosts ---------------------------------------------------------------------

GANG: dict[str, Any] = {
    "hostsPerReplica": 3, "gpusPerReplica": 24, "parallelism": {"tp": 8, "pp": 3},
    "engine": "vllm", "image": "vllm:1", "shmSize": "64Gi", "loadSeconds": 7200,
    "topology": {"pack": "rack", "mode": "required"}, "args": ["--max-model-len", "8192"],
}  # fmt: skip
#: Variables that a controller sets in the pods of its gangs, and the leader's address by them.
SET_BY = {
    "LeaderWorkerSet": ({"LWS_LEADER_ADDRESS": "x-0.x.ns", "LWS_GROUP_SIZE": "3"}, "x-0.x.ns"),
    "PodCliqueSet": (
        {"GROVE_PCS_NAME": "x", "GROVE_PCS_INDEX": "1", "GROVE_HEADLESS_SERVICE": "x-1.ns.svc"},
        "x-1-leader-0.x-1.ns.svc",
    ),
}  # fmt: skip


def gang(kind: str) -> tuple[Manifest, Manifest, Manifest]:
    """Return a gang's workload, and the templates of its leader and its further hosts."""
    body = fleet(pool("decode", 2, **GANG))
    clusters = {"gangs": kind == "LeaderWorkerSet", "grove": True}
    writes = reconcile(observed(body, **clusters)).writes
    workload = next(w.manifest for w in writes if w.manifest["kind"] == kind)
    if kind == "LeaderWorkerSet":
        template = workload["spec"]["leaderWorkerTemplate"]
        assert (template["size"], template["restartPolicy"]) == (3, "RecreateGroupOnPodRestart")
        return workload, template["leaderTemplate"], template["workerTemplate"]
    cliques = workload["spec"]["template"]["cliques"]
    assert [(c["name"], c["spec"]["replicas"], c["spec"]["minAvailable"]) for c in cliques] == [
        ("leader", 1, 1), ("worker", 2, 2)]  # fmt: skip
    assert max(len(workload["metadata"]["name"] + c["name"]) for c in cliques) <= 45
    leader, worker = (
        {"metadata": {k: c[k] for k in ("labels", "annotations")}, "spec": c["spec"]["podSpec"]}
        for c in cliques
    )
    return workload, leader, worker


def started(template: Manifest, variables: dict[str, str], folder: Path) -> list[str]:
    """Run a container's command as a kubelet does, with a `vllm` that prints its arguments."""
    program = folder / "vllm"
    program.write_text('#!/bin/sh\nfor each; do echo "$each"; done\n')
    program.chmod(0o755)
    container = template["spec"]["containers"][0]
    command = [
        re.sub(r"\$\((\w+)\)", lambda m: variables.get(m[1], m[0]), word)
        for word in [*container["command"], *container["args"]]
    ]
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(command, env={**variables, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", SET_BY)
def test_each_host_of_a_worker_has_its_rank_and_the_leader_s_address(
    kind: str, tmp_path: Path
) -> None:
    variables, address = SET_BY[kind]
    _, leader, worker = gang(kind)
    for rank in range(3):
        more = {"LWS_WORKER_INDEX": str(rank), "GROVE_PCLQ_POD_INDEX": str(max(0, rank - 1))}
        more["POD_IP"] = f"10.0.0.{rank}"
        argv = started(worker if rank else leader, variables | more, tmp_path)
        value = dict(pairwise(argv))
        assert argv[:2] == ["serve", "bundled"]
        assert (value["--nnodes"], value["--node-rank"]) == ("3", str(rank))
        assert value["--master-addr"] == (address if rank else "10.0.0.0")
        assert ("--headless" in argv) == (rank > 0)
        assert value["--tensor-parallel-size"] == "8"
        assert value["--kv-transfer-config"].startswith("{")
        assert value["--max-model-len"] == "8192"


@pytest.mark.parametrize("kind", SET_BY)
def test_the_leader_alone_is_probed_and_looks_like_a_worker(kind: str) -> None:
    validator = None
    with suppress(ImportError):
        import kubernetes_validate as validator
    workload, leader, worker = gang(kind)
    selector = {"pigou.dev/fleet": "chat", "pigou.dev/part": "worker"}
    for template, leads in ((leader, True), (worker, False)):
        labels, spec = template["metadata"]["labels"], template["spec"]
        container = spec["containers"][0]
        assert (selector.items() <= labels.items()) == leads
        assert ("pigou.dev/stock-role" in labels) == leads
        assert labels["pigou.dev/version"]
        assert any(key.endswith("Probe") for key in container) == leads
        assert container["resources"]["limits"] == {GPU: 8}
        assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
        assert spec["terminationGracePeriodSeconds"] > 120
        near = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert near[0]["topologyKey"] == "topology.kubernetes.io/rack"
        (_, _, drain) = container["lifecycle"]["preStop"]["exec"]["command"]
        assert ("127.0.0.1" in drain) == leads
        assert "$(" not in drain  # a kubelet expands none in hooks
        if validator is not None:
            metadata = template["metadata"] | {"name": "p"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            validator.validate(pod, "1.34", strict=True)
    probe = leader["spec"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 7200
    there = observed(fleet(), [workload], gangs=True)
    assert free_gpus(there, GPU) == 64 - 2 * 24


# --- names ----------------------------------------------------------------------------------------

NAMES = [
    "Llama-3.1-8B", "llama-3.1-8b", "llama-3-1-8b", "meta-llama/Llama-3.1-8B", "3b", "a.b", "a/b",
    "a_b", "A", "x" * 200, "y" * 64, "-", "org/" + "long-" * 12 + "a", "org/" + "long-" * 12 + "b",
]  # fmt: skip


@pytest.mark.parametrize("hosts", [1, 2])
def test_models_of_any_name_have_valid_labels_and_names_of_their_own(hosts: int) -> None:
    workers = pool("both", None, minReplicas=1, maxReplicas=1, engine="vllm", image="v",
                   gpusPerReplica=2, hostsPerReplica=hosts, parallelism={"tp": 2})  # fmt: skip
    body = fleet(workers, name="a-fleet-of-thirty-letters-0000")
    body["spec"]["models"] = [
        {"name": name, "model": "bundled", "pools": [workers]} for name in NAMES
    ]
    made = [w.manifest for w in reconcile(observed(body)).writes if w.verb == "create"]
    kind = "LeaderWorkerSet" if hosts > 1 else "Deployment"
    workloads = [m for m in made if m["kind"] == kind and m["metadata"]["name"] != "gateway"]
    workloads = [m for m in workloads if "pigou.dev/model" in m["metadata"]["labels"]]
    for objects in (workloads, [m for m in made if m["kind"] == "PigouPool"]):
        assert len({m["metadata"]["name"] for m in objects}) == len(NAMES)
        assert len({m["metadata"]["labels"]["pigou.dev/model"] for m in objects}) == len(NAMES)
        for manifest in objects:
            assert re.fullmatch("[a-z]([-a-z0-9]{0,251}[a-z0-9])", manifest["metadata"]["name"])
            for value in manifest["metadata"]["labels"].values():
                assert re.fullmatch("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)
    assert max(len(m["metadata"]["name"]) for m in workloads) <= 46
    served = re.findall(r"'--served-model-name', '([^']*)'", str(workloads))
    assert list(dict.fromkeys(served)) == NAMES


def test_a_fleet_whose_name_no_service_can_have_is_refused() -> None:
    for name in ("my.fleet", "f" * 31, "3b"):
        (condition,) = reconcile(observed(fleet(POOL, name=name))).status["conditions"]
        assert condition["reason"] == "InvalidSpec"
        assert "metadata.name" in condition["message"]
    with pytest.raises(ConfigError, match=r"metadata\.name is 'a_b'"):
        read_fleet(BODY["spec"], "a_b")
