"""Decorators of compiled kernels, and numba's cache of them.

The cache is in a writable place, and shared by the processes of a fleet that start together: one
process compiles a kernel, the others wait and load it. A cache file that is damaged counts as
missing, and a cache that cannot be written is done without.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from pigou.small_file import check_regular

_log = logging.getLogger(__name__)

#: Seconds that another process is given to compile one kernel, before this one does it too.
WAIT_S = 120.0
#: Seconds between looks at a kernel that another process compiles.
_POLL_S = 0.02
Listener = Callable[[str], None]
_listeners: list[Listener] = []
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
from numba.core.caching import IndexDataCacheFile  # noqa: E402
from numba.core.compiler_lock import global_compiler_lock  # noqa: E402


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
    """Return names, times and sizes of a folder's modules."""
    files = ((file.name, file.stat()) for file in sorted(folder.glob("*.py")))
    return tuple((name, stat.st_mtime, stat.st_size) for name, stat in files)


def inlined(function: Function) -> Function:
    """Compile a function into every bare kernel of its folder that calls it.

    A call would hand over arrays field by field, which costs more than a short function does.
    """
    return cast(Function, njit(forceinline=True, **_BARE)(function))


class DirectCalls:
    """Kernels by name, each with numba's signature of it, called without numba's dispatcher.

    A call takes 0.1 to 0.5 us less, the more the more arguments, but only the sizes of arrays'
    items are checked: call it with contiguous arrays of the right type and dimensions alone.

    Example:
        calls = DirectCalls(add=(add, "void(u8[::1], i8)"))
        calls.add(array, 1)
    """

    def __init__(self, **kernels: tuple[Callable[..., Any], str]) -> None:
        for name, (function, signature) in kernels.items():
            setattr(self, name, partial(self._first, name, function, signature))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no kernel {name}")

    def _first(self, name: str, function: Any, signature: str, *arguments: Any) -> Any:
        entry_point = function.compile(signature)
        setattr(self, name, entry_point)
        return entry_point(*arguments)


@contextmanager
def on_compiling(listener: Listener) -> Iterator[None]:
    """Within it, `listener` gets the name of each kernel that this process begins to compile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class KernelCacheFile(IndexDataCacheFile):
    """Files of one kernel's cache; unreadable and unwritable files are ignored."""

    def load(self, key: Any) -> Any:
        """Return a cached entry, None where it must be compiled."""
        entry = super().load(key)
        if entry is None:
            name = self._index_name.rsplit("-", 1)[0]
            for listener in tuple(_listeners):
                listener(name)
        return entry

    def save(self, key: Any, data: Any) -> None:
        """Keep an entry, where the folder can be written."""
        try:
            super().save(key, data)
        except OSError as error:
            _log.warning("a compiled kernel cannot be kept in %s: %s", self._cache_path, error)

    def _load_index(self) -> dict[Any, str]:
        try:
            _check(self._index_path)
            index: dict[Any, str] = super()._load_index()
        except Exception as error:  # unpickling damaged bytes can raise anything
            _log.warning("%s cannot be read, and is made anew: %s", self._index_path, error)
            return {}
        return index

    def _load_data(self, name: str) -> Any:
        try:
            _check(self._data_path(name))
            return super()._load_data(name)
        except OSError:
            raise
        except Exception as error:
            _log.warning("%s is damaged, and is made anew: %s", self._data_path(name), error)
            raise OSError(str(error)) from error


def _check(path: str) -> None:
    """Refuse files that would block numba or fill the memory. Raises OSError."""
    with suppress(FileNotFoundError):
        check_regular(os.stat(path), path)


def share(kernel: Any, stamp: Any = None) -> Any:
    """Let one process at a time compile a kernel of numba's; return it.

    Args:
        kernel: a dispatcher of `njit(cache=True)`.
        stamp: state of the source under which a cached entry is valid; None leaves that to numba,
            which stamps the kernel's own file.
    """
    cache, compile_ = kernel._cache, kernel.compile
    if not hasattr(cache, "_cache_file"):
        return kernel  # it is compiled without a cache
    of_numba = cache._cache_file
    file = KernelCacheFile(
        cache._cache_path,
        cache._impl.filename_base,
        of_numba._source_stamp if stamp is None else stamp,
    )
    cache._cache_file = file
    lock = file._index_path.removesuffix(".nbi") + ".lock"

    def compile(sig: Any) -> Any:
        # The order of the locks matters: a thread that holds a kernel's must not wait for numba's.
        with global_compiler_lock, _locked(lock):
            return compile_(sig)

    kernel.compile = compile
    return kernel


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a file's lock among processes, where there can be such a lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a cache that is only read
        yield
        return
    try:
        _wait(descriptor)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return  # the lock's holder hangs; a kernel compiled twice does no harm
            time.sleep(_POLL_S)
        except OSError:  # the file system has no locks
            return
