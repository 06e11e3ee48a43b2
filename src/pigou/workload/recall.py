"""Recall items: pairs of words scattered in text, and a question about one of them far behind.

A pair is one line, `@key value`. A prompt is text with such lines between its own lines, more text, and the
line `@key` left open; the answer is the one word that the pair gave. Mark, keys and values are single tokens
of the bundled tokenizer, so one greedy token decides an item.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MARK = "@"
KEYS = tuple(
    """acorn almond amulet anchor antler anvil apron arrow badge banner barley barrel basket beacon beetle bellows
    biscuit blanket bobbin bonnet bottle bracelet bramble bridle bucket buckle button cabin camel candle canoe
    carpet carrot castle cedar chapel chariot cherry chimney cider clover cobweb compass copper coral cotton
    cradle cricket dagger daisy donkey dragon drum eagle easel falcon feather fiddle flagon flask fossil fountain
    garlic garnet goblet granite hammer harbor harness harp hazel helmet heron honey hornet jacket jasmine kettle
    ladder lantern lemon lizard locket magnet maple marble meadow mirror mitten mortar needle nutmeg oyster paddle
    parrot pebble pepper pigeon pillow pistol pocket puddle pulley quill rabbit raven ribbon rocket saddle salmon
    sandal satchel scarf shovel sickle spider sponge statue stirrup tablet teapot thimble timber trumpet turnip
    turtle velvet violin""".split()
)
VALUES = tuple(
    """amber april august autumn azure bishop bronze butler canyon captain carmine chalk cobalt comet cosmic crimson
    crystal cyan dawn delta desert dozen dusk ebony eleven emerald epsilon falling fifty forest forty friday
    frozen galaxy gamma gentle giant ginger glacier golden green hidden hollow humble hundred indigo island ivory
    jade january jolly july june jungle jupiter khaki lagoon lilac linen little lively lunar magenta mango maroon
    mellow mercury meteor million misty monday mosaic neon neptune nimble nine noble november ocean october olive
    opal orange orbit orchid oval pale pastel pearl pink planet plum polar prairie purple quartz quiet rapid river
    royal ruby rustic saffron sapphire saturn scarlet secret seven shadow silver sixty solar spiral spring square
    stellar summer sunday sunny swift tango teal tender thirty thunder tiger topaz triple""".split()
)


@dataclass(frozen=True)
class RecallItem:
    """A prompt that ends in `@key`, and the word (without its leading space) that must follow."""

    prompt: str
    answer: str
    key: str
    pairs: tuple[tuple[str, str], ...]


def is_held_out(key: str, value: str) -> bool:
    """Whether this combination is kept for evaluation: one in five, by hash; training never shows it."""
    return zlib.crc32(f"{key}={value}".encode()) % 5 == 0


def pair_line(key: str, value: str) -> str:
    """The line that states a pair, with its newline."""
    return f"{MARK}{key} {value}\n"


def held_out_pairs(rng: random.Random, count: int) -> tuple[tuple[str, str], ...]:
    """`count` pairs with different keys and different values, all held out. `ValueError` beyond 64 pairs."""
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
    """Yields `count` items over pieces of `text`.

    Between consecutive pairs stands one line of text; after the last pair stand the fewest whole lines that
    make `distance` tokens, as `tokens(line)` counts them. `ValueError` if the text is too short.
    """
    lines = [line + "\n" for line in text.split("\n")]
    sizes = [tokens(line) for line in lines]
    rng = random.Random(f"{seed}/{pairs}/{distance}")
    for _ in range(count):
        stated = held_out_pairs(rng, pairs)
        start, end = _stretch(sizes, rng, pairs, distance)
        key, answer = rng.choice(stated)
        body = _weave(stated, lines[start:end])
        yield RecallItem(body + f"{MARK}{key}", answer, key, stated)


def _weave(pairs: Sequence[tuple[str, str]], lines: Sequence[str]) -> str:
    """A line of text before each pair, and the remaining lines after the last."""
    told = [line + pair_line(*pair) for line, pair in zip(lines, pairs, strict=False)]
    return "".join(told) + "".join(lines[len(pairs) :])


def _stretch(sizes: Sequence[int], rng: random.Random, pairs: int, distance: int) -> tuple[int, int]:
    """A random range of lines: `pairs` of them, then the fewest that make `distance` tokens."""
    for _ in range(1000):
        start = rng.randrange(len(sizes))
        end, room = start + pairs, distance
        while end < len(sizes) and room > 0:
            room -= sizes[end]
            end += 1
        if room <= 0:
            return start, end
    raise ValueError(f"the text has no stretch of {pairs} lines and {distance} tokens; give a longer text")
