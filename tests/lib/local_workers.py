"""The local workers of a fleet that a test starts."""

from __future__ import annotations

from collections.abc import Iterable

from pigou.fleet.config import LocalWorker
from pigou.fleet.sources.local import WorkerTemplate, start_workers


def local_workers(
    prefill: int, decode: int, both: int, arguments: Iterable[str], devices: Iterable[str]
) -> list[LocalWorker]:
    template = WorkerTemplate(arguments=tuple(arguments), devices=tuple(devices))
    return start_workers([template], {"": (prefill, decode, both)})
