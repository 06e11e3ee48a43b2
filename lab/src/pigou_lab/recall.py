"""Recall items: `@key value` lines in text, and an open `@key` far behind; one token each."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MARK = "@"
KEYS = tuple(
    """acorn almond amulet anchor antler anvil apron arrow badge banner barley barrel basket beacon
    beetle bellows biscuit blanket bobbin bonnet bottle bracelet bramble bridle bucket buckle
    button cabin camel candle canoe carpet carrot castle cedar chapel chariot cherry chimney
    cider clover cobweb compass copper coral cotton cradle cricket dagger daisy donkey dragon
    drum eagle easel falcon feather fiddle flagon flask fossil fountain garlic garnet goblet
    granite hammer harbor harness harp hazel helmet heron honey hornet jacket jasmine kettle
    ladder lantern lemon lizard locket magnet maple marble meadow mirror mitten mortar needle
    nutmeg oyster paddle parrot pebble pepper pigeon pillow pistol pocket puddle pulley quill
    rabbit raven ribbon rocket saddle salmon sandal satchel scarf shovel sickle spider sponge
    statue stirrup tablet teapot thimble timber trumpet turnip turtle velvet violin""".split()  # noqa: SIM905
)
VALUES = tuple(
    """amber april august autumn azure bishop bronze butler canyon captain carmine chalk cobalt
    comet cosmic crimson crystal cyan dawn delta desert dozen dusk ebony eleven emerald epsilon
    falling fifty forest forty friday frozen galaxy gamma gentle giant ginger glacier golden
    green hidden hollow humble hundred indigo island ivory jade january jolly july june jungle
    jupiter khaki lagoon lilac linen little lively lunar magenta mango maroon mellow mercury
    meteor million misty monday mosaic neon neptune nimble nine noble november ocean october
    olive opal orange orbit orchid oval pale pastel pearl pink planet plum polar prairie purple
    quartz quiet rapid river royal ruby rustic saffron sapphire saturn scarlet secret seven
    shadow silver sixty solar spiral spring square stellar summer sunday sunny swift tango teal
    tender thirty thunder tiger topaz triple""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class RecallItem:
    """A question about a pair told far behind."""

    prompt: str  # text that ends in the open line `@key`
    answer: str  # the word that must follow, without its leading space
    key: str
    pairs: tuple[tuple[str, str], ...]  # all (key, value) pairs of the prompt, in the order told


def is_held_out(key: str, value: str) -> bool:
    """Return whether training never shows this combination: one in five, by hash."""
    return zlib.crc32(f"{key}={value}".encode()) % 5 == 0


def pair_line(key: str, value: str) -> str:
    """Return a pair's line, with newline."""
    return f"{MARK}{key} {value}\n"


def held_out_pairs(rng: random.Random, count: int) -> tuple[tuple[str, str], ...]:
    """Return `count` (1 to 64) held-out pairs of distinct keys and values; raises ValueError."""
    if not 1 <= count <= len(KEYS) // 2:
        raise ValueError(f"count is {count}; give 1 to {len(KEYS) // 2} pairs")
    pairs: dict[str, str] = {}
    keys = rng.sample(KEYS, len(KEYS))
    while len(pairs) < count:
        key = keys.pop()
        free = [v for v in VALUES if is_held_out(key, v) and v not in pairs.values()]
        if free:
            pairs[key] = rng.choice(free)
    return tuple(pairs.items())


def recall_items(
    text: str,
    tokens: Callable[[str], int],
    *,
    pairs: int,
    distance: int,
    count: int,
    seed: int = 0,
) -> Iterator[RecallItem]:
    """Yield questions at least `distance` tokens after the last pair; raises ValueError."""
    lines = [line + "\n" for line in text.split("\n")]
    sizes = [tokens(line) for line in lines]
    rng = random.Random(f"{seed}/{pairs}/{distance}")
    for _ in range(count):
        pairs_ = held_out_pairs(rng, pairs)
        start, end = _stretch(sizes, rng, pairs, distance)
        key, answer = rng.choice(pairs_)
        yield RecallItem(_weave(pairs_, lines[start:end]) + MARK + key, answer, key, pairs_)


def _weave(pairs: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    parts = [line + pair_line(*pair) for line, pair in zip(lines, pairs, strict=False)]
    return "".join(parts) + "".join(lines[len(pairs) :])


def _stretch(
    sizes: Sequence[int], rng: random.Random, pairs: int, distance: int
) -> tuple[int, int]:
    for _ in range(1000):
        start = rng.randrange(len(sizes))
        end, room = start + pairs, distance
        while end < len(sizes) and room > 0:
            room -= sizes[end]
            end += 1
        if room <= 0:
            return start, end
    raise ValueError(f"no stretch of {pairs} lines and {distance} tokens; give a longer text")
