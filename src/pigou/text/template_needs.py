"""What a chat template needs of its messages, read from its syntax tree.

OpenAI's API allows a message's content to be a string or a list of parts. A template that loops
over the content wants parts, another one a string. vLLM's content format detection does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

#: Tests by which a template tells a string from a list.
_KIND_TESTS = {"string", "iterable", "sequence", "mapping"}
#: Filters that keep a list a list; `content | trim` is text.
_KEEP = {"list", "reverse", "default", "d"}


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """How a template reads messages.

    Attributes:
        parts: it loops over the parts of a content.
        strings: it reads a content that is a string.
        text_arguments: it reads a tool call's arguments as a string of JSON, not as an object.
    """

    parts: bool
    strings: bool
    text_arguments: bool


def read_needs(tree: nodes.Template) -> TemplateNeeds:
    """Read the needs of a parsed template."""
    content = _aliases(tree, "content")
    parts = any(_is(loop.iter, "content", content) for loop in tree.find_all(nodes.For))
    tested = any(
        test.name in _KIND_TESTS and _is(test.node, "content", content)
        for test in tree.find_all(nodes.Test)
    )
    return TemplateNeeds(parts, tested or not parts, _prints_arguments(tree))


def _prints_arguments(tree: nodes.Template) -> bool:
    """Whether arguments are printed or joined as they are, or told apart by their kind."""
    names = _aliases(tree, "arguments")
    printed: list[nodes.Node] = []
    for output in tree.find_all(nodes.Output):
        printed += output.nodes
    for add in tree.find_all(nodes.Add):
        printed += (add.left, add.right)
    for concat in tree.find_all(nodes.Concat):
        printed += concat.nodes
    printed += (test.node for test in tree.find_all(nodes.Test) if test.name in _KIND_TESTS)
    return any(_is(node, "arguments", names) for node in printed)


def _aliases(tree: nodes.Template, key: str) -> set[str]:
    """Return variables and parameters of macros that a message's `key` is given to."""
    names: set[str] = set()
    while True:
        more = {name for name, value in _bindings(tree) if _is(value, key, names)}
        if more <= names:
            return names
        names |= more


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Yield names with the expressions that they stand for."""
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield from ((assign.target.name, value) for value in _values(assign.node))
        elif isinstance(assign.target, nodes.NSRef):
            yield from ((assign.target.attr, value) for value in _values(assign.node))
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            yield from zip(parameters, call.args, strict=False)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _values(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield an expression, or both branches of a conditional one."""
    if isinstance(node, nodes.CondExpr):
        yield from _values(node.expr1)
        if node.expr2 is not None:
            yield from _values(node.expr2)
    else:
        yield node


def _is(node: nodes.Node | None, key: str, names: set[str]) -> bool:
    """Whether an expression is something's `key`, or a variable that stands for one."""
    if isinstance(node, nodes.Or):
        return _is(node.left, key, names) or _is(node.right, key, names)
    while (isinstance(node, nodes.Filter) and node.name in _KEEP) or _is_slice(node):
        assert isinstance(node, (nodes.Filter, nodes.Getitem))
        node = node.node
    match node:
        case nodes.Name(name=name):
            own = name in names
        case nodes.Getattr(attr=attr):
            own = attr == key or attr in names
        case nodes.Getitem(arg=nodes.Const(value=value)):
            own = value == key
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=value), *_]):
            own = value == key
        case _:
            own = False
    return own


def _is_slice(node: nodes.Node | None) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
