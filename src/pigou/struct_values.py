"""Values of options and files, read as structs; what is wrong with them is a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pigou.config import ConfigError, wrong

T = TypeVar("T", bound=msgspec.Struct)


def read_struct(where: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """Read values, which may be text, as a struct. Raises ConfigError, which names `where`."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {wrong(error, kind, values)}") from error
