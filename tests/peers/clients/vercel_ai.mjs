// Programs of the Vercel AI SDK as its documentation has them. Arguments: URL, model.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, streamText, tool, stepCountIs, jsonSchema } from "ai";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any" });
const model = openai.chat(process.argv[3]);
const prompt = "Where is the market?", maxRetries = 0;

const whole = await generateText({ model, prompt, maxOutputTokens: 12, temperature: 0, maxRetries });
assert(whole.text);
assert(whole.usage.outputTokens <= 12);
const stream = streamText({ model, prompt, maxOutputTokens: 12, temperature: 0, maxRetries });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);

const schema = jsonSchema({ type: "object", properties: { celsius: { type: "boolean" } }, required: ["celsius"], additionalProperties: false });
let asked = 0;
const tools = { get_weather: tool({ description: "Tell the weather", inputSchema: schema, execute: async () => { asked += 1; return "rain"; } }) };
const called = await generateText({ model, prompt, tools, toolChoice: "required", maxOutputTokens: 96, providerOptions: { openai: { parallelToolCalls: false } }, stopWhen: stepCountIs(1), maxRetries });
assert.equal(called.toolCalls[0].toolName, "get_weather");
assert.equal(asked, 1);
const shaped = await generateText({ model, prompt, output: Output.object({ schema }), maxOutputTokens: 64, maxRetries });
assert.equal(typeof (shaped.output ?? shaped.experimental_output).celsius, "boolean");

await assert.rejects(generateText({ model: openai.chat("nope"), prompt, maxRetries }), /does not exist/);
// The default of this package is the Responses API: refused, with what to do instead.
await assert.rejects(generateText({ model: openai(process.argv[3]), prompt, maxRetries }), (error) =>
  error.statusCode === 404 && error.message.includes("openai.chat('MODEL')"));
