"""Ranks: the processes of a worker with tensor parallelism, driven by its first one.

Rank 0 is the worker: it plans, samples and moves blocks. The others repeat its forward passes on
their part of the model, told by a socket that nobody else has; they end when it closes. On the CPU
all ranks share one cache of whole blocks, each with its heads of them: a block's bytes do not
depend on the number of ranks. On CUDA each has a cache of its own, and repeats its moves.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from pigou.models import ModelError
from pigou.request import Ints
from pigou.runtime.attention.batch import StepBatch
from pigou.runtime.attention.kv_cache import KVCache
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.models.decoder import Decoder
from pigou.runtime.models.load import LoadedModel, load
from pigou.runtime.parallel import Group, RankError

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
#: Seconds for a rank to end by itself.
_END_S = 5.0
#: Folder of files in memory; None for the usual one.
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
#: A follower's first byte, sent once it has imported torch.
_READY = b"\n"


class Join(msgspec.Struct, tag=True):
    """Joins the group and loads a part of the model."""

    rank: int
    size: int
    meeting: str
    threads: int
    options: dict[str, Any]  # arguments of `load`


class Attach(msgspec.Struct, tag=True):
    """Makes the cache; memory to share comes with the message, as a descriptor."""

    blocks: int
    block_size: int
    host_blocks: int  # 0 with shared memory: rank 0 swaps
    context: int
    tables: tuple[int, int]  # shape of the block tables
    offset: int  # bytes before the blocks
    size: int  # bytes of the memory, the offset included; 0 for none


class Step(msgspec.Struct, tag=True):
    """Repeats one forward pass."""

    batch: StepBatch
    wanted: Tensor | None
    cells: Ints  # flat indices of changed cells of the block tables
    blocks: Ints  # block ids in those cells


class MoveBlocks(msgspec.Struct, tag=True):
    """Moves blocks, as `KVCache.move`."""

    swap_out: Ints
    copies: Ints
    swap_in: Ints


Message = Join | Attach | Step | MoveBlocks


def _encode_array(value: Any) -> Any:
    array = value.cpu().numpy() if isinstance(value, Tensor) else value
    return array.dtype.str, array.shape, array.tobytes()


def _decode_array(kind: type, value: Any) -> Any:
    dtype, shape, raw = value
    array = np.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return torch.from_numpy(array) if kind is Tensor else array


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Message, dec_hook=_decode_array
)


# --- rank 0 -------------------------------------------------------------------------------------


class Ranks:
    """The other ranks of this process, which is rank 0."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        """Start ranks 1 to `size - 1`; each will call `load(**options)` for its part."""
        self.size = size
        self._options = options
        self._closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="pigou-ranks-", dir=_MEMORY)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[socket.socket] = []
        self._attention: PagedAttention | None = None  # to whose cache the others are attached
        self._sent: Ints = np.empty((0, 0), dtype=np.int32)  # block tables as the others have them
        self._memory: tuple[int, int] | None = None
        self.group: Group | None = None
        self.context = 0
        for _ in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                command = f"from pigou.runtime.ranks import follow; follow({theirs.fileno()})"
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", command],
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                        pass_fds=(theirs.fileno(),),
                    )
                )  # fmt: skip
            self._channels.append(ours)

    def load(self) -> ParallelModel:
        """Load this process's part while the others load theirs; raises ModelError."""
        meeting = Path(self._folder.name) / "meeting"
        for rank, channel in enumerate(self._channels, 1):
            if channel.recv(1) != _READY:
                raise ModelError(f"rank {rank} did not start; the log says why")
            self._send(rank, Join(rank, self.size, str(meeting), torch.get_num_threads(),
                                  self._options))  # fmt: skip
        device = rank_device(self._options.get("device", "cpu"), 0)
        self.group = Group(0, self.size, torch.device(device), meeting)
        model = load(**{**self._options, "device": device}, group=self.group)
        if self.group.device.type == "cpu":  # gloo has met; nothing is left if this is killed
            self.group.barrier()
            self._folder.cleanup()
        decoder = LeadingDecoder(**_fields_of(model.decoder), ranks=self, group=self.group)
        return ParallelModel(**{**_fields_of(model), "decoder": decoder}, ranks=self)

    def share(self, descriptor: int, offset: int) -> None:
        """Have the cache's blocks lie at `offset` in the memory that a descriptor maps."""
        self._memory = (os.dup(descriptor), offset)

    def allocate(self, size: int) -> memoryview:
        """Return zeroed memory that all ranks can map; raises OSError without room."""
        with tempfile.TemporaryFile(dir=_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            self.share(file.fileno(), 0)
            return memoryview(mmap.mmap(file.fileno(), size))

    def repeat(self, attention: PagedAttention, wanted: Tensor | None) -> None:
        """Have the other ranks repeat the forward pass that comes next here."""
        if self._attention is not attention:
            self._attach(attention)
        batch, tables = attention.batch, attention.tables
        rows = np.unique(batch.rows)
        width = int(batch.slots.max()) // attention.block_size + 1
        row, column = np.nonzero(tables[rows, :width] != self._sent[rows, :width])
        cells = (rows[row] * tables.shape[1] + column).astype(np.int32)
        blocks = tables[rows[row], column]
        self._sent[rows[row], column] = blocks
        self.tell(Step(batch, wanted, cells, blocks))

    def tell(self, message: Message) -> None:
        """Send a message to all other ranks."""
        frame = _frame(message)
        for rank in range(1, self.size):
            self._send(rank, frame)

    def _attach(self, attention: PagedAttention) -> None:
        cache, tables = attention.cache, attention.tables
        descriptor, offset = self._memory or (None, 0)
        size, host = offset + cache.blocks * cache.layout.block_bytes, 0
        if descriptor is None:
            size, host = 0, len(cache.host)
        message = Attach(cache.blocks, cache.layout.block_size, host, self.context,
                         (tables.shape[0], tables.shape[1]), offset, size)  # fmt: skip
        for rank in range(1, self.size):
            self._send(rank, message, descriptor)
        if descriptor is not None:
            os.close(descriptor)
        self._attention, self._sent = attention, np.zeros_like(tables)

    def _send(self, rank: int, message: Message | bytes, descriptor: int | None = None) -> None:
        frame = message if isinstance(message, bytes) else _frame(message)
        channel = self._channels[rank - 1]
        try:
            channel.sendall(frame)
            if descriptor is not None:
                socket.send_fds(channel, [b"\0"], [descriptor])
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> RankError:
        """Return what to raise for a failed collective or message: which rank ended, and how."""
        for _ in range(20):  # connections close shortly before a process has ended
            for rank, process in enumerate(self.processes, 1):
                if (status := process.poll()) is not None:
                    return RankError(_ended(rank, process.pid, status))
            time.sleep(0.05)
        return RankError(f"the ranks of this worker cannot go on: {error}")

    def watch(self, on_end: Callable[[RankError], None]) -> None:
        """Call `on_end`, from a thread, when a rank ends by itself."""

        def wait(rank: int, process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            if not self._closing:
                on_end(RankError(_ended(rank, process.pid, status)))

        for rank, process in enumerate(self.processes, 1):
            name, given = f"rank-{rank}", (rank, process)
            threading.Thread(target=wait, args=given, name=name, daemon=True).start()

    def close(self) -> None:
        """End the other ranks."""
        self._closing = True
        for channel in self._channels:
            channel.close()
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.group is not None:
            self.group.close()
        self._folder.cleanup()


def _ended(rank: int, pid: int, status: int) -> str:
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"rank {rank} (process {pid}) ended {how}; this worker has no whole model any more"


def rank_device(device: str, rank: int) -> str:
    """Return a rank's device: the CPU, or consecutive GPUs from the one given."""
    given = torch.device(device)
    return device if given.type != "cuda" else f"cuda:{(given.index or 0) + rank}"


def _fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


@dataclass(slots=True, kw_only=True)
class LeadingDecoder(Decoder):
    """Rank 0's part of a decoder; the other ranks compute theirs with it."""

    ranks: Ranks
    group: Group

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Return hidden states as `Decoder.hidden`; raises RankError if a rank is gone."""
        self.ranks.repeat(attention, wanted)
        try:
            states = Decoder.hidden(self, tokens, attention, wanted)
            if not len(states):  # no sum of the last layer says that all have stored their keys
                self.group.barrier()
        except RuntimeError as error:
            raise self.ranks.failure(error) from error
        return states


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel(LoadedModel):
    """Rank 0's part of a model, with the other ranks."""

    ranks: Ranks

    def cache(
        self, blocks: int, block_size: int, host_blocks: int = 0, memory: memoryview | None = None
    ) -> KVCache:
        """Allocate an empty cache that all ranks share (see `Ranks.share` for given memory)."""
        on_cpu = self.device.type == "cpu"
        if memory is None and on_cpu:
            memory = self.ranks.allocate(blocks * self.layout(block_size).block_bytes)
        cache = LoadedModel.cache(self, blocks, block_size, host_blocks, memory)
        if not on_cpu:
            move_own = cache.move

            def move(swap_out: Ints, copies: Ints, swap_in: Ints) -> None:
                if len(swap_out) or len(copies) or len(swap_in):
                    self.ranks.tell(MoveBlocks(swap_out, copies, swap_in))
                move_own(swap_out, copies, swap_in)

            cache.move = move  # type: ignore[method-assign]
        return cache

    def attention(self, cache: KVCache, tables: Ints, max_model_len: int) -> PagedAttention:
        """Build the attention of this rank's heads; the others build theirs at the first step."""
        self.ranks.context = max_model_len
        return LoadedModel.attention(self, cache, tables, max_model_len)


# --- the other ranks ----------------------------------------------------------------------------


def follow(descriptor: int) -> None:
    """Be a rank other than 0 until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides, and may drain first
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    channel = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    channel.sendall(_READY)
    try:
        _follow(channel)
    except EOFError:
        pass
    except RuntimeError as error:
        sys.exit(f"a rank ends: {error}")


def _end_with(channel: socket.socket) -> None:
    """End this process once the socket is closed at the other end, whatever it does then."""
    closed = select.poll()
    closed.register(channel, 0)
    closed.poll()
    os._exit(0)


@torch.inference_mode()
def _follow(channel: socket.socket) -> None:
    join = _receive(channel)
    assert isinstance(join, Join)
    torch.set_num_threads(join.threads)
    device = rank_device(join.options.get("device", "cpu"), join.rank)
    group = Group(join.rank, join.size, torch.device(device), Path(join.meeting))
    model = load(**{**join.options, "device": device}, group=group)
    if group.device.type == "cpu":
        group.barrier()
    while True:
        message = _receive(channel)
        if isinstance(message, Attach):
            memory = None
            if message.size:
                descriptor = socket.recv_fds(channel, 1, 1)[1][0]
                memory = memoryview(mmap.mmap(descriptor, message.size))[message.offset :]
                os.close(descriptor)
            cache = model.cache(message.blocks, message.block_size, message.host_blocks, memory)
            tables = np.zeros(message.tables, dtype=np.int32)
            attention = model.attention(cache, tables, message.context)
        if isinstance(message, MoveBlocks):
            cache.move(message.swap_out, message.copies, message.swap_in)
        if isinstance(message, Step):
            tables.reshape(-1)[message.cells] = message.blocks
            batch = replace(message.batch, tokens=message.batch.tokens.to(model.device))
            wanted = None if message.wanted is None else message.wanted.to(model.device)
            attention.begin(batch)
            if not len(model.decoder.hidden(batch.tokens, attention, wanted)):
                group.barrier()


def _frame(message: Message) -> bytes:
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


def _receive(channel: socket.socket) -> Message:
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    return _DECODER.decode(_read(channel, length))


def _read(channel: socket.socket, size: int) -> bytearray:
    body = bytearray(size)
    view = memoryview(body)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return body
