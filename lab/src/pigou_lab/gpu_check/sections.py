"""The sections of a GPU check, one after the other, each for itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pigou.runtime.attention.kv_cache import DTYPES
from pigou.runtime.models.load import LoadedModel
from pigou_lab.gpu_check.equal_outputs import compare, decode_alone, decode_elsewhere
from pigou_lab.gpu_check.profile import profile_plans, waits_per_step
from pigou_lab.gpu_check.random_model import QWEN3_600M, TINY, random_model, write_checkpoint
from pigou_lab.gpu_check.serving import measure_serving
from pigou_lab.gpu_check.speed import Peaks, make_engine, measure_peaks, measure_speed

STREAMS = (1, 32, 256)
#: Streams over HTTP.
HTTP_STREAMS = (1, 32)
#: Kernels that are printed of each profile.
_KERNELS = 12
_TESTS = Path(__file__).parents[4] / "tests" / "runtime"
#: Nats within which two tokens are a near tie, and differences that are too large.
_GAPS = {"fp32": 1e-3, "bf16": 0.25}
_DIFFERENCES = {"fp32": 1e-2, "bf16": 0.25}


class SkippedError(Exception):
    """A skipped section; says why."""


class Check:
    """Runs the sections, prints findings, and remembers whether all passed."""

    def __init__(self, device: str, *, small: bool, deadline: float) -> None:
        """`deadline` is of `time.monotonic`."""
        self._device = device
        self._small = small
        self._deadline = deadline
        self._shape = TINY if small else QWEN3_600M
        self._loaded: LoadedModel | None = None
        self._measured: Peaks | None = None

    def run(self, *, tests: bool) -> bool:
        """Run all sections; return whether none failed or was left out for lack of time."""
        sections: list[tuple[str, Callable[[], None]]] = [
            ("path", self._path),
            ("equality", self._equality),
            ("formats", self._formats),
            ("P/D", self._disaggregation),
            ("peaks", self._peaks),
            ("speed", self._speed),
            ("kernels", self._kernels),
            ("waits", self._host_waits),
            ("serving", self._serving),
        ]
        if tests:
            sections.append(("tests", self._tests))
        held = [self._guard(name, section) for name, section in sections]
        return all(held)

    def _guard(self, name: str, section: Callable[[], None]) -> bool:
        if time.monotonic() >= self._deadline:
            _say(name, "NOT RUN: the time is up; give a longer --budget")
            return False
        began = time.monotonic()
        try:
            section()
        except SkippedError as reason:
            _say(name, f"skipped: {reason}")
            return True
        except AssertionError as error:
            _say(name, f"FAILED: {error}")
            return False
        except Exception:
            _say(name, "FAILED:")
            traceback.print_exc(file=sys.stdout)
            return False
        _say(name, f"done in {time.monotonic() - began:.1f} s")
        return True

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            self._loaded = random_model(
                self._shape, self._device, DTYPES["bf16"], source=self._device
            )
        return self._loaded

    def _path(self) -> None:
        path = make_engine(self._model(), 4, 64).executor.path
        _say("path", path)
        if self._device.startswith("cuda"):
            for expected in ("Triton kernels", "decode graphs"):
                assert expected in path, f"{expected} are not in use; is triton installed?"

    def _formats(self) -> None:
        failures = []
        for weights, cache in (("int8", "auto"), ("none", "int8_per_token_head")):
            models = [
                replace(
                    random_model(TINY, device, DTYPES["fp32"], quantization=weights),
                    kv_dtype=cache,
                )
                for device in ("cpu", self._device)
            ]
            result = compare(models[0], models[1], gap=_GAPS["bf16"], prompts=4, output=16)
            name = f"weights {weights}, KV {cache}"
            _say(
                "formats",
                f"{name}: {result.tokens} greedy tokens alike, {result.ties} near ties, "
                f"{result.divergences} divergences",
            )
            if result.divergences or not result.difference < _DIFFERENCES["bf16"]:
                failures.append(name)
        assert not failures, f"{', '.join(failures)} is not what the CPU computes"

    def _equality(self) -> None:
        shape = self._shape | {"num_hidden_layers": min(4, self._shape["num_hidden_layers"])}
        failures = []
        for name, dtype in DTYPES.items():
            on_cpu, on_device = (random_model(shape, name, dtype) for name in ("cpu", self._device))
            result = compare(on_cpu, on_device, gap=_GAPS[name], prompts=4, output=16)
            _say(
                "equality",
                f"{name}: {result.tokens} greedy tokens alike, {result.ties} near ties, "
                f"{result.divergences} divergences; log-probabilities differ by "
                f"{result.difference:.2g} (root mean square), {result.largest:.2g} at most",
            )
            if result.divergences or not result.difference < _DIFFERENCES[name]:
                failures.append(name)
        assert not failures, f"{', '.join(failures)} is not what the CPU computes"

    def _disaggregation(self) -> None:
        model = self._model()
        prompt = [3 + 7 * i % 300 for i in range(200)]
        tokens = decode_alone(model, prompt, 32)
        disaggregated, blocks = decode_elsewhere(model, prompt, 32)
        assert blocks > 0, "no block went from prefill to decode"
        equal = [mine == theirs for mine, theirs in zip(tokens, disaggregated, strict=True)]
        agree = (*equal, False).index(False)
        _say(
            "P/D",
            f"{blocks} blocks through shared memory; {agree} of {len(tokens)} tokens alike",
        )
        assert agree == len(tokens), "decoding after a transfer gives other tokens"

    def _peaks(self) -> None:
        sizes = (2**24, 256) if self._small else (2**30, 8192)
        self._measured = measure_peaks(self._model().device, *sizes)
        _say(
            "peaks",
            f"copy {self._measured.bandwidth / 1e9:,.0f} GB/s, "
            f"bf16 product {self._measured.flops / 1e12:,.2f} TFLOP/s (both measured)",
        )

    def _speed(self) -> None:
        if self._measured is None:
            raise SkippedError("the peaks were not measured")
        runs = [(streams, False) for streams in ((1, 4) if self._small else STREAMS)]
        runs += [(1, True)] * self._device.startswith("cuda")
        for streams, eager in runs:
            speed = measure_speed(self._model(), self._measured, streams, eager=eager)
            _say(
                "speed",
                f"{streams:3} streams: {speed.tokens_per_s:,.0f} tokens/s, "
                f"{1e3 * speed.step_s:.2f} ms a step, MBU {speed.mbu:.1%}, MFU {speed.mfu:.1%}"
                f"{', without graphs' if eager else ''}",
            )

    def _kernels(self) -> None:
        profiles = profile_plans(self._model(), 4 if self._small else 32)
        for title, profile in zip(("prompts", "decoding"), profiles, strict=True):
            _say("kernels", f"{title}: {profile.launches_per_step:,.0f} launches a step")
            for name, (us, count) in list(profile.kernels.items())[:_KERNELS]:
                print(f"           {us:10,.0f} us {count:6} x  {name[:90]}")

    def _host_waits(self) -> None:
        if not self._device.startswith("cuda"):
            raise SkippedError("only CUDA counts them")
        waits_per_plan_step = waits_per_step(self._model(), 4 if self._small else 32)
        _say("waits", f"the host waits {waits_per_plan_step:.1f} times in a greedy decode step")
        assert waits_per_plan_step <= 2, "the token is to be waited for, and nothing else"

    def _serving(self) -> None:
        streams = (1, 4) if self._small else HTTP_STREAMS
        with tempfile.TemporaryDirectory(prefix="pigou-gpu-check-") as name:
            folder = Path(name)
            write_checkpoint(folder, self._shape, DTYPES["bf16"], source=self._device)
            left_s = max(1.0, self._deadline - time.monotonic())
            speeds = measure_serving(folder, self._device, streams, timeout_s=left_s)
        for speed in speeds:
            _say(
                "serving",
                f"{speed.streams:3} streams over HTTP: TTFT {1e3 * speed.ttft_s:.1f} ms, "
                f"ITL {1e3 * speed.itl_s:.2f} ms, {speed.tokens_per_s:,.0f} tokens/s",
            )

    def _tests(self) -> None:
        if not _TESTS.is_dir():
            raise SkippedError("the tests are not part of this installation")
        for needed in ("pytest", "transformers", "hypothesis"):
            if importlib.util.find_spec(needed) is None:
                raise SkippedError(f"{needed} is not installed; the sections above need it not")
        left = max(1.0, self._deadline - time.monotonic())
        command = [sys.executable, "-m", "pytest", str(_TESTS), "-m", "gpu", "-q"]
        command += ["-p", "no:cacheprovider", "-rs"]
        try:
            done = subprocess.run(command, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            raise AssertionError("the tests marked gpu did not end in time") from None
        assert done.returncode == 0, f"pytest ended with {done.returncode}"


def _say(section: str, text: str) -> None:
    print(f"{section:10} {text}", flush=True)
