"""LangChain on Responses, Messages and embeddings. Arguments: URL, model[, reasons]."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

URL, MODEL, REASONS = sys.argv[1], sys.argv[2], len(sys.argv) > 3


@tool
def get_weather(celsius: bool) -> str:
    """Tell the weather."""
    return f"rain, {celsius}"


asked = HumanMessage("What is the weather?")
for llm in (
    ChatOpenAI(base_url=URL + "/v1", api_key="any", model=MODEL, use_responses_api=True,
               max_tokens=400, temperature=0, max_retries=0),
    ChatAnthropic(base_url=URL, api_key="any", model=MODEL, max_tokens=400, temperature=0,
                  max_retries=0),
):  # fmt: skip
    whole = llm.invoke("Where is the market?", max_tokens=96)
    kinds = [block["type"] for block in whole.content_blocks]
    assert kinds[0] == ("reasoning" if REASONS else "text"), kinds
    assert whole.usage_metadata["output_tokens"] <= 96
    chunks = list(llm.stream("Where is the market?", max_tokens=96))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    answer = llm.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke(
        [asked]
    )
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    reply = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    bound = llm.bind_tools([get_weather])
    assert bound.invoke([asked, answer, reply], max_tokens=8) is not None

embeddings = OpenAIEmbeddings(base_url=URL + "/v1", api_key="any", model=MODEL,
                              check_embedding_ctx_length=False)  # fmt: skip
assert len(embeddings.embed_documents(["Oslo", "Rome"])) == 2
assert len(embeddings.embed_query("Oslo")) > 100
