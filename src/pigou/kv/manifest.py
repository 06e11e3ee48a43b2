"""Manifest: which version of a corpus, permission or session is current, on every gateway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from pigou.kv.tenure import Tenure
from pigou.request import NEVER

#: Fields of a tenure whose values change versions; `session` names an agent's session.
FIELDS = ("corpus", "principal", "permissions", "tools", "template", "safety", "session")
#: Separates a principal from its session; no header can hold it.
SESSION = "\x1f"
#: Separates a corpus from the version that a request states, `handbook@7`.
AT = "@"


class ManifestEntry(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The current version of one value of a tenant; the larger of two entries counts."""

    serial: int  # larger than all that its gateway knew
    version: str = ""
    tenant: str = ""
    field: str = ""
    value: str = ""
    until: int = NEVER  # nothing made before it lasts longer, ns since 1970


@dataclass(frozen=True, slots=True)
class Bound:
    """A tenure under the manifest of one moment; after a change, nothing made under it is found."""

    declared: Tenure
    tenure: Tenure  # with versions in its release


class Manifest:
    """Entries by tenant, field and value; merging is commutative, so that gateways agree."""

    def __init__(self, max_entries: int = 32_768) -> None:
        self.max_entries, self.serial = max_entries, 0
        self.entries: dict[tuple[str, str, str], ManifestEntry] = {}

    def change(
        self, tenant: str, field: str, value: str, version: str, now: int, until: int = NEVER
    ) -> ManifestEntry | None:
        """Record a new version, or a revocation; None if the manifest is full."""
        if len(self.entries) >= self.max_entries:
            self.entries = {key: old for key, old in self.entries.items() if old.until > now}
        if len(self.entries) >= self.max_entries and (tenant, field, value) not in self.entries:
            return None
        entry = ManifestEntry(self.serial + 1, version, tenant, field, value, until)
        self.merge([entry])
        return entry

    def merge(self, entries: Iterable[ManifestEntry]) -> list[ManifestEntry]:
        """Take entries of other gateways; return those that changed something."""
        changed = []
        for entry in entries:
            key = (entry.tenant, entry.field, entry.value)
            self.serial = max(self.serial, entry.serial)
            if key not in self.entries or self.entries[key] < entry:
                self.entries[key] = entry
                changed.append(entry)
        return changed

    def bind(self, tenure: Tenure) -> Bound:
        """Bind a tenure to the present versions."""
        text = repr([
            (entry.field, entry.value, entry.serial, entry.version)
            for entry in self.of(tenure) if entry is not None
        ])  # fmt: skip
        return Bound(tenure, replace(tenure, release=f"{len(text)};{text}{tenure.release}"))

    def holds(self, bound: Bound) -> bool:
        """True if nothing that the tenure depends on changed since it was bound."""
        return self.bind(bound.declared) == bound and not self.is_old(bound.declared)

    def is_old(self, tenure: Tenure) -> bool:
        """True if the tenure states a corpus as `NAME@VERSION`, and another is current."""
        name, at, version = tenure.corpus.rpartition(AT)
        entry = self.entries.get((tenure.tenant, "corpus", name))
        return bool(at) and entry is not None and entry.version != version

    def of(self, tenure: Tenure) -> Iterator[ManifestEntry | None]:
        """Yield the entry of each of a tenure's values, in a fixed order."""
        find, tenant = self.entries.get, tenure.tenant
        corpus = tenure.corpus.rpartition(AT)[0] or tenure.corpus
        principal, _, session = tenure.principal.partition(SESSION)
        for field, value in (("corpus", corpus), ("principal", principal), ("session", session),
                             ("template", tenure.template), ("safety", tenure.safety)):  # fmt: skip
            yield find((tenant, field, value)) if value else None
        for field, values in (("permissions", tenure.permissions), ("tools", tenure.tools)):
            for value in sorted(values):
                yield find((tenant, field, value))
