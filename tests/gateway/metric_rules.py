"""The rules of `promtool check metrics`, for pages that are read by prometheus_client."""

from __future__ import annotations

import re
import shutil
import subprocess

from prometheus_client.parser import text_string_to_metric_families

_NAME = re.compile(r"pigou_[a-z0-9_]*[a-z0-9]")
_TYPES = {"counter", "gauge", "histogram", "summary", "metric"}
#: Units that are not base units, and abbreviations of any.
_UNITS = {
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks", "ms", "us",
    "ns", "s", "sec", "secs", "min", "kilobytes", "megabytes", "kib", "mib", "gib", "kb", "mb",
    "gb", "bits", "percent", "perc", "pct",
}  # fmt: skip
#: Names of the worker contract, which dashboards and routers for vLLM read as they are.
CONTRACT = "vllm:"
#: Names of others: those, and of OpenTelemetry's conventions.
FOREIGN = (CONTRACT, "gen_ai_")


def complaints(page: str) -> list[str]:
    """Return what is wrong with the names of a metrics page, but for those of the contract."""
    found = []
    for family in text_string_to_metric_families(page):
        if family.name.startswith(FOREIGN):
            continue
        name = family.name + "_total" * (family.type == "counter")
        words = set(name.split("_"))
        if not _NAME.fullmatch(name):
            found.append(f"{name} is no lower-case name that begins with pigou_")
        if not family.documentation:
            found.append(f"{name} has no help text")
        if family.type not in ("counter", "gauge", "histogram"):
            found.append(f"{name} has the type {family.type}")
        if family.type != "counter" and name.endswith("_total"):
            found.append(f"{name} is a {family.type}, and ends in _total")
        if family.type != "histogram" and name.endswith(("_bucket", "_count", "_sum", "_created")):
            found.append(f"{name} ends as a series of a histogram does")
        if bad := words & _TYPES:
            found.append(f"{name} names its type: {bad}")
        if bad := words & _UNITS:
            found.append(f"{name} has units that are no base units: {bad}")
    return found


def promtool_complaints(page: str) -> list[str] | None:
    """Return what `promtool check metrics` says of a page; None where there is no promtool."""
    program = shutil.which("promtool")
    if program is None:
        return None
    done = subprocess.run(
        [program, "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if line and not line.startswith(FOREIGN)]
