"""Which exceptions concern one request, and which the whole process. Imports no torch."""

from __future__ import annotations


def is_contained(error: BaseException) -> bool:
    """Whether an exception says nothing of the process as a whole.

    Panics of libraries in Rust are no `Exception`, but concern what they were asked alone. After
    an error of the CUDA device its context cannot be used any further.
    """
    if type(error).__name__ == "PanicException":
        return True
    return isinstance(error, Exception) and not is_device_error(error)


def is_device_error(error: BaseException) -> bool:
    """Whether the accelerator failed, and with it all that is on it."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def described(error: BaseException) -> str:
    """Return what a client is told of an exception."""
    return f"{type(error).__name__}: {error}"[:300]
