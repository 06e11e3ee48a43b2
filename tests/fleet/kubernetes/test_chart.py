"""The Helm chart renders what API servers take, and grants what the operator asks for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.fleet.kubernetes.fleets import Manifest, fleet, operated, pool, until
from tests.lib.fake_kubernetes import FakeKubernetes, ObjectStore, SeenRequest
from tests.lib.source_tree import ROOT

from pigou.capacity.plan.output import VLLM_IMAGE
from pigou.fleet.kubernetes.definitions import definitions, definitions_yaml
from pigou.fleet.kubernetes.fleet_spec import read_fleet
from pigou.fleet.kubernetes.manifests import FleetObjects
from tools.chart_values import PATH, schema

CHART = ROOT / "deploy" / "helm" / "pigou"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VARIANTS: list[dict[str, Any]] = [
    {},
    {"operator": {"namespaced": False}, "nats": {"enabled": True}},
    {"operator": {"enabled": False}, "fleet": None, "fleetSecret": "secret"},
    {
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gw", "namespace": "infra"}],
                      "hostnames": ["llm.example.org"], "annotations": {"a": "b"}},
        "disruption": {"gateway": "50%", "workers": None},
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"},
                               "keySecret": {"name": "pigou-metrics", "key": "key"}},
            "prometheusRule": {"enabled": True}, "dashboards": {"enabled": True},
        },
    },
]  # fmt: skip
TEXT = {"type": "string"}


def listed(**properties: Any) -> Any:
    return {"type": "array", "items": {"type": "object", "properties": properties}}


LABELS = {"type": "object", "additionalProperties": TEXT}
#: Fields that definitions of others have, as far as the chart writes them.
OTHERS = {
    ("monitoring.coreos.com", "v1", "ServiceMonitor"): {
        "selector": {"type": "object", "properties": {"matchLabels": LABELS}},
        "endpoints": listed(
            port=TEXT, path=TEXT, interval=TEXT, relabelings=listed(targetLabel=TEXT,
            replacement=TEXT), authorization={"type": "object", "properties": {
                "credentials": {"type": "object", "properties": {"name": TEXT, "key": TEXT}}}},
        ),
    },
    ("monitoring.coreos.com", "v1", "PrometheusRule"): {
        "groups": listed(name=TEXT, interval=TEXT, rules=listed(
            record=TEXT, alert=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS, **{"for": TEXT},
        )),
    },
    ("gateway.networking.k8s.io", "v1", "HTTPRoute"): {
        "parentRefs": listed(name=TEXT, namespace=TEXT), "hostnames": {"type": "array",
                                                                      "items": TEXT},
        "rules": listed(backendRefs=listed(name=TEXT, port={"type": "integer"}),
                        timeouts={"type": "object", "properties": {"request": TEXT}}),
    },
}  # fmt: skip


def defined_by_others() -> list[Manifest]:
    crds = []
    for (group, version, kind), properties in OTHERS.items():
        spec = {"type": "object", "properties": properties}
        schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
        plural = f"{kind.lower()}s"
        names = {"kind": kind, "plural": plural, "singular": kind.lower()}
        versions = [{"name": version, "served": True, "storage": True, "schema": schema}]
        crds.append({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": versions},
        })  # fmt: skip
    return crds


def test_the_chart_has_the_definitions_of_the_operator() -> None:
    """`pigou operator --definitions > deploy/helm/pigou/crds/pigou.yaml` makes them again."""
    assert (CHART / "crds" / "pigou.yaml").read_text() == definitions_yaml()
    assert list(yaml.safe_load_all(definitions_yaml())) == definitions()


def test_the_fleet_of_the_chart_s_values_is_valid() -> None:
    read_fleet(VALUES["fleet"]["spec"])


def test_the_fleet_of_the_guide_is_valid() -> None:
    page = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    read_fleet(yaml.safe_load(text)["spec"])
    assert set(re.findall(r"vllm/vllm-openai:\S+", text)) == {VLLM_IMAGE}


@pytest.fixture(scope="module")
def helm() -> Any:
    return pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed")


def rendered(helm: Any, values: dict[str, Any]) -> list[Manifest]:
    pages = helm.Chart.load(str(CHART)).render(values, name="r", namespace="default").items()
    parts = [yaml.safe_load_all(text) for path, text in pages if path.endswith(".yaml")]
    return [manifest for part in parts for manifest in part if manifest]


@pytest.mark.helm
@pytest.mark.parametrize("values", VARIANTS)
def test_what_is_rendered_is_taken_by_an_api_server(helm: Any, values: dict[str, Any]) -> None:
    store = ObjectStore()
    for crd in [*definitions(), *defined_by_others()]:
        store.put(crd)
    manifests = rendered(helm, values)
    for manifest in manifests:
        plural = {r.kind: r for r in store.resources.values()}[manifest["kind"]]
        namespace = manifest["metadata"].get("namespace", "")
        assert bool(namespace) == plural.namespaced
        store.create(plural, namespace, manifest, strict=True)
    if values.get("fleet", "default") is None:
        assert "PigouFleet" not in {manifest["kind"] for manifest in manifests}


@pytest.mark.helm
@pytest.mark.parametrize("values", VARIANTS)
def test_manifests_have_no_field_that_kubernetes_does_not_know(
    helm: Any, values: dict[str, Any]
) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is absent")
    for manifest in rendered(helm, values):
        if manifest["kind"] not in {"PigouFleet", *(kind for _, _, kind in OTHERS)}:
            validator.validate(manifest, "1.34", strict=True)


@pytest.mark.helm
def test_the_chart_is_lint_clean_and_refuses_unknown_values(helm: Any) -> None:
    for values in VARIANTS:
        report = helm.lint(str(CHART), values, strict=True)
        assert not report["errors"]
        assert all(message["severity"] < 2 for message in report["messages"]), report
    chart = helm.Chart.load(str(CHART))
    models = VALUES["fleet"]["spec"]["models"]
    wrong: list[Any] = [
        {"operators": {}}, {"nats": {"storage": "much"}}, {"fleet": {"name": "A"}},
        {"monitoring": {"serviceMonitors": {}}}, {"httpRoute": {"enabled": True}},
        {"disruption": {"workers": "some"}},
        {"fleet": {"spec": {"models": models, "gateways": {}}}},
        {"fleet": {"spec": {"models": [{**models[0], "pools": [{"role": "both", "gpu": 1}]}]}}},
    ]  # fmt: skip
    for values in wrong:
        with pytest.raises(Exception, match="at '"):
            chart.validate_schema(chart.merge_values(values))


def test_the_chart_s_schema_has_the_types_of_a_fleet() -> None:
    """`python -m tools.chart_values` renews it."""
    text = PATH.read_text()
    assert text == schema(text)


@pytest.mark.helm
def test_what_needs_definitions_is_off_and_files_are_taken_as_they_are(helm: Any) -> None:
    kinds = {manifest["kind"] for manifest in rendered(helm, {})}
    assert not kinds & {kind for _, _, kind in OTHERS}
    assert "PodDisruptionBudget" in kinds
    manifests = rendered(helm, VARIANTS[-1])
    rules = {m["metadata"]["name"].removeprefix("r-"): m["spec"] for m in manifests
             if m["kind"] == "PrometheusRule"}  # fmt: skip
    files = [*(ROOT / "deploy" / "rules").glob("*.yml"), ROOT / "deploy" / "prometheus-alerts.yml"]
    assert rules == {file.stem: yaml.safe_load(file.read_text()) for file in files}
    (dashboards,) = [m["data"] for m in manifests if m["kind"] == "ConfigMap"]
    folder = ROOT / "deploy" / "grafana"
    assert dashboards == {path.name: path.read_text() for path in folder.glob("*.json")}


@pytest.mark.helm
def test_what_the_chart_selects_is_what_the_operator_makes(helm: Any) -> None:
    manifests = rendered(helm, VARIANTS[-1])
    spec = next(m for m in manifests if m["kind"] == "PigouFleet")
    body = {"metadata": {**spec["metadata"], "uid": "u"}}
    made = {m["kind"]: m for m in FleetObjects(body, read_fleet(spec["spec"])).gateway()}
    (monitor,) = [m["spec"] for m in manifests if m["kind"] == "ServiceMonitor"]
    service = made["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports.keys()
    jobs = {e["path"]: e["relabelings"][0]["replacement"] for e in monitor["endpoints"]}
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    assert jobs == {
        each.get("metrics_path", "/metrics"): each["job_name"] for each in config["scrape_configs"]
    }
    (route,) = [m["spec"] for m in manifests if m["kind"] == "HTTPRoute"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert (backend["name"], backend["port"]) == (service["metadata"]["name"], ports["http"])
    pods = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    (budget,) = [m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"]
    (among,) = budget["selector"]["matchExpressions"]
    assert budget["selector"]["matchLabels"].items() <= pods.items()
    assert pods[among["key"]] in among["values"]
    assert budget["maxUnavailable"] == "50%"


def allowed(seen: SeenRequest, api: FakeKubernetes, rules: list[Manifest]) -> bool:
    for resource in api.store.resources.values():
        name = f"{resource.group}/{resource.plural}".strip("/")
        if seen.resource in (name, f"{name}/status"):
            plural = resource.plural + seen.resource.removeprefix(name)
            return any(
                resource.group in rule["apiGroups"] and plural in rule["resources"]
                and seen.verb in rule["verbs"]
                for rule in rules
            )  # fmt: skip
    return False


@pytest.mark.helm
@pytest.mark.parametrize("namespaced", [True, False])
async def test_roles_grant_all_that_the_operator_asks_for(helm: Any, namespaced: bool) -> None:
    roles = rendered(helm, {"operator": {"namespaced": namespaced}})
    rules = [
        rule for role in roles if role["kind"] in ("Role", "ClusterRole")
        and role["metadata"]["name"].endswith("operator") for rule in role["rules"]
    ]  # fmt: skip
    async with operated() as cluster:
        workers = pool("both", None, minReplicas=1, maxReplicas=2)
        cluster.store.put(fleet(workers))
        await until(cluster.ready)
        cluster.store.put(fleet(pool("both", 2), model="other"))
        await until(cluster.ready)
        requests = [seen for seen in cluster.api.requests if seen.verb != "discover"]
        assert {seen.verb for seen in requests} >= {"create", "patch", "delete", "list", "watch"}
        refused = {seen for seen in requests if not allowed(seen, cluster.api, rules)}
        assert not refused
