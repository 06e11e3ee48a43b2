"""The Helm chart renders what API servers take, and grants what the operator asks for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from tests.fleet.kubernetes.fleets import Manifest, fleet, operated, pool, until
from tests.lib.fake_kubernetes import FakeKubernetes, ObjectStore, SeenRequest
from tests.lib.source_tree import ROOT

from pigou.fleet.kubernetes.definitions import definitions, definitions_yaml
from pigou.fleet.kubernetes.fleet_spec import read_fleet

CHART = ROOT / "deploy" / "helm" / "pigou"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
VARIANTS: list[dict[str, Any]] = [
    {},
    {"operator": {"namespaced": False}, "nats": {"enabled": True}},
    {"operator": {"enabled": False}, "fleet": None, "fleetSecret": "secret"},
]


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
    for crd in definitions():
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
        if manifest["kind"] != "PigouFleet":
            validator.validate(manifest, "1.34", strict=True)


@pytest.mark.helm
def test_the_chart_is_lint_clean_and_refuses_unknown_values(helm: Any) -> None:
    for values in VARIANTS:
        report = helm.lint(str(CHART), values, strict=True)
        assert not report["errors"]
        assert all(message["severity"] < 2 for message in report["messages"]), report
    chart = helm.Chart.load(str(CHART))
    wrong: list[Any] = [{"operators": {}}, {"nats": {"storage": "much"}}, {"fleet": {"name": "A"}}]
    for values in wrong:
        with pytest.raises(Exception, match=r"(?i)schema|additional|pattern|match"):
            chart.validate_schema(chart.merge_values(values))


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
