"use strict";
const KEPT = 180;
const REGIMES = ["below", "transition", "saturated"];
const byId = (id) => document.getElementById(id);
const series = new Map();
const past = { series: {}, events: [], totals: {} };
let model = "";
//: What the words of this page mean, as engineers of vLLM, SGLang and Dynamo use them.
const WORDS = {
  "TTFT": "Time to first token: from a request's arrival at the gateway to its first token. Half (p50) or 95 of 100 (p95) are below.",
  "ITL": "Inter-token latency: between two tokens of one stream.",
  "streams": "Sequences that are decoding now.",
  "prefills": "Prompts that are being computed now.",
  "queued": "Requests that wait at the gateway, because admission holds them back.",
  "refused": "Requests answered 429 or 503 since the start, because the fleet or a tenant's share was full.",
  "errors": "Requests that ended with a status of 500 or above since the start.",
  "restarts": "Times that a worker was started anew.",
  "tokens/s": "Output tokens that pass through, per second.",
  "running": "Sequences in the worker's batch, by its own account.",
  "waiting": "Sequences that wait inside the worker.",
  "cached blocks": "KV blocks of prompts that the prefix index knows this worker to hold.",
  "KV events": "Events of stored and removed blocks that came from the worker.",
  "KV in use": "Share of the worker's KV cache that is in use.",
  "cached": "Tokens of the prompt whose KV the chosen worker held.",
  "cost": "What the routing policy minimizes, in its own unit.",
  "toll": "Seconds that one more request costs those that are there already: its externality.",
  "social ÷ own cost": "What one more stream costs everybody, over what it costs itself; 1 when it harms nobody.",
  "PoA": "Price of Anarchy of the requests that this worker served.",
  "price of anarchy": "What requests cost over what they would cost if spread at best; 1 is optimal. Over the last minute, with its 95% interval.",
  "placement": "The same for which worker holds which prefix, against the best placement.",
  "next ITL": "Inter-token latency that one more stream is expected to see here.",
  "ρ": "Active KV blocks over all blocks of the device; above 1, blocks are evicted.",
  "regret": "What a choice costs everybody more than the best candidate would have.",
  "replicas": "Workers of each pool that serve; those that start, and those that drain, of all pools.",
  "shadow price": "Weighted seconds of delay that one more GPU-second of the budget would save; 0 while there is room.",
  "attained": "Share of the requests that ended in an interval and were inside their objective.",
  "value": "Weighted seconds of delay that one more worker of the pool would save, each second.",
  "price": "What that worker costs, in the same unit.",
  "candidates": "Pairs of workers that were compared.",
};

function worded(label) {
  return element("span", WORDS[label] ? { "data-word": label, title: WORDS[label] } : {}, label);
}

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") made.style.cssText = value;  // the policy of the page forbids the attribute
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function number(value, digits) {
  if (value === null || value === undefined) return "–";
  return Number(value).toLocaleString("en", { maximumFractionDigits: digits ?? (Math.abs(value) < 100 ? 1 : 0) });
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1) return `${number(value, 2)} s`;
  if (size >= 0.001) return `${number(value * 1000, 1)} ms`;
  return `${number(value * 1e6, 0)} µs`;
}

function keep(name, value) {
  if (!series.has(name)) series.set(name, []);
  const kept = series.get(name);
  kept.push(value);
  if (kept.length > KEPT) kept.shift();
  return kept;
}

// A line over time, newest at the right; `band` are pairs around it, `least` a fixed lower end.
function chart(values, { color, least = 0, band = null, label }) {
  const known = [...values, ...(band ?? []).flat()].filter((value) => value !== null && value !== undefined);
  const top = Math.max(...known, least + 1e-12), height = 52, wide = Math.max(60, values.length);
  const x = (i) => (wide - values.length + i + 1).toFixed(1);
  const y = (value) => (height - (height - 4) * (value - least) / (top - least)).toFixed(2);
  const path = (points) => points.length ? "M" + [...points, points.at(-1)].join("L") : "";
  const line = path(values.map((value, i) => value === null ? null : `${x(i)},${y(value)}`).filter(Boolean));
  const edges = (band ?? []).map((pair, i) => pair && [`${x(i)},${y(pair[1])}`, `${x(i)},${y(pair[0])}`]).filter(Boolean);
  const area = edges.length ? path([...edges.map((e) => e[0]), ...edges.map((e) => e[1]).reverse()]) + "Z" : "";
  const made = document.createElement("template");
  made.innerHTML = `<svg viewBox="0 0 ${wide} 56" preserveAspectRatio="none" role="img">
    <path fill="var(${color})" fill-opacity=".15" stroke="none" d="${area}"/>
    <path fill="none" stroke="var(${color})" stroke-width="2" stroke-linejoin="round" stroke-linecap="round" vector-effect="non-scaling-stroke" d="${line}"/></svg>`;
  const svg = made.content.firstElementChild;
  svg.setAttribute("aria-label", label);
  return svg;
}

function figure(label, value, bad = false) {
  return element("div", { class: bad ? "figure bad" : "figure" }, element("b", {}, typeof value === "string" ? value : number(value)), worded(label));
}

function term(label, value) {
  return element("div", {}, element("dt", WORDS[label] ? { "data-word": label, title: WORDS[label] } : {}, label), element("dd", {}, value));
}

function card(worker) {
  const up = worker.state === "up";
  const usage = Math.round(worker.kv_usage * 100);
  const tolls = keep(`toll ${worker.id}`, worker.toll);
  const made = element("article", { class: `card worker ${worker.role} ${up ? "" : "away"}`, "data-worker": worker.id, "data-toll": worker.toll ?? "" },
    element("div", { class: "top" },
      element("h4", {}, worker.id),
      element("span", { class: "role" }, worker.role, worker.epoch ? ` · epoch ${worker.epoch}` : ""),
      element("span", { class: `state ${up ? "up" : ""}` }, worker.state)),
    element("div", { class: "url" }, worker.url || "no address yet", worker.kind === "attached" ? " · attached" : ""),
    chart(tolls, { color: "--toll", label: `toll of ${worker.id} over time` }),
    element("dl", {},
      term("toll", seconds(worker.toll)),
      term("social ÷ own cost", number(worker.social_ratio, 2)),
      term("PoA", worker.poa === null || worker.poa_low === null ? "–" : `${number(worker.poa, 2)} (${number(worker.poa_low, 2)} to ${number(worker.poa_high, 2)})`),
      term("next ITL", seconds(worker.itl)),
      term("running", number(worker.running)),
      term("waiting", number(worker.waiting)),
      term("tokens/s", number(worker.tokens_per_second)),
      term("prefills", number(worker.prefill_requests)),
      term("streams", number(worker.decode_requests)),
      term("restarts", worker.restarts ? element("span", { class: "saturated" }, number(worker.restarts)) : "0"),
      term("cached blocks", number(worker.cached_blocks)),
      term("KV events", number(worker.kv_events)),
      term("KV in use", `${usage}%`),
      term("ρ", number(worker.rho, 2))),
    element("div", { class: "bar", role: "meter", "aria-label": "KV memory in use", "aria-valuenow": usage },
      element("i", { style: `width:${usage}%` })));
  if (worker.limits) made.append(element("p", { class: "note" }, limitsText(worker.limits)));
  if (worker.note) made.append(element("p", { class: "note" }, worker.note));
  return made;
}

// The limits that a regime's operating point, or a planner, has set.
function limitsText(limits) {
  const parts = [[limits.max_seqs, "streams"], [limits.max_batched_tokens, "tokens a step"]];
  const set = parts.filter(([value]) => value).map(([value, unit]) => `${number(value)} ${unit}`);
  return `at most ${set.join(", ") || "as started"}` + (limits.refused ? `; ${limits.refused}` : "");
}

function drawGame(game) {
  byId("policy").textContent = `policy ${game.policy}` + (game.controller === "static" ? "" : `, set by ${game.controller}`);
  const regime = byId("regime");
  regime.textContent = game.regime;
  regime.className = game.regime;
  const set = Object.entries(game.parameters).map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? number(value, 3) : value}`);
  byId("regime-note").replaceChildren("temperature ", element("b", { id: "temperature" }, number(game.temperature, 3)),
    ` · signal ${number(game.signal, 3)}`, set.length ? ` · ${set.join(", ")}` : "");
  const poa = game.poa;
  byId("poa").replaceChildren(poa ? number(poa.whole.value, 3) : "–", poa ? element("small", {}, ` ${number(poa.whole.low, 2)} to ${number(poa.whole.high, 2)} (90%)`) : "");
  byId("poa-note").textContent = poa
    ? `routing ${number(poa.routing.value, 3)} × prefill/decode ${number(poa.prefill_decode.value, 3)} × queueing ${number(poa.queueing.value, 3)} · ${game.poa_requests} requests`
    : game.poa_unknown || "known after twenty requests";
  drawSplit(game.poa_split);
  drawMemory(game.caching);
}

// The better split of workers between prefill and decode, where one is known.
function drawSplit(split) {
  byId("split").hidden = !split;
  if (!split) return;
  const moves = split.moves.length ? `move ${split.moves.join(", ")}: ` : "";
  byId("split").textContent = `Better split: ${moves}prefill on ${split.prefill.join(", ") || "none"}, decode on ${split.decode.join(", ") || "none"}; saves ${seconds(split.saves_seconds_per_request)} a request`
    + ` (gain ${number(split.gain.value, 3)}, ${number(split.gain.low, 2)} to ${number(split.gain.high, 2)}${split.certain ? "" : ", not certain"})`;
}

function drawMemory(caching) {
  byId("memory").replaceChildren(number(caching.poa, 3), element("small", {}, caching.rho === null ? "" : ` ρ ${number(caching.rho, 2)}`));
  const first = caching.first_eviction_seconds;
  byId("memory-note").textContent = `${number(caching.evicted_blocks)} blocks evicted, ${number(caching.evicted_blocks_per_second, 1)} a second`
    + (first === null ? "" : ` · first after ${number(first, 0)} s: PoA ${number(caching.poa_before_eviction, 3)} before, ${number(caching.poa_after_eviction, 3)} after`)
    + (caching.poa === null ? " · PoA is known after twenty prompts whose workers publish KV events" : ` · ${caching.prompts} prompts, ${caching.objects} prefixes`);
}

function draw(fleet) {
  const workers = fleet.workers;
  const total = (name) => workers.reduce((sum, worker) => sum + worker[name], 0);
  const totals = past.totals;
  const up = workers.filter((worker) => worker.state === "up").length;
  byId("model").textContent = model = [...new Set(workers.map((worker) => worker.model).filter(Boolean))].join(", ") || "the fleet";
  byId("figures").replaceChildren(
    figure("streams", total("decode_requests")),
    figure("prefills", total("prefill_requests")),
    figure("queued", fleet.queued),
    figure("tokens/s", fleet.tokens_per_second),
    figure("refused", fleet.shed, fleet.shed > 0),
    figure("errors", totals.errors ?? 0, totals.errors > 0),
    figure("restarts", total("restarts"), total("restarts") > 0),
    figure(`of ${workers.length} workers up`, up, up < workers.length));
  drawGame(fleet.game);
  byId("fleet").replaceChildren(...workers.map(card));
}

// The server keeps the history; only what is new is asked for.
async function drawHistory() {
  const times = past.series.time ?? [];
  const fresh = await ask(`/history?since=${times.at(-1) ?? 0}`);
  const kept = fresh.kept_s / fresh.step_s;
  for (const [name, values] of Object.entries(fresh.series)) past.series[name] = [...(past.series[name] ?? []), ...values].slice(-kept);
  past.events = [...past.events, ...fresh.events].slice(-200);
  past.totals = fresh.totals;
  for (const plot of plots) plot.show(past.series);
  byId("events").replaceChildren(...(past.events.length ? [...past.events].reverse().map(eventRow) : [element("li", {}, element("span", {}, "nothing happened"))]));
}

function eventRow(event) {
  return element("li", { class: event.kind }, element("time", {}, new Date(event.time * 1000).toLocaleTimeString("en-GB")),
    element("span", {}, event.worker), element("b", {}, event.kind), element("span", {}, event.text));
}

function drawDecisions(decisions) {
  byId("decisions-note").textContent = decisions.length ? "A click shows every candidate, and the trace of the request." : "no requests yet";
  const focused = document.activeElement?.dataset?.id;
  byId("decisions").replaceChildren(...decisions.map((each) => {
    const cells = [`${number(each.age_seconds, 1)} s ago`, each.prefill ?? "local", each.decode, number(each.prompt_tokens),
      number(each.cached_tokens), number(each.cost, 3), seconds(each.toll_seconds), seconds(each.regret_seconds), number(each.choices)];
    const row = element("tr", { tabindex: 0, "data-id": each.id, title: "Show every candidate, and the trace" },
      ...cells.map((cell, i) => element("td", i === 1 || i === 2 ? { class: "left" } : i === 7 && each.regret_seconds > 1e-9 ? { class: "regret" } : {}, cell)));
    return row;
  }));
  if (focused) byId("decisions").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function explain(why) {
  const rows = [...why.candidates].sort((a, b) => (a.cost ?? Infinity) - (b.cost ?? Infinity));
  const names = Object.keys(rows[0]?.parts ?? {});
  const most = Math.max(...rows.map((row) => names.reduce((sum, name) => sum + Math.max(0, row.parts[name] ?? 0), 0)), 1e-12);
  const amount = names.length ? seconds : (value) => number(value, 3);
  const paint = (name, i) => `background:var(--p${i % 7})`;
  const head = ["prefill", "decode", "cached", ...names.map((name) => name.replaceAll("_", " ")), "cost", "of it toll", ...(names.length ? [""] : [])];
  const body = rows.map((row) => element("tr", row.chosen ? { class: "chosen" } : {},
    element("td", {}, row.prefill ?? "local"), element("td", { class: "left" }, row.decode + (row.chosen ? " ✓" : "")),
    element("td", {}, number(row.cached_tokens)),
    ...names.map((name) => element("td", {}, seconds(row.parts[name]))),
    element("td", {}, amount(row.cost)), element("td", {}, seconds(row.toll_seconds)),
    names.length ? element("td", {}, element("div", { class: "stack" }, ...names.map((name, i) =>
      element("i", { style: `width:${(100 * Math.max(0, row.parts[name] ?? 0) / most).toFixed(2)}%;${paint(name, i)}`, title: name })))) : null));
  byId("why-body").replaceChildren(
    element("div", {}, element("code", {}, why.id)),
    element("p", { class: "unit" }, `${why.policy} at temperature ${number(why.temperature, 3)}, ${number(why.prompt_tokens)} prompt tokens, ${rows.length} candidates; regret ${seconds(why.regret_seconds)}`),
    element("div", { class: "legend" }, ...names.map((name, i) => element("span", {}, element("i", { style: paint(name, i) }), name.replaceAll("_", " ")))),
    element("div", { class: "table" }, element("table", {},
      element("thead", {}, element("tr", {}, ...head.map((name, i) => element("th", i < 2 ? { class: "left" } : {}, name)))),
      element("tbody", {}, ...body))));
  if (!byId("why").open) byId("why").showModal();
}

let isTenant = null;

// What a tenant's key may see: its own tokens, and its own decisions.
async function drawTenant() {
  const used = await ask("/usage");
  byId("model").textContent = `tenant ${used.tenant}`;
  byId("figures").replaceChildren(figure("prompt tokens", used.prompt_tokens), figure("generated tokens", used.generation_tokens));
  for (const part of document.querySelectorAll(".fleet-wide")) part.hidden = true;
}

function authorized(headers = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...headers, authorization: `Bearer ${key}` } : headers;
}

async function ask(path) {
  const reply = await fetch(path, { cache: "no-store", headers: authorized() });
  if (!reply.ok) {
    const told = await reply.json().catch(() => ({}));
    if (reply.status === 401) askForKey();
    throw new Error(reply.status === 401 ? "a valid API key is needed to see the fleet" : told.error?.message ?? `status ${reply.status}`);
  }
  return reply.json();
}

let askedForKey = false;

function askForKey(again = false) {
  if (byId("key").open || (askedForKey && !again)) return;
  askedForKey = true;
  byId("key-value").value = "";
  byId("key").showModal();
}

function useKey(event) {
  event.preventDefault();
  sessionStorage.setItem("key", byId("key-value").value.trim());
  location.reload();
}

// A link carries no key: with one, its page is fetched, and shown in a tab of its own.
async function openKeyed(event) {
  const link = event.target.closest("a");
  if (!link || !sessionStorage.getItem("key")) return;
  event.preventDefault();
  const page = await (await fetch(link.href, { headers: authorized() })).text();
  open(URL.createObjectURL(new Blob([page], { type: "text/plain;charset=utf-8" })));
}

async function show(id) {
  try {
    explain(await ask(`/decisions/${encodeURIComponent(id)}`));
    await drawTrace(id);
  } catch (error) {
    byId("status").textContent = error.message;
  }
}

function pick(event) {
  const row = event.target.closest("tr");
  if (row && (event.type === "click" || event.key === "Enter")) location.hash = row.dataset.id;
}

function follow() {
  if (location.hash.length > 1 && !document.querySelector(`[id="${CSS.escape(location.hash.slice(1))}"]`)) show(decodeURIComponent(location.hash.slice(1)));
}

async function drawFleet() {
  const fleet = await ask("/workers");
  await drawHistory();
  draw(fleet);
  await drawPlan();
  await drawDiagnosis();
  if (fleet.costs) await drawCosts();
}

async function look() {
  try {
    isTenant ??= !(await ask("/usage")).admin;
    await (isTenant ? drawTenant() : drawFleet());
    drawDecisions((await ask("/decisions?limit=12")).decisions);
    byId("status").textContent = "";
  } catch (error) {
    byId("status").textContent = `no news of the fleet: ${error.message}`;
  }
  setTimeout(look, 1000);
}

for (const node of document.querySelectorAll("[data-word]")) node.title = WORDS[node.dataset.word] ?? "";
byId("glossary").replaceChildren(...Object.entries(WORDS).flatMap(([word, text]) => [element("dt", {}, word), element("dd", {}, text)]));
byId("ask").addEventListener("submit", converse);
byId("words").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) converse(event); });
byId("halt").addEventListener("click", () => halting?.abort());
byId("anew").addEventListener("click", () => { halting?.abort(); talk.length = 0; byId("talk").replaceChildren(); byId("measured").textContent = ""; });
byId("key-form").addEventListener("submit", useKey);
byId("key-close").addEventListener("click", () => byId("key").close());
byId("other-key").addEventListener("click", () => askForKey(true));
const MS = (value) => value === null ? "–" : seconds(value);
const plots = [
  new Plot(byId("ttft-card"), "TTFT", [["ttft_p50_s", "p50", "--decode"], ["ttft_p95_s", "p95", "--prefill"]], MS),
  new Plot(byId("itl-card"), "ITL", [["itl_p50_s", "p50", "--decode"], ["itl_p95_s", "p95", "--prefill"]], MS),
  new Plot(byId("rate-card"), "requests per second", [["requests_per_s", "ended", "--both"], ["errors_per_s", "errors", "--bad"], ["refused_per_s", "refused", "--warn"]], (value) => number(value, 2)),
  new Plot(byId("tokens-card"), "tokens/s", [["tokens_per_s", "tokens/s", "--decode"], ["streams", "streams", "--both"], ["queued", "queued", "--warn"]], (value) => number(value, Math.abs(value) < 2 ? 1 : 0)),
  new Plot(byId("poa-chart"), null, [["poa", "Price of Anarchy", "--both"], ["poa_low", "low", "--soft"], ["poa_high", "high", "--soft"]], (value) => number(value, 3), ["poa_low", "poa_high"]),
  new Plot(byId("toll-chart"), null, [["toll_s", "highest toll", "--toll"]], MS),
  new Plot(byId("memory-chart"), null, [["kv_usage", "highest share of KV in use", "--decode"]], (value) => value === null ? "–" : `${number(100 * value, value < 0.02 ? 2 : 0)}%`),
];
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.repaint()));
document.querySelector("footer").addEventListener("click", openKeyed);
byId("decisions").addEventListener("click", pick);
byId("decisions").addEventListener("keydown", pick);
byId("why-close").addEventListener("click", () => byId("why").close());
byId("why").addEventListener("close", () => history.replaceState(null, "", location.pathname));
addEventListener("hashchange", follow);
look().then(follow);
