"""The decorator of compiled kernels, and a writable place for what numba caches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
#: `_nrt` is numba's own switch for the runtime that counts references; it has no public name.
_BARE: dict[str, Any] = {"nogil": True, "_nrt": False}


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def cache_folder(package: Path) -> Path | None:
    """Choose where compiled kernels are kept.

    Args:
        package: folder of the package; numba's own choice is its `__pycache__` folders.

    Returns:
        None where numba's own choice can be written, else the user's cache folder, or a folder
        of the system's temporary one as the last resort.
    """
    if _writable(package / "__pycache__"):
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = Path(home) / "pigou" / "numba"
    if _writable(user):
        return user
    return Path(tempfile.gettempdir()) / f"pigou-numba-{os.getuid()}"


if "NUMBA_CACHE_DIR" not in os.environ and (_folder := cache_folder(Path(__file__).parent)):
    os.environ["NUMBA_CACHE_DIR"] = str(_folder)

from numba import njit  # noqa: E402  (numba reads NUMBA_CACHE_DIR when it is imported)

from pigou.kernel_cache import share  # noqa: E402


def kernel(function: Function) -> Function:
    """Compile a function of arrays and integers to machine code, free of the GIL, and cache it.

    numba notices a change of the file that a kernel is in, not of files whose kernels it calls:
    kernels that call one another live in one file.
    """
    return cast(Function, share(njit(cache=True, nogil=True)(function)))


def bare_kernel(function: Function) -> Function:
    """Compile a kernel as `kernel` does, without counting references to arrays.

    For kernels that neither make arrays nor return them: counting (atomically) at each use of an
    array costs more than the short functions that use it. They may call one another, and `inlined`
    functions, across the files of their folder: a change of any of these is noticed.
    """
    return _bare(function, Path(function.__code__.co_filename).parent)


def bare_kernel_over(*packages: str) -> Callable[[Function], Function]:
    """Compile bare kernels that call those of several packages of Pigou, their own among them."""
    folders = [Path(__file__).parent / package for package in packages]
    return lambda function: _bare(function, *folders)


def _bare(function: Function, *folders: Path) -> Function:
    # As of the folders, where numba has only the kernel's own file.
    stamp = tuple(entry for folder in folders for entry in _stamp(folder))
    return cast(Function, share(njit(cache=True, **_BARE)(function), stamp))


@lru_cache
def _stamp(folder: Path) -> tuple[tuple[str, float, int], ...]:
    """Return what changes when a module of a folder does."""
    files = ((file.name, file.stat()) for file in sorted(folder.glob("*.py")))
    return tuple((name, stat.st_mtime, stat.st_size) for name, stat in files)


def inlined(function: Function) -> Function:
    """Compile a function into every bare kernel of its folder that calls it.

    A call would hand over arrays field by field, which costs more than a short function does.
    """
    return cast(Function, njit(forceinline=True, **_BARE)(function))
