"""Entries of workers for the registry's tests."""

from __future__ import annotations

from typing import Any

from pigou.fleet.registry.entry import KVShape, Topology, WorkerEntry
from pigou.request import Role


def entry(worker: str = "w0", incarnation: str = "incarnation-a", **fields: Any) -> WorkerEntry:
    """Return an entry; `fields` replace what is given here."""
    given: dict[str, Any] = {
        "role": Role.DECODE,
        "model": "tiny",
        "version": "v1",
        "shape": KVShape(tp=2, kv_layout="shm:abc"),
        "url": f"http://10.0.0.1:{8000 + sum(worker.encode()) % 1000}",
        "topology": Topology(host="h1", rack="r1", zone="z1", gpus=2, labels={"nic": "ib0"}),
        "ttl_s": 10.0,
    }
    return WorkerEntry(worker=worker, incarnation=incarnation, **(given | fields))
