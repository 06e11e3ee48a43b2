// The Vercel AI SDK by its default (Responses), and on chats. Arguments: URL, model[, reasons].
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, streamText, tool, stepCountIs, jsonSchema } from "ai";

const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any" });
const reasons = process.argv.length > 4;
const prompt = "Where is the market?", maxRetries = 0;


const schema = jsonSchema({ type: "object", properties: { celsius: { type: "boolean" } }, required: ["celsius"], additionalProperties: false });
let asked = 0;
const tools = { get_weather: tool({ description: "Tell the weather", inputSchema: schema, execute: async () => { asked += 1; return "rain"; } }) };
const providerOptions = { openai: { parallelToolCalls: false } };
for (const [model, tells] of [[openai(process.argv[3]), true], [openai.chat(process.argv[3]), false]]) {
  const short = { model, prompt, maxOutputTokens: 96, temperature: 0, maxRetries };
  const whole = await generateText(short);
  assert(whole.text || reasons);
  assert(whole.usage.outputTokens <= 96);
  if (tells) assert.equal(whole.reasoning.length > 0, reasons);
  let text = "";
  for await (const part of streamText(short).textStream) text += part;
  assert.equal(text, whole.text);
  asked = 0;
  const called = await generateText({ ...short, tools, toolChoice: "required", maxOutputTokens: 400, providerOptions, stopWhen: stepCountIs(2) });
  assert.equal(called.steps[0].toolCalls[0].toolName, "get_weather");
  assert(asked >= 1);
  const shaped = await generateText({ ...short, output: Output.object({ schema }), maxOutputTokens: 400 });
  assert.equal(typeof (shaped.output ?? shaped.experimental_output).celsius, "boolean");
}

await assert.rejects(generateText({ model: openai.chat("nope"), prompt, maxRetries }), /does not exist/);
