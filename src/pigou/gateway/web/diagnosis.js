"use strict";
// Which failure modes the last half hour shows, on which figures, and what to do.
const DIAGNOSED_EVERY = 10;
let diagnosisLooks = 0;

async function drawDiagnosis() {
  if (diagnosisLooks++ % DIAGNOSED_EVERY) return;
  const seen = await ask("/diagnosis");
  const span = seen.windows ? seen.seconds < 120 ? `${number(seen.seconds, 0)} s` : `${number(seen.seconds / 60, 0)} min` : "";
  byId("diagnosis-note").textContent = !seen.windows ? "known after ten seconds"
    : seen.healthy ? `nothing is wrong in the last ${span}, as far as it was judged` : `seen in the last ${span}`;
  byId("findings").replaceChildren(...seen.findings.map(findingRow));
  const missing = Object.keys(seen.not_judged ?? {});
  byId("not-judged").textContent = missing.length ? `Not judged here, for want of workers' own figures (pigou diagnose URL reads them): ${missing.join(", ")}.` : "";
}

function findingRow(finding) {
  const figures = finding.evidence.map((row) => `${row.where ? `${row.where}: ` : ""}${row.name} ${number(row.value, 3)} ${row.unit}`.trim() + (row.limit === null ? "" : ` (limit ${number(row.limit, 3)})`));
  const advice = finding.follows_from ? `follows from ${finding.follows_from}` : `Fix: ${finding.smallest_fix}`;
  return element("li", { class: finding.follows_from ? "" : "down", "data-mode": finding.number }, element("b", {}, `${finding.number} ${finding.mode}`),
    element("span", { class: "unit" }, `${finding.confidence} confidence · ${figures.join(" · ")}`), element("div", {}, advice));
}
