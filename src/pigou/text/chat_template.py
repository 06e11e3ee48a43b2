"""Chat templates: from messages to the text of a prompt, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: Marks the end of a final message that is to be continued. Its own trailing space shows whether
#: the template trims messages.
_END = "CONTINUE_FINAL_MESSAGE_TAG "
#: OpenAI's newer name of the role `system`.
_DEVELOPER = "developer"
#: Fields of a message's reasoning; templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: The template for most chats; those for chats with a variable are named after their use.
_DEFAULT = "default"
_USES = {"tools": "tool_use", "documents": "rag"}
_FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
#: Tests by which a template tells a string from a list.
_KIND_TESTS = {"string", "iterable", "sequence", "mapping"}
#: Filters and methods of objects only.
_WALKS = {"items", "dictsort", "keys", "values"}
#: Filters that keep a list a list; `content | trim` is text.
_KEEP = {"list", "reverse", "default", "d"}


class ChatError(ValueError):
    """Messages refused by the template; the text is for the client."""


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment with the settings of published templates."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = _now
    env.globals["namespace"] = _Namespace
    env.tests["none"] = _is_null
    env.tests["string"] = lambda value: isinstance(value, str) and not _is_null(value)
    return env


class _Null(str):
    """A content that is null: it reads as "", as in vLLM, and passes Jinja's test for none."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_NULL = _Null()


def _is_null(value: object) -> bool:
    return value is None or isinstance(value, _Null)


class _Generation(Extension):
    """Reads `{% generation %}...{% endgeneration %}`, a mark for training, as its contents."""

    tags = {"generation"}  # noqa: RUF012 (the type of the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the nodes between the marks, with a scope of their own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """A `namespace()` without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        for name in dict(*given, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *given, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


def _raise(message: str) -> NoReturn:
    raise ChatError(f"the chat template refuses these messages: {message}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON; unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled chat template, as Hugging Face tokenizers publish them."""

    def __init__(
        self,
        source: str,
        names: Mapping[str, str],
        uses: Mapping[str, ChatTemplate] = MappingProxyType({}),
    ) -> None:
        """Compile Jinja2 text with special tokens `names`; raises ValueError."""
        env = make_environment()
        try:
            tree = env.parse(source)
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja2: {error}") from None
        self.source = source
        self.needs = read_needs(tree)
        self._names = names
        self._uses = uses
        self._knows_developer = _DEVELOPER in source

    @classmethod
    def choose(cls, templates: Mapping[str, str], names: Mapping[str, str]) -> ChatTemplate | None:
        """Compile `default`, `tool_use` and `rag`; None without `default`. Raises ValueError."""
        if _DEFAULT not in templates:
            return None
        given = {variable: use for variable, use in _USES.items() if use in templates}
        uses = {variable: cls(templates[use], names) for variable, use in given.items()}
        return cls(templates[_DEFAULT], names, uses)

    @property
    def identity(self) -> str:
        """Text that identifies this template and its companions."""
        return "\0".join([self.source, *(template.source for template in self._uses.values())])

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt of checked messages; raises ChatError if the template refuses or fails.

        Contents arrive as parts where the template loops over them, else as one string. Fields that
        are None are left out; `developer` becomes `system` where the template lacks it.
        `continue_final_message` ends the prompt within the final message.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **(variables or {})}
        use = next((self._uses[name] for name in self._uses if given[name] is not None), self)
        shown = [use._prepare(message) for message in messages]
        final = _mark_end(shown) if continue_final_message else ""
        given |= {"messages": shown, "add_generation_prompt": add_generation_prompt}
        try:
            text: str = use._template.render(**{**self._names, **given})
        except ChatError:
            raise
        except _FAILURES as error:
            raise ChatError(f"the chat template failed on these messages: {error}") from None
        return _within(text, final) if continue_final_message else text

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        result = {key: value for key, value in message.items() if value is not None}
        if result.get("role") == _DEVELOPER and not self._knows_developer:
            result["role"] = "system"
        result["content"] = self._content(result["content"]) if "content" in result else _NULL
        if isinstance(result.get("tool_calls"), list):
            convert = _CONVERTED[self.needs.arguments]
            result["tool_calls"] = [convert(call) for call in result["tool_calls"]]
        reasoning = next((result[key] for key in _REASONING if key in result), None)
        if reasoning is not None:
            result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
        return result

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return content if self.needs.strings else [{"type": "text", "text": content}]
        texts = [part if isinstance(part, str) else _text(part) for part in content]
        if self.needs.parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _text(part: dict[str, Any]) -> str:
    text: str = part["refusal"] if part["type"] == "refusal" else part["text"]
    return text


def parse_call(call: Any) -> Any:
    """Return a tool call with its arguments parsed where they are text. Raises ValueError."""
    return _with_arguments(call, str, lambda text: json.loads(text or "{}"))


def _with_object(call: Any) -> Any:
    try:
        parsed = parse_call(call)
    except ValueError:
        return call
    fits = parsed is call or isinstance(parsed["function"]["arguments"], dict)
    return parsed if fits else call


def _with_arguments(call: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return a tool call with its arguments converted where they are of a kind."""
    match call:
        case {"function": {"arguments": arguments} as function} if isinstance(arguments, kind):
            return {**call, "function": {**function, "arguments": convert(arguments)}}
    return call


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "object": _with_object,
    "text": lambda call: _with_arguments(call, dict, _tojson),
    "either": lambda call: call,
}


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the final message, in place; return its text. Raises ChatError."""
    content = messages[-1]["content"]
    if isinstance(content, str) and not _is_null(content):
        messages[-1]["content"] = content + _END
        return content
    if content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _END
        return text
    raise ChatError("continue_final_message: the final message has no content to continue")


def _within(text: str, final: str) -> str:
    """Cut the template's text after the final message, as transformers does."""
    at = text.rfind(_END.strip())
    if at < 0 or final.strip() not in text:
        raise ChatError("continue_final_message: the template does not show the final message")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """How a template reads messages."""

    parts: bool
    strings: bool
    # whether it reads a tool call's arguments as an object, as text of JSON, or as either.
    arguments: Literal["object", "text", "either"]


def read_needs(tree: nodes.Template) -> TemplateNeeds:
    """Read the needs of a parsed template."""
    content = _aliases(tree, "content")
    parts = any(_is(loop.iter, "content", content) for loop in tree.find_all(nodes.For))
    tested = any(
        test.name in _KIND_TESTS and _is(test.node, "content", content)
        for test in tree.find_all(nodes.Test)
    )
    return TemplateNeeds(parts, tested or not parts, _read_arguments(tree))


def _read_arguments(tree: nodes.Template) -> Literal["object", "text", "either"]:
    """Return how arguments are read: an object where a branch loops over them."""
    names = _aliases(tree, "arguments")

    def any_is(read: Iterable[nodes.Node]) -> bool:
        return any(_is(node, "arguments", names) for node in read)

    tested = {test.name for test in tree.find_all(nodes.Test) if _is(test.node, "arguments", names)}
    walked = [loop.iter for loop in tree.find_all(nodes.For)]
    walked += [use.node for use in tree.find_all(nodes.Filter) if use.name in _WALKS and use.node]
    walked += [get.node for get in tree.find_all(nodes.Getattr) if get.attr in _WALKS]
    if "mapping" in tested or any_is(walked):
        return "object"
    if tested & _KIND_TESTS:
        return "either"
    printed = [node for output in tree.find_all(nodes.Output) for node in output.nodes]
    printed += [node for add in tree.find_all(nodes.Add) for node in (add.left, add.right)]
    printed += [node for concat in tree.find_all(nodes.Concat) for node in concat.nodes]
    return "text" if any_is(printed) else "object"


def _aliases(tree: nodes.Template, key: str) -> set[str]:
    """Return variables and parameters of macros that a message's `key` is given to."""
    names: set[str] = set()
    while True:
        more = {name for name, value in _bindings(tree) if _is(value, key, names)}
        if more <= names:
            return names
        names |= more


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
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
    while (isinstance(node, nodes.Filter) and node.name in _KEEP) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr=attr):
            return attr == key or attr in names
        case (
            nodes.Getitem(arg=nodes.Const(value=value))
            | nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=value), *_])
        ):
            return bool(value == key)
    return False
