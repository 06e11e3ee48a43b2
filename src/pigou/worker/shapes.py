"""What the output of a request must match: its grammar, compiled, and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pigou.sampling import Grammar
from pigou.wire.errors import APIError, bad_request
from pigou.wire.openai_requests import ChatRequest, GenerationRequest
from pigou.wire.structured_output import grammar
from pigou.worker.grammar_pool import CompileQueueFull, GrammarSource
from pigou.worker.sequence_output import Tools, request_tools
from pigou.worker.served_model import ServedModel

if TYPE_CHECKING:
    from pigou.runtime.grammar import GrammarState


@dataclass(frozen=True, slots=True)
class Shape:
    """What the output must match.

    Attributes:
        grammar: that it follows; None where it is free.
        states: of the grammar, for each sequence of the request; None without a grammar.
        tools: that it may call; None for none.
    """

    grammar: Grammar | None
    states: list[GrammarState | None]
    tools: Tools | None = None


class Shapes:
    """Makes the shapes of requests; grammars are compiled off the loop and the engine."""

    def __init__(self, source: GrammarSource, model: ServedModel, *, flexible: bool) -> None:
        """Make shapes.

        Args:
            source: compiles grammars.
            model: that is served.
            flexible: JSON may have white space between its parts, where a request does not say.
        """
        self._source = source
        self._model = model
        self._flexible = flexible

    def tools(self, request: GenerationRequest) -> Tools | None:
        """Return a request's tools, checked; None where it may call none."""
        if not isinstance(request, ChatRequest):
            return None
        return request_tools(request, self._model.tool_format)

    async def shape(
        self,
        request: GenerationRequest,
        count: int,
        output: Sequence[int],
        tenant: str = "",
        tools: Tools | None = None,
    ) -> Shape:
        """Return a request's shape.

        Args:
            request: of a client, checked.
            count: of its sequences.
            output: tokens of its first sequence that were generated elsewhere.
            tenant: whose it is, as the fleet's gateway told; else its salt tells.
            tools: from `tools`.

        Raises:
            APIError: 400, the grammar cannot be honoured; 503, too many wait to be compiled.
        """
        wanted, name = self._wanted(request, tools)
        if wanted is None:
            return Shape(None, [None] * count, tools)
        try:
            whose = tenant or request.cache_salt or ""
            states = await self._source.prepare(wanted, whose, count, output)
        except CompileQueueFull as error:
            raise APIError(
                503, f"{name} cannot be compiled now: {error}.", name, retry_after=1
            ) from None
        except ValueError as error:
            raise bad_request(f"{name} cannot be honoured: {error}", name) from None
        return Shape(wanted, [*states], tools)

    def _wanted(
        self, request: GenerationRequest, tools: Tools | None
    ) -> tuple[Grammar | None, str]:
        """Return the grammar, and the field that asks for it."""
        if tools is not None and tools.use.grammar is not None:
            return tools.use.grammar, "tools"
        form = request.response_format
        formed = form is not None and form.type != "text"
        name = "response_format" if formed else "structured_outputs"
        return grammar(request, self._flexible), name
