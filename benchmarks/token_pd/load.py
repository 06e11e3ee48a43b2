"""What the streams of `benchmarks.token_pd.tables` read: unseen text, and questions about what
they read.

All is drawn from one seed, so that every policy gets the same requests at the same times.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.lib.shared_folder import shared_folder
from pigou.request import SECOND
from pigou.sim.arrival_rate import renewal_times
from pigou_lab.recall import RecallItem, pair_line, recall_items

Ids = NDArray[np.int32]

_ROOT = Path(__file__).parents[2]
#: Lengths in tokens, least and most, both drawn evenly.
PROMPT, OUTPUT = (48, 144), (96, 256)
#: Pairs told in a recall item, and tokens between the last of them and the question.
PAIRS, DISTANCE = 8, 160
#: How often a job is a tenant's.
TENANTS = {"play": 3, "agents": 3, "recall": 2}


@dataclass(frozen=True)
class Item:
    """What one request reads and writes."""

    tenant: str
    prompt: Ids  # ids, shape (n,)
    forced: Ids  # ids that it is made to generate, shape (m,)
    answer: int = -1  # token that ought to follow them greedily; -1 where nothing is asked

    @property
    def generated(self) -> int:
        """Tokens generated, forced ones and the answer."""
        return len(self.forced) + (self.answer >= 0)


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in nanoseconds from the start."""

    time: int
    item: Item


class Texts:
    """What tenants read, as text and as token ids."""

    def __init__(self, model: Path, play: str, agents: str, scale: float = 1.0) -> None:
        """Encode two texts with a model's tokenizer; questions are asked over the first.

        Args:
            model: folder of the tokenizer.
        """
        self.scale = scale
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.play = play
        self.ids = {"play": self.encode(play), "agents": self.encode(agents)}

    @classmethod
    def unseen(cls, model: Path, scale: float = 1.0) -> Texts:
        """Read the bundled model's validation split, from `$PIGOU_SHARED/corpus`.

        Raises:
            FileNotFoundError: it is not there.
        """
        sys.path.append(str(_ROOT / "tools"))
        from tiny.corpus import load

        shared = shared_folder()
        split = load(shared / "corpus")
        return cls(model, split.play, "\n".join(split.held_out.documents[1:]), scale)

    def encode(self, text: str) -> Ids:
        """Return a text's token ids."""
        return np.array(self.tokenizer.encode(text).ids, dtype=np.int32)

    def read(self, tenant: str, rng: np.random.Generator) -> Item:
        """Draw a stretch of a tenant's text, cut into a prompt and what is forced after it."""
        ids = self.ids[tenant]
        prompt, output = (int(self.scale * rng.integers(*bounds)) for bounds in (PROMPT, OUTPUT))
        start = int(rng.integers(0, len(ids) - prompt - output))
        begin = np.array([self.tokenizer.token_to_id("<|begin|>") or 0], dtype=np.int32)
        whole = np.concatenate((begin, ids[start : start + prompt + output]))
        return Item(tenant, whole[:prompt], whole[prompt : prompt + output])

    def questions(self, count: int, seed: int) -> Iterator[Item]:
        """Yield recall items whose filler and question come as generated tokens."""

        def tokens(line: str) -> int:
            return len(self.tokenizer.encode(line).ids)

        distance = round(self.scale * DISTANCE)
        items = recall_items(
            self.play, tokens, pairs=PAIRS, distance=distance, count=count, seed=seed
        )
        return (self._question(item) for item in items)

    def _question(self, item: RecallItem) -> Item:
        told = pair_line(*item.pairs[-1])
        end = item.prompt.index(told) + len(told)
        encoded = self.tokenizer.encode(item.prompt)
        cut = next(i for i, (start, _) in enumerate(encoded.offsets) if start >= end)
        ids = np.array(encoded.ids, dtype=np.int32)
        (answer,) = self.tokenizer.encode(" " + item.answer).ids
        return Item("recall", ids[:cut], ids[cut:], answer)


def make_items(texts: Texts, count: int, fan: int, seed: int) -> list[Item]:
    """Draw jobs of `fan` requests of one tenant, until there are `count` requests."""
    rng = np.random.default_rng((seed, 0))
    names, weights = list(TENANTS), np.array(list(TENANTS.values()), dtype=float)
    questions = texts.questions(count, seed)
    items: list[Item] = []
    while len(items) < count:
        tenant = names[int(rng.choice(len(names), p=weights / weights.sum()))]
        for _ in range(min(fan, count - len(items))):
            items.append(next(questions) if tenant == "recall" else texts.read(tenant, rng))
    return items


def arrivals(items: list[Item], rate: float, fan: int, seed: int) -> list[Arrival]:
    """Let jobs of `fan` requests come as a Poisson process, the first of them at 0.

    Args:
        items: in the order of their coming.
        rate: requests per second; `inf` lets all come at once.
        fan: requests of a job, which come together.
    """
    if rate == float("inf"):
        return [Arrival(0, item) for item in items]
    jobs = -(-len(items) // fan)
    times = list(islice(renewal_times(rate / fan, 1.0, np.random.default_rng((seed, 1))), jobs))
    return [Arrival(times[i // fan] - times[0], item) for i, item in enumerate(items)]


def busy_share(coming: list[Arrival], work: float) -> float:
    """Return the share of the time until the last arrival in which a server would be busy.

    Args:
        coming: in order of time.
        work: seconds that each request takes of it, whoever else it serves.
    """
    end, left, idle = coming[-1].time / SECOND, 0.0, 0.0
    for before, after in zip([0, *(a.time for a in coming)], coming, strict=False):
        gap = (after.time - before) / SECOND
        idle += max(gap - left, 0.0)
        left = max(left - gap, 0.0) + work
    return 1.0 - idle / end


def rate_for(items: list[Item], busy: float, work: float, fan: int, seed: int) -> float:
    """Return the requests per second at which a server is busy for this share of the time."""
    low, high = 0.1 / work, 4.0 / work
    for _ in range(40):
        rate = math.sqrt(low * high)
        if busy_share(arrivals(items, rate, fan, seed), work) < busy:
            low = rate
        else:
            high = rate
    return math.sqrt(low * high)
