"""What a method is given to read, what it answers, and the meter that turns it into figures.

A task lies in a folder, so that two processes can share it: `task.json`, `tokens.npy`, and of the
full cache `logits.npy`, `attention.npy` and `mass.npy`. Only NumPy is needed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.token_eviction.metrics import divergence, kept_mass, nll, present


@dataclass(frozen=True)
class Task:
    """Rows of tokens of equal length.

    Where `whole` is 0, a row is streamed: `chunk` tokens at a time, entries being given up between
    chunks so that never more than the budget are held. Else the first `whole` tokens are computed
    at once, the cache is cut to the budget, and the rest is computed behind that, in one go.
    """

    name: str
    model: str
    length: int  # tokens of a row
    whole: int  # tokens computed before the only cut; 0 where the row is streamed
    chunk: int  # tokens between cuts of a streamed row
    measured: int  # first position whose logits are measured; the last is `length - 2`
    every: int  # positions between two whose attention is measured, from `measured` on

    @property
    def asked(self) -> range:
        """The positions whose attention is measured."""
        return range(self.measured, self.length - 1, self.every)

    @property
    def cuts(self) -> list[int]:
        """Tokens that were computed when entries may be given up, ascending."""
        if self.whole:
            return [self.whole]
        return list(range(self.chunk, self.length, self.chunk))

    def spans(self) -> list[tuple[int, int]]:
        """Return first and last (exclusive) position of each piece that is computed at once."""
        edges = [0, *self.cuts, self.length]
        return list(pairwise(edges))

    def write(self, folder: Path) -> None:
        """Store it."""
        (folder / "task.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Prepared:
    """A task with its tokens and what the full cache gives."""

    task: Task
    folder: Path
    tokens: NDArray[np.int64]  # shape (rows, length)
    # full cache's logits at the measured positions, shape (rows, n, vocab).
    logits: NDArray[np.float32]
    # full cache's attention at the asked positions, shape (rows, m, layers, heads, length).
    attention: NDArray[np.float32]
    # attention that the full cache has given to each position by each cut, and by the end of the
    # row, shape (rows, cuts + 1, layers, kv_heads, length).
    mass: NDArray[np.float32]

    @classmethod
    def read(cls, folder: Path) -> Prepared:
        """Open a folder; the arrays are mapped, not read."""
        task = Task(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
        names = ("tokens", "logits", "attention", "mass")
        return cls(task, folder, *(np.load(folder / f"{n}.npy", mmap_mode="r") for n in names))

    def future(self, cut: int, horizon: int) -> NDArray[np.float32]:
        """Return the attention that the full cache gives within a horizon after a cut.

        Args:
            cut: index into `Task.cuts`.
            horizon: tokens after it, a multiple of the chunk where the row is streamed; beyond the
                end of the row there are none.

        Returns:
            Shape (rows, layers, kv_heads, length).
        """
        task = self.task
        reach = task.cuts[cut] + horizon
        later = [i for i, at in enumerate(task.cuts) if at >= reach]
        end = later[0] if later else len(task.cuts)
        return np.asarray(self.mass[:, end] - self.mass[:, cut])


@dataclass(frozen=True)
class Outcome:
    """What came of a task."""

    nll: NDArray[np.float64]  # loss at each measured position, in nats, shape (rows, n)
    kl: NDArray[np.float64]  # divergence from the full cache there, in nats, shape (rows, n)
    right: NDArray[np.bool_]  # whether the likeliest token is the one that follows, shape (rows, n)
    # share of the full cache's attention on what was kept, shape (rows, m, layers, heads).
    mass: NDArray[np.float64]
    mean_bytes: float  # keys and values, over the tokens from `measured` on, for a row
    peak_bytes: float  # the most that attention worked on at once after the first cut, for a row
    side_bytes: float  # the most that the method kept beside keys and values, for a row
    seconds: float

    def write(self, path: Path) -> None:
        """Store it, wholly or not at all."""
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **asdict(self))
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read what `write` stored."""
        with np.load(path) as found:
            return cls(
                found["nll"], found["kl"], found["right"], found["mass"],
                float(found["mean_bytes"]), float(found["peak_bytes"]),
                float(found["side_bytes"]), float(found["seconds"]),
            )  # fmt: skip


class Meter:
    """Collects what a method shows of some rows of a task."""

    def __init__(self, prepared: Prepared, rows: slice) -> None:
        self._prepared, self._rows = prepared, rows
        task = prepared.task
        self._tokens = prepared.tokens[rows]
        shape = (len(self._tokens), task.length - 1 - task.measured)
        self._nll, self._kl = np.full(shape, np.nan), np.full(shape, np.nan)
        self._right = np.zeros(shape, dtype=np.bool_)
        sizes = prepared.attention.shape[1:4]
        self._mass = np.full((len(self._tokens), *sizes), np.nan)
        self._steps: list[tuple[int, float]] = []
        self._peak = self._side = 0.0

    def logits(self, first: int, logits: NDArray[np.float32]) -> None:
        """Take up logits of successive positions; those not measured are passed over.

        Args:
            logits: shape (rows, positions, vocab).
        """
        task = self._prepared.task
        begin, end = max(first, task.measured), min(first + logits.shape[1], task.length - 1)
        if begin >= end:
            return
        cut = logits[:, begin - first : end - first]
        here = slice(begin - task.measured, end - task.measured)
        targets = self._tokens[:, begin + 1 : end + 1]
        self._nll[:, here] = nll(cut, targets)
        self._kl[:, here] = divergence(self._prepared.logits[self._rows, here], cut)
        self._right[:, here] = cut.argmax(axis=-1) == targets

    def kept(self, first: int, end: int, positions: NDArray[np.integer]) -> None:
        """Take up what attention worked on while positions `first` to `end` were computed.

        Args:
            end: the one behind the last.
            positions: of the entries, those just computed among them, negative where there is
                none, shape (rows, layers, kv_heads, entries).
        """
        asked = self._prepared.task.asked
        wanted = [i for i, at in enumerate(asked) if first <= at < end]
        if not wanted:
            return
        flags = present(positions, self._prepared.task.length)
        for i in wanted:
            seen = flags.copy()
            seen[..., asked[i] + 1 :] = False
            self._mass[:, i] = kept_mass(self._prepared.attention[self._rows, i], seen)

    def held(self, first: int, end: int, held: float, side: float = 0.0) -> None:
        """Take up what was held while positions `first` to `end` were computed.

        Args:
            end: the one behind the last.
            held: bytes of keys and values, of all rows together.
            side: bytes beside them.
        """
        task = self._prepared.task
        if first >= task.cuts[0]:
            self._peak = max(self._peak, held)
            self._side = max(self._side, side)
        if end > task.measured:
            self._steps.append((end - max(first, task.measured), held))

    def outcome(self, seconds: float) -> Outcome:
        """Return the figures.

        Raises:
            ValueError: logits or attention were not shown of every position that is measured.
        """
        if np.isnan(self._nll).any() or np.isnan(self._mass).any():
            raise ValueError(f"{self._prepared.task.name}: some positions were not shown")
        rows = len(self._tokens)
        tokens = sum(count for count, _ in self._steps)
        mean = sum(count * held for count, held in self._steps) / tokens
        return Outcome(
            self._nll, self._kl, self._right, self._mass,
            mean / rows, self._peak / rows, self._side / rows, seconds,
        )  # fmt: skip


def joined(parts: list[Outcome]) -> Outcome:
    """Return one outcome of the rows of several, in order."""
    rows = np.array([len(part.nll) for part in parts], dtype=np.float64)
    share = rows / rows.sum()
    return Outcome(
        np.concatenate([part.nll for part in parts]),
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.right for part in parts]),
        np.concatenate([part.mass for part in parts]),
        float(share @ [part.mean_bytes for part in parts]),
        max(part.peak_bytes for part in parts),
        max(part.side_bytes for part in parts),
        sum(part.seconds for part in parts),
    )
