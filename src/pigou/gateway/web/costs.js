"use strict";
// What the fleet costs, and whom; hidden where no prices were given.
const COSTS_EVERY = 5;
let costLooks = 0;

async function drawCosts() {
  if (costLooks++ % COSTS_EVERY) return;
  const bill = await ask("/costs");
  for (const part of document.querySelectorAll(".costs")) part.hidden = false;
  const hourly = bill.workers.reduce((sum, worker) => sum + worker.usd_per_hour, 0);
  const million = (value) => (value === null ? "–" : usd(value));
  byId("costs-note").textContent = `${usd(hourly)} an hour; energy by ${[...new Set(bill.workers.map((worker) => worker.energy))].join(", ") || "none"}`;
  byId("costs").replaceChildren(
    figure("so far", usd(bill.usd)), figure("idle", usd(bill.idle_usd)), figure("in use", `${number(100 * bill.utilisation, 1)}%`),
    figure("a million output tokens", million(bill.usd_per_million.output)), figure("a million uncached input tokens", million(bill.usd_per_million.uncached_input)),
    figure("kJ", number(bill.energy.joules / 1000, 1)));
  byId("bills-note").textContent = bill.usages.length ? "" : "no requests yet";
  byId("bills").replaceChildren(...bill.usages.map((row) => element("tr", {},
    element("td", { class: "left" }, row.tenant || "–"), element("td", { class: "left" }, row.workload || "default"),
    ...[usd(row.usage_usd), usd(row.allocated_usd), million(row.marginal_usd), number(row.allocated_joules / 1000, 1), number(row.output_tokens)].map((text) => element("td", {}, text)))));
}

function usd(value) {
  return `$${value >= 1 ? value.toFixed(2) : value.toPrecision(3)}`;
}
