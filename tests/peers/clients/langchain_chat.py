"""Programs of langchain-openai as its documentation has them. Argument: URL of a gateway."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Market(BaseModel):
    """A market."""

    open: bool


@tool
def get_weather(celsius: bool) -> str:
    """Tell the weather."""
    return f"rain, {celsius}"


def refusal(call, kind):
    """Return the error that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


llm = ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="any", model=sys.argv[2], max_tokens=96,
                 temperature=0, max_retries=0)  # fmt: skip
whole = llm.invoke("Where is the market?", max_tokens=12)
assert whole.content
assert whole.usage_metadata["output_tokens"] <= 12
text = "".join(chunk.content for chunk in llm.stream("Where is the market?", max_tokens=12))
assert text == whole.content
assert len(llm.batch(["a", "b"], max_tokens=4)) == 2
assert isinstance(llm.with_structured_output(Market, method="json_schema").invoke("Open?"), Market)
assert isinstance(
    llm.with_structured_output(Market, method="function_calling").invoke("Open?"), Market
)
bound = llm.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
asked = HumanMessage("What is the weather?")
answer = bound.invoke([asked])
[call] = answer.tool_calls
assert call["name"] == "get_weather"
reply = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
assert llm.bind_tools([get_weather]).invoke([asked, answer, reply], max_tokens=8) is not None
assert llm.bind(logprobs=True).invoke("a", max_tokens=3).response_metadata["logprobs"]["content"]
told = refusal(lambda: llm.invoke("a", model="nope"), Exception)
assert "does not exist" in str(told)
