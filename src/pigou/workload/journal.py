"""A journal's file, read: its runs and entries, and the workload that it recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pigou.config import ConfigError
from pigou.control.journal import (
    End,
    Entry,
    First,
    Head,
    JournalError,
    More,
    Submit,
    Up,
    decode,
)
from pigou.request import NEVER, SECOND, FinishReason, Worker
from pigou.workload.packed import unpacked
from pigou.workload.trace import Session, Trace, Turn, ordered


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a journal; `entry` is None where it was cut off when its writer was killed."""

    number: int
    entry: Head | Entry | None


def is_journal(first: bytes) -> bool:
    """Whether a file with this first line is a journal."""
    try:
        return isinstance(decode(first), Head)
    except JournalError:
        return b'"k":"journal"' in first.replace(b" ", b"")


def lines(path: str | Path) -> Iterator[Line]:
    """Yield a journal's lines; `.gz` and `.zst` are unpacked.

    A run's last line may be cut off.

    Raises:
        ConfigError: the file cannot be read, is no journal, or has a line that is no entry.
    """
    broken: tuple[int, str] | None = None
    number = 0
    try:
        with unpacked(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = decode(line)
                except JournalError as error:
                    if broken or number == 1:
                        raise ConfigError(_wrong(path, *(broken or (number, str(error))))) from None
                    broken = (number, str(error))
                    continue
                if number == 1 and not isinstance(entry, Head):
                    raise ConfigError(f"journal: {path} does not begin with the head of one")
                if broken and not isinstance(entry, Head):
                    raise ConfigError(_wrong(path, *broken))
                if broken:
                    yield Line(broken[0], None)
                    broken = None
                yield Line(number, entry)
    except (OSError, EOFError) as error:
        raise ConfigError(f"journal: {path} cannot be read ({error})") from error
    if number == 0:
        raise ConfigError(f"journal: {path} is empty")
    if broken:
        yield Line(broken[0], None)


def _wrong(path: str | Path, number: int, why: str) -> str:
    return f"journal: line {number} of {path} is no entry ({why})"


@dataclass(slots=True)
class _Asked:
    entry: Submit
    start: int  # nanoseconds since 1970
    input: int
    output: int = 0
    routed: bool = False
    answered: bool = False
    shed: bool = False

    def is_load(self, reason: FinishReason | None) -> bool:
        """Whether it was there to be served, as far as its end (None: it has none) tells."""
        if self.answered or self.shed:
            return True
        return self.routed and reason is not FinishReason.ERROR

    def tokens(self, usual: float) -> int:
        """Return the tokens of its output; `usual` are those of others."""
        if self.shed and not self.answered:
            return max(1, round(min(self.entry.most, usual)))
        return max(1, self.output)


def read_workload(path: str | Path) -> Trace:
    """Return what was asked of the gateway, as sessions of one turn.

    Outputs have the tokens that came, at least 1. Requests that went on elsewhere count once,
    with their first prompt; those that were cancelled, or had not ended when the journal ended,
    are as long as what came of them. Requests that were shed, for want of room, were asked for as
    well: they have the mean output of those that were answered, at most their limit; their limit
    where none was. Others that never had a worker, and those that ended in an error before a
    token (refused, by the gateway or a worker, or failed), are left out, as are prompts that were
    shed and that no worker's KV cache holds. Block ids are numbered anew, in the order of their
    first use, at the smallest block size of the fleet.

    Raises:
        ConfigError: it cannot be read, or has no requests.
    """
    requests = list(_requests(path))
    if not requests:
        raise ConfigError(
            f"trace: {path} is a journal without requests that a worker served, or would have"
        )
    sizes = Counter(size for each in requests for size in each.entry.keys)
    size = min((size for size, uses in sizes.items() if uses == max(sizes.values())), default=1)
    usual = _usual(requests)
    ids: dict[int, int] = {}
    sessions = []
    for number, each in enumerate(requests):
        keys = np.frombuffer(each.entry.keys.get(size, b""), dtype="<u8").tolist()
        blocks = tuple(ids.setdefault(key, len(ids)) for key in keys)
        # What has no blocks shares nothing.
        scope = "journal" if blocks else str(number)
        turn = Turn(each.input, each.tokens(usual), blocks)
        start = (each.start - requests[0].start) / SECOND
        sessions.append(Session(start, scope, (turn,), each.entry.tenant))
    return ordered(float(size), sessions)


def _usual(requests: list[_Asked]) -> float:
    """Return the mean output of those that were answered; without any there is no bound."""
    outputs = [each.output for each in requests if each.output]
    return sum(outputs) / len(outputs) if outputs else NEVER


def _requests(path: str | Path) -> Iterator[_Asked]:
    shift = most = 0
    asked: dict[str, _Asked] = {}
    for line in lines(path):
        entry = line.entry
        match entry:
            case Head(now=now, unix=unix):
                yield from _left(asked)
                shift = unix - now
            case Up(worker=worker):
                most = max(most, _held(worker))
            case Submit() if entry.id not in asked:
                start = (min(entry.arrival, entry.now) or entry.now) + shift
                asked[entry.id] = _Asked(entry, start, entry.prompt)
            case First(id=id) if id in asked:
                asked[id].answered = True
            case More(id=id, count=count) if id in asked:
                asked[id].output += count
                asked[id].answered = True
            case End(id=id, reason=reason) if id in asked:
                ended = asked.pop(id)
                if ended.is_load(reason):
                    yield ended
            case _:
                pass
        if entry is not None and not isinstance(entry, Head):
            _note_decisions(entry, asked, most or NEVER)
    yield from _left(asked)


def _left(asked: dict[str, _Asked]) -> Iterator[_Asked]:
    """Take out those that have no end."""
    yield from (each for each in asked.values() if each.is_load(None))
    asked.clear()


def _held(worker: Worker) -> int:
    """Return the most tokens that a worker holds; without a bound where it did not say."""
    return worker.blocks * worker.block_size or NEVER


def _note_decisions(entry: Entry, asked: dict[str, _Asked], most: int) -> None:
    """Note who was routed, and who was shed, unless its prompt has more than `most` tokens."""
    for each in entry.out:
        if not isinstance(each, dict) or (found := asked.get(each.get("request", ""))) is None:
            continue
        if "choice" in each:
            found.routed = True
        elif "retry_after" in each:
            found.shed = found.input <= most
