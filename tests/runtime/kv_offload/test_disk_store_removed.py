"""A disk store whose files are removed under it forgets their blocks, and begins again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from store_bench import NAMESPACE, SIZE, bytes_of, entries_of, keys_of, rows_of

from pigou.runtime.stores.disk_store import DiskStore
from pigou.runtime.stores.store import StoreError


def test_blocks_of_removed_files_are_forgotten_and_the_folder_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    store = DiskStore(folder, NAMESPACE, SIZE, 40_000)
    assert store.put(entries_of([1, 2]), bytes_of([1, 2]), rows_of(2)).all()
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match="was removed"):
        store.put(entries_of([3]), bytes_of([3]), rows_of(1))
    with pytest.raises(StoreError):
        store.probe()
    folder.mkdir()
    store.probe()
    assert store.used_bytes == 0
    assert not store.has(keys_of([1, 2, 3])).any()
    assert store.put(entries_of([3]), bytes_of([3]), rows_of(1)).all()
    out = np.zeros((1, SIZE), dtype=np.uint8)
    assert store.get(keys_of([3]), out, rows_of(1)).all()
    with pytest.raises(StoreError, match="in use by another process"):
        DiskStore(folder, NAMESPACE, SIZE, 40_000)
    store.close()
    again = DiskStore(folder, NAMESPACE, SIZE, 40_000)
    assert again.has(keys_of([3])).all()
    again.close()
