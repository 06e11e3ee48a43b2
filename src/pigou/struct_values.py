"""Values of options and files, read as structs; what is wrong with them is a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec

from pigou.config import ConfigError, wrong

T = TypeVar("T", bound=msgspec.Struct)


def read_struct(where: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """Read values, which may be text, as a struct. Raises ConfigError, which names `where`."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {wrong(error, kind, values)}") from error


def tagged(field: str, name: str, values: Mapping[str, Any], kinds: Any) -> Any:
    """Read values as one of a union of tagged structs.

    Args:
        field: of `ControlConfig` that the values are of.
        name: key that names the struct; the other values are its fields.

    Raises:
        ConfigError: there is none of that name, it has no such field, or a value does not fit.
    """
    known = {str(kind.__struct_config__.tag): kind for kind in get_args(kinds)}
    chosen, own = values.get(name), {key: values[key] for key in values if key != name}
    if chosen not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{name} is {chosen!r}; it must be one of: {names}")
    return read_struct(f"{field} {chosen}", known[chosen], own | {name: chosen})
