"""Which positions a cache of transformers holds, told from its tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

#: Odd, and its multiples differ in all bits (2^64 over the golden ratio, as int64).
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
#: Numbers of a key that tell it from others: the first turn fastest with its position.
_FEW = 8


class Tracker:
    """Which position each entry of a cache stands for, found from the keys themselves.

    A press tells nobody what it kept; so the keys before and after it are compared, bit by bit.
    """

    def __init__(self, model: Any, rows: int, rerotated_sinks: int | None) -> None:
        """Begin with an empty cache.

        Args:
            rerotated_sinks: where the press turns keys (after which they compare no more), how
                many sinks it keeps before the most recent entries; None where it does not.
        """
        config = model.config
        empty = torch.empty((rows, config.num_key_value_heads, 0), dtype=torch.int64)
        self._sinks = rerotated_sinks
        self._layers = [layer.self_attn for layer in model.model.layers]
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.positions = [empty] * len(self._layers)
        self.during = list(self.positions)
        self.span = (0, 0)
        self.held = 0

    @contextmanager
    def watch(self, model: Any) -> Iterator[Callable[[Any], Callable[[], None]]]:
        """Look at the cache at each layer; yields what puts a press (None for none) between two
        looks, which returns what takes it away again.
        """
        with ExitStack() as stack:
            self._hook(stack, self._look)
            between = stack.enter_context(ExitStack())

            def attach(press: Any) -> Callable[[], None]:
                between.enter_context(press(model) if press is not None else nullcontext())
                self._hook(stack, self._compare)
                return between.close

            yield attach

    def replay(self, module: Any, kwargs: dict[str, Any], press: Any) -> None:
        """Let a press see a layer's attention that was computed before, its entries in the cache.

        Args:
            module: the layer's attention.
            press: whose hook is called; None for none.
        """
        self._look(module, (), kwargs, None)
        if press is not None:
            press.forward_hook(module, [], kwargs, [None, None])
        self._compare(module, (), kwargs, None)

    def begin(self, first: int, end: int) -> None:
        """Tell what is computed next."""
        self.span, self.held = (first, end), 0

    def _hook(self, stack: ExitStack, hook: Any) -> None:
        for layer in self._layers:
            stack.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)

    def _look(self, module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        index = module.layer_idx
        layer = kwargs["past_key_values"].layers[index]
        old = self.positions[index]
        new = torch.arange(*self.span).expand(*old.shape[:2], -1)
        self.during[index] = self.positions[index] = torch.cat([old, new], dim=2)
        self._before[index] = (layer.keys, layer.values)
        self.held += sum(each.untyped_storage().nbytes() for each in (layer.keys, layer.values))

    def _compare(self, module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        index = module.layer_idx
        layer = kwargs["past_key_values"].layers[index]
        keys, values = self._before.pop(index)
        if layer.keys is keys:
            return
        if self._sinks is None:
            order = places(keys, layer.keys)
        else:
            order = self._windowed(values, layer.values, self._sinks)
        self.positions[index] = self.positions[index].gather(2, order)

    @staticmethod
    def _windowed(whole: torch.Tensor, part: torch.Tensor, sinks: int) -> torch.Tensor:
        """Return which entries are sinks and the most recent, by their values."""
        rest = whole.shape[2] - (part.shape[2] - sinks)
        order = torch.cat([torch.arange(sinks), torch.arange(rest, whole.shape[2])])
        if not torch.equal(whole[:, :, order], part):
            raise RuntimeError("the press keeps other values than sinks and the most recent")
        return order.expand(*whole.shape[:2], -1)


def places(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return where the rows of `part` stand in `whole`, by the bits of their first numbers.

    Args:
        whole: shape (..., n, width), float32; equal rows get one and the same place.
        part: shape (..., k, width).

    Returns:
        Shape (..., k).

    Raises:
        RuntimeError: a row is not there.
    """
    few = min(_FEW, whole.shape[-1])
    odd = torch.arange(1, few + 1) * _SPREAD | 1
    sums = [
        (each[..., :few].contiguous().view(torch.int32).long() * odd).sum(-1)
        for each in (whole, part)
    ]
    ordered, order = sums[0].sort(dim=-1)
    at = torch.searchsorted(ordered, sums[1]).clamp(max=ordered.shape[-1] - 1)
    if not torch.equal(ordered.gather(-1, at), sums[1]):
        raise RuntimeError("the press keeps keys that are none of the cache's")
    return order.gather(-1, at)
