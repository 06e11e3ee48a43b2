"""Adapters in one batch: each as alone, as merged into the weights; faulty ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_config, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.lib.lora_adapters import PROJECTIONS, write_adapter

from pigou.config import EngineConfig
from pigou.engine.plan import Rates
from pigou.models import ModelError
from pigou.request import SamplingParams
from pigou.runtime.local_engine import LocalEngine, Output
from pigou.runtime.lora import Adapter, LoRABank, attach, read_adapter
from pigou.runtime.models.load import LoadedModel, load
from reference import make_prompts

RANK = 8
#: Adapters of different ranks, scales and modules.
KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": list(PROJECTIONS)},
    "few": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "mixed": {"r": 2, "lora_alpha": 4, "target_modules": ["k_proj", "up_proj", "down_proj"],
              "rank_pattern": {"layers.1.mlp.down_proj": 5},
              "alpha_pattern": {"up_proj": 1.5}},
}  # fmt: skip


class Served:
    """A model with a bank of adapters, and the same model with each merged in."""

    def __init__(self, root: Path, implementation: str = "pigou") -> None:
        self.base = write_checkpoint(root / "base", make_config("llama"))
        self.model = load(self.base, "fp32", implementation=implementation)
        self.bank = attach(self.model.decoder, 3, RANK, 16)
        self.adapters: dict[str, Adapter] = {}
        self.merged: dict[str, LoadedModel] = {"": load(self.base, "fp32")}
        for seed, (name, kind) in enumerate(KINDS.items()):
            folder = write_adapter(root / name, self.base, kind, seed)
            self.adapters[name] = read_adapter(folder, self.bank.modules, RANK, torch.float32)
            self.merged[name] = load(folder / "merged", "fp32")

    def engine(self, slots: int = 3, **options: Any) -> LocalEngine:
        """An engine with all adapters."""
        config = {"blocks": 64, "max_seqs": 8, "max_model_len": 128, "max_loras": slots, **options}
        return LocalEngine(self.model, EngineConfig(**config), self.bank, self.adapters)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("lora"))


NAMES = ("", *KINDS)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)


def run(engine: LocalEngine, work: list[tuple[Any, str]], params: SamplingParams = GREEDY
        ) -> list[Output]:  # fmt: skip
    """Run prompts with adapters together."""
    outputs = [engine.add(prompt, params, adapter=name) for prompt, name in work]
    while any(output.reason is None for output in outputs):
        engine.step()
    return outputs


def same(output: Output, wanted: Output, tolerance: float = 1e-5) -> None:
    """Assert equal tokens and log probabilities, up to a tie of the two best."""
    for at, (ours, theirs) in enumerate(zip(output.logprobs, wanted.logprobs, strict=True)):
        np.testing.assert_allclose(
            ours.logprobs, theirs.logprobs, atol=tolerance, rtol=tolerance, err_msg=f"token {at}"
        )
        if output.tokens[at] != wanted.tokens[at]:
            assert abs(theirs.logprobs[0] - theirs.logprobs[1]) < tolerance
            return


@pytest.fixture(scope="module")
def alone(served: Served) -> Callable[[Any, str], Output]:
    """Return the output of a prompt on the model with an adapter merged in."""
    known: dict[Any, Output] = {}

    def find(prompt: Any, name: str) -> Output:
        key = name, tuple(prompt)
        if key not in known:
            config = EngineConfig(blocks=64, max_model_len=128)
            [known[key]] = LocalEngine(served.merged[name], config).generate([prompt], GREEDY)
        return known[key]

    return find


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_of_adapters_equals_merged_weights(
    served: Served, alone: Callable[[Any, str], Output], masked: bool
) -> None:
    work = [(prompt, NAMES[i % 4]) for i, prompt in enumerate(make_prompts(8, 320, 40, seed=1))]
    served.bank.masked = masked  # how CUDA computes, here on the CPU
    try:
        outputs = run(served.engine(), work)
    finally:
        served.bank.masked = False
    assert len({tuple(output.tokens) for output in outputs}) == 8
    for output, (prompt, name) in zip(outputs, work, strict=True):
        same(output, alone(prompt, name))


def test_a_decoder_of_transformers_takes_adapters(
    tmp_path: Path, alone: Callable[[Any, str], Output]
) -> None:
    served = Served(tmp_path, "transformers")
    work = [(prompt, NAMES[i % 4]) for i, prompt in enumerate(make_prompts(8, 320, 40, seed=1))]
    for output, (prompt, name) in zip(run(served.engine(), work), work, strict=True):
        same(output, alone(prompt, name))


def test_adapters_change_the_output(served: Served, alone: Callable[[Any, str], Output]) -> None:
    [prompt] = make_prompts(1, 320, 40, seed=2)
    assert len({tuple(alone(prompt, name).tokens) for name in NAMES}) == 4


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.sampled_from(NAMES)),
             min_size=1, max_size=8),
    st.integers(1, 3), st.sampled_from([8, 24, 256]), st.sampled_from([9, 64]),
    st.sampled_from([1, 4]), st.sampled_from([0, 64]),
)  # fmt: skip
def test_chunks_hits_and_preemption_change_nothing(
    served: Served, alone: Callable[[Any, str], Output], work: list[tuple[int, int, str]],
    slots: int, budget: int, blocks: int, repeat: int, host: int,
) -> None:  # fmt: skip
    stems = make_prompts(3, 320, 1, seed=3)
    stems = [np.random.default_rng(int(stem[0])).integers(3, 320, size=60) for stem in stems]
    prompts = [(stems[which][:length], name) for which, length, name in work]
    engine = served.engine(slots, max_batched_tokens=budget, blocks=blocks, max_repeat=repeat,
                           host_blocks=host)  # fmt: skip
    engine.core.rates = Rates(prefill=1.0, swap=1e9, block_bytes=1) if host else None
    for _ in range(2):  # the second time from the cache
        for output, (prompt, name) in zip(run(engine, prompts), prompts, strict=True):
            same(output, alone(prompt, name), 1e-4)  # chunks add in another order


@pytest.mark.parametrize("host", [0, 64])
def test_preempted_rows_go_on_with_their_adapter(served: Served, host: int) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
    work = [(np.arange(3 + i, 18 + i), NAMES[i % 4]) for i in range(8)]
    engine = served.engine(blocks=9, host_blocks=host, headroom=0)
    engine.core.rates = Rates(prefill=1.0, swap=1e9, block_bytes=1) if host else None
    outputs = run(engine, work, params)
    stats = engine.core.stats
    assert (stats.preemptions > 3, stats.swaps) == (True, stats.preemptions if host else 0)
    for output, (prompt, name) in zip(outputs, work, strict=True):
        lone = LocalEngine(served.merged[name], EngineConfig(blocks=64, max_model_len=128))
        same(output, lone.generate([prompt], params)[0], 1e-4)


def test_no_prefix_is_hit_across_adapters_or_versions(served: Served, tmp_path: Path) -> None:
    prompt = np.arange(3, 67)
    engine = served.engine()
    assert [run(engine, [(prompt, name)])[0].cached for name in NAMES] == [0, 0, 0, 0]
    assert [run(engine, [(prompt, name)])[0].cached for name in NAMES] == [63, 63, 63, 63]
    other = write_adapter(tmp_path / "few", served.base, KINDS["few"], seed=9)
    new = read_adapter(other, served.bank.modules, RANK, torch.float32)
    assert new.digest != served.adapters["few"].digest
    engine._adapters = {**served.adapters, "few": new}
    assert run(engine, [(prompt, "few")])[0].cached == 0


# --- refusals ---------------------------------------------------------------------------------


@pytest.fixture
def adapter(served: Served, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", served.base, KINDS["all"])


def read(served: Served, folder: Path) -> Adapter:
    return read_adapter(folder, served.bank.modules, RANK, torch.float32)


@pytest.mark.parametrize(("field", "value"), [
    ("use_dora", True), ("bias", "all"), ("lora_bias", True), ("modules_to_save", ["lm_head"]),
    ("init_lora_weights", "pissa"), ("peft_type", "IA3"), ("r", 16), ("r", True), ("r", 0),
    ("lora_alpha", "8"), ("target_modules", ["q_proj"]), ("target_modules", ["q_proj", "lm_head"]),
    ("target_modules", 7), ("rank_pattern", {"(a*)*b": 4}), ("rank_pattern", []), ("r", 3),
    ("alpha_pattern", []), ("lora_alpha", 1e300), ("layer_replication", [[0, 1]]),
])  # fmt: skip
def test_a_feature_that_is_not_applied_is_refused_by_name(
    served: Served, adapter: Path, field: str, value: Any
) -> None:
    path = adapter / "adapter_config.json"
    if value == []:
        value = [["q_proj", 4]]
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ModelError) as raised:
        read(served, adapter)
    assert (
        field in str(raised.value) or "lora_A" in str(raised.value) or "finite" in str(raised.value)
    )


@pytest.mark.parametrize("name", [
    "base_model.model.lm_head.lora_A.weight",
    "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.0.input_layernorm.weight",
])  # fmt: skip
def test_a_tensor_that_is_not_applied_is_refused_by_name(
    served: Served, adapter: Path, name: str
) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), name: torch.zeros(4, 64)}, path)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        read(served, adapter)


def test_hostile_files_are_refused_without_being_read(served: Served, adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    data = weights.read_bytes()
    for damage in (data[:100], b"", b"\xff" * 64, data[:-8]):
        weights.write_bytes(damage)
        with pytest.raises(ModelError, match="damaged"):
            read(served, adapter)
    with weights.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="bytes"):
        read(served, adapter)
    weights.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read(served, adapter)
    weights.write_bytes(data)
    tensors = load_file(weights)
    name = next(iter(tensors))
    for value in (float("nan"), float("inf")):
        tensors[name][0, 0] = value
        save_file(tensors, weights)
        with pytest.raises(ModelError, match="not finite"):
            read(served, adapter)


def test_the_digest_is_of_all_bytes(served: Served, adapter: Path) -> None:
    first = read(served, adapter).digest
    path = adapter / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    second = read(served, adapter).digest
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    assert len({first, second, read(served, adapter).digest}) == 3


def test_the_bank_counts_its_bytes(served: Served) -> None:
    bank: LoRABank = served.bank
    total = sum(RANK * sum(shape) for shape in bank.modules.values())
    assert bank.bytes >= 3 * 4 * total
