"""Expert parallelism: experts, some with copies, in slots of the ranks of a group.

All ranks have the same tokens. Each sums the experts in its own slots, and an all-reduce adds the
ranks' sums. With more than 2 k ranks, for k experts a token, less is sent if each rank has a part
of the tokens: they go to the ranks of their experts and back by all-to-all, then all are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pigou.config import NEVER, EplbConfig
from pigou.models import ModelError
from pigou.placement.expert_placement import ExpertRanks, imbalance, rank_loads, rebalance
from pigou.runtime.models.experts import ExpertLoads, Experts, Products
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.parallel import Group

Slots = NDArray[np.int64]
#: Tokens of an expert from which computing takes longer than reading its weights; 16 in bf16 on a
#: Zen 4 core. A GPU's are some hundreds, but there copies take turns.
KNEE = 16.0
#: Parts in which the tokens of an expert are shared out among its copies.
_PARTS = 8
#: Least imbalance of a layer's ranks, (max - mean) / mean, to move experts.
_IMBALANCE = 0.2


def share_tokens(tokens: Slots, ranks_of: list[list[int]], ranks: int, knee: float) -> Slots:
    """Return the tokens that each copy of each expert takes, (experts, max copies).

    A rank takes max(experts hit, tokens / knee), in times of reading an expert: in prefill each
    token costs its time, in decode the first one of an expert on a rank costs all of it. Copies
    are chosen by the least time of the slowest rank, then by the time added, then by the rank's.
    """
    shares = np.zeros((len(tokens), max(map(len, ranks_of))), dtype=np.int64)
    hit, load = np.zeros(ranks), np.zeros(ranks)
    several = []
    for expert in np.flatnonzero(tokens).tolist():
        copies = ranks_of[expert]
        if len(copies) > 1:
            several.append(expert)
            continue
        shares[expert, 0] = tokens[expert]
        hit[copies[0]] += 1
        load[copies[0]] += tokens[expert] / knee
    time = np.maximum(hit, load)
    for expert in sorted(several, key=lambda expert: -tokens[expert]):
        rest = int(tokens[expert])
        part = -(-rest // _PARTS)
        while rest:
            taken = min(part, rest)
            slowest, best = time.max(), (np.inf,) * 3
            for copy, rank in enumerate(ranks_of[expert]):
                new = max(hit[rank] + (not shares[expert, copy]), load[rank] + taken / knee)
                key = (max(slowest, new), new - time[rank], new)
                if key < best:
                    best, chosen = key, copy
            rank = ranks_of[expert][chosen]
            hit[rank] += not shares[expert, chosen]
            load[rank] += taken / knee
            time[rank] = best[2]
            shares[expert, chosen] += taken
            rest -= taken
    return shares


@dataclass(slots=True)
class ExpertSlots:
    """The slots of a layer: which experts they hold, and which of them tokens go to."""

    group: Group
    placement: Slots  # expert of each slot, shape (slots,); rank r has slots r n to (r + 1) n - 1
    experts: int
    _table: Tensor = field(init=False)  # slots of the experts' copies, shape (experts, copies)
    _copies: Tensor = field(init=False)  # shape (experts,)
    _ranks_of: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.adopt(self.placement)

    @property
    def held(self) -> list[int]:
        """Experts in the slots of this rank."""
        held: list[int] = self.placement.reshape(-1, self.own)[self.group.rank].tolist()
        return held

    @property
    def own(self) -> int:
        """Slots of a rank."""
        return len(self.placement) // self.group.size

    def adopt(self, placement: Slots) -> None:
        """Have tokens follow another placement."""
        self.placement = placement
        slots = [np.flatnonzero(placement == expert) for expert in range(self.experts)]
        copies = max(map(len, slots))
        table = np.stack([np.resize(held, copies) for held in slots])
        self._table = torch.from_numpy(table).to(self.group.device)
        self._copies = torch.tensor([len(held) for held in slots], device=self.group.device)
        self._ranks_of = [(held // self.own).tolist() for held in slots]

    def __call__(self, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of all ranks on tokens that all ranks have."""
        group, slots = self.group, self.choose(chosen)
        if 2 * min(chosen.shape[1], group.size) >= group.size or len(x) < group.size:
            own = torch.where(slots // self.own == group.rank, slots % self.own, self.own)
            return group.all_reduce(experts.local(x, own, weights, self.own))
        count = -(-len(x) // group.size)
        part = slice(group.rank * count, (group.rank + 1) * count)
        out = self.exchange(experts, x[part], slots[part], weights[part])
        padded = torch.nn.functional.pad(out, (0, 0, 0, count - len(out)))
        return group.all_gather(padded).flatten(0, 1)[: len(x)]

    def choose(self, chosen: Tensor) -> Tensor:
        """Return a slot for each choice (tokens, k): copies by `share_tokens`; in turn on CUDA."""
        if self._table.shape[1] == 1:
            return self._table[:, 0][chosen]
        if chosen.is_cuda:  # shares would wait for the device
            turns = torch.arange(len(chosen), device=chosen.device).unsqueeze(1)
            return self._table[chosen, turns % self._copies[chosen]]
        ids = chosen.flatten()
        tokens = torch.bincount(ids, minlength=self.experts)
        shares = share_tokens(tokens.numpy(), self._ranks_of, self.group.size, KNEE)
        order = ids.argsort(stable=True)
        before = torch.empty_like(ids)  # earlier tokens of the same expert
        before[order] = torch.arange(len(ids)) - (tokens.cumsum(0) - tokens)[ids[order]]
        stops = torch.from_numpy(shares).cumsum(1)[ids]
        copy = (before.unsqueeze(1) >= stops).sum(1)
        return self._table[ids, copy].view_as(chosen)

    def exchange(self, experts: Experts, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Run the experts of all ranks on tokens of this rank; each goes to a rank once.

        Waits for the device: the ranks must know how many tokens come.
        """
        group, own = self.group, self.own
        ranks = slots // own
        goes = torch.zeros(group.size, len(x), dtype=torch.bool, device=x.device)
        goes.scatter_(0, ranks.mT, True)
        rank, token = goes.nonzero(as_tuple=True)
        counts = goes.sum(1, keepdim=True)
        sent, one = counts.flatten().tolist(), [1] * group.size
        received = group.all_to_all_single(counts, one, one).flatten().tolist()
        held = torch.where(ranks[token] == rank.unsqueeze(1), slots[token] % own, own)
        routes = torch.cat((held.float(), weights[token]), 1)
        rows = group.all_to_all_single(x[token], sent, received)
        held, weights = group.all_to_all_single(routes, sent, received).chunk(2, 1)
        sums = experts.local(rows, held.long(), weights, own)
        back = group.all_to_all_single(sums, received, sent)
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, token, back.float()).to(x)

    def move(self, products: Products, placement: Slots) -> None:
        """Fetch the experts of another placement from the ranks that have them, and adopt it."""
        group, me, own = self.group, self.group.rank, self.own
        old, new = self.placement.reshape(-1, own), placement.reshape(-1, own)
        sends: list[tuple[int, int]] = []  # rank to send to, own slot; both may be this rank
        takes: list[tuple[int, int]] = []  # rank to take from, own slot
        for rank, slot in np.argwhere(old != new).tolist():
            holders = np.flatnonzero((old == new[rank, slot]).any(1))
            source = rank if rank in holders else int(holders[rank % len(holders)])
            held = int(np.argmax(old[source] == new[rank, slot]))
            if source == me:
                sends.append((rank, held))
            if rank == me:
                takes.append((source, slot))
        takes.sort(key=lambda take: take[0])  # rows come by rank, then in order of slots
        sent, received = (
            np.bincount([rank for rank, _ in moves], minlength=group.size).tolist()
            for moves in (sends, takes)
        )
        outgoing = [products.read(slot) for _, slot in sends]
        incoming = []
        for part, weight in enumerate(products.read(0)):
            rows = [weights[part] for weights in outgoing]
            stacked = torch.stack(rows) if rows else weight.new_empty((0, *weight.shape))
            incoming.append(group.all_to_all_single(stacked, sent, received))
        for row, (_, slot) in enumerate(takes):
            products.write(slot, [part[row] for part in incoming])
        self.adopt(placement)


class ExpertParallel(ExpertLoads):
    """Expert parallelism of a model's layers; places their experts anew between steps."""

    def __init__(
        self, layers: list[int], experts: int, device: torch.device, *, group: Group,
        config: EplbConfig,
    ) -> None:  # fmt: skip
        super().__init__(layers, experts, device)
        self.group, self.config = group, config
        self.moved = 0  # experts moved since the start
        self._slots: list[ExpertSlots] = []
        self._mark = self.totals.clone()  # total loads when the window began

    def add(self, layer: int) -> Experts:
        """Place a layer at first: all experts in order, then the first again."""
        experts = super().add(layer)
        count = len(experts.loads)
        placement = np.arange(self.config.slots(count, self.group.size)) % count
        slots = ExpertSlots(self.group, placement, count)
        experts.spread, experts.held = slots, slots.held
        self._slots.append(slots)
        return experts

    def begin_step(self) -> None:
        """Place experts by the loads of the last window, once an interval; all ranks together."""
        interval, window = self.config.step_interval, self.config.window_size
        turn = self.steps % interval
        if self.steps == 0 and interval < NEVER:
            for experts in self.experts:
                experts.products.read(0)  # raises ModelError if they cannot be moved
        elif turn == 0 and self.steps:
            self.balance((self.totals - self._mark).cpu().numpy())
        if turn == max(0, interval - window):
            self._mark = self.totals.clone()
        super().begin_step()

    def report(self) -> dict[str, Any]:
        """Return figures by name, the window's tokens, and the expert of each slot by layer."""
        report, placements = super().report(), [slots.placement for slots in self._slots]
        ranks = [
            imbalance(rank_loads(placement, tokens, self.group.size))
            for placement, tokens in zip(placements, report["window_tokens"], strict=True)
        ]
        placed = [placement.tolist() for placement in placements]
        more = {"rank_imbalance": float(np.mean(ranks)), "moved": self.moved, "placements": placed}
        return {**report, "ranks": self.group.size, **more}

    def balance(self, loads: Slots) -> None:
        """Place the experts of all layers by their loads, (layers, experts), where that pays."""
        windows = max(1.0, self.config.step_interval / self.config.window_size)
        for experts, slots, tokens in zip(self.experts, self._slots, loads, strict=True):
            ranks = ExpertRanks(self.group.size, len(slots.placement))
            # In times of reading an expert: fetching one costs 1, a token 1 / KNEE.
            better = rebalance(
                slots.placement, tokens, ranks, expert_bytes=1.0, bytes_per_s=1.0,
                horizon_s=windows / KNEE, threshold=_IMBALANCE,
            )  # fmt: skip
            if better is not None:
                slots.move(experts.products, better.placement)
                self.moved += better.moved


def expert_loads(
    model: ModelConfig, group: Group | None, config: EplbConfig | None
) -> Callable[[list[int], int, torch.device], ExpertLoads]:
    """Return what makes a model's loads: spread over a group if asked; raises ModelError."""
    if config is not None:
        config = msgspec.convert(config, EplbConfig, from_attributes=True)  # ranks get a mapping
    if config is not None and (model.experts is None or group is None):
        reason = "the model has no experts" if group else "it needs tensor_parallel_size above 1"
        raise ModelError(f"enable_expert_parallel is given, but {reason}; leave it out")
    if model.experts is None or group is None:
        return ExpertLoads
    if config is None:
        raise ModelError(
            f"tensor_parallel_size is {group.size}, and the model has experts, which are not cut; "
            "give --enable-expert-parallel too"
        )
    config.slots(model.experts.count, group.size)
    return partial(ExpertParallel, group=group, config=config)
