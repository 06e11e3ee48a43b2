"""The objects of the fake: what may be written, what follows of it, and the history of changes."""

from __future__ import annotations

import copy
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonpatch
from tests.lib.fake_kubernetes.errors import ApiError
from tests.lib.fake_kubernetes.resources import BUILT_IN, Resource, defined
from tests.lib.fake_kubernetes.schema import pruned, validate
from tests.lib.fake_kubernetes.selectors import Matches, Object, at, put_at
from tests.lib.fake_kubernetes.writing import (
    check_finalizers,
    check_preconditions,
    labels_of,
    long_name,
    merged,
    named,
    now_text,
    spec_of,
)

MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
_SERVER_OWNED = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "selfLink")


@dataclass(frozen=True)
class Change:
    """One change of one object, as watches see it: `old` is None before, `new` after its life."""

    revision: int
    resource: tuple[str, str]
    old: Object | None
    new: Object | None


class ObjectStore:
    """All objects, and the changes that led to them.

    Attributes:
        revision: of the last change; it is the resourceVersion of lists.
        compacted: watches and pages from this revision or before it are Gone (410).
        history: changes, oldest first.
        notify: called after each change.
    """

    def __init__(self) -> None:
        self.resources: dict[tuple[str, str, str], Resource] = {}
        self.objects: dict[tuple[str, str], dict[tuple[str, str], Object]] = {}
        self.revision, self.compacted = 100, 0
        self.history: list[Change] = []
        self.notify: Callable[[], None] = lambda: None
        for resource in BUILT_IN:
            self._serve(resource)
        for name in ("default", "kube-system"):
            self.create(self.find("namespaces"), "", named("Namespace", name))

    # Looking
    def find(self, plural: str, group: str | None = None) -> Resource:
        """Return the resource of a plural name; its group matters where two have the name.

        Raises:
            KeyError: there is none.
        """
        for resource in self.resources.values():
            if resource.plural == plural and group in (None, resource.group):
                return resource
        raise KeyError(plural)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object; nobody may change it.

        Raises:
            ApiError: 404.
        """
        try:
            return self._of(resource)[namespace, name]
        except KeyError:
            raise ApiError(404, f'{long_name(resource)} "{name}" not found') from None

    def list(self, resource: Resource, namespace: str, matches: Matches) -> list[Object]:
        """Return the objects of one namespace (empty: of all), in the order of their names."""
        items = sorted(self._of(resource).items())
        return [o for (ns, _), o in items if namespace in ("", ns) and matches(o)]

    def all(self, plural: str, **labels: str) -> list[Object]:
        """Return copies of objects by plural name and labels, for tests."""
        items = self.list(self.find(plural), "", lambda _: True)
        wanted = labels.items()
        return [copy.deepcopy(o) for o in items if wanted <= labels_of(o).items()]

    # Writing
    def put(self, body: Object) -> Object:
        """Write an object whole, status included, for tests; return it as it is then."""
        group, _, version = body["apiVersion"].rpartition("/")
        plurals = (r for k, r in self.resources.items() if k[:2] == (group, version))
        resource = next(r for r in plurals if r.kind == body["kind"])
        namespace = body["metadata"].get("namespace", "default") if resource.namespaced else ""
        name = body["metadata"]["name"]
        if (namespace, name) not in self._of(resource):
            self.create(resource, namespace, body)
        old = self.get(resource, namespace, name)
        body = {**body, "metadata": {**old["metadata"], **body["metadata"]}}
        body["metadata"].pop("resourceVersion", None)
        self.replace(resource, namespace, name, body, checked=False)
        if resource.status and "status" in body:
            self.replace(resource, namespace, name, body, "status", checked=False)
        return copy.deepcopy(self.get(resource, namespace, name))

    def create(
        self, resource: Resource, namespace: str, body: Object, *, strict: bool = False,
        dry_run: bool = False,
    ) -> Object:  # fmt: skip
        """Add an object, and return it.

        Raises:
            ApiError: 400 malformed; 404 no such namespace; 409 it exists; 422 invalid.
        """
        body = copy.deepcopy(body)
        meta = self._checked_metadata(resource, namespace, body)
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        name = meta.get("name") or ""
        if not _NAME.match(name):
            raise ApiError(422, f'{resource.kind} "{name}" is invalid: metadata.name')
        if resource.namespaced and ("", namespace) not in self.objects["", "namespaces"]:
            raise ApiError(404, f'namespaces "{namespace}" not found')
        if (namespace, name) in self._of(resource):
            message = f'{long_name(resource)} "{name}" already exists'
            raise ApiError(409, message, "AlreadyExists")
        if resource.status:
            body.pop("status", None)
        body = self._validated(resource, body, None, strict)
        meta = body["metadata"]
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=now_text(), generation=1)
        meta.pop("deletionTimestamp", None)
        if resource.namespaced:
            meta["namespace"] = namespace
        if dry_run:
            return body
        self._commit(resource, None, body)
        if resource.plural == "customresourcedefinitions":
            self._define(body)
        self.collect_garbage()
        return body

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, part: str = "", *,
        strict: bool = False, checked: bool = True, dry_run: bool = False,
    ) -> Object:  # fmt: skip
        """Change an object (`part`: its status or scale alone), and return what it is then.

        Raises:
            ApiError: 400, 404, 409 by resourceVersion or uid, 422 invalid.
        """
        old = self.get(resource, namespace, name)
        new = copy.deepcopy(body)
        check_preconditions(resource, old, new, checked and part != "scale")
        if part == "scale":
            new = self._scaled(resource, old, new)
        elif part == "status":
            new = {**copy.deepcopy(old), "status": new.get("status", {})}
        else:
            self._checked_metadata(resource, namespace, new)
            if new["metadata"].get("name", name) != name:
                raise ApiError(400, "the name of the object does not match the name on the URL")
            new["metadata"]["name"] = name
            if resource.status:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = copy.deepcopy(old["status"])
        new = self._validated(resource, new, old, strict)
        meta, before = new["metadata"], old["metadata"]
        meta.update({k: before[k] for k in _SERVER_OWNED if k in before})
        meta["resourceVersion"] = before["resourceVersion"]
        if resource.namespaced:
            meta["namespace"] = namespace
        check_finalizers(resource, meta, before)
        if spec_of(new, resource) != spec_of(old, resource):
            meta["generation"] = before["generation"] + 1
        if new == old or dry_run:
            return new
        if "deletionTimestamp" in meta and not meta.get("finalizers"):
            self._commit(resource, old, None)
            self.collect_garbage()
            return new
        self._commit(resource, old, new)
        if resource.plural == "customresourcedefinitions":
            self._define(new)
        return new

    def patch(
        self, resource: Resource, namespace: str, name: str, patch: Any, media_type: str,
        part: str = "", **options: bool,
    ) -> Object:  # fmt: skip
        """Change an object by a merge patch or a JSON patch, and return what it is then.

        Raises:
            ApiError: as `replace`; 415 for other patches; 422 where a `test` fails.
        """
        old = self.get(resource, namespace, name)
        base = self.scale_of(resource, old) if part == "scale" else old
        if media_type == MERGE:
            if not isinstance(patch, dict):
                raise ApiError(400, "a merge patch is a JSON object")
            new = merged(base, patch)
        elif media_type == JSON_PATCH:
            try:
                new = jsonpatch.apply_patch(base, patch)
            except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
                raise ApiError(422, f"the server rejected our request: {error}") from error
        else:
            known = f"{MERGE} and {JSON_PATCH}"
            raise ApiError(415, f"{media_type} is not served by this fake; it has {known}")
        return self.replace(resource, namespace, name, new, part, checked=False, **options)

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Object | None = None
    ) -> Object:
        """Delete an object, or mark it as deleted until its finalizers are gone.

        Raises:
            ApiError: 404; 409 where a precondition fails.
        """
        old, options = self.get(resource, namespace, name), options or {}
        for key, value in (options.get("preconditions") or {}).items():
            if old["metadata"].get(key) != value:
                raise ApiError(409, f"Precondition failed: {key}: {value}")
        if options.get("propagationPolicy") == "Orphan":
            self._orphan(old["metadata"]["uid"])
        if not old["metadata"].get("finalizers"):
            self._commit(resource, old, None)
            if resource.plural == "customresourcedefinitions":
                self._undefine(old)
            self.collect_garbage()
        elif "deletionTimestamp" not in old["metadata"]:
            new = copy.deepcopy(old)
            new["metadata"].update(deletionTimestamp=now_text(), deletionGracePeriodSeconds=0)
            new["metadata"]["generation"] += 1
            self._commit(resource, old, new)
            return new
        return old

    def scale_of(self, resource: Resource, item: Object) -> Object:
        """Return the `Scale` of an object."""
        assert resource.scale is not None
        wanted, actual, selector = resource.scale
        labels = at(item, selector) if selector else ""
        if isinstance(labels, dict):
            labels = ",".join(f"{k}={v}" for k, v in labels.get("matchLabels", {}).items())
        keep = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        return {
            "kind": "Scale", "apiVersion": "autoscaling/v1",
            "metadata": {k: item["metadata"][k] for k in keep},
            "spec": {"replicas": at(item, wanted) or 0},
            "status": {"replicas": at(item, actual) or 0, "selector": labels or ""},
        }  # fmt: skip

    def compact(self) -> None:
        """Forget the history: what a client saw before is Gone (410)."""
        self.compacted = self.revision
        self.history.clear()
        self.notify()

    def collect_garbage(self) -> None:
        """Delete the objects whose owners are all gone, and what they own in turn."""
        while True:
            alive = {
                o["metadata"]["uid"] for items in self.objects.values() for o in items.values()
            }
            for resource in list(self.resources.values()):
                for (namespace, name), item in list(self._of(resource).items()):
                    owners = item["metadata"].get("ownerReferences")
                    gone = owners and not any(owner["uid"] in alive for owner in owners)
                    if gone and "deletionTimestamp" not in item["metadata"]:
                        self.delete(resource, namespace, name)
                        break
                else:
                    continue
                break
            else:
                return

    # Within
    def _of(self, resource: Resource) -> dict[tuple[str, str], Object]:
        return self.objects[resource.group, resource.plural]

    def _serve(self, resource: Resource) -> None:
        self.resources[resource.group, resource.version, resource.plural] = resource
        self.objects.setdefault((resource.group, resource.plural), {})

    def _define(self, crd: Object) -> None:
        resources = defined(crd)
        for resource in resources:
            self._serve(resource)
        status = {"acceptedNames": crd["spec"]["names"], "storedVersions": [resources[0].version]}
        status["conditions"] = [{"type": kind, "status": "True", "reason": kind, "message": ""}
                                for kind in ("NamesAccepted", "Established")]  # fmt: skip
        crds, name = self.find("customresourcedefinitions"), crd["metadata"]["name"]
        body = {**self.get(crds, "", name), "status": status}
        self.replace(crds, "", name, body, "status", checked=False)

    def _undefine(self, crd: Object) -> None:
        for resource in defined(crd):
            for namespace, name in list(self._of(resource)):
                self._commit(resource, self.get(resource, namespace, name), None)
            del self.resources[resource.group, resource.version, resource.plural]

    def _checked_metadata(self, resource: Resource, namespace: str, body: Object) -> Object:
        if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
            raise ApiError(400, "Object 'metadata' is missing")
        if (body.get("apiVersion"), body.get("kind")) != (resource.api_version, resource.kind):
            wanted = f"{resource.api_version} {resource.kind}"
            raise ApiError(400, f"{body.get('apiVersion')} {body.get('kind')} is not {wanted}")
        if resource.namespaced and body["metadata"].get("namespace", namespace) != namespace:
            raise ApiError(400, "the namespace of the object does not match that of the request")
        return body["metadata"]

    def _validated(
        self, resource: Resource, new: Object, old: Object | None, strict: bool
    ) -> Object:
        name = new["metadata"].get("name")
        if resource.schema is not None:
            unknown: list[str] = []
            new = pruned(new, resource.schema, "", unknown)
            if unknown and strict:
                names = ", ".join(f'unknown field "{path}"' for path in unknown)
                raise ApiError(400, f"strict decoding error: {names}")
            validate(new, resource.schema, resource.kind)
        elif resource.group == "apps":
            labels = (at(new, "spec.template.metadata.labels") or {}).items()
            selected = at(new, "spec.selector.matchLabels") or {}
            if not selected or not selected.items() <= labels:
                raise ApiError(422, f'{resource.kind} "{name}" is invalid: spec.selector does not '
                               "match the template's labels")  # fmt: skip
            if old is not None and old["spec"]["selector"] != new["spec"]["selector"]:
                raise ApiError(422, f'{resource.kind} "{name}" is invalid: spec.selector: field is '
                               "immutable")  # fmt: skip
        if (hosts := at(new, "spec.template.spec.containers")) is not None and not hosts:
            raise ApiError(422, f'{resource.kind} "{name}" is invalid: containers: Required value')
        return new

    def _scaled(self, resource: Resource, old: Object, scale: Object) -> Object:
        assert resource.scale is not None
        replicas = at(scale, "spec.replicas") or 0
        if not isinstance(replicas, int) or replicas < 0:
            raise ApiError(422, f"Scale is invalid: spec.replicas: {replicas}")
        new = copy.deepcopy(old)
        put_at(new, resource.scale[0], replicas)
        return new

    def _orphan(self, uid: str) -> None:
        for resource in self.resources.values():
            for item in list(self._of(resource).values()):
                owners = item["metadata"].get("ownerReferences") or []
                if any(owner["uid"] == uid for owner in owners):
                    new = copy.deepcopy(item)
                    left = [owner for owner in owners if owner["uid"] != uid]
                    new["metadata"]["ownerReferences"] = left
                    self._commit(resource, item, new)

    def _commit(self, resource: Resource, old: Object | None, new: Object | None) -> None:
        self.revision += 1
        item = new if new is not None else old
        assert item is not None
        key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
        if new is None:
            old = copy.deepcopy(item)
            old["metadata"]["resourceVersion"] = str(self.revision)
            del self._of(resource)[key]
        else:
            new["metadata"]["resourceVersion"] = str(self.revision)
            self._of(resource)[key] = new
        self.history.append(Change(self.revision, (resource.group, resource.plural), old, new))
        self.notify()
