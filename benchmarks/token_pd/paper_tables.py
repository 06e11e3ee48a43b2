"""Tables of `benchmarks.token_pd.tables`: what was measured, and the paper's figures beside it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.token_pd.run import Figures

MIB = 2**20

#: The paper's tables 1 and 2 (seed token-pd): streams -> policy -> (peak GB, req/s, P95 in ms,
#: perplexity, exact match in %). "pigou" and "paper" are both compared with its Token-PD.
PAPER = {
    128: {
        "fifo": (39.0, 338, 110, 6.38, 78.5),
        "lru": (34.7, 359, 106, 6.39, 78.5),
        "h2o": (24.5, 428, 92, 6.41, 78.4),
        "token-pd": (18.8, 451, 87, 6.40, 78.4),
    },
    256: {
        "fifo": (77.2, 612, 123, 6.41, 78.4),
        "lru": (68.1, 639, 118, 6.42, 78.3),
        "h2o": (46.0, 778, 101, 6.45, 78.1),
        "token-pd": (31.6, 811, 94, 6.44, 78.2),
    },
    512: {
        "fifo": (79.8, 592, 145, 6.46, 78.2),
        "lru": (79.5, 621, 137, 6.46, 78.2),
        "h2o": (60.2, 725, 118, 6.49, 78.0),
        "token-pd": (46.1, 744, 112, 6.48, 78.1),
    },
}  # fmt: skip
_OURS = ("paper", "paper-lossy", "pigou")


def published(streams: int, policy: str) -> tuple[float, ...] | None:
    """Return the paper's figures of a policy; None where it has none."""
    return PAPER.get(streams, {}).get("token-pd" if policy in _OURS else policy)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(figures: Sequence[Figures]) -> str:
    """Return one table of runs; changes are against FIFO, the paper's beside ours."""
    base = {f.streams: f for f in figures if f.policy == "fifo"}
    head = ["streams", "policy", "peak MiB", "mean MiB", "perplexity", "exact", "req/s",
            "per busy s", "P95 s", "at once", "busy", "short", "per busy s / FIFO (paper)",
            "P95 / FIFO (paper)"]  # fmt: skip
    return markdown(head, [_row(f, base.get(f.streams)) for f in figures])


def _row(f: Figures, fifo: Figures | None) -> list[str]:
    theirs, first = published(f.streams, f.policy), published(f.streams, "fifo")
    speed = late = "-"
    if fifo is not None:
        speed, late = f"{f.capacity / fifo.capacity:.2f}", f"{f.p95 / fifo.p95:.2f}"
        if theirs and first:
            speed += f" ({theirs[1] / first[1]:.2f})"
            late += f" ({theirs[2] / first[2]:.2f})"
    name = f.policy if f.blocks < _UNBOUND * f.streams else f"{f.policy}, unbounded"
    return [
        str(f.streams), name, f"{f.peak_bytes / MIB:.1f}", f"{f.mean_bytes / MIB:.1f}",
        f"{f.perplexity:.3f}", f"{f.exact:.1%}", f"{f.rate:.2f}", f"{f.capacity:.2f}",
        f"{f.p95:.2f}", f"{f.at_once:.0f} (most {f.most})", f"{f.busy:.0%}", f"{f.short:.0%}",
        speed, late,
    ]  # fmt: skip


#: Blocks a stream from which on a budget stands for none.
_UNBOUND = 18
