"""Laws of the eviction policy that vLLM loads: with fakes, with vLLM's manager, and by property."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integrations import vllm_fakes, vllm_policy_laws
from tests.integrations.vllm_policy_laws import LAWS, Setting, keys

from benchmarks.lib.peers import PeerMissing, python_path, vllm_home

vllm_fakes.install()
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_policy(law: Callable[[bool], None]) -> None:
    law(False)


def run_in_vllm(links: Path, *arguments: str) -> str:
    """Run Python with a real vLLM's interpreter and this tree; skip without one."""
    try:
        home = vllm_home()
    except PeerMissing as missing:
        pytest.skip(str(missing))
    path = os.pathsep.join([python_path(links), str(ROOT)])
    done = subprocess.run(
        [str(home / "bin/python"), *arguments], cwd=ROOT, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-6_000:]
    return done.stdout


@pytest.mark.vllm
def test_policy_under_a_real_vllm_s_manager(tmp_path: Path) -> None:
    assert f"{len(LAWS)} laws hold" in run_in_vllm(tmp_path, "-m", vllm_policy_laws.__name__)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "store", "fail", "load", "unload", "evict")),
        st.integers(0, 5), st.integers(1, 6), st.sets(st.integers(0, 35), max_size=4),
    ),
    max_size=40,
)  # fmt: skip


@given(OPERATIONS)
def test_any_order_of_calls_keeps_the_contract(
    operations: list[tuple[str, int, int, set[int]]],
) -> None:
    """Evictions are exact and atomic, of free chunks, last of a chain first; slots are not lost."""
    s = Setting(12, False)
    chains = [keys(*(f"{c if i > 1 else 0}.{i}" for i in range(6))) for c in range(6)]
    everything = {key for chain in chains for key in chain}
    loading: list[list[bytes]] = []
    writing: list[list[bytes]] = []
    for name, which, n, some in operations:
        chain = chains[which][:n]
        ctx = s.context(chain)
        s.now += 700_000_000
        if name == "ask":
            s.ask(chain)
        elif name in ("store", "fail"):
            if writing and name == "fail":
                s.manager.complete_store(writing.pop(), ctx, success=which % 2 == 0)
            elif (stored := s.manager.prepare_store(chain, ctx)) is not None:
                writing.append(stored.keys_to_store)
        elif name == "load":
            held = [key for key in chain if s.held(key)]
            if held:
                s.manager.prepare_load(held, ctx)
                loading.append(held)
        elif name == "unload" and loading:
            s.manager.complete_load(loading.pop(), ctx)
        elif name == "evict":
            protected = {key for i, key in enumerate(sorted(everything)) if i in some}
            before = dict(s.policy._chunks)
            free = _evictable(before, protected)
            found = s.policy.evict(n, protected)
            assert (found is None) == (len(free) < n)
            after = s.policy._chunks
            if found is None:
                assert after == before
            else:
                assert len(found) == n
                assert {key for key, _ in found} == before.keys() - after.keys() <= free
                s.manager._free += [chunk.chunk_id for _, chunk in found]
        _check(s)


def _evictable(chunks: dict[bytes, vllm_fakes.Any], protected: set[bytes]) -> set[bytes]:
    """Keys that may go if all that may go before them do."""
    stay = {key for key, c in chunks.items() if c.status.ref_cnt != 0 or key in protected}
    for key in list(stay):
        above = chunks[key].up
        while above is not None:
            stay.add(above.key)
            above = above.up
    return chunks.keys() - stay


def _check(s: Setting) -> None:
    chunks = s.policy._chunks
    slots = [chunk.status.chunk_id for chunk in chunks.values()] + s.manager._free
    assert sorted(slots) == list(range(12))
    assert {c.key for c in s.policy._order} == chunks.keys()
    assert all(s.policy._order[c.slot] is c for c in chunks.values())
    assert not chunks.keys() & s.policy._absent.keys()
    for chunk in chunks.values():
        assert chunk.kids == sum(other.up is chunk for other in chunks.values())
        if chunk.free:  # else it could never be evicted
            assert any(item[1:] == (chunk.stamp, chunk) for item in s.policy._heap)


def test_an_insertion_that_names_its_request_as_in_vllm_0_33_holds_the_chunk() -> None:
    setting = Setting(4, False)
    insert = setting.policy.insert
    setting.policy.insert = lambda key, chunk: insert(key, chunk, setting.context())
    assert setting.ask(keys(1, 2)) == 0
    assert setting.ask(keys(1, 2)) == 2
