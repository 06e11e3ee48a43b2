"""SlotMap: which key lies in which slot, and which slots are being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SlotMap:
    """Keys in slots. A slot that is being read outlives its key. Not locked: the store locks."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        self._readers: dict[int, int] = {}
        self._doomed: set[int] = set()

    def __len__(self) -> int:
        """Keys."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        """Whether a key has a slot."""
        return key in self._slots

    def find(self, key: bytes) -> int | None:
        """Where a key lies, None for nowhere."""
        return self._slots.get(key)

    def put(self, key: bytes, slot: int) -> None:
        """Enter a key that is not there."""
        self._slots[key] = slot

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Find keys and pin their slots for reading; -1 where there is none."""
        slots = [self._slots.get(key, -1) for key in keys]
        for slot in slots:
            if slot >= 0:
                self._readers[slot] = self._readers.get(slot, 0) + 1
        return slots

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """End reading; returns the slots that nobody needs any more."""
        empty = []
        for slot in slots:
            if slot < 0:
                continue
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._doomed:
                    self._doomed.discard(slot)
                    empty.append(slot)
        return empty

    def remove(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """Forget keys; returns how many there were, and the slots that nobody needs any more."""
        slots = [slot for key in keys if (slot := self._slots.pop(key, -1)) >= 0]
        empty = [slot for slot in slots if slot not in self._readers]
        self._doomed.update(slot for slot in slots if slot in self._readers)
        return len(slots), empty

    def keys(self) -> list[bytes]:
        """All keys, in no order."""
        return list(self._slots)

    def slots(self) -> list[int]:
        """Where keys lie, in no order."""
        return list(self._slots.values())
