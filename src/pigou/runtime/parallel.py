"""Group: the ranks (processes) of one worker, their collectives, and each one's part of a model."""

from __future__ import annotations

import mmap
import os
import platform
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pigou.kv.resharding import heads_of_rank
from pigou.models import ModelError
from pigou.runtime.models.decoder import Decoder, GatedMLP
from pigou.runtime.models.linear import Product
from pigou.runtime.models.model_config import ModelConfig
from pigou.runtime.models.weights import Part

#: Longest wait of a collective; it covers the compilation of kernels in a cold cache.
TIMEOUT = timedelta(minutes=10)
#: Machines on which other cores see stores in the order of the program.
_ORDERED = ("x86_64", "AMD64")
#: Bytes that a rank shares at once.
_PIECE = 1 << 20
#: Looks for the other ranks' numbers before a process sleeps: a few milliseconds.
_LOOKS = 2000
_WORDS = 8  # int64 words of a rank's line: step of each buffer, process id


class RankError(RuntimeError):
    """Raised in a rank when another one is gone: the worker cannot go on."""


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
            "nccl" if device.type == "cuda" else "gloo", init_method=meeting.as_uri(), rank=rank,
            world_size=size, timeout=TIMEOUT,
        )  # fmt: skip
        self._sum = None
        one_memory = device.type == "cpu" and hasattr(os, "pidfd_open")
        if size > 1 and one_memory and platform.machine() in _ORDERED:
            self._sum = SharedSum(rank, size, meeting.with_name("sums"))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; all ranks get the same bits."""
        if self._sum is None or not x.is_contiguous():
            dist.all_reduce(x)
        else:
            self._sum(x.view(-1))
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class SharedSum:
    """Sums over ranks of one machine in shared memory, several times quicker than by sockets.

    Each rank writes its numbers, then the step, and reads all once every rank has. The next step
    uses the other buffer, so nobody overwrites what is still read.
    """

    def __init__(self, rank: int, size: int, path: Path) -> None:
        """Map the file `path`, new; blocks until all ranks have."""
        self._rank, self._step, self._others = rank, 0, [r for r in range(size) if r != rank]
        head = size * _WORDS * 8
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.ftruncate(file.fileno(), head + 2 * size * _PIECE)
            memory = memoryview(mmap.mmap(file.fileno(), head + 2 * size * _PIECE))
        self._words = memory[:head].cast("q")
        self._buffers = torch.frombuffer(memory[head:], dtype=torch.uint8).view(2, size, _PIECE)
        self._words[rank * _WORDS + 2] = os.getpid()
        dist.barrier()
        path.unlink(missing_ok=True)
        self._ended = select.poll()
        for other in self._others:
            self._ended.register(os.pidfd_open(self._words[other * _WORDS + 2]))

    def __call__(self, x: Tensor) -> None:
        """Sum `x` (n,) in place; raises RankError if a rank has ended."""
        for piece in x.split(_PIECE // x.itemsize):
            self._step += 1
            buffer = self._step % 2
            numbers = self._buffers[buffer].view(x.dtype)[:, : len(piece)]
            numbers[self._rank].copy_(piece)
            self._words[self._rank * _WORDS + buffer] = self._step
            for other in self._others:
                self._await(other * _WORDS + buffer)
            torch.add(numbers[0], numbers[1], out=piece)
            for rank in range(2, len(numbers)):
                piece.add_(numbers[rank])

    def _await(self, word: int) -> None:
        for _ in range(_LOOKS):
            if self._words[word] == self._step:
                return
            os.sched_yield()
        while self._words[word] != self._step:
            if self._ended.poll(1):
                raise RankError("another rank of this worker has ended")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a dense decoder under tensor parallelism."""

    model: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        for name, count in (("attention heads", self.model.heads), ("ffn columns", self.model.ffn)):
            if count % self.size:
                raise ModelError(
                    f"tensor_parallel_size is {self.size}; it must divide the {count} {name}"
                )
        try:
            heads_of_rank(self.model.kv_heads, self.size, self.rank)
        except ValueError as error:
            raise ModelError(f"tensor_parallel_size does not fit: {error}") from None

    @property
    def kv_heads(self) -> range:
        """KV heads of this rank; several ranks have the same where there are more ranks."""
        return heads_of_rank(self.model.kv_heads, self.size, self.rank)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank computes it."""
        model, kv_heads = self.model, len(self.kv_heads)
        heads, ffn = model.heads // self.size, model.ffn // self.size
        forms = tuple(replace(form, heads=heads, kv_heads=kv_heads) for form in model.attention)
        return replace(model, heads=heads, kv_heads=kv_heads, ffn=ffn, attention=forms)

    def part(self, name: str) -> Part | None:
        """Return a tensor's part in this rank; None for all of it.

        Projections into heads and feed-forward are split by rows, those back by columns. Experts
        are whole (see `ExpertParallel`).
        """
        model, width = self.model, self.model.head_dim
        match name.split(".")[-3:]:
            case [_, "k_proj" | "v_proj", _]:
                heads = self.kv_heads
                return Part(0, heads.start * width, len(heads) * width, model.kv_heads * width)
            case [_, "o_proj", "bias"] | ["mlp", "down_proj", "bias"]:
                return Part(0, 0, model.hidden, model.hidden, 1 / self.size)
            case [_, "q_proj" | "o_proj" as module, _]:
                axis, whole = int(module == "o_proj"), model.heads * width
            case ["mlp", "gate_proj" | "up_proj" | "down_proj" as module, _]:
                axis, whole = int(module == "down_proj"), model.ffn
            case _:
                return None
        count = whole // self.size
        return Part(axis, self.rank * count, count, whole)


class RowParallel:
    """A product whose weight is split by columns: the ranks' results are summed."""

    def __init__(self, product: Product, group: Group) -> None:
        self.product = product
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs), the same in all ranks."""
        return self._group.all_reduce(self.product(x))


def share(decoder: Decoder, group: Group) -> None:
    """Let the ranks of a group sum what each computes with its part of a decoder."""
    for layer in decoder.layers:
        layer.output = RowParallel(layer.output, group)
        if isinstance(layer.mlp, GatedMLP):
            layer.mlp = RowParallel(layer.mlp, group)
