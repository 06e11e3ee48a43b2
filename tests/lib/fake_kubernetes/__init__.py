"""A Kubernetes API server in memory, for tests: no cluster runs, no container starts.

It keeps what clients rely on: separation of spec and status, generation, resourceVersion,
finalizers, owners, selectors, pages, watches, and schemas of custom resources. It has no
scheduler, no kubelet, no controllers, no admission and no access control.
"""

from tests.lib.fake_kubernetes.objects import ObjectStore
from tests.lib.fake_kubernetes.server import FakeKubernetes, SeenRequest

__all__ = ["FakeKubernetes", "ObjectStore", "SeenRequest"]
