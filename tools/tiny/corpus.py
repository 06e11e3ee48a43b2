"""The text that the tiny model reads: Shakespeare and agent conversations, split into training
and held-out parts.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

HELD_OUT = 0.1  # share of each source that is never trained on
AGENT_LIMIT = 4000  # characters kept of one agent message


@dataclass
class Corpus:
    """Plain documents, and dialogues as lists of turns, alternately the user's and the
    assistant's.
    """

    documents: list[str] = field(default_factory=list)
    dialogues: list[list[str]] = field(default_factory=list)


@dataclass
class Split:
    """Training part and held-out part; `play` is the held-out Shakespeare as one string."""

    train: Corpus
    held_out: Corpus
    play: str


def load(folder: Path) -> Split:
    """Reads `tinyshakespeare.txt` and `agent-conversations.tar.zst` from `folder`.

    The last tenth of Shakespeare and every tenth agent session are held out. `FileNotFoundError`
    if a file is missing.
    """
    play = (folder / "tinyshakespeare.txt").read_text("utf-8")
    cut = play.index("\n\n", int(len(play) * (1 - HELD_OUT))) + 2
    split = Split(Corpus(), Corpus(), play[cut:])
    for part, text in ((split.train, play[:cut]), (split.held_out, play[cut:])):
        part.documents.append(text)
        part.dialogues.extend(scenes(text))
    for index, session in enumerate(sessions(folder / "agent-conversations.tar.zst")):
        part = split.held_out if index % 10 == 9 else split.train
        part.documents.extend(messages(session))
        part.dialogues.extend(exchanges(session))
    return split


def scenes(play: str, turns: int = 6) -> Iterator[list[str]]:
    """Runs of up to `turns` speeches, without the speakers' names, of at least two; a run begins
    where one ends.
    """
    speeches = []
    for block in play.split("\n\n"):
        name, _, speech = block.partition(":\n")
        if speech and "\n" not in name:
            speeches.append(speech.strip())
    for start in range(0, len(speeches) - 1, turns - 1):
        yield speeches[start : start + turns]


def sessions(archive: Path) -> Iterator[list[dict[str, str]]]:
    """The agent sessions of the archive that converse in prose, each a list of records with
    `input` and `output`.
    """
    raw = zstandard.ZstdDecompressor().stream_reader(archive.read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            handle = tar.extractfile(member) if member.name.endswith(".jsonl") else None
            if handle is not None:
                yield [json.loads(line) for line in handle.read().decode("utf-8").splitlines()]


def messages(session: list[dict[str, str]]) -> Iterator[str]:
    """The session's prose outputs, each beginning once: JSON and near-repeats are left out."""
    seen: set[str] = set()
    for record in session:
        text = record["output"].strip()
        start = text[:60]
        if text and text[0] not in "{[" and start not in seen:
            seen.add(start)
            yield text[:AGENT_LIMIT] + "\n"


def exchanges(session: list[dict[str, str]]) -> Iterator[list[str]]:
    """Pairs of a customer's message and the reply to it: short prose, each reply once."""
    seen: set[str] = set()
    for record in session:
        asked, reply = record["input"].split("\n\n")[-1].strip(), record["output"].strip()
        prose = (
            0 < len(asked) < 600 and 0 < len(reply) < 600 and not {asked[0], reply[0]} & set("{[<`")
        )
        if prose and reply not in seen:
            seen.add(reply)
            yield [asked, reply]
