// Programs of @ai-sdk/openai-compatible as its documentation has them. Arguments: URL, model.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText } from "ai";

const provider = createOpenAICompatible({ name: "pigou", baseURL: `${process.argv[2]}/v1`, apiKey: "any", supportsStructuredOutputs: true, includeUsage: true });
const model = provider(process.argv[3]), prompt = "Where is the market?", maxRetries = 0;
const whole = await generateText({ model, prompt, maxOutputTokens: 12, temperature: 0, maxRetries });
assert(whole.text);
const stream = streamText({ model, prompt, maxOutputTokens: 12, temperature: 0, maxRetries });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
const schema = jsonSchema({ type: "object", properties: { celsius: { type: "boolean" } }, required: ["celsius"], additionalProperties: false });
const shaped = await generateText({ model, prompt, output: Output.object({ schema }), maxOutputTokens: 64, maxRetries });
assert.equal(typeof (shaped.output ?? shaped.experimental_output).celsius, "boolean");
