"""Examples to learn from: entries of sequences that a model read with its full cache."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pigou.runtime.eviction.returns import POWER
from pigou.runtime.models.decoder import Decoder
from returns.change import discounted, drop_changes, output_grams
from returns.probe import Probe

SINKS, RECENT = 4, 32  # protected anyway
STEP = 64  # tokens between the times at which entries are looked at
EACH = 64  # entries looked at, at each time
AHEAD = 256  # least queries to come
LEAST = 1e-12  # return, so that its logarithm exists


@dataclass(frozen=True)
class Examples:
    """Entries, each at one time; Z = layers * kv_heads.

    Attributes:
        keys: before rotation, shape (Z, n, head_dim).
        values: shape (Z, n, head_dim).
        masses: received until then, shape (Z, n, scales).
        age: tokens since the entry's own, at least 1, shape (n,).
        target: logarithm of the discounted return to come, shape (Z, n).
    """

    keys: Tensor
    values: Tensor
    masses: Tensor
    age: Tensor
    target: Tensor

    @classmethod
    def join(cls, parts: list[Examples]) -> Examples:
        """All of them, in order."""
        names = [field.name for field in fields(cls)]
        return cls(*(torch.cat([getattr(p, n) for p in parts], _axis(n)) for n in names))


def _axis(name: str) -> int:
    return 0 if name == "age" else 1


@dataclass(frozen=True)
class Collector:
    """Runs a model over sequences, and picks entries at random."""

    decoder: Decoder
    horizon: float

    @torch.inference_mode()
    def look(
        self, probe: Probe, ids: Tensor, generator: torch.Generator
    ) -> tuple[Examples, Tensor]:
        """Read one sequence, shape (1, T), with an empty probe.

        Returns:
            Examples, and the logits of all tokens, shape (T, vocab).
        """
        times = torch.arange(2 * STEP, ids.shape[1] - AHEAD + 1, STEP)
        masses, logits = [], []
        grams = self.grams
        changes = self.room(ids)
        probe.keep = True
        for start in range(0, ids.shape[1], STEP):
            logits.append(probe.feed(ids[:, start : start + STEP])[0])
            masses.append(probe.masses[:, 0].clone())
            for layer, gram in enumerate(grams):
                values = probe.values[layer, :, :, : probe.length]
                changed = drop_changes(probe.kept_probs[layer], probe.outputs[layer], values, gram)
                changes[layer][:, start : probe.length, : probe.length] = changed[0] ** POWER
        probe.keep = False
        targets = [discounted(c, times, self.horizon) for c in changes]
        parts = []
        for index, time in enumerate(times.tolist()):
            chosen = self._pick(time, generator)
            seen = masses[time // STEP - 1][:, :, chosen]
            target = torch.stack([t[:, index, chosen] for t in targets])
            parts.append(
                Examples(
                    probe.keys[:, 0, :, chosen].flatten(0, 1),
                    probe.values[:, 0, :, chosen].flatten(0, 1),
                    seen.flatten(0, 1),
                    (time - chosen).float(),
                    target.flatten(0, 1).clamp_min(LEAST).log(),
                )
            )
        return Examples.join(parts), torch.cat(logits)

    @property
    def grams(self) -> list[Tensor]:
        """Of each layer's output product."""
        config = self.decoder.config
        return [
            output_grams(layer.output.weight, config.kv_heads, config.group)
            for layer in self.decoder.layers
        ]

    def room(self, ids: Tensor) -> list[Tensor]:
        """For each layer, zeros of shape (kv_heads, T, T)."""
        config, length = self.decoder.config, ids.shape[1]
        return [torch.zeros(config.kv_heads, length, length) for _ in range(config.layers)]

    def _pick(self, time: int, generator: torch.Generator) -> Tensor:
        old = time - RECENT - SINKS
        return SINKS + torch.randperm(old, generator=generator)[:EACH]
