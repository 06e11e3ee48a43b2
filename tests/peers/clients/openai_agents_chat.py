"""openai-agents by its default (Responses), and on chats. Arguments: URL, model[, reasons]."""

import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
set_default_openai_client(client, use_for_tracing=False)
name, reasons = sys.argv[2], len(sys.argv) > 3


class Market(BaseModel):
    """A market."""

    open: bool
    town: Literal["Oslo", "Rome"]


asked = []


@function_tool
def get_weather(celsius: bool) -> str:
    """Tell the weather."""
    asked.append(celsius)
    return "rain"


short = ModelSettings(max_tokens=200, temperature=0)
must = ModelSettings(max_tokens=400, tool_choice="required", parallel_tool_calls=False)
for model in (name, OpenAIChatCompletionsModel(model=name, openai_client=client)):
    agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=short)
    result = Runner.run_sync(agent, "Where is the market?")
    kinds = [item.type for item in result.new_items]
    assert ("reasoning_item" in kinds) is reasons, kinds
    assert result.final_output or reasons
    shaped = Agent(name="b", model=model, output_type=Market, model_settings=short)
    assert Runner.run_sync(shaped, "Open?").final_output.town in ("Oslo", "Rome")
    tools = Agent(name="c", model=model, tools=[get_weather], model_settings=must)
    asked.clear()
    assert Runner.run_sync(tools, "What is the weather?", max_turns=3).final_output is not None
    assert asked
