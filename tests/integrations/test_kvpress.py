"""`PigouPress` keeps what Pigou's own evictor keeps, with a fake kvpress and with the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.lib.peers import PeerMissing, kvpress_home
from benchmarks.token_eviction.pigou_side import Reading
from benchmarks.token_eviction.reference import prepare
from benchmarks.token_eviction.task import Task
from pigou.config import EvictionConfig
from pigou.models import bundled_path
from pigou.request import Ints
from pigou.runtime.models.load import load
from tools.make_random_checkpoint import Shape, write_checkpoint

SIZE, SINKS, RECENT = 16, 4, 16
SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=640)
ROOT = Path(__file__).parents[2]


@dataclass
class FakeScorerPress:
    """Stands for kvpress's: dataclass fields, and the hook that gives a press the cache."""

    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.compression_ratio < 1

    def hook(self, module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        some = (kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
        layer.keys, layer.values = self.compress(module, *some)  # type: ignore[attr-defined]


def fake_queries(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Stands for kvpress's `get_prerope_query_states` on Llama."""
    rows, count, _ = hidden.shape
    queries: torch.Tensor = module.q_proj(hidden).view(rows, count, -1, module.head_dim)
    return queries.transpose(1, 2)


@pytest.fixture
def press_type(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The press on a kvpress of three names."""
    fake, utils = types.ModuleType("kvpress"), types.ModuleType("kvpress.utils")
    fake.ScorerPress = FakeScorerPress  # type: ignore[attr-defined]
    utils.compute_n_kept = lambda count, ratio: max(1, int(count * (1 - ratio)))  # type: ignore[attr-defined]
    utils.get_prerope_query_states = fake_queries  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    monkeypatch.setitem(sys.modules, "kvpress.utils", utils)
    monkeypatch.delitem(sys.modules, "pigou.integrations.kvpress", raising=False)
    from pigou.integrations.kvpress import PigouPress

    yield PigouPress
    sys.modules.pop("pigou.integrations.kvpress")


def prompts(rows: int, length: int) -> Ints:
    return np.random.default_rng(3).integers(10, 600, (rows, length)).astype(np.int64)


def own_kept(model: Path, tokens: Ints, keep: int, folder: Path) -> Ints:
    """Return what Pigou's executor keeps of prompts, (rows, layers, kv_heads, keep)."""
    rows, length = tokens.shape
    padded = np.concatenate((tokens, tokens[:, :SIZE]), axis=1)
    task = Task("cut", str(model), length + SIZE, length, SIZE, length, SIZE)
    config = EvictionConfig(
        policy="pigou", sinks=SINKS, recent=RECENT, least=SINKS + RECENT, params={}
    )
    reading = Reading(
        load(model, dtype="fp32"), prepare(task, padded, folder), slice(0, rows), config
    )
    reading._compute(0, length, 0)
    reading._compute(length, length + SIZE, length - keep)
    evictor = reading.executor.evictor
    assert evictor is not None
    kept = [evictor.positions(table, keep + SIZE) for table in reading.tables]
    found = np.sort(np.stack(kept), axis=-1)
    return found[..., found[0, 0, 0] < length]


def press_kept(model: Path, tokens: Ints, press: Any) -> Ints:
    """Return what a press keeps of prompts, by where its keys stand in the full cache."""
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ids = torch.from_numpy(tokens)
    caches = []
    for use in (False, True):
        hooks = [
            layer.self_attn.register_forward_hook(press.hook, with_kwargs=True)
            for layer in network.model.layers
            if use
        ]
        cache = DynamicCache()
        with torch.inference_mode():
            network(ids, past_key_values=cache, logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        caches.append([layer.keys for layer in cache.layers])
    return np.stack([found_at(a, b) for a, b in zip(*caches, strict=True)], axis=1)


def found_at(full: torch.Tensor, cut: torch.Tensor) -> Ints:
    same = (cut[..., :, None, :] == full[..., None, :, :]).all(-1)
    assert bool((same.sum(-1) == 1).all()), "each kept entry stands once in the full cache"
    return same.int().argmax(-1).numpy()


@pytest.mark.parametrize("length", [224, 232])  # whole groups of queries, and a rest
def test_a_press_keeps_what_the_evictor_keeps_by_the_generic_predictor(
    press_type: Any, tmp_path: Path, length: int
) -> None:
    write_checkpoint(tmp_path / "model", SHAPE, dtype="float32")
    tokens, keep = prompts(2, length), length - 112
    expected = own_kept(tmp_path / "model", tokens, keep, tmp_path / "cut")
    press = press_type(1 - (keep + 0.5) / length, sinks=SINKS, recent=RECENT)
    np.testing.assert_array_equal(press_kept(tmp_path / "model", tokens, press), expected)


def test_a_press_keeps_what_the_evictor_keeps_by_a_trained_predictor(
    press_type: Any, tmp_path: Path
) -> None:
    model, tokens, keep = bundled_path(), prompts(2, 128) % 400 + 5, 64
    expected = own_kept(model, tokens, keep, tmp_path / "cut")
    press = press_type(0.4999, predictor=str(model), sinks=SINKS, recent=RECENT)
    found = press_kept(model, tokens, press)
    assert (found == expected).mean() > 0.99  # float32 in other orders: near-ties may differ


def test_sinks_and_the_recent_entries_are_kept_whatever_the_ratio(press_type: Any) -> None:
    press = press_type(0.99, sinks=SINKS, recent=RECENT)
    kept = press_kept(bundled_path(), prompts(1, 100) % 400 + 5, press)
    wanted = [*range(SINKS), *range(100 - RECENT, 100)]
    assert (kept == np.array(wanted)).all()


def test_a_short_prompt_and_a_ratio_of_zero_leave_the_cache_alone(press_type: Any) -> None:
    tokens = prompts(1, 24) % 400 + 5
    for press in (press_type(0.9, sinks=4, recent=20), press_type(0.0)):
        assert press_kept(bundled_path(), tokens, press).shape[-1] == 24


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"predictor": "/nowhere"}, "returns.npz"),
        ({"recent": 0}, "recent"),
        ({"sinks": -1}, "sinks"),
    ],
)
def test_impossible_options_are_refused_by_name(
    press_type: Any, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        press_type(0.5, **options)


def test_queries_that_are_not_the_whole_prompt_are_refused(press_type: Any) -> None:
    press = press_type(0.5, recent=4)
    keys = torch.zeros(1, 2, 64, 16)
    with pytest.raises(ValueError, match="whole prompts"):
        press.compress(
            types.SimpleNamespace(layer_idx=0), torch.zeros(1, 8, 64), keys, keys, None, {}
        )


_SCRIPT = """
import json, sys
import torch
from kvpress import ScorerPress
from pigou.integrations.kvpress import PigouPress
from transformers import AutoModelForCausalLM, DynamicCache
model, ratio, tokens = json.load(sys.stdin)
network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
press = PigouPress(ratio, predictor=model, sinks=4, recent=16)
assert isinstance(press, ScorerPress)
full, cut = DynamicCache(), DynamicCache()
ids = torch.tensor(tokens)
with torch.inference_mode():
    network(ids, past_key_values=full)
    with press(network):
        network(ids, past_key_values=cut)
found = []
for a, b in zip(full.layers, cut.layers):
    same = (b.keys[..., :, None, :] == a.keys[..., None, :, :]).all(-1)
    found.append(same.int().argmax(-1).tolist())
print(json.dumps(found))
"""


def test_the_real_kvpress_drives_the_press_to_the_same_entries(tmp_path: Path) -> None:
    try:
        python = kvpress_home() / "bin" / "python"
    except PeerMissing as missing:
        pytest.skip(str(missing))
    model, tokens = bundled_path(), prompts(1, 256) % 400 + 5
    done = subprocess.run(
        [str(python), "-c", _SCRIPT], input=json.dumps([str(model), 0.4999, tokens.tolist()]),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.array(json.loads(done.stdout.splitlines()[-1])).swapaxes(0, 1)
    expected = own_kept(model, tokens, 128, tmp_path / "cut")
    assert (found == expected).mean() > 0.99
