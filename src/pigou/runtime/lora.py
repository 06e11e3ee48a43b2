"""LoRA: adapters in PEFT's format, on slots of the device beside a decoder's products.

y = W x + s B A x, with s = alpha / r (alpha / sqrt(r) with `use_rslora`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor

from pigou.models import ModelError
from pigou.request import Ints
from pigou.runtime.models.decoder import Decoder, DecoderModel, GatedMLP
from pigou.runtime.models.linear import Product
from pigou.runtime.models.transformers_decoder import TransformersDecoder
from pigou.runtime.tensor_io import stored, upload
from pigou.small_file import FileRefused, parse_json, read_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Bytes of a configuration, and of the header of the weights.
_MAX_CONFIG, _MAX_HEADER = 1 << 20, 8 << 20
#: Features of PEFT that change what an adapter computes.
_REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens",
    "trainable_token_indices", "use_qalora", "use_bdlora", "target_parameters", "fan_in_fan_out",
    "arrow_config", "megatron_config",
)  # fmt: skip
#: Initial weights after which an adapter is plain LoRA; others change the base model.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "lora_ga")
_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
#: Patterns of hostile adapters could take exponential time: no repeated groups, few repeats.
_MAX_PATTERNS, _MAX_PATTERN, _MAX_REPEATS = 4096, 256, 3
_REPEATED_GROUP = re.compile(r"\)[*+?{]")

#: Inputs and outputs of a product, by module name.
Modules: TypeAlias = Mapping[str, tuple[int, int]]


class Adapter(NamedTuple):
    """An adapter in host memory."""

    digest: str  # hash of both files, 32 hexadecimal digits
    # A (rank, inputs) and s B^T (rank, outputs) by module name.
    pairs: dict[str, tuple[Tensor, Tensor]]
    bytes: int


def read_adapter(folder: Path, modules: Modules, max_rank: int, dtype: torch.dtype) -> Adapter:
    """Read a PEFT folder; raises ModelError if it cannot be applied exactly."""
    # The largest legal adapter in float32; nothing larger is read.
    limit = 4 * max_rank * sum(map(sum, modules.values())) + _MAX_HEADER
    try:
        text = read_bytes(folder / CONFIG, _MAX_CONFIG)
        data = read_bytes(folder / WEIGHTS, limit)
        config = parse_json(text)
    except FileRefused as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None
    except OSError as error:
        raise ModelError(f"{folder} has no {CONFIG} and {WEIGHTS}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{folder / CONFIG} is no JSON: {error}") from None
    rules = _Rules(folder, config, max_rank)
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{folder / WEIGHTS} is damaged: {error}") from None
    tensors_of: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _PAIR.fullmatch(name)
        if match is None or match[1] not in modules:
            raise ModelError(
                f"{folder}: tensor {name!r} is none of A and B of a projection; adapters of "
                "embeddings, heads, norms and experts are not supported"
            )
        tensors_of.setdefault(match[1], {})[match[2]] = tensor
    rules.check_targets(tensors_of.keys())
    pairs = {name: rules.pair(name, tensors_of[name], modules[name], dtype) for name in tensors_of}
    digest = blake2b(len(text).to_bytes(8) + text + data, digest_size=16).hexdigest()
    return Adapter(digest, pairs, sum(a.nbytes + b.nbytes for a, b in pairs.values()))


class _Rules:
    """What `adapter_config.json` says of each module."""

    def __init__(self, folder: Path, config: Any, max_rank: int) -> None:
        self._folder, self._max_rank = folder, max_rank
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise self._error("peft_type", "must be LORA")
        self._config = config
        for name in _REFUSED:
            if config.get(name):
                raise self._error(name, "is not supported")
        if config.get("bias", "none") != "none":
            raise self._error("bias", "is not supported; train with none")
        if config.get("init_lora_weights") not in _PLAIN_INITS:
            raise self._error("init_lora_weights", "changes the base model; convert the adapter")
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")

    def check_targets(self, tensors_of: Collection[str]) -> None:
        """Refuse tensors of modules that are no targets: PEFT leaves them out."""
        given = self._config.get("target_modules")
        names = ["all-linear"] if given is None else [given] if isinstance(given, str) else given
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise self._error("target_modules", "must be a list of module names, or a pattern")
        keys = names if isinstance(given, str) else map(re.escape, names)
        patterns = [self._regex("target_modules", key) for key in keys]
        for name in tensors_of if "all-linear" not in names else ():
            if not any(pattern.fullmatch(name) for pattern in patterns):
                raise self._error("target_modules", f"has not {name}, whose tensors are there")

    def pair(
        self, name: str, parts: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return A, and B transposed and scaled, of a module."""
        rank = _first(self._ranks, name, self._config.get("r"))
        alpha = _first(self._alphas, name, self._config.get("lora_alpha"))
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= self._max_rank:
            raise self._error("r", f"is {rank!r} for {name}; --max-lora-rank is {self._max_rank}")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise self._error("lora_alpha", f"is {alpha!r} for {name}; it must be a number")
        wanted = {"A": (rank, shape[0]), "B": (shape[1], rank)}
        for part, size in wanted.items():
            tensor = parts.get(part)
            if tensor is None or tuple(tensor.shape) != size or not tensor.is_floating_point():
                given = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ModelError(f"{self._folder}: lora_{part} of {name} is {given}, not {size}")
        scale = alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
        a, b = parts["A"].to(dtype), (parts["B"].T.float() * scale).to(dtype).contiguous()
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ModelError(f"{self._folder}: {name} has numbers that are not finite in {dtype}")
        return a, b

    def _pattern(self, field: str) -> list[tuple[re.Pattern[str], Any]]:
        given = self._config.get(field) or {}
        if not isinstance(given, dict) or len(given) > _MAX_PATTERNS:
            raise self._error(field, f"must be a map of at most {_MAX_PATTERNS} module names")
        return [(self._regex(field, key), value) for key, value in given.items()]

    def _regex(self, field: str, key: str) -> re.Pattern[str]:
        repeats = sum(key.replace("(?", "").count(sign) for sign in "*+?{")
        if len(key) > _MAX_PATTERN or repeats > _MAX_REPEATS or _REPEATED_GROUP.search(key):
            raise self._error(field, f"has the pattern {key[:60]!r}, which is too complex")
        try:
            return re.compile(rf"(?:.*\.)?(?:{key})")
        except re.error as error:
            raise self._error(field, f"has the pattern {key!r}: {error}") from None

    def _error(self, field: str, text: str) -> ModelError:
        return ModelError(f"{self._folder / CONFIG}: {field} {text}")


def _first(patterns: list[tuple[re.Pattern[str], Any]], name: str, default: Any) -> Any:
    """Return the value of the first pattern that a module's name ends with, as PEFT does."""
    return next((value for pattern, value in patterns if pattern.fullmatch(name)), default)


class LoRALinear:
    """A product and those of the adapters in slots, for projections that lie side by side."""

    def __init__(self, base: Product, names: Sequence[str], bank: LoRABank) -> None:
        """Wrap `base`, whose outputs are those of the modules `names`, in order."""
        self.base, self.names, self._bank = base, names, bank
        inputs, width = bank.modules[names[0]][0], len(names) * bank.max_rank
        outputs = (bank.modules[name][1] for name in names)
        self._columns = list(accumulate(outputs, initial=0))
        #: A stacked over modules, (slots, rank, inputs), and B transposed, (slots, rank, outputs).
        self.a = torch.zeros(bank.slots, width, inputs, dtype=bank.dtype, device=bank.device)
        self.b = self.a.new_zeros((bank.slots, width, self._columns[-1]))
        self.ranks = [0] * bank.slots  # used ranks

    def __call__(self, x: Tensor) -> Tensor:
        """Return shape (rows, outputs)."""
        return self._bank.add(self, x, self.base(x))

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter to a slot that no step uses."""
        a, b = self.a[slot], self.b[slot]
        for old in (a, b):
            old.zero_() if old.is_cuda else stored(old).fill(0)
        rank = 0
        for name, start, end in zip(self.names, self._columns, self._columns[1:], strict=False):
            if (pair := adapter.pairs.get(name)) is not None:
                rows = slice(rank, rank + len(pair[0]))
                _copy(a[rows], pair[0])
                _copy(b[rows, start:end], pair[1])
                rank = rows.stop
        self.ranks[slot] = rank


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_cuda:
        target.copy_(source, non_blocking=True)
    else:  # in this thread alone: the engine's threads compute meanwhile
        stored(target)[...] = stored(source)


class LoRABank:
    """The adapters on the device, and which of them each token of a step takes.

    On the CPU each adapter multiplies its own tokens. On CUDA shapes do not depend on the adapters:
    all tokens are multiplied by all slots' A, and what is not theirs is masked before B.
    """

    def __init__(self, slots: int, max_rank: int, rows: int, like: Tensor) -> None:
        """`rows`: of the batch; `like`: a tensor of the model's dtype and device."""
        self.modules: dict[str, tuple[int, int]] = {}
        self.slots, self.max_rank = slots, max_rank
        self.dtype, self.device = like.dtype, like.device
        self.masked = like.is_cuda
        self.active = False  # True if a token of the step has an adapter
        self._slot_of: dict[str, int] = {}  # loaded adapters
        self._row_slots: Ints = np.full(rows, -1, dtype=np.int32)
        self._sites: list[LoRALinear] = []
        #: By number of rows: masks (rows, slots), or the rows of each slot in use.
        self._parts: dict[int, Tensor | list[tuple[int, slice | Tensor]]] = {}
        self._stream: Any = torch.cuda.Stream(like.device) if like.is_cuda else None

    @property
    def bytes(self) -> int:
        """Device memory of all slots."""
        return sum(site.a.nbytes + site.b.nbytes for site in self._sites)

    def wrap(self, base: Product, inputs: int, outputs: Mapping[str, int]) -> LoRALinear:
        """Add adapters to a product, the outputs of whose modules lie side by side."""
        self.modules |= {name: (inputs, width) for name, width in outputs.items()}
        site = LoRALinear(base, list(outputs), self)
        self._sites.append(site)
        return site

    def read(self, folder: Path) -> Adapter:
        """Read an adapter for this bank; raises ModelError."""
        return read_adapter(folder, self.modules, self.max_rank, self.dtype)

    def load(self, name: str, adapter: Adapter, slot: int) -> None:
        """Write an adapter to an idle slot, beside steps; when it returns, rows may take it."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.default_stream(self.device))
            for site in self._sites:
                site.fill(slot, adapter)
            if self._stream is not None:
                self._stream.synchronize()
        self._slot_of = {n: s for n, s in self._slot_of.items() if s != slot} | {name: slot}

    def take_row(self, row: int, name: str) -> None:
        """Let a row of the batch use a loaded adapter, "" for none."""
        self._row_slots[row] = self._slot_of[name] if name else -1

    def begin(self, rows: Ints, wanted: NDArray[np.int64]) -> None:
        """Start a step, given each token's row of the batch, and the tokens that sample.

        The last layer computes the wanted tokens alone, or all: their number tells which.
        """
        slots = self._row_slots[rows]
        self.active = bool((slots >= 0).any())
        if self.active:
            self._parts = {len(some): self._cut(some) for some in (slots[wanted], slots)}

    def _cut(self, slots: Ints) -> Tensor | list[tuple[int, slice | Tensor]]:
        if self.masked:
            return upload(slots[:, None] == np.arange(self.slots), self.device)[:, :, None]
        parts: list[tuple[int, slice | Tensor]] = []
        for slot in np.unique(slots[slots >= 0]).tolist():
            rows = np.flatnonzero(slots == slot)
            first, last = int(rows[0]), int(rows[-1])
            adjacent = last - first + 1 == len(rows)
            parts.append((slot, slice(first, last + 1) if adjacent else torch.from_numpy(rows)))
        return parts

    def add(self, site: LoRALinear, x: Tensor, y: Tensor) -> Tensor:
        """Add the adapters' products for x (rows, inputs) to y (rows, outputs), in place."""
        if not self.active:
            return y
        parts = self._parts[len(x)]
        if isinstance(parts, Tensor):
            low = F.linear(x, site.a.flatten(0, 1)).view(len(x), self.slots, -1)
            low = torch.where(parts, low, low.new_zeros(()))
            return y.addmm_(low.flatten(1), site.b.flatten(0, 1))
        for slot, rows in parts:
            if rank := site.ranks[slot]:
                a, b = site.a[slot, :rank], site.b[slot, :rank]
                if isinstance(rows, slice):
                    y[rows].addmm_(F.linear(x[rows], a), b)
                else:
                    y.index_add_(0, rows, F.linear(x.index_select(0, rows), a) @ b)
        return y


def attach(decoder: DecoderModel, slots: int, max_rank: int, rows: int) -> LoRABank:
    """Let a decoder's projections take adapters, experts aside; raises ModelError without any."""
    if isinstance(decoder, TransformersDecoder):
        linears = {n: part for n, part in decoder.linears().items() if ".layers." in n}
        if not linears:
            raise ModelError(f"{decoder.config.family} has no projections that take adapters")
        bank = LoRABank(slots, max_rank, rows, next(iter(linears.values())).weight)
        for name, part in linears.items():
            inputs, outputs = part.shape
            part.product = bank.wrap(part.product, inputs, {name: outputs})
        return bank
    assert isinstance(decoder, Decoder)
    config = decoder.config
    hidden, width = config.hidden, config.head_dim
    bank = LoRABank(slots, max_rank, rows, decoder.embedding)

    def wrap(base: Product, inputs: int, part: str, **outputs: int) -> LoRALinear:
        named = {f"model.layers.{layer.index}.{part}.{n}_proj": w for n, w in outputs.items()}
        return bank.wrap(base, inputs, named)

    for layer in decoder.layers:
        queries, others = config.heads * width, config.kv_heads * width
        layer.qkv = wrap(layer.qkv, hidden, "self_attn", q=queries, k=others, v=others)
        layer.output = wrap(layer.output, queries, "self_attn", o=hidden)
        if isinstance(mlp := layer.mlp, GatedMLP):
            mlp.gate_up = wrap(mlp.gate_up, hidden, "mlp", gate=config.ffn, up=config.ffn)
            mlp.down = wrap(mlp.down, config.ffn, "mlp", down=hidden)
    return bank
