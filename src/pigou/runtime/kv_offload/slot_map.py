"""Shelf: which key lies in which place, and which places are being read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class SlotMap:
    """Keys in places; a place that is being read outlives its key. Not locked: the store locks."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._readers: dict[int, int] = {}
        self._doomed: set[int] = set()

    def __len__(self) -> int:
        """Keys."""
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        """Whether a key has a place."""
        return key in self._places

    def find(self, key: bytes) -> int | None:
        """Where a key lies, None for nowhere."""
        return self._places.get(key)

    def put(self, key: bytes, place: int) -> None:
        """Enter a key that is not there."""
        self._places[key] = place

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Find keys and keep their places for reading; -1 where there is none."""
        places = [self._places.get(key, -1) for key in keys]
        for place in places:
            if place >= 0:
                self._readers[place] = self._readers.get(place, 0) + 1
        return places

    def unpin(self, places: Iterable[int]) -> list[int]:
        """End reading; returns the places that nobody needs any more."""
        empty = []
        for place in places:
            if place < 0:
                continue
            self._readers[place] -= 1
            if not self._readers[place]:
                del self._readers[place]
                if place in self._doomed:
                    self._doomed.discard(place)
                    empty.append(place)
        return empty

    def remove(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """Forget keys; returns how many there were, and the places that nobody needs any more."""
        places = [place for key in keys if (place := self._places.pop(key, -1)) >= 0]
        empty = [place for place in places if place not in self._readers]
        self._doomed.update(place for place in places if place in self._readers)
        return len(places), empty

    def keys(self) -> list[bytes]:
        """All keys, in no order."""
        return list(self._places)

    def places(self) -> list[int]:
        """Where keys lie, in no order."""
        return list(self._places.values())
