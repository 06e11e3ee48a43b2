// Programs of the openai package for Node as its documentation has them. Arguments: URL, model.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const model = process.argv[3];
const messages = [{ role: "user", content: "Where is the market?" }];
const chat = client.chat.completions;

const whole = await chat.create({ model, messages, max_tokens: 12, temperature: 0 });
assert(whole.choices[0].message.content);
let text = "", usage = null;
for await (const chunk of await chat.create({ model, messages, max_tokens: 12, temperature: 0, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const parameters = { type: "object", properties: { celsius: { type: "boolean" } }, required: ["celsius"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await chat.create({ model, messages, max_tokens: 96, tools, tool_choice: "required" });
const [call] = called.choices[0].message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).celsius, "boolean");
const back = [...messages, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "rain" }];
assert((await chat.create({ model, messages: back, max_tokens: 8, tools })).choices[0]);

const format = { type: "json_schema", json_schema: { name: "a", schema: parameters, strict: true } };
const shaped = await chat.create({ model, messages, max_tokens: 64, response_format: format });
assert("celsius" in JSON.parse(shaped.choices[0].message.content));
const scored = await chat.create({ model, messages, max_tokens: 3, logprobs: true, top_logprobs: 2 });
assert.equal(scored.choices[0].logprobs.content.length, scored.usage.completion_tokens);

await assert.rejects(chat.create({ model: "nope", messages }), OpenAI.NotFoundError);
const said = await client.responses.create({ model, input: "hello", max_output_tokens: 8 });
assert(said.output_text);
const stream = await chat.create({ model, messages, max_tokens: 200, stream: true });
for await (const _ of stream) break;  // leaving the loop aborts the request
