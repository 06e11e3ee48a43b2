"use strict";
// The planner: alerts, replicas, forecasts and prices over time, and why it did what it did.
const PLAN_EVERY = 3;
const POOL_COLOURS = { prefill: "--prefill", decode: "--decode", both: "--both" };
let planLooks = 0;
let planPlots = null;
let planPools = "";

async function drawPlan() {
  if (planLooks++ % PLAN_EVERY) return;
  const plan = await ask("/plan");
  const shown = Boolean(plan.planner || plan.slo);
  for (const part of document.querySelectorAll(".plan")) part.hidden = !shown;
  if (!shown) return;
  byId("alerts").replaceChildren(...plan.alerts.map((alert) => element("li", { class: alert.kind }, element("b", {}, alert.kind), element("span", {}, alert.text))));
  drawAttainment(plan.slo);
  for (const part of document.querySelectorAll(".planner")) part.hidden = !plan.planner;
  if (!plan.planner) return;
  const workers = Object.values(plan.replicas).flatMap((states) => Object.values(states)).reduce((sum, count) => sum + count, 0);
  const moves = Object.entries(plan.moves).map(([name, count]) => `${count} ${name.replaceAll("_", " ")}`).join(", ") || "no moves yet";
  byId("plan-note").textContent = `planner ${plan.planner}: ${workers} workers${plan.max_workers ? ` of at most ${plan.max_workers}` : ""} · ${moves}` + (plan.failures ? ` · failed ${plan.failures} times` : "");
  drawPlanCharts(plan.series);
  byId("pools").replaceChildren(...(plan.latest?.pools ?? []).map(poolRow));
  byId("reasons").replaceChildren(...(plan.latest?.reasons ?? []).map((reason) => element("li", {}, reason)));
  byId("plan-decisions").replaceChildren(...(plan.decisions.length ? [...plan.decisions].reverse().map(planRow) : [element("li", {}, element("span", {}, "nothing was changed yet"))]));
}

function drawAttainment(slo) {
  byId("attainment").replaceChildren(...Object.entries(slo?.recent ?? {}).map(([name, recent]) => {
    const terms = slo.classes?.[name] ?? slo;
    const limits = [terms.ttft_s === null ? "" : `TTFT ${seconds(terms.ttft_s)}`, terms.itl_s === null ? "" : `ITL ${seconds(terms.itl_s)}`].filter(Boolean).join(", ");
    const bad = recent.attained !== null && 100 * recent.attained < terms.percentile;
    return element("div", { class: bad ? "figure bad" : "figure", "data-class": name },
      element("b", {}, recent.attained === null ? "–" : `${number(100 * recent.attained, 1)}%`),
      element("span", {}, `${name} inside ${limits || "no limit"}; ${number(terms.percentile)}% shall`));
  }));
}

function drawPlanCharts(series) {
  const pools = Object.keys(series.pools);
  const columns = { ...series };
  for (const pool of pools) for (const [state, counts] of Object.entries(series.pools[pool])) columns[`${pool} ${state}`] = counts;
  const times = series.time.length;
  columns.starting = Array.from({ length: times }, (_, i) => pools.reduce((sum, pool) => sum + series.pools[pool].starting[i], 0));
  columns.draining = Array.from({ length: times }, (_, i) => pools.reduce((sum, pool) => sum + series.pools[pool].draining[i], 0));
  if (planPlots === null || planPools !== pools.join()) {
    planPools = pools.join();
    byId("replicas-card").replaceChildren();
    const whole = (value) => value === null ? "–" : number(value, Math.abs(value) < 2 ? 1 : 0);
    const lines = pools.map((pool) => [`${pool} ready`, pool, POOL_COLOURS[pool.split(".")[0]] ?? "--soft"]);
    planPlots = [
      new Plot(byId("replicas-card"), "replicas", [...lines, ["starting", "starting", "--warn"], ["draining", "draining", "--bad"]], whole),
      new Plot(byId("forecast-card"), "requests per second", [["rps", "seen", "--both"], ["planned_rps", "planned", "--prefill"], ["low_rps", "low", "--soft"], ["high_rps", "high", "--soft"]], (value) => value === null ? "–" : number(value, 2), ["low_rps", "high_rps"]),
      new Plot(byId("price-card"), "shadow price", [["shadow_price", "shadow price", "--toll"]], (value) => value === null ? "–" : number(value, 3)),
      new Plot(byId("attained-card"), "attained", [["attained", "attained", "--decode"]], (value) => value === null ? "–" : `${number(100 * value, 1)}%`),
    ];
  }
  for (const plot of planPlots) plot.show(columns);
}

function poolRow(pool) {
  const cells = [pool.pool, number(pool.ready), number(pool.pending), number(pool.wanted), number(pool.capacity_rps, 2), seconds(pool.ttft_s),
    seconds(pool.itl_s), number(pool.value, 3), number(pool.price, 3)];
  return element("tr", { "data-pool": pool.pool }, ...cells.map((cell, i) => element("td", i ? {} : { class: "left" }, cell)));
}

function planRow(decision) {
  const words = decision.actions.map(actionWords).join(", ");
  const why = [...(decision.alternatives ?? []).filter((move) => move.chosen && move.reason).map((move) => move.reason), ...decision.reasons];
  return element("li", { class: decision.refused.length ? "down" : "" }, element("time", {}, new Date(decision.time * 1000).toLocaleTimeString("en-GB")),
    element("b", {}, words), element("span", {}, [...why, ...decision.refused.map((text) => `refused: ${text}`)].join("; ")));
}

function actionWords(action) {
  switch (action.kind) {
    case "add_workers": return `add ${action.count} ${action.pool}`;
    case "flip_role": return `flip ${action.worker} to ${action.pool}`;
    default: return `${action.kind.split("_")[0]} ${action.worker ?? action.pool}`;
  }
}
