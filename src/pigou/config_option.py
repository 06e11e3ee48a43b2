"""What a command line says of a field of a configuration: help, group, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

#: How an option is written, where the field holds something else than what is typed.
#: `size`: bytes, as 512MiB. `seconds`: the field is in nanoseconds. `numbers`: NAME=NUMBER,
#: repeatable. `named`: NAME[,key=value]... `weights`: NAME=weight[,NAME=weight]...
#: `entries`: NAME,key=value... (tiers: NAME=SIZE[@PLACE],key=value...), repeatable; each is a
#: struct. `rate`: a number, or a text.
Form = Literal["plain", "size", "seconds", "numbers", "named", "weights", "entries", "rate"]
#: Heading of options that belong to no group; it comes last.
OTHER_OPTIONS = "Options"
_EXTRA = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a command, made from a field of a configuration class."""

    help: str
    group: str = OTHER_OPTIONS  # heading that it stands under in the help
    name: str = ""  # with underscores; empty for the field's own
    form: Form = "plain"
    key: str = ""  # `named` form: key of the field's dictionary that the name goes to
    params: str = ""  # `named` form without key: field that the parameters go to
    flags: tuple[str, ...] = ()  # as they are typed, such as `--chat`; empty for `--name`
    # whether the parser checks the values of a Literal, and the help lists them.
    choices: bool = False
    argument: bool = False  # whether it is given by its position
    variables: tuple[str, ...] = ()  # further variables of the environment that set it
    show_default: bool = True  # whether the help shows the default
    # in place of the field's own, as it is typed; only where a command overrides it.
    default: Any = msgspec.NODEFAULT


def option(help: str, group: str = OTHER_OPTIONS, **rest: Any) -> msgspec.Meta:
    """Return the annotation that makes an option of a field.

    Args:
        help: what it does; it is the field's description, too.
        group: heading that it stands under in the help.
        rest: further attributes of `Option`.

    For example:
        port: Annotated[int, option("Port to listen on; 0 picks a free one.", "Server")] = 8100
    """
    return msgspec.Meta(description=help, extra={_EXTRA: Option(help=help, group=group, **rest)})


def option_of(metadata: tuple[Any, ...]) -> Option | None:
    """Return the option among the annotations of a field; None where it has none."""
    for entry in metadata:
        if isinstance(entry, msgspec.Meta) and entry.extra and _EXTRA in entry.extra:
            value = entry.extra[_EXTRA]
            assert isinstance(value, Option)
            return value
    return None
