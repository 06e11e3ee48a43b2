"""Programs of pydantic-ai as its documentation has them. Arguments: URL of a gateway, model."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(
    sys.argv[2], provider=OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="any")
)


class Market(BaseModel):
    """A market."""

    open: bool
    town: Literal["Oslo", "Rome"]


whole = Agent(model).run_sync("Where is the market?", model_settings={"max_tokens": 12})
assert whole.output
assert whole.usage.output_tokens <= 12
for kind in (NativeOutput(Market), ToolOutput(Market)):
    found = Agent(model, output_type=kind).run_sync("Open?", model_settings={"max_tokens": 96})
    assert found.output.town in ("Oslo", "Rome")


async def stream() -> str:
    async with Agent(model).run_stream("Where?", model_settings={"max_tokens": 12}) as result:
        return [part async for part in result.stream_text()][-1]


assert asyncio.run(stream())
