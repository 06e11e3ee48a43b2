"""The kinds of objects that the fake serves: built-in ones, and those of definitions (CRD)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resource:
    """One kind of objects.

    Attributes:
        status: its status is written apart from its spec.
        scale: paths of spec.replicas, status.replicas and the selector; None without `/scale`.
        schema: OpenAPI v3 schema of a custom resource; None for built-in ones.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = True
    scale: tuple[str, str, str] | None = None
    short_names: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    def discovery(self) -> list[dict[str, Any]]:
        """Return its entries of an `APIResourceList`, subresources too."""
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        entry: dict[str, Any] = {
            "name": self.plural, "singularName": self.kind.lower(), "kind": self.kind,
            "namespaced": self.namespaced, "verbs": verbs, "shortNames": list(self.short_names),
        }  # fmt: skip
        entries = [entry]
        part = {"singularName": "", "namespaced": self.namespaced}
        part["verbs"] = ["get", "patch", "update"]
        if self.status:
            entries.append({**part, "name": f"{self.plural}/status", "kind": self.kind})
        if self.scale:
            scale = {"name": f"{self.plural}/scale", "kind": "Scale"}
            entries.append({**part, **scale, "group": "autoscaling", "version": "v1"})
        return entries


_SCALE = (".spec.replicas", ".status.replicas", ".spec.selector")


def _core(plural: str, kind: str, *short_names: str, namespaced: bool = True) -> Resource:
    status = plural in {"pods", "services", "namespaces", "nodes", "persistentvolumeclaims"}
    return Resource("", "v1", plural, kind, namespaced, status, short_names=short_names)


BUILT_IN = (
    _core("namespaces", "Namespace", "ns", namespaced=False),
    _core("nodes", "Node", "no", namespaced=False),
    _core("pods", "Pod", "po"),
    _core("services", "Service", "svc"),
    _core("endpoints", "Endpoints", "ep"),
    _core("events", "Event", "ev"),
    _core("configmaps", "ConfigMap", "cm"),
    _core("secrets", "Secret"),
    _core("serviceaccounts", "ServiceAccount", "sa"),
    _core("persistentvolumeclaims", "PersistentVolumeClaim", "pvc"),
    Resource("apps", "v1", "deployments", "Deployment", scale=_SCALE, short_names=("deploy",)),
    Resource("apps", "v1", "statefulsets", "StatefulSet", scale=_SCALE, short_names=("sts",)),
    Resource("batch", "v1", "jobs", "Job"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", short_names=("pdb",)),
    Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", status=False),
    Resource("coordination.k8s.io", "v1", "leases", "Lease", status=False),
    Resource("events.k8s.io", "v1", "events", "Event", status=False),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", status=False),
    Resource("rbac.authorization.k8s.io", "v1", "roles", "Role", status=False),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding", status=False),
    Resource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", False, False),
    Resource(
        "rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", False, False
    ),
    Resource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition",
        False, short_names=("crd",),
    ),
)  # fmt: skip


def defined(crd: dict[str, Any]) -> list[Resource]:
    """Return what a definition (CRD) adds: one resource for each version that is served."""
    spec = crd["spec"]
    names = spec["names"]
    resources = []
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        parts = version.get("subresources", {})
        scale = parts.get("scale")
        paths = scale and (
            scale["specReplicasPath"], scale["statusReplicasPath"],
            scale.get("labelSelectorPath", ""),
        )  # fmt: skip
        resources.append(
            Resource(
                spec["group"], version["name"], names["plural"], names["kind"],
                spec["scope"] == "Namespaced", "status" in parts, paths,
                tuple(names.get("shortNames", ())), version["schema"]["openAPIV3Schema"],
            )
        )  # fmt: skip
    return resources


def openapi(path: str, resources: Iterable[Resource]) -> dict[str, Any] | None:
    """Return the index of OpenAPI documents, or one: it says that the server checks fields itself.

    kubectl asks for it before it writes, and leaves the checks to such a server.
    """
    if not path:
        urls = {r.path: {"serverRelativeURL": f"/openapi/v3{r.path}"} for r in resources}
        return {"paths": {name.strip("/"): url for name, url in urls.items()}}
    check = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {}
    for resource in resources:
        if resource.path == path:
            scope = "/namespaces/{namespace}" if resource.namespaced else ""
            kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
            patch = {"parameters": check, "x-kubernetes-group-version-kind": kind, "responses": {}}
            paths[f"{path}{scope}/{resource.plural}/{{name}}"] = {"patch": patch}
    info = {"title": "fake", "version": "v1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths} if paths else None
