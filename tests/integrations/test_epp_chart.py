"""The chart of the endpoint picker renders what API servers take, and grants what it asks for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.fleet.kubernetes.test_chart import allowed
from tests.integrations.inference_pools import DEFINITION, pod
from tests.integrations.test_endpoint_pools import followed, until
from tests.lib.fake_kubernetes import FakeKubernetes, ObjectStore
from tests.lib.source_tree import ROOT

from pigou.integrations.endpoint_pools import InferencePool

CHART = ROOT / "deploy" / "helm" / "pigou-epp"
VARIANTS: list[dict[str, Any]] = [
    {},
    {"pool": {"create": False}, "tls": False, "fleetSecret": "pigou-fleet"},
    {
        "replicas": 2, "peers": "nats://nats:4222", "apiKeysSecret": "pigou-keys",
        "fleetSecret": "pigou-fleet",
        "pool": {"name": "qwen", "matchLabels": {"app": "sglang", "tier": "gold"},
                 "targetPorts": [8000, 8001], "failureMode": "FailOpen"},
        "events": {"port": 5557, "replayPort": 5657},
        "args": ["--max-inflight", "64"], "env": [{"name": "HF_TOKEN", "value": "x"}],
    },
]  # fmt: skip
Manifest = dict[str, Any]
pytestmark = pytest.mark.helm


@pytest.fixture(scope="module")
def helm() -> Any:
    return pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")


def rendered(helm: Any, values: dict[str, Any]) -> dict[str, Manifest]:
    pages = helm.Chart.load(str(CHART)).render(values, name="r", namespace="default").items()
    parts = [yaml.safe_load_all(text) for path, text in pages if path.endswith(".yaml")]
    return {manifest["kind"]: manifest for part in parts for manifest in part if manifest}


@pytest.mark.parametrize("values", VARIANTS)
def test_what_is_rendered_is_taken_by_an_api_server(helm: Any, values: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is absent")
    store = ObjectStore()
    store.put(DEFINITION)
    manifests = rendered(helm, values)
    assert ("InferencePool" in manifests) is values.get("pool", {}).get("create", True)
    for manifest in manifests.values():
        plural = {r.kind: r for r in store.resources.values()}[manifest["kind"]]
        store.create(plural, manifest["metadata"]["namespace"], manifest, strict=True)
        if manifest["kind"] != "InferencePool":
            validator.validate(manifest, "1.34", strict=True)


def test_the_chart_is_lint_clean_and_refuses_unknown_values(helm: Any) -> None:
    for values in VARIANTS:
        report = helm.lint(str(CHART), values, strict=True)
        assert not report["errors"]
        assert all(message["severity"] < 2 for message in report["messages"]), report
    chart = helm.Chart.load(str(CHART))
    wrong: list[Any] = [
        {"replica": 1}, {"replicas": 2}, {"replicas": 2, "peers": "nats://n:1"}, {"peers": "redis://h"},
        {"pool": {"targetPorts": []}}, {"pool": {"targetPorts": list(range(1, 10))}},
        {"pool": {"targetPorts": [0]}}, {"pool": {"failureMode": "FailSafe"}},
        {"pool": {"name": "A"}}, {"pool": {"selector": {}}}, {"args": "--help"},
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(Exception, match="at '"):
            chart.validate_schema(chart.merge_values(values))


@pytest.mark.parametrize("values", [VARIANTS[0], VARIANTS[2]])
def test_the_parts_of_the_chart_name_each_other(helm: Any, values: dict[str, Any]) -> None:
    made = rendered(helm, values)
    picker = made["InferencePool"]["spec"]["endpointPickerRef"]
    service, template = made["Service"], made["Deployment"]["spec"]["template"]
    ports = {port["port"]: port["targetPort"] for port in service["spec"]["ports"]}
    container = template["spec"]["containers"][0]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert picker["name"] == service["metadata"]["name"]
    assert named[ports[picker["port"]["number"]]] == 9002
    assert service["spec"]["selector"] == template["metadata"]["labels"]
    assert made["Deployment"]["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert made["RoleBinding"]["roleRef"]["name"] == made["Role"]["metadata"]["name"]
    account = template["spec"]["serviceAccountName"]
    assert account == made["ServiceAccount"]["metadata"]["name"]
    assert made["RoleBinding"]["subjects"][0]["name"] == account


async def test_the_role_grants_all_that_the_pool_asks_for(helm: Any) -> None:
    made = rendered(helm, VARIANTS[2])
    (url,) = (arg.removeprefix("--pool=") for arg in
              made["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
              if arg.startswith("--pool="))  # fmt: skip
    async with FakeKubernetes() as api:
        api.store.put(DEFINITION)
        api.store.put(made["InferencePool"])
        api.store.put(pod("a", "10.1.0.1", app="sglang", tier="gold"))
        pool = InferencePool.parse(f"{url}&api={api.url}")
        async with followed(pool) as seen:
            await until(lambda: len(seen()) == 2)
            await until(lambda: {asked.verb for asked in api.requests
                                 if asked.resource == "pods"} >= {"watch", "list"})  # fmt: skip
        events = [worker.events for worker in seen().values()]
        assert events == ["tcp://10.1.0.1:5557", "tcp://10.1.0.1:5558"]
        verbs = {(asked.verb, asked.resource.rpartition("/")[2]) for asked in api.requests}
        assert verbs >= {("watch", "pods"), ("watch", "inferencepools"), ("list", "pods")}
        rules = made["Role"]["rules"]
        assert not [asked for asked in api.requests if not allowed(asked, api, rules)]
