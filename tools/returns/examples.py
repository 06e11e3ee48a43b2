"""Examples to learn from: entries of sequences that a model read with its full cache."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pigou.runtime.models.decoder import Decoder, Layer
from pigou.runtime.models.linear import Linear
from pigou.runtime.token_eviction.predictor import FOLD, POWER, SCALES, ReturnModel
from returns.change import discounted, drop_changes, output_grams
from returns.cut import RECENT, SHARES, SINKS, STRIDE, cut, gains, worth
from returns.probe import Probe

PIECE = 16  # tokens between times at which entries may be looked at
TIMES = 20  # at which they are, of a sequence
EACH = 64  # entries looked at, at each time
FIRST, AHEAD = 128, 256  # least queries before and to come
LEAST = 1e-12  # return, so that its logarithm exists


@dataclass(frozen=True)
class Examples:
    """Entries, each at one time; Z = layers * kv_heads."""

    keys: Tensor  # before rotation, shape (Z, n, head_dim)
    values: Tensor  # shape (Z, n, head_dim)
    masses: Tensor  # received until then, shape (Z, n, scales)
    age: Tensor  # tokens since the entry's own, at least 1, shape (n,)
    # logarithms of returns to come, discounted, shape (Z, n, 3): of what the entry changes alone,
    # of attention that it receives, of what it brings at a cut; or of the first alone, shape (Z,
    # n).
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
    horizon: float  # discount horizon of returns to come, in tokens
    # policy that makes the cuts of returns; None for returns of entries alone.
    policy: ReturnModel | None = None

    @torch.inference_mode()
    def look(
        self, probe: Probe, ids: Tensor, generator: torch.Generator
    ) -> tuple[Examples, Tensor]:
        """Read one sequence, shape (1, T), with an empty probe; T is a multiple of `PIECE`.

        Returns:
            Examples, of one return where there is no policy, else of three; and the logits of all
            tokens, shape (T, vocab).
        """
        times = _times(ids.shape[1], generator)
        probe.keep = True
        logits = probe.feed(ids)[0]
        probe.keep = False
        received = torch.stack(
            [p[0].sum(1).unflatten(1, (-1, PIECE)).sum(2) for p in probe.kept_probs]
        )
        alone, sought = self._alone(probe, times), self._sought(probe, times)
        content = torch.empty(0)
        if self.policy is not None:
            content = self.policy.birth(probe.keys[:, 0], probe.values[:, 0])
        parts = []
        for index, time in enumerate(times.tolist()):
            chosen = _pick(time, generator)
            masses = (fades(time) @ received[:, :, : time // PIECE, :time]).mT
            target = alone[:, :, index, chosen]
            if self.policy is not None:
                share = SHARES[int(torch.randint(len(SHARES), (1,), generator=generator))]
                kept = cut(self.policy, content[:, :, :time], masses, share)
                among = self._among(probe, kept, chosen, time)
                target = torch.stack((target, sought[:, :, index, chosen], among), dim=-1)
            parts.append(
                Examples(
                    probe.keys[:, 0, :, chosen].flatten(0, 1),
                    probe.values[:, 0, :, chosen].flatten(0, 1),
                    masses[:, :, chosen].flatten(0, 1),
                    (time - chosen).float(),
                    target.clamp_min(LEAST).log().flatten(0, 1),
                )
            )
        return Examples.join(parts), logits

    def _alone(self, probe: Probe, times: Tensor) -> Tensor:
        """Return of each entry if it alone is dropped, shape (L, H, times, T)."""
        config, found = self.decoder.config, []
        for index, layer in enumerate(self.decoder.layers):
            grams = output_grams(_weight(layer), config.kv_heads, config.group)
            seen = probe.kept_probs[index], probe.outputs[index], probe.values[index]
            found.append(discounted(drop_changes(*seen, grams)[0] ** POWER, times, self.horizon))
        return torch.stack(found)

    def _sought(self, probe: Probe, times: Tensor) -> Tensor:
        """Attention that each entry will receive, shape (L, H, times, T)."""
        probs = (probs[0].sum(1) for probs in probe.kept_probs)
        return torch.stack([discounted(each, times, self.horizon) for each in probs])

    def _among(self, probe: Probe, kept: Tensor, chosen: Tensor, time: int) -> Tensor:
        """Return of chosen entries where others are cut, shape (L, H, e)."""
        end = min(time + int(2 * self.horizon), probe.length)
        span, found = slice(time, end, STRIDE), []
        for index, layer in enumerate(self.decoder.layers):
            probs = probe.kept_probs[index][0, :, :, span, :end]
            outputs, values = probe.outputs[index][0, :, :, span], probe.values[index, 0, :, :end]
            pair = gains(probs, outputs, values, kept[index], chosen, _weight(layer))
            found.append(worth(*pair, self.horizon))
        return torch.stack(found)


def _weight(layer: Layer) -> Tensor:
    """Weight of the output product, shape (hidden, heads * width)."""
    assert isinstance(layer.output, Linear), "quantised weights teach nothing"
    return layer.output.weight


def fades(time: int) -> Tensor:
    """What attention of each piece of queries counts by a time, shape (scales, pieces).

    As the runtime folds its sums: every `FOLD` queries, of which those since the last fold and
    those that were folded then count the same among themselves.
    """
    fold = torch.arange(time // PIECE) * PIECE // FOLD
    last = (time - 1) // FOLD
    age = (time - last * FOLD + FOLD * (last - 1 - fold)).float()
    return torch.exp(-age.masked_fill(fold == last, 0.0) / torch.tensor(SCALES)[:, None])


def _times(length: int, generator: torch.Generator) -> Tensor:
    """Times at which entries are looked at, ascending."""
    first, last = FIRST // PIECE, (length - AHEAD) // PIECE
    drawn = torch.randperm(last - first + 1, generator=generator)[:TIMES]
    return PIECE * (first + drawn.sort().values)


def _pick(time: int, generator: torch.Generator) -> Tensor:
    old = time - RECENT - SINKS
    return SINKS + torch.randperm(old, generator=generator)[:EACH]
