"""What a fleet's specification may say, by its types and by the definition made of them."""

from __future__ import annotations

from typing import Any

import pytest
from openapi_schema_validator import OAS30Validator
from tests.fleet.kubernetes.fleets import GPU, fleet, pool
from tests.lib.fake_kubernetes.errors import ApiError
from tests.lib.fake_kubernetes.schema import pruned, validate

from pigou.config import ConfigError
from pigou.fleet.kubernetes.definitions import definitions
from pigou.fleet.kubernetes.fleet_spec import read_fleet

SCHEMA = definitions()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
WIDE = {"parallelism": {"tp": 4}, "gpusPerReplica": 4, "engine": "vllm", "image": "vllm"}


def keywords(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    inner = schema.get("properties", {}).values()
    nested = [*inner, schema.get("items"), schema.get("additionalProperties")]
    return set(schema).union(*(keywords(part) for part in nested))


def test_definitions_have_structural_schemas() -> None:
    """No references, no null, no `anyOf`: a real API server refuses those (KEP-1693)."""
    for crd in definitions():
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        OAS30Validator.check_schema(schema)
        assert not keywords(schema) & {"$ref", "anyOf", "oneOf", "$defs", "prefixItems", "title"}

        def typed(part: Any) -> None:
            if isinstance(part, dict):
                assert "type" in part or "x-kubernetes-int-or-string" in part, part
                for inner in part.get("properties", {}).values():
                    typed(inner)
                typed(part.get("items"))

        typed(schema)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (fleet(pool("prefill", 1)), "needs a pool that decodes"),
        (fleet(pool("both", 1), pool("both", 1)), "give one pool a role"),
        (fleet(pool("both", None)), "give replicas, or minReplicas and maxReplicas"),
        (fleet(pool("both", 1, minReplicas=1, maxReplicas=2)), "give one of both"),
        (fleet(pool("both", None, minReplicas=3, maxReplicas=2)), "is above maxReplicas"),
        (fleet(pool("both", 1, parallelism={"tp": 2}, gpusPerReplica=2)), "set engine to vllm"),
        (fleet(pool("both", 1, **{**WIDE, "image": ""})), "without an image"),
        (fleet(pool("both", 1, **{**WIDE, "gpusPerReplica": 2})), "make them equal"),
        (fleet(pool("both", 1, **WIDE, hostsPerReplica=3)), "cannot share evenly"),
        (fleet(pool("both", 1, **{**WIDE, "parallelism": {"dp": 4}}, hostsPerReplica=4)), None),
        (
            fleet(
                pool(
                    "both",
                    1,
                    **{**WIDE, "gpusPerReplica": 12, "parallelism": {"tp": 2, "dp": 6}},
                    hostsPerReplica=4,
                )
            ),
            "with dp 6, which 4 hosts cannot share evenly",
        ),
        (fleet(pool("both", 1, gpusPerReplica=0, hostsPerReplica=2)), "only vLLM on GPUs"),
        (fleet(pool("both", 1, args=["-tp", "2"])), "args has -tp, .*; say it by parallelism"),
        (fleet(pool("both", 1, args=["--port=9000"])), "args has --port, .*; leave it out"),
        (
            fleet(pool("both", 1), gateway={"args": ["--registry", "file:/x"]}),
            "args has --registry",
        ),
        (fleet(pool("both", 1), gateway={"args": ["--policy", "toll", "--role"]}), None),
        (fleet(pool("both", 1, labels={"pigou.dev/part": "x"})), "which the operator sets"),
        (fleet(pool("both", 1, tolerations=[{"keys": "gpu"}])), "unknown field `keys`"),
        (fleet(pool("both", 1, env=[{"name": "A"}])), r"env\[A\]: give value, or valueFrom"),
        (
            fleet(
                pool(
                    "both",
                    1,
                    env=[{"name": "A", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
                )
            ),
            r"env\[A\]: give value, or valueFrom",
        ),
        (fleet(pool("both", 1, resources={"limits": {GPU: 1}})), "say it by gpusPerReplica"),
        (fleet(pool("both", 1, resources={"requests": {"memory": "1Gi"}})), "say it by memory"),
        (fleet(pool("both", 1, volumes=[{"name": "shm"}])), "give one other than shm"),
        (fleet(pool("both", 1), gateway={"volumeMounts": [{"name": "x"}]}), "mountPath is None"),
        (fleet(pool("prefill", 1), pool("decode", 1, **WIDE)), "engines differ"),
        (fleet(pool("both", 1), update={"surge": 0}), "set one above 0"),
        (fleet(pool("both", 1), update={"surge": "some"}), "count or like 25%"),
    ],
)
def test_what_no_schema_can_refuse_is_refused_by_name(body: Any, why: str | None) -> None:
    validate({**body, "spec": pruned(body, SCHEMA, "", [])["spec"]}, SCHEMA, "PigouFleet")
    if why is None:
        read_fleet(body["spec"])
        return
    with pytest.raises(ConfigError, match=why):
        read_fleet(body["spec"])


@pytest.mark.parametrize(
    "spec",
    [
        {"models": []},
        {"models": [{"name": "my model", "pools": [{"role": "both"}]}]},
        {"models": [{"name": "m", "pools": [{"role": "draft", "replicas": 1}]}]},
        {"models": [{"name": "m", "pools": [{"role": "both", "replicas": -1}]}]},
        {**fleet(pool("both", 1))["spec"], "slo": {"ttftSeconds": 0, "itlSeconds": 1}},
    ],
)
def test_types_and_schema_refuse_the_same(spec: Any) -> None:
    body = fleet() | {"spec": spec}
    with pytest.raises(ApiError):
        validate(body, SCHEMA, "PigouFleet")
    with pytest.raises(ConfigError):
        read_fleet(spec)


def test_percents_that_round_to_nothing_still_let_an_update_go_on() -> None:
    update = {"surge": 0, "unavailable": "25%"}
    model = read_fleet(fleet(pool("both", 2), update=update)["spec"]).models[0]
    assert model.limits({"both": 2}) == (0, 1)
