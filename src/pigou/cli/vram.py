"""`pigou vram`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pigou.capacity.vram import (
    VramConfig,
    VramMap,
    decode_intensity,
    measured_map,
    mix_demand,
    ridge_point,
    vram_map,
)
from pigou.cli.option_values import check_json, write_json
from pigou.cli.progress import wide_console
from pigou.config import ConfigError, RunError
from pigou.models.architecture import Architecture
from pigou.models.gpus import GIB, GIGA, Gpu
from pigou.models.gpus import gpu as gpu_named
from pigou.models.read import architecture

_TERMS = ("weights", "cache", "activations", "adapters", "runtime", "scratch")
_MARGIN = 0.3
#: Memory of a GPU at most.
_MAX_GIB = 2**20
_SEQUENCES = re.compile(r"(\d+)x(\d+)")


def vram(
    config: VramConfig,
    model: Annotated[
        str, typer.Option(help="Model name, or folder with a config.json, or its path.")
    ] = "",
    gpu: Annotated[str, typer.Option(help="GPU name: H200, RTX PRO 6000.")] = "",
    worker: Annotated[
        str,
        typer.Option(
            help="URL of a worker: show its memory as measured at startup instead of computing it."
        ),
    ] = "",
    key: Annotated[
        str, typer.Option("--api-key", "--key", help="Fleet secret that the worker asks for.")
    ] = "",
    kv_dtype: Annotated[
        str,
        typer.Option(help="Number format of the KV cache: bfloat16, fp8, fp8_ds_mla, ...; by "
                          "default the model's own."),
    ] = "",
    draft_model: Annotated[
        str, typer.Option(help="Draft model, whole on each GPU beside its KV: a name, or folder.")
    ] = "",
    memory_gib: Annotated[
        float, typer.Option(help="Memory in GiB as the driver reports it, if it differs.", min=0.0)
    ] = 0.0,
    sequences: Annotated[
        str, typer.Option(help="Batch to check, as 28x1280,4x32896: count x tokens.")
    ] = "",
    margin: Annotated[
        float, typer.Option(help="Share of the cache that the batch should leave free.")
    ] = _MARGIN,
    json: Annotated[
        str, typer.Option(help="File to write the figures to, in bytes.", show_default=False)
    ] = "",
) -> None:  # fmt: skip
    """Map a GPU's memory under a model: six terms, the KV of a token, and what a batch needs."""
    check_json(json)
    if worker:
        computed = (model, gpu, sequences, kv_dtype, draft_model, memory_gib, margin != _MARGIN)
        if any(computed) or config != VramConfig():
            raise ConfigError("--worker is given, and options of a computed map, too; give one")
        measured = _measured(worker, key)
        _show_terms(measured["map"], f"{measured['model']} on {measured['device']}, measured")
        write_json("--json", json, measured)
        return
    if key:
        raise ConfigError("--api-key is given, and is for --worker alone; leave it out")
    if not model or not gpu:
        raise ConfigError(f"{'gpu' if model else 'model'} is missing; give both, or --worker")
    shape = architecture(model)
    if kv_dtype:
        shape = replace(shape, kv_dtype=kv_dtype)
    device = gpu_named(gpu)
    if memory_gib > _MAX_GIB:
        raise ConfigError(f"--memory-gib is {memory_gib:g}; it must be at most {_MAX_GIB}")
    if memory_gib:
        device = replace(device, memory=int(memory_gib * GIB))
    if margin != _MARGIN and not sequences:
        raise ConfigError("--margin is given, and is of the batch of --sequences; give both")
    batch = _parse_sequences(sequences)
    draft = architecture(draft_model) if draft_model else None
    memory = vram_map(shape, device, config, draft)
    document = _document(shape, device, config, memory)
    document["draft_model"] = "" if draft is None else draft.name
    if batch:
        demand = mix_demand(shape, device, memory, batch, config.parallel, margin, draft)
        document["batch"] = {**msgspec.to_builtins(demand), "margin": margin}
        count = sum(number for number, _ in batch)
        mean = sum(number * tokens for number, tokens in batch) // count
        document["batch"]["flops_per_byte"] = decode_intensity(shape, count, mean)
    _show(document)
    write_json("--json", json, document)


def _measured(url: str, key: str) -> dict[str, Any]:
    from pigou.cli.fleet import ask

    try:
        about = ask(url, key, "GET", "/server_info")
    except (ConfigError, RunError) as error:
        raise ConfigError(f"worker is {url!r}, which cannot be asked: {error}") from None
    memory = measured_map(about)
    return {
        "model": about.get("model", ""), "device": about["memory"]["device"],
        "memory_bytes": about["memory"]["memory"],
        "map": {"source": "measured", **msgspec.to_builtins(memory)},
    }  # fmt: skip


def _parse_sequences(text: str) -> list[tuple[int, int]]:
    batch = []
    for item in text.split(",") if text else ():
        match = _SEQUENCES.fullmatch(item.strip())
        if match is None or not int(match[1]) or not int(match[2]):
            raise ConfigError(f"--sequences has {item!r}; write COUNTxTOKENS, like 28x1280")
        batch.append((int(match[1]), int(match[2])))
    return batch


def _document(
    shape: Architecture, device: Gpu, config: VramConfig, memory: VramMap
) -> dict[str, Any]:
    """Return the document of `--json`; memory in bytes per GPU."""
    return {
        "model": shape.name, "gpu": device.name, "tp": config.tp, "dp": config.dp, "ep": config.ep,
        "memory_bytes": device.memory,
        "map": {"source": "computed", **msgspec.to_builtins(memory)},
        "parameters": shape.parameters, "active_parameters": shape.active_parameters,
        "weights_by_part": {
            part: round(size) for part, size in shape.parts(config.parallel).items()
        },
        "checkpoint_bytes": shape.checkpoint_bytes,
        "not_loaded": {extra.name: extra.size for extra in shape.extras if not extra.loaded},
        "kv": {
            "dtype": shape.kv_dtype,
            "bytes_per_token": shape.token_bytes(),
            "bytes_per_token_and_gpu": shape.token_bytes(config.tp),
            "bytes_per_token_multi_head": shape.multi_head_token_bytes(),
            "bytes_per_sequence": shape.state_bytes,
            "sequence_bytes": {
                str(tokens): shape.sequence_bytes(tokens)
                for tokens in (1024, 8192, 32_768, 131_072)
                if tokens <= shape.context
            },
        },
        "ridge_flops_per_byte": {
            dtype: ridge_point(device, dtype) for dtype in device.flops if dtype != "float16"
        },
    }  # fmt: skip


def _show_terms(memory: dict[str, Any], title: str) -> Console:
    console = wide_console()
    table = Table("memory of each GPU", "GiB", "GB", "share")
    for term in _TERMS:
        size = memory[term]
        table.add_row(
            term, f"{size / GIB:.2f}", f"{size / GIGA:.2f}", f"{size / memory['usable']:.1%}"
        )
    table.add_row("usable", f"{memory['usable'] / GIB:.2f}", f"{memory['usable'] / GIGA:.2f}", "")
    console.print(title)
    console.print(table)
    return console


def _show(document: dict[str, Any]) -> None:
    memory, kv = document["map"], document["kv"]
    title = f"{document['model']} on {document['tp'] * document['dp']} x {document['gpu']}"
    console = _show_terms(memory, title)
    console.print(
        f"KV cache ({kv['dtype']}): {kv['bytes_per_token']:,} bytes a token"
        + (f", {kv['bytes_per_token_multi_head']:,} with a KV head for each query head"
           if kv["bytes_per_token_multi_head"] not in (None, kv["bytes_per_token"]) else "")
        + f"; {memory['blocks']:,} blocks, {memory['tokens']:,} tokens."
    )  # fmt: skip
    for name, size in document["not_loaded"].items():
        console.print(f"Not loaded, of the checkpoint: {name}, {size / GIB:.2f} GiB.")
    ridges = ", ".join(
        f"{value:.0f} in {dtype}" for dtype, value in document["ridge_flops_per_byte"].items()
    )
    console.print(f"Ridge point, FLOP a byte: {ridges}.")
    if batch := document.get("batch"):
        verdict = "fits, with its margin" if batch["is_safe"] else (
            f"fits, but leaves less than {batch['margin']:.0%} free" if batch["fits"]
            else "does not fit"
        )  # fmt: skip
        console.print(
            f"The batch needs {batch['demand'] / GIB:.2f} GiB a GPU of {memory['cache'] / GIB:.2f} "
            f"GiB ({batch['safe'] / GIB:.2f} GiB safe): it {verdict}. A decode step reads for "
            f"{batch['step_s'] * 1e3:.2f} ms ({batch['step_peak_s'] * 1e3:.2f} ms at the peak of "
            f"the memory), at {batch['flops_per_byte']:.1f} FLOP a byte."
        )
