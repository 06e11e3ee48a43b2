"""The fake API server keeps the laws that clients of a real one rely on."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from tests.lib.fake_kubernetes import FakeKubernetes

PODS, DEPLOYMENTS = (
    "/api/v1/namespaces/default/pods",
    "/apis/apps/v1/namespaces/default/deployments",
)
MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
FINALIZER = "example.org/hold"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "lamps.example.org"},
    "spec": {
        "group": "example.org", "scope": "Namespaced",
        "names": {"plural": "lamps", "singular": "lamp", "kind": "Lamp"},
        "versions": [{
            "name": "v1", "served": True, "storage": True,
            "subresources": {"status": {}, "scale": {
                "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
            "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                "spec": {"type": "object", "required": ["watts"], "properties": {
                    "watts": {"type": "integer", "minimum": 1},
                    "replicas": {"type": "integer", "default": 1}}},
                "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}},
        }],
    },
}  # fmt: skip


def pod(name: str, **labels: str) -> dict[str, Any]:
    meta = {"name": name, "labels": labels}
    spec = {"containers": [{"name": "main", "image": "none"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def lamp(**spec: Any) -> dict[str, Any]:
    meta = {"name": "desk"}
    return {"apiVersion": "example.org/v1", "kind": "Lamp", "metadata": meta, "spec": spec}


class Client:
    def __init__(self, api: FakeKubernetes, session: aiohttp.ClientSession) -> None:
        self.api, self.session = api, session

    async def ask(
        self, method: str, path: str, body: Any = None, media_type: str = "application/json"
    ) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": media_type}
        url = self.api.url + path
        async with self.session.request(method, url, data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    async def events(self, path: str, count: int) -> list[tuple[str, str]]:
        events = []
        async with self.session.get(self.api.url + path) as reply:
            while len(events) < count:
                event = json.loads(await reply.content.readline())
                name = event["object"].get("metadata", {}).get("name", "")
                events.append((event["type"], name or event["object"].get("reason", "")))
        return events


class Fake(FakeKubernetes):
    async def __aenter__(self) -> Client:  # type: ignore[override]
        await super().__aenter__()
        self.session = aiohttp.ClientSession()
        return Client(self, self.session)

    async def __aexit__(self, *error: Any) -> None:
        await self.session.close()
        await super().__aexit__(*error)


async def test_spec_and_status_are_written_apart_and_generation_counts_specs() -> None:
    async with Fake() as client:
        client.api.store.put(CRD)
        lamps = "/apis/example.org/v1/namespaces/default/lamps"
        _, made = await client.ask("POST", lamps, lamp(watts=4) | {"status": {"on": True}})
        assert made["spec"] == {"watts": 4, "replicas": 1}
        assert "status" not in made
        status = {"spec": {"watts": 9}, "status": {"on": True}}
        _, lit = await client.ask("PATCH", f"{lamps}/desk/status", status, MERGE)
        assert (lit["spec"]["watts"], lit["status"], lit["metadata"]["generation"]) == (
            4, {"on": True}, 1)  # fmt: skip
        _, scale = await client.ask(
            "PATCH", f"{lamps}/desk/scale", {"spec": {"replicas": 3}}, MERGE
        )
        assert scale["spec"] == {"replicas": 3}
        _, last = await client.ask("GET", f"{lamps}/desk")
        assert (last["spec"]["replicas"], last["metadata"]["generation"]) == (3, 2)


@pytest.mark.parametrize(
    ("body", "query", "code"),
    [
        (lamp(watts=0), "", 422),
        (lamp(), "", 422),
        (lamp(watts="4"), "", 422),
        (lamp(watts=4, volts=2), "?fieldValidation=Strict", 400),
        (lamp(watts=4, volts=2), "", 201),
        (lamp(watts=4) | {"kind": "Pod"}, "", 400),
    ],
)
async def test_a_schema_refuses_what_does_not_fit(body: Any, query: str, code: int) -> None:
    async with Fake() as client:
        client.api.store.put(CRD)
        path = f"/apis/example.org/v1/namespaces/default/lamps{query}"
        assert (await client.ask("POST", path, body))[0] == code


async def test_an_old_version_and_a_failed_test_change_nothing() -> None:
    async with Fake() as client:
        made = client.api.store.put(pod("a"))
        client.api.store.put(pod("a", color="red"))
        assert (await client.ask("PUT", f"{PODS}/a", made))[0] == 409
        patch = [{"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
                 {"op": "add", "path": "/metadata/labels/color", "value": "blue"}]  # fmt: skip
        assert (await client.ask("PATCH", f"{PODS}/a", patch, JSON_PATCH))[0] == 422
        assert client.api.store.all("pods", color="red")
        for refused in ("application/apply-patch+yaml", "application/strategic-merge-patch+json"):
            assert (await client.ask("PATCH", f"{PODS}/a", {}, refused))[0] == 415


async def test_finalizers_hold_an_object_and_its_children_go_with_it() -> None:
    async with Fake() as client:
        owner = pod("owner")
        owner["metadata"]["finalizers"] = [FINALIZER]
        uid = client.api.store.put(owner)["metadata"]["uid"]
        child = pod("child")
        reference = {"apiVersion": "v1", "kind": "Pod", "name": "owner", "uid": uid}
        child["metadata"]["ownerReferences"] = [reference]
        client.api.store.put(child)
        _, marked = await client.ask("DELETE", f"{PODS}/owner")
        assert marked["metadata"]["deletionTimestamp"]
        assert len(client.api.store.all("pods")) == 2
        await client.ask("PATCH", f"{PODS}/owner", {"metadata": {"finalizers": None}}, MERGE)
        assert not client.api.store.all("pods")


async def test_a_watch_sees_what_enters_and_leaves_its_selector_and_bookmarks() -> None:
    async with Fake(bookmark_s=0.02) as client:
        store = client.api.store
        store.put(pod("a", app="x"))
        revision = store.revision
        store.put(pod("b", app="y"))
        store.put(pod("a", app="y"))
        path = f"{PODS}?watch=true&labelSelector=app%3Dx&allowWatchBookmarks=true"
        seen = await client.events(f"{path}&resourceVersion={revision}", 2)
        assert seen == [("DELETED", "a"), ("BOOKMARK", "")]
        assert await client.events(f"{PODS}?watch=true&labelSelector=app+in+(x,y)", 2) == [
            ("ADDED", "a"), ("ADDED", "b")]  # fmt: skip


async def test_a_compacted_history_is_gone_for_watches_and_pages() -> None:
    async with Fake() as client:
        for name in "abc":
            client.api.store.put(pod(name))
        _, page = await client.ask("GET", f"{PODS}?limit=2")
        token = page["metadata"]["continue"]
        _, rest = await client.ask("GET", f"{PODS}?limit=2&continue={token}")
        assert [p["metadata"]["name"] for p in page["items"] + rest["items"]] == ["a", "b", "c"]
        client.api.store.compact()
        assert (await client.ask("GET", f"{PODS}?continue={token}"))[0] == 410
        assert await client.events(f"{PODS}?watch=1&resourceVersion=101", 1) == [
            ("ERROR", "Expired")]  # fmt: skip


async def test_lost_events_are_never_seen_and_a_restart_keeps_port_and_objects() -> None:
    async with Fake() as client:
        api = client.api
        revision = api.store.revision
        api.muted = True
        api.store.put(pod("lost"))
        api.muted = False
        api.store.put(pod("seen"))
        url = api.url
        await api.stop()
        await api.start()
        assert api.url == url
        watched = await client.events(f"{PODS}?watch=1&resourceVersion={revision}", 1)
        assert watched == [("ADDED", "seen")]
        api.fail_next(503)
        assert (await client.ask("GET", PODS))[0] == 503
        assert len((await client.ask("GET", PODS))[1]["items"]) == 2


async def test_a_deployment_whose_selector_misses_its_pods_is_refused() -> None:
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pod("x")["spec"]}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
            "spec": {"selector": {"matchLabels": {"a": "c"}}, "template": template}}  # fmt: skip
    async with Fake() as client:
        assert (await client.ask("POST", DEPLOYMENTS, body))[0] == 422


async def test_an_unknown_request_fails_the_test() -> None:
    fake = Fake()
    with pytest.raises(AssertionError, match="does not know"):
        async with fake as client:
            assert (await client.ask("GET", f"{PODS}/a/log"))[0] == 404
