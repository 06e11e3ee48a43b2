"""The peer's side: reads tasks with kvpress, in a process and an environment of its own.

Importing kvpress replaces the attention functions of transformers, so nothing else runs here. It
reads orders from standard input, one JSON object a line: `task` (folder), `press`, `most`, `sinks`,
`recent`, `rows` (at once), `out` (where the outcome goes), and answers each with a line. The order
`names` asks what presses there are for prompts (true) or streams (false).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import KeyRerotationPress
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from benchmarks.token_eviction.presses import Guarded, Oracle, names, prefill_press, stream_press
from benchmarks.token_eviction.task import Meter, Outcome, Prepared, joined
from benchmarks.token_eviction.tracker import Tracker

#: Tokens after a cut that the oracle knows.
HORIZON = 256


@dataclass(frozen=True)
class Layer:
    """Inputs of a layer's attention over a whole prompt, and what it put in the cache."""

    module: Any
    kwargs: dict[str, Any]
    keys: torch.Tensor  # shape (rows, kv_heads, tokens, head_dim)
    values: torch.Tensor  # shape of the keys


class Peer:
    """The model, once with each kind of attention that presses need.

    A prompt that many presses cut is computed once: a press's own hook is then called with what it
    would have seen. Where it wants attention weights, which are large, it is computed each time.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], Any] = {}
        self._task: Path | None = None
        self._prompts: dict[int, list[Layer]] = {}

    def model(self, folder: str, press: str) -> Any:
        """Return a model in float32; only `observed` needs attention weights."""
        kind = "eager" if press.startswith("observed") else "sdpa"
        if (folder, kind) not in self._models:
            self._models[folder, kind] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=kind
            ).eval()
        return self._models[folder, kind]

    def run(self, order: dict[str, Any]) -> Outcome:
        """Do an order, some rows at a time."""
        prepared = Prepared.read(Path(order["task"]))
        if prepared.folder != self._task:
            self._task, self._prompts = prepared.folder, {}
        model = self.model(prepared.task.model, order["press"])
        rows = len(prepared.tokens)
        torch.manual_seed(0)
        parts = []
        for at in range(0, rows, order["rows"]):
            here = slice(at, min(at + order["rows"], rows))
            layers = None
            if prepared.task.whole and not order["press"].startswith("observed"):
                if at not in self._prompts:
                    self._prompts[at] = prompt(model, prepared, here)
                layers = self._prompts[at]
            parts.append(read(model, prepared, here, order, layers))
        return joined(parts)


def prompt(model: Any, prepared: Prepared, rows: slice) -> list[Layer]:
    """Compute the prompt of some rows."""
    found: list[Layer] = []

    def keep(module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        rest = {name: value for name, value in kwargs.items() if name != "past_key_values"}
        found.append(Layer(module, rest, layer.keys, layer.values))

    ids = torch.from_numpy(np.array(prepared.tokens[rows, : prepared.task.whole]))
    hooks = [
        layer.self_attn.register_forward_hook(keep, with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return found


def read(
    model: Any,
    prepared: Prepared,
    rows: slice,
    order: dict[str, Any],
    layers: list[Layer] | None,
) -> Outcome:
    """Read some rows of a task, whose prompt may have been computed before."""
    task, name = prepared.task, order["press"]
    press = make(prepared, order)
    meter = Meter(prepared, rows)
    ids = torch.from_numpy(np.array(prepared.tokens[rows]))
    turned = press.press.n_sink if isinstance(press, KeyRerotationPress) else None
    tracker = Tracker(model, len(ids), turned)
    cache = DynamicCache()
    began = time.perf_counter()
    spent = 0.0
    with torch.inference_mode(), tracker.watch(model) as attach:
        detach = attach(press)
        for number, (first, end) in enumerate(task.spans()):
            tracker.begin(first, end)
            if number == len(task.cuts):
                detach()  # nothing is cut behind the last piece
            elif name.startswith("oracle"):
                inform(press, tracker, prepared, rows, number)
            if layers is not None and not number:
                replay(tracker, layers, cache, press)
                continue
            shift = cache.get_seq_length() - first if turned is not None and first else 0
            logits = model(
                ids[:, first:end],
                past_key_values=cache,
                position_ids=torch.arange(first + shift, end + shift)[None],
                logits_to_keep=0 if end > task.measured else 1,
            ).logits
            pause = time.perf_counter()
            show(meter, tracker, logits.numpy(), task.measured)
            spent += time.perf_counter() - pause
    return meter.outcome(time.perf_counter() - began - spent)


def replay(tracker: Tracker, layers: list[Layer], cache: DynamicCache, press: Any) -> None:
    """Put a prompt's entries into a cache, layer by layer, and let a press cut them."""
    for index, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, index)
        tracker.replay(layer.module, layer.kwargs | {"past_key_values": cache}, press)


def show(meter: Meter, tracker: Tracker, logits: np.ndarray, measured: int) -> None:
    """Tell the meter what was computed."""
    first, end = tracker.span
    meter.held(first, end, tracker.held)
    if end <= measured:
        return
    meter.logits(first, logits)
    most = max(each.shape[2] for each in tracker.during)
    sizes = [torch.nn.functional.pad(p, (0, most - p.shape[2]), value=-1) for p in tracker.during]
    meter.kept(first, end, torch.stack(sizes, dim=1).numpy())


def make(prepared: Prepared, order: dict[str, Any]) -> Any:
    """Make the press of an order; None for the full cache."""
    task, guards = prepared.task, (order["sinks"], order["recent"])
    if order["press"] == "full":
        return None
    if task.whole:
        return prefill_press(order["press"], task.whole, order["most"], *guards)
    return stream_press(order["press"], order["most"], task.chunk, *guards)


def inform(press: Any, tracker: Tracker, prepared: Prepared, rows: slice, cut: int) -> None:
    """Tell an oracle what comes after the next cut."""
    base = getattr(press, "base_press", press)
    oracle = base.base if isinstance(base, Guarded) else base
    assert isinstance(oracle, Oracle)
    future = torch.from_numpy(prepared.future(cut, HORIZON)[rows])
    oracle.future = lambda layer: future[:, layer]
    oracle.positions = lambda layer: tracker.positions[layer]


def main() -> None:
    """Do orders until there are no more."""
    torch.set_num_threads(1)
    disable_progress_bar()
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print
    peer = Peer()
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {"error": None}
        try:
            if "names" in order:
                answer["names"] = names(order["names"])
            else:
                peer.run(order).write(Path(order["out"]))
        except Exception as error:  # a press that cannot run is told of, and left out
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
