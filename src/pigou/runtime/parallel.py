"""Group: the ranks (processes) of one worker, and their collectives."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

#: Longest wait of a collective; it covers the compilation of kernels in a cold cache.
TIMEOUT = timedelta(minutes=10)


class Group:
    """Collectives over torch.distributed: gloo on the CPU, NCCL on CUDA.

    Every rank must call the same collective in the same order; a dead rank raises RuntimeError in
    the others.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: Path) -> None:
        """Join through the file `meeting`, new and in a private folder; blocks until all did."""
        self.rank = rank
        self.size = size
        self.device = device
        # Ranks share a machine: neither library has to listen beyond it.
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=meeting.as_uri(),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; all ranks get the same bits."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, of equal shapes, as (size, *x.shape)."""
        out = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(out.unbind()), x.contiguous())
        return out

    def all_to_all_single(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[r]` rows of `x` to each rank r; return the rows received, by rank."""
        out = x.new_empty((sum(received), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent))
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite `x` by rank `source`'s."""
        dist.broadcast(x, source)
        return x

    def barrier(self) -> None:
        """Wait until all ranks are here, and so are the kernels that they queued before."""
        dist.all_reduce(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
