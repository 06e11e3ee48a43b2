"""Decoders of transformers: its modules and weights, over our attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pigou.models import ModelError
from pigou.models.rope_parameters import scaled_context
from pigou.runtime.attention.paged_attention import PagedAttention
from pigou.runtime.models.experts import ExpertLoads, adopt_experts
from pigou.runtime.models.linear import Product, WeightMatrix
from pigou.runtime.models.model_config import LayerAttention, ModelConfig
from pigou.runtime.models.weights import Weights
from pigou.runtime.ops import Ops
from pigou.text.model_files import read_end_tokens

#: Names of our function in transformers' registers: serving (no masks are made), and dry runs.
_ATTENTION, _DRY_RUN = "pigou", "pigou-dry-run"
#: Arguments of attention functions that change no score.
_HARMLESS = {
    "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "dropout", "cache_position", "sliding_window", "is_causal", "deterministic",
    "training", "output_router_logits",
}  # fmt: skip
#: Tensors of a vision-language checkpoint that its text part has no use for.
_OTHER_PARTS = re.compile(
    r"^(model\.)?(vision|visual|image|audio|multi_modal|mm_|embed_vision|embed_audio|connector|"
    r"patch_|resampler|img_)"
)
#: Masks that old checkpoints of GPT-2 and GPT-NeoX hold.
_MASKS = re.compile(r"\.(attn|attention)\.(masked_)?bias$")
_TEXT_PART = re.compile(r"^(model\.)?(language_model|text_model)\.(?=(model\.)?)(model\.)?")
#: CPU kernels need heads of a multiple of this; narrower ones are padded above it.
_LANES = 16
#: Sizes that a configuration must have.
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


@dataclass(slots=True)
class AttentionSeam:
    """Where attention modules of transformers call ours; records their shapes on a dry run."""

    step: PagedAttention | None = None  # None on a dry run
    layers: list[LayerAttention] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)  # attention module -> layer
    context: int = 2**31  # tokens within which chunked attention equals full attention


@dataclass(frozen=True, slots=True)
class _Mask:
    """Form of a mask that a model asks for, in place of its numbers."""

    window: int = 0
    chunk: int = 0
    causal: bool = True  # False for any other form


def _mask_form(mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> _Mask:
    """Return a mask's form by a few of its entries."""

    def sees(query: int, key: int) -> bool:
        at = [torch.tensor(i, device="cpu") for i in (0, 0, query, key)]
        return bool(mask_function(*at))

    far = local_size or 2
    if sees(0, 1) or not sees(far, far) or not sees(far - 1, 0):
        return _Mask(causal=False)
    if not local_size or sees(far, 0):
        return _Mask()
    return _Mask(window=far) if sees(far, 1) else _Mask(chunk=far)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend over paged KV; query is (1, heads, tokens, head_dim), key and value as ours."""
    seam: AttentionSeam = module.pigou_seam  # type: ignore[assignment]
    name: str = module.pigou_name  # type: ignore[assignment]
    up: _Latents | None = getattr(module, "pigou_latents", None)
    if up is not None:
        query, value = up.absorb(query), key[..., : up.keys.shape[2]]
    widest = max(query.shape[-1], value.shape[-1])
    cached = widest if widest <= _LANES else -(-widest // _LANES) * _LANES
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if seam.step is None:
        mask = attention_mask or _Mask(window=int(others.get("sliding_window") or 0))
        given = {key for key, value in others.items() if value is not None} - _HARMLESS
        if isinstance(mask, _Mask) and not mask.causal:
            raise ModelError(f"{name} is not causal")
        if given or not isinstance(mask, _Mask):
            raise ModelError(f"{name} needs {', '.join(sorted(given)) or 'a mask of its own'}")
        if name in seam.names:
            raise ModelError(f"{name} computes attention more than once a step")
        seam.names[name] = len(seam.layers)
        seam.context = min(seam.context, mask.chunk or seam.context)
        form = LayerAttention(
            query.shape[1], key.shape[1], cached, scale, mask.window, float(softcap or 0.0),
            sinks=s_aux is not None, latent=0 if up is None else value.shape[-1],
        )  # fmt: skip
        seam.layers.append(form)
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
        return (out if up is None else up.expand(out))[None], None
    step, layer = seam.step, seam.names[name]
    if scale != step.config.layer_attention(layer).scale:
        raise ModelError(f"{name} changed its scale to {scale}")
    if step.beat is not None:
        step.beat()
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    q, k, v = (F.pad(x, (0, cached - x.shape[-1])) if x.shape[-1] < cached else x for x in parts)
    out = step.compute(layer, q, k, v, s_aux)[..., : value.shape[-1]]
    return (out if up is None else up.expand(out))[None], None


@dataclass(frozen=True, slots=True)
class _Latents:
    """MLA in its absorbed form: queries meet cached latents, and outputs are expanded.

    With c the latent, W_k and W_v a head's halves of `kv_b_proj`: q W_k c = (W_k^T q) c, and the
    sum of p W_v c is W_v times the sum of p c.
    """

    keys: Tensor  # W_k, shape (heads, numbers of a query without rotation, latent)
    values: Tensor  # W_v, shape (heads, numbers of a value, latent)

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries of latents and rotated keys, (1, heads, tokens, latent + rotated)."""
        still, rotated = query.split([self.keys.shape[1], query.shape[-1] - self.keys.shape[1]], -1)
        return torch.cat((still @ self.keys, rotated), -1)

    def expand(self, out: Tensor) -> Tensor:
        """Return values (tokens, heads, numbers) of weighted latents (tokens, heads, latent)."""
        return (out.transpose(0, 1) @ self.values.mT).transpose(0, 1)


def _use_latents(base: nn.Module) -> None:
    """Let modules with latent attention (MLA) hand over latents, not expanded heads."""
    for module in base.modules():
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            latent: Any = module
            weight = latent.kv_b_proj.weight.detach()
            numbers = [latent.qk_nope_head_dim, latent.v_head_dim]
            halves = weight.view(-1, sum(numbers), weight.shape[1]).split(numbers, 1)
            latent.pigou_latents = _Latents(*(half.contiguous() for half in halves))
            latent.expand_kv = lambda still, rotated: (torch.cat((still, rotated), -1), still)
            latent.kv_b_proj = nn.Identity()


class LinearModule(nn.Module):
    """A product in place of an `nn.Linear`."""

    def __init__(self, product: Product, like: Tensor) -> None:
        super().__init__()
        self.product = product  # callable (rows, inputs) -> (rows, outputs)
        self.weight = like.new_empty(0)  # for models that ask for its dtype
        self.shape = like.shape[1], like.shape[0]  # inputs and outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (..., outputs)."""
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _GivenStates:
    """Stands in for the decoder below the output layer, and for its output of given states."""

    last_hidden_state: Tensor

    @property
    def decoder(self) -> _GivenStates:
        """OPT's output layer asks for its decoder's decoder."""
        return self

    def __call__(self, *_: Any, **__: Any) -> _GivenStates:
        return self

    def __getattr__(self, name: str) -> None:
        return None  # whatever else is asked for

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class TransformersDecoder:
    """A causal model of transformers, as `DecoderModel`."""

    def __init__(self, model: Any, config: ModelConfig, seam: AttentionSeam, ops: Ops) -> None:
        """Wrap a loaded model, whose attention calls `seam`."""
        self.config = config
        self.ops = ops
        self.model = model
        self.prefix, self.base = _base(model)
        self.loads: ExpertLoads | None = None
        self._seam = seam
        self._positions = 0  # length that rotary embeddings are fixed for
        self._given = _GivenStates()
        delattr(model, self.prefix)  # a module's place would take a module alone
        setattr(model, self.prefix, self._given)
        _join(self.base, seam)

    def hidden(self, tokens: Tensor, attention: PagedAttention, wanted: Tensor | None) -> Tensor:
        """Return normalized hidden states of tokens (tokens,), only the `wanted` (n,) or all."""
        if self._positions != len(attention.turns):
            self._positions = len(attention.turns)
            _fix_rope(self.base, self._positions)
        self._seam.step = attention
        if self.loads is not None:
            self.loads.begin_step()
        output = self.base(
            input_ids=tokens.long()[None],
            position_ids=attention.positions()[None],
            use_cache=False,
            return_dict=True,
        )
        self._seam.step = None
        states: Tensor = output.last_hidden_state[0]
        return states if wanted is None else states[wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (n, vocab) of hidden states, scaled and capped by the model's own code."""
        self._given.last_hidden_state = hidden[None]
        logits: Tensor = self.model(input_ids=torch.zeros(1, 1), use_cache=False).logits[0]
        return logits

    def rotary_table(self, attention: PagedAttention) -> Tensor:
        """Return cosines, then sines, of keys by position; raises ModelError if they differ."""
        first, *others = self.config.attention
        rotary = getattr(self.base, "rotary_emb", None)
        blame = f"eviction: {self.config.family}"
        if not first.standard or any(form != first for form in others):
            raise ModelError(f"{blame} has windows, soft caps, sinks or different layers")
        if rotary is None:
            raise ModelError(f"{blame} does not rotate its keys")
        at = torch.arange(len(attention.turns), device=attention.device)[None]
        parts = rotary(torch.empty(1, 1, dtype=torch.float32, device=at.device), at)
        half = self.config.head_dim // 2
        if len(parts) != 2 or any(
            part.shape[-1] != 2 * half or not torch.equal(part[..., :half], part[..., half:])
            for part in parts
        ):
            raise ModelError(f"{blame} rotates its keys in another way")
        return torch.cat([part[0, :, :half] for part in parts], -1)

    def linears(self) -> dict[str, LinearModule]:
        """Return products by module name, as `model.layers.0.self_attn.q_proj`."""
        modules = {f"{self.prefix}.{n}": m for n, m in self.base.named_modules()}
        modules |= dict(self.model.named_modules())
        return {name: m for name, m in modules.items() if isinstance(m, LinearModule)}


# --- loading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A class of transformers, its configuration, and what its attention needs."""

    kind: Any  # class of the causal model
    source: Any  # transformers' configuration
    text_part: bool  # part of a vision-language checkpoint
    config: ModelConfig
    seam: AttentionSeam


def read_causal_model(folder: Path) -> CausalModel:
    """Read a folder's config.json and dry-run its model; raises ModelError if unsupported."""
    kind, source, text_part = _causal_class(folder)
    if hasattr(source, "quantization_config"):
        del source.quantization_config  # MXFP4: `Weights` dequantises it
    family = str(source.model_type)
    with _quiet():
        seam = _dry_run(kind, source, family)
    widest = max(seam.layers, key=lambda form: form.kv_heads * form.head_dim)
    hidden, vocab = int(source.hidden_size), int(source.vocab_size)
    config = ModelConfig(
        family=family, layers=len(seam.layers), hidden=hidden, heads=widest.heads,
        kv_heads=widest.kv_heads, head_dim=widest.head_dim,
        ffn=int(getattr(source, "intermediate_size", None) or 4 * hidden), vocab=vocab,
        context=min(_context(source), seam.context), norm_eps=0.0, rope=None,
        dtype=str(getattr(source, "dtype", None) or "float32").removeprefix("torch."),
        eos=read_end_tokens(folder, vocab), attention=tuple(seam.layers),
    )  # fmt: skip
    return CausalModel(kind, source, text_part, config, seam)


def load_transformers(described: CausalModel, weights: Weights, ops: Ops) -> TransformersDecoder:
    """Load all tensors; raises ModelError if one is missing, left over, or of another shape."""
    tensors = weights.take_all()
    if described.text_part:
        tensors = {_TEXT_PART.sub("model.", name).replace("model.lm_head", "lm_head"): tensor
                   for name, tensor in tensors.items() if not _OTHER_PARTS.match(name)}  # fmt: skip
        if "lm_head.weight" in tensors:
            described.source.tie_word_embeddings = False
    with _quiet():
        try:
            model, info = described.kind.from_pretrained(
                None, config=described.source, state_dict=tensors, dtype=weights.dtype,
                attn_implementation=_ATTENTION, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
        except RuntimeError as error:
            raise ModelError(f"weights cannot be loaded: {error}") from None
    _check(info, described)
    model = model.eval().to(weights.device)
    tensors.clear()  # else adopted experts are held twice
    decoder = TransformersDecoder(model, described.config, described.seam, ops)
    decoder.loads = adopt_experts(decoder.base, weights, ops.gate)
    _pack(decoder.base, weights, is_head=False)
    _pack(model, weights, is_head=True)
    return decoder


def _causal_class(folder: Path) -> tuple[Any, Any, bool]:
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    try:
        source = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configurations are code, and fail in all ways
        reason = str(error).split("\n")[0]
        raise ModelError(f"{folder}: transformers {__version__} cannot read it: {reason}") from None
    if getattr(source, "is_encoder_decoder", False):
        raise ModelError(f"model_type {source.model_type!r} is an encoder-decoder; give a decoder")
    kinds = AutoModelForCausalLM._model_mapping
    text = source.get_text_config(decoder=True)
    for config in (text, source) if text is not source else (source,):
        if type(config) in kinds:
            kind = kinds[type(config)]
            if getattr(kind, "_is_stateful", False):
                raise ModelError(
                    f"model_type {config.model_type!r} keeps a state besides KV (state-space or "
                    "linear attention layers), which is not supported"
                )
            if config is not source:  # the outer configuration decides, then the checkpoint
                config.tie_word_embeddings = getattr(source, "tie_word_embeddings", False)
            return kind, config, config is not source
    raise ModelError(
        f"model_type {source.model_type!r} is no decoder that generates text by itself, nor has it "
        "such a part"
    )


def _dry_run(kind: Any, source: Any, family: str) -> AttentionSeam:
    """Run a model without numbers, and record its layers' attention; raises ModelError."""
    from torch.fx.experimental import _config as shape_rules
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    AttentionInterface.register(_ATTENTION, _attention)
    AttentionInterface.register(_DRY_RUN, _attention)
    AttentionMaskInterface.register(_DRY_RUN, _mask_form)
    source._attn_implementation = _DRY_RUN
    seam = AttentionSeam()
    blame = f"model_type {family!r} is not supported"
    find_packed = masking_utils.find_packed_sequence_indices
    setattr(masking_utils, find_packed.__name__, lambda _: None)  # it needs numbers
    try:
        layers, *_ = (int(getattr(source, name)) for name in _SIZES)
        rules = shape_rules.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with torch.device("meta"), torch.no_grad(), rules:
            _, base = _base(kind(source).eval())
            _join(base, seam)
            _check_rope(base)
            for module in base.modules():
                if type(module).__name__.endswith("Experts"):  # their loops need numbers
                    module.forward = lambda x, *_, **__: torch.empty_like(x)
            ids = torch.zeros((1, 2), dtype=torch.int64)
            base(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
            _check_positions(base)
    except ModelError as error:
        raise ModelError(f"{blame}: {error}") from None
    except Exception as error:
        why = f"it does more than causal attention ({type(error).__name__}: {error})"
        if not kind._supports_attention_backend:
            why = "its attention is not called through transformers' interface"
        raise ModelError(f"{blame}: {why}") from error
    finally:
        setattr(masking_utils, find_packed.__name__, find_packed)
        source._attn_implementation = _ATTENTION
    if len(seam.layers) < layers:
        raise ModelError(
            f"{blame}: {layers - len(seam.layers)} of its {layers} layers have no attention that "
            "another function can take over"
        )
    return seam


def _base(model: Any) -> tuple[str, nn.Module]:
    """Return the name and module of the decoder below the output layer."""
    names = (model.base_model_prefix, "model", "transformer")
    name = next(name for name in names if hasattr(model, name))
    return name, getattr(model, name)


def _fix_rope(base: nn.Module, positions: int) -> None:
    """Choose LongRoPE's factors by `positions`, not by the longest sequence of each batch."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in base.modules():
        if getattr(module, "rope_type", None) == "longrope":
            rotary: Any = module
            trained = int(rotary.config.rope_parameters["original_max_position_embeddings"])
            chosen = trained + (positions > trained)
            make = ROPE_INIT_FUNCTIONS["longrope"]
            frequencies, _ = make(rotary.config, rotary.inv_freq.device, seq_len=chosen)
            rotary.original_inv_freq = rotary.long_inv_freq = frequencies


def _check_rope(base: nn.Module) -> None:
    for module in base.modules():
        said: Any = getattr(module, "rope_type", "")
        layered = isinstance(said, dict)
        for kind in said.values() if layered else [said]:
            if "dynamic" in kind or (layered and kind == "longrope"):
                raise ModelError(f"rope_type {kind!r} depends on the longest sequence of a batch")


def _check_positions(base: nn.Module) -> None:
    """Raise ModelError if chunks of a prompt would not get the positions that they are given."""
    embeddings = (m for name, m in base.named_modules() if name.endswith("position_embeddings"))
    if "position_ids" not in signature(base.forward).parameters or any(
        getattr(embedding, "padding_idx", None) is not None for embedding in embeddings
    ):
        raise ModelError("it counts positions by itself, from a prompt's first token or padding")


def _join(base: Any, seam: AttentionSeam) -> None:
    """Let a decoder's modules find the seam; its look for padding would wait for the device."""
    base.warn_if_padding_and_no_attention_mask = lambda *_: None
    _use_latents(base)
    for name, module in base.named_modules():
        module.pigou_seam = seam
        module.pigou_name = name


def _context(source: Any) -> int:
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    positions = next((int(n) for name in names if (n := getattr(source, name, None))), 0)
    if not positions:
        raise ModelError(f"config.json has none of {', '.join(names)}")
    try:
        return scaled_context({**source.to_dict(), "max_position_embeddings": positions})
    except ModelError:  # a rope type of transformers' own
        return positions


def _check(info: Mapping[str, Any], described: CausalModel) -> None:
    """Raise ModelError, by name, for tensors that did not load as they should."""
    errors = [*info.get("error_msgs", ()), *dict(info.get("conversion_errors") or {}).values()]
    if errors:
        raise ModelError(f"weights cannot be loaded: {errors[0]}")
    if wrong := sorted(info["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        raise ModelError(f"tensor {name!r} has shape {tuple(stored)}, not {tuple(wanted)}")
    unexpected = [name for name in info["unexpected_keys"] if not _MASKS.search(name)]
    for what, names in (("missing", info["missing_keys"]), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(
                f"tensor {min(names)!r}{more} is {what}; config.json describes a "
                f"{described.config.family} model {'with' if what == 'missing' else 'without'} it"
            )


def _pack(root: nn.Module, weights: Weights, *, is_head: bool) -> None:
    """Replace products by those of `weights` (packed, quantised), routers in float32 aside."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype is weights.dtype:
                weight, bias = child.weight.data, None if child.bias is None else child.bias.data
                product = weights.linear(WeightMatrix(weight), bias, head=is_head)
                setattr(parent, name, LinearModule(product, weight))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing load reports and bars."""
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity_error()
    bars = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
