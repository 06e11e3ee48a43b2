"""Configuration of something that goes by name, with parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from pigou.config import ConfigError, wrong


def tagged(field: str, name: str, values: Mapping[str, Any], kinds: Any) -> Any:
    """Read values as one of several tagged structs.

    Args:
        field: of `ControlConfig` that the values are of.
        name: key that names the struct; the other values are its fields.
        values: to read.
        kinds: union of the structs.

    Raises:
        ConfigError: there is none of that name (the message lists those that there are), it has no
            such field, or a value does not fit.
    """
    known = {str(kind.__struct_config__.tag): kind for kind in get_args(kinds)}
    chosen, own = values.get(name), {key: values[key] for key in values if key != name}
    if chosen not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"{name} is {chosen!r}; it must be one of: {names}")
    try:
        return msgspec.convert(own | {name: chosen}, known[chosen], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{field} {chosen}: {wrong(error, known[chosen], own)}") from error
