"""Number formats of a checkpoint's matrices: which modules are quantised, and how."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from pigou.config import ConfigError
from pigou.models.hf_config import EXCLUDED_KEYS

#: Bytes per number, without scales except for 4-bit floats: one 8-bit scale per 16 (NVFP4) or 32
#: (MXFP4) numbers.
DTYPE_BYTES = {
    "float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5,
    "nvfp4": 0.5625, "mxfp4": 0.53125,
}  # fmt: skip
#: Compute formats; others are widened to 16 bits.
_COMPUTE = {"nvfp4": "fp4", "mxfp4": "fp4", "int4": "bfloat16"}
#: `quant_method` of weights that workers read; MXFP4 is that of experts.
SERVED = ("fp8", "compressed-tensors", "modelopt", "gptq", "awq", "mxfp4")
#: Prefixes of `layers.` in a checkpoint's module names.
_PREFIXES = (
    "model.language_model.", "language_model.model.", "language_model.", "model.", "backbone.",
    "transformer.",
)  # fmt: skip
_LAYER = re.compile(r"layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Format:
    """Storage and compute format of a matrix."""

    dtype: str  # one of DTYPE_BYTES
    compute: str = ""  # format of the products; "" for that of `dtype`
    size: float = 0.0  # bytes per parameter, scales and zeros included; 0 for those of `dtype`

    def __post_init__(self) -> None:
        if not self.compute:
            object.__setattr__(self, "compute", _COMPUTE.get(self.dtype, self.dtype))
        if not self.size:
            object.__setattr__(self, "size", DTYPE_BYTES[self.dtype])


def integers(bits: int, group: int, *, zeros: bool, inputs: int | None = None) -> Format:
    """Return 4- or 8-bit integers, scaled per group; `inputs`: activation bits, None for 16."""
    extra = (2.0 + (bits / 8 if zeros else 0.0)) / group if group > 0 else 0.0
    return Format(f"int{bits}", "int8" if inputs == 8 == bits else "bfloat16", bits / 8 + extra)


def block_fp8(block: Any) -> Format:
    """Return FP8 with a float32 scale per block, or per matrix if no block is given."""
    if not isinstance(block, list) or len(block) != 2 or not all(block):
        return Format("fp8")
    return Format("fp8", size=1.0 + 4.0 / (block[0] * block[1]))


#: ModelOpt's `quant_algo`.
ALGORITHMS = {
    "FP8": Format("fp8"), "FP8_PER_CHANNEL_PER_TOKEN": Format("fp8"),
    "FP8_PB_WO": block_fp8([128, 128]), "FP8_PB_REAL": block_fp8([128, 128]),
    "MXFP8": Format("fp8", size=1 + 1 / 32), "NVFP4": Format("nvfp4"),
    "NVFP4_AWQ": Format("nvfp4"), "W4A16_NVFP4": Format("nvfp4", "bfloat16"),
    "W4A8_NVFP4_FP8": Format("nvfp4", "fp8"), "W4A8_MXFP4_FP8": Format("mxfp4", "fp8"),
    "W4A16_MXFP4": Format("mxfp4", "bfloat16"), "MXFP4": Format("mxfp4"),
    "W4A16_AWQ": integers(4, 128, zeros=False), "INT8_SQ": Format("int8"),
    "W8A8_SQ_PER_CHANNEL": Format("int8"), "W8A16": Format("int8", "bfloat16"),
}  # fmt: skip


class Patterns:
    """Module name patterns: names, substrings, `*` wildcards, `re:` expressions."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: set[str] = set()
        self._parts: list[str] = []
        self._by_layer: dict[str, list[re.Pattern[str]]] = {}
        self._regex: list[re.Pattern[str]] = []
        for pattern in patterns:
            self._add(pattern)

    def _add(self, pattern: str) -> None:
        if pattern.startswith("re:"):
            self._regex.append(re.compile(pattern[3:]))
            return
        bare = _bare(pattern)
        if "*" not in bare:
            self._exact.add(bare)
            if not _LAYER.match(bare):
                self._parts.append(f".{bare}.")
            return
        layer = _LAYER.match(bare)
        expression = re.compile(translate(bare))
        self._by_layer.setdefault(layer[1] if layer else "", []).append(expression)

    def match(self, name: str) -> bool:
        """True if a pattern matches this module (`layers.3.mlp.gate_proj`) or a parent."""
        holders = [name]
        while "." in holders[-1]:
            holders.append(holders[-1].rpartition(".")[0])
        if not self._exact.isdisjoint(holders):
            return True
        if any(part in f".{name}." for part in self._parts):
            return True
        layer = _LAYER.match(name)
        globs = self._by_layer.get("", []) + self._by_layer.get(layer[1] if layer else "-", [])
        if any(glob.match(holder) for glob in globs for holder in holders):
            return True
        spelt = [prefix + name for prefix in ("", *_PREFIXES)] if self._regex else ()
        return any(regex.match(full) for regex in self._regex for full in spelt)


class Quantisation:
    """Formats of modules, from `quantization_config`."""

    def __init__(self, where: str, keys: Mapping[str, Any] | None, dtype: str) -> None:
        """Parse `quantization_config`, None for none; raises ConfigError on an unknown key."""
        self.where, self.keys = where, keys or {}
        self.unquantised = Format(dtype)
        self.experts_only = False
        self.kv_dtype = self._read_kv_dtype()
        self.excluded = Patterns(self._excluded())
        self.groups: list[tuple[Patterns | None, Format]] = []
        self.named: dict[str, Format] = {}
        if keys is not None:
            self._read()

    def format_of(
        self, names: Iterable[str], *, linear: bool = True, expert: bool = False
    ) -> Format:
        """Return a module's format, by its possible names."""
        names = list(names)
        for name in names:
            holder = name
            while holder:
                if holder in self.named:
                    return self.named[holder]
                holder = holder.rpartition(".")[0]
        if any(self.excluded.match(name) for name in names):
            return self.unquantised
        for targets, format_ in self.groups:
            meant = linear and (expert or not self.experts_only)
            if meant if targets is None else any(targets.match(name) for name in names):
                return format_
        return self.unquantised

    @property
    def main(self) -> Format:
        """Format of most matrices."""
        if self.groups:
            return self.groups[-1][1]
        common = Counter(self.named.values()).most_common(1)
        return common[0][0] if common else self.unquantised

    @property
    def method(self) -> str:
        """`quant_method`, or ModelOpt's if only its algorithm is given."""
        return str(
            self.keys.get("quant_method") or ("modelopt" if "quant_algo" in self.keys else "")
        )

    def _refusal(self, key: str, value: Any, known: Iterable[object]) -> ConfigError:
        return ConfigError(
            f"{self.where}: {key} is {value!r}; known are {', '.join(map(str, known))}"
        )

    def _excluded(self) -> list[str]:
        patterns: list[str] = []
        for key in EXCLUDED_KEYS:
            value = self.keys.get(key) or []
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"{self.where}: {key} is {value!r}; it must be a list of names")
            if self.method == "fp8" and "moe_quant_algo" in self.keys:
                continue  # excludes modules only from the experts' format; they are FP8
            patterns += value
        dynamic = self.keys.get("dynamic")
        if isinstance(dynamic, dict):
            patterns += [f"re:{key[2:]}" for key in dynamic if key.startswith("-:")]
            if changed := [key for key in dynamic if not key.startswith("-:")]:
                raise ConfigError(
                    f"{self.where}: dynamic has {changed[0]!r}: formats that differ by module are "
                    "not described for this method"
                )
        return patterns

    def _read_kv_dtype(self) -> str:
        scheme = self.keys.get("kv_cache_scheme") or self.keys.get("kv_cache_quant_algo")
        if not scheme:
            return ""
        if isinstance(scheme, dict):
            scheme = f"{scheme.get('type', 'float')}{scheme.get('num_bits')}"
        known = {"FP8": "fp8", "FLOAT8": "fp8", "INT8": "int8", "NVFP4": "nvfp4", "FLOAT4": "nvfp4"}
        if str(scheme).upper() not in known:
            raise self._refusal("kv_cache_scheme", scheme, known)
        return known[str(scheme).upper()]

    def _read(self) -> None:
        keys, bits = self.keys, self.keys.get("bits", self.keys.get("w_bit", 4))
        group = keys.get("group_size", keys.get("q_group_size", 128))
        group = group if isinstance(group, int) else 128
        match self.method:
            case "fp8" | "fbgemm_fp8":
                self.groups.append((None, block_fp8(keys.get("weight_block_size"))))
                self._read_named()
            case "mxfp4":
                self.experts_only = True
                self.groups.append((None, Format("mxfp4")))
            case "awq" | "gptq" | "auto-round" if bits in (4, 8):
                zeros = self.method == "gptq" or bool(keys.get("zero_point", self.method == "awq"))
                self.groups.append((None, integers(bits, group, zeros=zeros)))
                if keys.get("lm_head"):
                    self.named["lm_head"] = self.groups[-1][1]
            case "bitsandbytes" if keys.get("load_in_4bit") or keys.get("_load_in_4bit"):
                twice = bool(keys.get("bnb_4bit_use_double_quant"))
                scales = 1 / 64 + 4 / (64 * 256) if twice else 4 / 64
                self.groups.append((None, Format("int4", size=0.5 + scales)))
            case "bitsandbytes" if keys.get("load_in_8bit") or keys.get("_load_in_8bit"):
                self.groups.append((None, Format("int8", "bfloat16")))
            case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
                self._read_modelopt()
            case "compressed-tensors":
                self._read_compressed()
            case method:
                raise ConfigError(
                    f"{self.where}: quant_method is {method!r} with {bits} bits; known are fp8, "
                    "fbgemm_fp8, mxfp4, modelopt, compressed-tensors, bitsandbytes, and awq, gptq "
                    "and auto-round with 4 or 8 bits"
                )

    def _algorithm(self, name: Any, group: Any) -> Format:
        algorithm = str(name or "").upper()
        if algorithm not in ALGORITHMS:
            raise self._refusal("quant_algo", name, ALGORITHMS)
        if algorithm == "W4A16_AWQ" and isinstance(group, int):
            return integers(4, group, zeros=False)
        return ALGORITHMS[algorithm]

    def _read_modelopt(self) -> None:
        algorithm = str(self.keys.get("quant_algo") or "").upper()
        if algorithm != "MIXED_PRECISION":
            self.groups.append((None, self._algorithm(algorithm, self.keys.get("group_size"))))
            return
        self._read_named()
        if not self.named:
            raise ConfigError(
                f"{self.where}: quant_algo is MIXED_PRECISION without quantized_layers; keep "
                "hf_quant_config.json of the checkpoint beside config.json"
            )

    def _read_named(self) -> None:
        layers = self.keys.get("quantized_layers") or {}
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            raise ConfigError(f"{self.where}: quantized_layers must be an object of objects")
        for name, how in layers.items():
            self.named[_bare(name)] = self._algorithm(how.get("quant_algo"), how.get("group_size"))

    def _read_compressed(self) -> None:
        groups = self.keys.get("config_groups")
        sparse = (self.keys.get("sparsity_config") or {}).get("format", "dense")
        if sparse != "dense":
            raise self._refusal("sparsity_config.format", sparse, ["dense"])
        if not isinstance(groups, dict) or not groups:
            raise ConfigError(
                f"{self.where}: config_groups is {groups!r}; it must be an object of groups"
            )
        for group in groups.values():
            targets = group.get("targets") or ["Linear"]
            named = None if set(targets) & {"Linear", "FusedMoE"} else Patterns(targets)
            self.groups.append((named, self._compressed(group)))
        self.groups.sort(key=lambda group: group[0] is None)

    def _compressed(self, group: Mapping[str, Any]) -> Format:
        weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
        kind = (weights.get("type"), weights.get("num_bits"), inputs.get("num_bits"))
        size = weights.get("group_size") or 0
        match kind:
            case ("float", 8, 8 | None):
                compute = "fp8" if inputs else "bfloat16"
                block = block_fp8(weights.get("block_structure"))
                return Format("fp8", compute, 1 + 1 / size if size > 0 else block.size)
            case ("float", 4, 4 | 8 | None):
                compute = {4: "fp4", 8: "fp8", None: "bfloat16"}[kind[2]]
                return Format("mxfp4" if size == 32 else "nvfp4", compute)
            case ("int", 4 | 8, 8 | None):
                zeros = not weights.get("symmetric", True)
                return integers(kind[1], size, zeros=zeros, inputs=kind[2])
        known = "('float', 8, 8), ('float', 4, 4), ('int', 8, 8), ('int', 4, None), ..."
        raise ConfigError(
            f"{self.where}: config_groups has (type, bits, bits of activations) {kind}; known are "
            f"{known}"
        )


def served_quantisation(where: str, keys: Mapping[str, Any] | None) -> Quantisation | None:
    """Return the formats of weights that workers read, None for plain ones; or ConfigError."""
    if keys is None:
        return None
    method = keys.get("quant_method") or ("modelopt" if "quant_algo" in keys else "")
    other = ""
    if method in SERVED:
        formats = Quantisation(where, keys, "bfloat16")
        named = [*(form for _, form in formats.groups), *formats.named.values()]
        kinds = {form.dtype for form in named} - {"fp8", "int8", "int4", "mxfp4"}
        if not kinds:
            return formats
        other = f" with {', '.join(sorted(kinds))}"
    raise ConfigError(
        f"{where}: quant_method is {method!r}{other}, which no worker reads; give a checkpoint in "
        f"bf16, or one of {', '.join(SERVED)} with FP8, int8 or int4 weights"
    )


def _bare(name: str) -> str:
    """Strip the prefix before the layers from a module's name."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name
