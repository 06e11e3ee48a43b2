"use strict";
// A chat that streams, as any client of the API would.
const talk = [];
let halting = null;

function say(role, text) {
  const made = element("div", { class: `said ${role}` }, text);
  byId("talk").append(made);
  byId("talk").scrollTop = byId("talk").scrollHeight;
  return made;
}

async function converse(event) {
  event.preventDefault();
  const words = byId("words").value.trim();
  if (!words || halting) return;
  byId("words").value = "";
  say("user", words);
  talk.push({ role: "user", content: words });
  const shown = say("assistant", "…");
  halting = new AbortController();
  byId("halt").hidden = false;
  const began = performance.now();
  let text = "", first = null, tokens = 0;
  try {
    const body = { messages: talk, stream: true, max_tokens: Number(byId("most").value) || 96, stream_options: { include_usage: true } };
    const reply = await fetch("/v1/chat/completions", { method: "POST", signal: halting.signal, body: JSON.stringify(body),
      headers: authorized({ "content-type": "application/json" }) });
    if (!reply.ok) throw new Error((await reply.json().catch(() => ({}))).error?.message ?? `status ${reply.status}`);
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const more = chunk.choices?.[0]?.delta?.content ?? "";
      if (more && first === null) first = performance.now();
      text += more;
      if (more) shown.textContent = text;
    }
    const took = (performance.now() - (first ?? began)) / 1000;
    byId("measured").textContent = `TTFT ${seconds(((first ?? performance.now()) - began) / 1000)} · ${tokens} tokens · ${number((tokens - 1) / Math.max(took, 1e-3), 1)} tokens/s · worker ${reply.headers.get("x-pigou-worker") ?? "–"}`;
    if (!text) shown.textContent = "(no text)";
  } catch (error) {
    shown.classList.add("failed");
    shown.textContent = `${text} [${error.name === "AbortError" ? "stopped" : error.message}]`;
  }
  talk.push({ role: "assistant", content: text });
  halting = null;
  byId("halt").hidden = true;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
