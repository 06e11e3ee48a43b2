"""A predictor trained for a model that has none, by the tool that users have."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "train_returns.py"


@dataclass(frozen=True)
class Training:
    """How predictors are trained."""

    corpus: Path  # folder of the texts, of whose training part they are
    sequences: int
    steps: int
    cut: float  # weight of what an entry brings where others are given up

    def folder(self, model: Path) -> Path:
        """Return a copy of a model's folder that has a predictor; it is trained the first time.

        Raises:
            subprocess.CalledProcessError: the tool failed.
        """
        final = model.with_name(f"{model.name}-trained")
        if not final.exists():
            part = final.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(model, part)
            arguments = ["train", "--sequences", str(self.sequences), "--steps", str(self.steps)]
            arguments += ["--cut", str(self.cut)]
            spent = _cpu_seconds([*arguments, "--model", str(part), "--corpus", str(self.corpus)])
            report = {"arguments": arguments, "cpu_seconds": spent}
            (part / "training.json").write_text(json.dumps(report), encoding="utf-8")
            part.rename(final)
        report = json.loads((final / "training.json").read_text(encoding="utf-8"))
        command = f"tools/{TOOL.name} {' '.join(report['arguments'])}"
        print(f"\n{final.name}: {command} took {report['cpu_seconds']:.0f} s of one core")
        return final


def _cpu_seconds(arguments: list[str]) -> float:
    """Run the tool on one core; return the processor time that it took, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(TOOL), *arguments], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
