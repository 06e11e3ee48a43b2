"""What both predictors learn from, of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from returns.blend import Blend
from returns.examples import PIECE, Collector, Examples
from returns.paper import LATEST, Births
from returns.probe import Probe
from returns.sequences import Sequences

BIRTHS = 320  # taken of a sequence
LENGTH = 512  # least tokens of a sequence


@dataclass(frozen=True)
class Collected:
    """Examples for the one, births for the other."""

    examples: Examples
    births: Births


def collect(
    collector: Collector,
    sequences: Sequences,
    count: int,
    length: int,
    *,
    seed: int,
    blend: Blend | None = None,
) -> Collected:
    """Run a model over `count` sequences of `length` tokens, with its full cache.

    Args:
        length: tokens of each, at least 512 and a multiple of `PIECE`.
        seed: of sequences and of what is looked at in them.
        blend: of the three returns that a collector with a policy finds.

    Raises:
        ValueError: the length is not so.
    """
    if length < LENGTH or length % PIECE:
        raise ValueError(f"length is {length}; give a multiple of {PIECE} from {LENGTH} on")
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    examples, births = [], []
    for _ in range(count):
        probe = Probe(collector.decoder, 1, length)
        ids = torch.tensor([sequences.draw(rng, length)])
        seen, logits = collector.look(probe, ids, generator)
        examples.append(seen)
        chosen = torch.randperm(length - LATEST, generator=generator)[:BIRTHS]
        births.append(Births.of(probe, logits, chosen))
    found = Examples.join(examples)
    if blend is not None:
        parts = found.target.unflatten(0, (collector.decoder.config.layers, -1))
        found = replace(found, target=blend.of(parts).flatten(0, 1))
    return Collected(found, Births.join(births))
