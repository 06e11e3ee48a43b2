"use strict";
// The trace of a request as a waterfall, below why it went where it went.

async function drawTrace(id) {
  const listed = await ask("/traces?limit=1000");
  const row = listed.traces.find((each) => each.id === id);
  byId("why-body").append(row ? waterfall(await ask(`/traces/${row.trace_id}`)) : element("p", { class: "unit", id: "trace" },
    listed.tracing ? "Its trace is not known: it was not sampled, or is forgotten, or goes on." : "Requests are not traced: --otlp-traces-endpoint memory of pigou serve traces them."));
}

function waterfall(trace) {
  const begin = Math.min(...trace.spans.map((span) => span.start));
  const whole = Math.max(...trace.spans.map((span) => span.start + span.duration_s)) - begin || 1;
  const percent = (value) => `${(100 * value / whole).toFixed(3)}%`;
  const rows = trace.spans.map((span) => {
    const said = [...Object.entries(span.attributes), ...span.events.map((event) => [event.name, seconds(event.at - begin)])];
    const title = said.map(([name, value]) => `${name}: ${value}`).join("\n");
    const bar = element("i", { style: `margin-left:${percent(span.start - begin)};width:max(2px,${percent(span.duration_s)});background:var(${span.error ? "--bad" : span.service === trace.spans[0].service ? "--both" : "--decode"})` });
    return element("tr", { title, class: "span" },
      element("td", { class: "left", style: `padding-left:${6 + 14 * span.depth}px` }, span.name + (span.error ? ` (${span.error})` : "")),
      element("td", { class: "left" }, span.service), element("td", {}, seconds(span.duration_s)),
      element("td", { style: "width:50%" }, element("div", { class: "waterfall" }, bar)));
  });
  return element("section", { id: "trace" }, element("h3", {}, "Its trace"),
    element("div", {}, element("code", {}, trace.trace_id)),
    element("div", { class: "table" }, element("table", {}, element("tbody", {}, ...rows))));
}
