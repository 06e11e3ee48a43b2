// Programs of @langchain/openai as its documentation has them. Arguments: URL, model.
import assert from "node:assert";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const llm = new ChatOpenAI({ model: process.argv[3], apiKey: "any", maxTokens: 96, temperature: 0, maxRetries: 0, configuration: { baseURL: `${process.argv[2]}/v1` } });
const whole = await llm.invoke("Where is the market?");
assert(whole.content);
assert(whole.usage_metadata.output_tokens <= 96);
let text = "";
for await (const chunk of await llm.stream("Where is the market?")) text += chunk.content;
assert.equal(text, whole.content);
const market = z.object({ open: z.boolean() });
for (const method of ["jsonSchema", "functionCalling"]) {
  const found = await llm.withStructuredOutput(market, { name: "market", method }).invoke("Open?");
  assert.equal(typeof found.open, "boolean");
}
const weather = tool(async ({ celsius }) => `rain, ${celsius}`, { name: "get_weather", description: "Tell the weather", schema: z.object({ celsius: z.boolean() }) });
const asked = new HumanMessage("What is the weather?");
const answer = await llm.bindTools([weather], { tool_choice: "any", parallel_tool_calls: false }).invoke([asked]);
const [call] = answer.tool_calls;
assert.equal(call.name, "get_weather");
const reply = new ToolMessage({ content: "rain", tool_call_id: call.id });
assert(await llm.bindTools([weather]).invoke([asked, answer, reply]));
await assert.rejects(new ChatOpenAI({ model: "nope", apiKey: "any", maxRetries: 0, configuration: { baseURL: `${process.argv[2]}/v1` } }).invoke("a"), /does not exist/);
