"""A small profile folder of made-up times that grow as those of a GPU do."""

from __future__ import annotations

from pathlib import Path

DENSE = {"embedding": 2, "layernorm": 2, "qkv_proj": 50, "rotary_emb": 2, "o_proj": 40,
         "gate_up_proj": 250, "act_fn": 3, "down_proj": 120, "final_layernorm": 2}  # fmt: skip
CHUNKS, KEYS, DECODES, KVS = (
    (0, 16, 256, 2048),
    (0, 256, 2048, 8192),
    (0, 1, 8, 64),
    (16, 512, 4096),
)


def attention(chunk: float, key: float, decodes: float, kv: float) -> float:
    """Microseconds that a layer's attention takes."""
    return 5 + chunk * (key + chunk / 2) * 1.5e-4 + decodes * kv * 5e-3


def write_tables(folder: Path, heads: int = 1000) -> None:
    """Write dense.csv, per_sequence.csv and attention.csv."""
    rows = [
        f"{layer},{tokens},{base + tokens * base / 200}"
        for layer, base in DENSE.items()
        for tokens in (1, 2, 16, 64, 256, 1024, 2048)
    ]
    _write(folder / "dense.csv", "layer,tokens,time_us", rows)
    rows = [
        f"{layer},{n},{base + n}"
        for layer, base in (("lm_head", heads), ("sampler", 20))
        for n in (1, 16, 256)
    ]
    _write(folder / "per_sequence.csv", "layer,sequences,time_us", rows)
    rows = [
        f"{c},{k},{n},{v},{attention(c, k, n, v)}"
        for c in CHUNKS
        for k in (KEYS if c else (0,))
        for n in DECODES
        for v in (KVS if n else (0,))
        if c or n
    ]
    _write(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", rows)


def _write(path: Path, head: str, rows: list[str]) -> None:
    path.write_text("\n".join([head, *rows]) + "\n")
