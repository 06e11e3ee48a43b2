"""Small traces for the simulations, made up by seeded generators: one of each public format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

_OWN_BLOCK, _MOONCAKE_BLOCK, _AGENT_BLOCK = 16, 512, 64


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sessions(folder: Path) -> Path:
    """Write Pigou's own format: tenants whose sessions grow from turn to turn."""
    rng, rows, fresh = Random(1), [], 1_000
    for number in range(48):
        tenant = ("acme", "guests", "batch")[number % 3]
        ids = list(range(12)) if number % 4 else []
        for turn in range(rng.randint(1, 6)):
            grown = rng.randint(4, 40)
            ids = ids + list(range(fresh, fresh + grown))
            fresh += grown
            row: dict[str, Any] = {
                "input": len(ids) * _OWN_BLOCK - rng.randrange(_OWN_BLOCK),
                "output": rng.randint(8, 160), "hash_ids": ids, "block": _OWN_BLOCK,
                "tenant": tenant, "session": f"s{number}",
            }  # fmt: skip
            if turn:
                row["think_s"] = rng.randint(1, 40) / 10
            else:
                row["arrival_s"] = number * 0.25
            rows.append(row)
    path = folder / "sessions.jsonl"
    _lines(path, rows)
    return path


def flood(folder: Path) -> Path:
    """Write Pigou's own format: one tenant floods, two others ask now and then."""
    rng, rows = Random(2), []
    for number in range(260):
        tenant = "flood" if number % 5 else ("calm" if number % 2 else "rare")
        rows.append({
            "arrival_s": number * 0.03, "input": rng.randint(64, 1500),
            "output": rng.randint(16, 120), "tenant": tenant,
        })  # fmt: skip
    path = folder / "flood.jsonl"
    _lines(path, rows)
    return path


def mooncake(folder: Path) -> Path:
    """Write Mooncake's format: long prompts, a third of which begin alike."""
    rng, rows, fresh = Random(3), [], 100
    for number in range(160):
        shared = list(range(rng.randrange(1, 9))) if number % 3 else []
        own = rng.randint(1, 12)
        ids = shared + list(range(fresh, fresh + own))
        fresh += own
        rows.append({
            "timestamp": number * 130, "hash_ids": ids, "output_length": rng.randint(4, 300),
            "input_length": len(ids) * _MOONCAKE_BLOCK - rng.randrange(_MOONCAKE_BLOCK),
        })  # fmt: skip
    path = folder / "mooncake.jsonl"
    _lines(path, rows)
    return path


def azure(folder: Path) -> Path:
    """Write Azure's format: CSV of times and lengths."""
    rng = Random(4)
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(240):
        minutes, tenths = divmod(number * 7 // 10, 600)
        stamp = f"2023-11-16 18:{minutes:02d}:{tenths // 10:02d}.{tenths % 10}000000"
        rows.append(f"{stamp},{rng.randint(30, 4000)},{rng.randint(2, 150)}")
    path = folder / "azure.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def burst(folder: Path) -> Path:
    """Write BurstGPT's format: CSV with arrivals in bursts, and requests that had failed."""
    rng = Random(5)
    rows = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    for number in range(240):
        asked, came = rng.randint(20, 1800), rng.randint(0, 12) and rng.randint(5, 400)
        rows.append(f"{number // 12 * 2},ChatGPT,{asked},{came},{asked + came},Conversation log")
    path = folder / "burst.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def agents(folder: Path) -> Path:
    """Write agent sessions: a folder of JSON files, whose prompts hold all that was said."""
    rng, fresh = Random(6), 50
    path = folder / "agents"
    path.mkdir(exist_ok=True)
    for number in range(14):
        ids, requests = list(range(10)), []
        for turn in range(rng.randint(4, 9)):
            grown = rng.randint(1, 12)
            ids = ids + list(range(fresh, fresh + grown))
            fresh += grown
            requests.append({
                "in": len(ids) * _AGENT_BLOCK, "out": rng.randint(10, 120), "hash_ids": ids,
                "think_time": rng.randint(5, 60) / 10 if turn else 0.0, "t": turn * 1.0,
            })  # fmt: skip
        session = {"id": f"agent-{number}", "block_size": _AGENT_BLOCK, "requests": requests}
        (path / f"{number}.json").write_text(json.dumps(session))
    return path


def measured(folder: Path) -> Path:
    """Write a timing file, as `pigou profile` does, with rhythm and scatter."""
    path = folder / "timing.json"
    path.write_text(json.dumps({
        "format": 2, "alone": 0.002, "context": 1e-8, "prompt": 0.0005, "overhead": 0.001,
        "decodes": [[1, 0.004], [4, 0.007], [16, 0.015]], "blocks": 1500, "block_size": 16,
        "prompts": [[0, 0.0], [100, 0.01], [400, 0.05]],
        "cache": [[0, 0.0], [2000, 1e-4], [40000, 4e-3]],
        "rhythm": [[1, [0.001, -0.0005, -0.0005, 0.0]], [8, [0.002, -0.001, -0.001, 0.0]]],
        "scatter": [[1, [0.8, 0.95, 1.0, 1.25]], [16, [0.9, 1.0, 1.0, 1.1]]],
    }))  # fmt: skip
    return path


def tables(folder: Path) -> Path:
    """Write a profile folder, as LLMServingSim's profiler does."""
    path = folder / "tables"
    path.mkdir(exist_ok=True)
    layers = {"embedding": 2, "layernorm": 2, "qkv_proj": 50, "rotary_emb": 2, "o_proj": 40,
              "gate_up_proj": 250, "act_fn": 3, "down_proj": 120, "final_layernorm": 2}  # fmt: skip
    dense = [f"{layer},{tokens},{base + tokens * base / 200}" for layer, base in layers.items()
             for tokens in (1, 2, 16, 64, 256, 1024, 2048)]  # fmt: skip
    sequence = [f"{layer},{count},{base + count}" for layer, base in (("lm_head", 1000),
                ("sampler", 20)) for count in (1, 16, 256)]  # fmt: skip
    attention = [
        f"{chunk},{key},{decodes},{kv},"
        f"{5 + chunk * (key + chunk / 2) * 1.5e-4 + decodes * kv * 5e-3}"
        for chunk in (0, 16, 256, 2048) for key in ((0, 256, 2048, 8192) if chunk else (0,))
        for decodes in (0, 1, 8, 64) for kv in ((16, 512, 4096) if decodes else (0,))
        if chunk or decodes
    ]  # fmt: skip
    for name, head, rows in (
        ("dense", "layer,tokens,time_us", dense),
        ("per_sequence", "layer,sequences,time_us", sequence),
        ("attention", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention),
    ):
        (path / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    return path


#: Name -> what writes it; a command names it in braces.
INPUTS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (sessions, flood, mooncake, azure, burst, agents, measured, tables)
}
