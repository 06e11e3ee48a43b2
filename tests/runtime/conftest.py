"""Tiny models of every family, and the reference beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from checkpoints import BUNDLED, make_config, write_checkpoint

from pigou.models import bundled_path
from pigou.runtime.models.load import LoadedModel, load
from reference import REPORTS, Reference


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how outputs compared, excused divergences counted."""
    if REPORTS:
        terminalreporter.section("beside transformers")
        for line in REPORTS:
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny model, or of the bundled one."""
    root = tmp_path_factory.mktemp("models")
    written: dict[str, Path] = {BUNDLED: bundled_path()}

    def find(family: str) -> Path:
        if family not in written:
            written[family] = write_checkpoint(root / family, make_config(family))
        return written[family]

    return find


@pytest.fixture(scope="session")
def loaded(folder: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """Return a family's tiny model in fp32."""
    models: dict[str, LoadedModel] = {}

    def find(family: str) -> LoadedModel:
        if family not in models:
            models[family] = load(folder(family), "fp32")
        return models[family]

    return find


@pytest.fixture(scope="session")
def reference(folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Return a family's tiny model as transformers computes it."""
    models: dict[str, Reference] = {}

    def find(family: str) -> Reference:
        if family not in models:
            models[family] = Reference(folder(family))
        return models[family]

    return find
