from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.workload.stub import Behaviour, Stub


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    """Return a function that starts a stub endpoint which behaves as its arguments say."""
    with ExitStack() as stack:

        def start(**how: Any) -> Stub:
            return stack.enter_context(Stub(Behaviour(**how)))

        yield start
