// Several runs beside one another: curves over each other, their results, and the settings in which they differ.
import { get, part } from "../api.js";
import { Chart } from "../chart.js";
import { comparedCharts } from "../curves.js";
import { CurveControls, curveView } from "../curve_controls.js";
import { html, useEffect, useMemo, useState } from "../html.js";
import { language, t } from "../language.js";
import { live } from "../live.js";
import { Matrices } from "../matrix.js";
import { bytes, duration, figure } from "../numbers.js";
import { Empty, Failure, Loading, metricName, State } from "../parts.js";
import { link, route, settle } from "../route.js";
import { useStore } from "../store.js";
import { asText } from "../values.js";

export const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const OWN = ["name", "output"]; // settings that differ between any two runs

export default function Compare({ me }) {
  useStore(language);
  const now = useStore(live);
  const { query } = useStore(route);
  const names = (query.runs ?? "").split("/").filter(Boolean); // a run's name has no /
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const moved = names.map((name) => now.runs.get(name)?.cursor).join(" ");
  useEffect(() => {
    let current = true;
    const asked = names.map(async (name) => ({ run: await get(`runs/${part(name)}`), curve: await get(`runs/${part(name)}/curve?most=1000`) }));
    Promise.all(asked).then((all) => { if (current) { setFound(all); setError(null); } }, (refused) => current && setError(refused));
    return () => { current = false; };
  }, [query.runs, moved]);
  const view = curveView(query);
  const charts = useMemo(() => (found ? comparedCharts(found, view.axis, view.weight, COLORS) : []), [found, view.axis, view.weight]);
  const choose = (name, on) => settle({ runs: (on ? [...names, name] : names.filter((each) => each !== name)).join("/") });
  return html`<div class="head"><h1 class="grow">${t("page.compare")}</h1></div>
    <${Matrices} chosen=${query.matrix || null} me=${me} />
    <details class="box quietbox" open=${names.length < 2 && !query.matrix}><summary><b>${t("compare.choose")}</b> <span class="quiet" translate=${false}>${names.join(", ")}</span></summary>
      <div class="choices">${[...now.runs.values()].map((run) => html`<label key=${run.name}>
        <input type="checkbox" checked=${names.includes(run.name)} onChange=${(event) => choose(run.name, event.target.checked)} /> <span translate=${false}>${run.name}</span> <span class="quiet small">${t(`state.${run.status}`)}</span></label>`)}</div></details>
    ${error ? html`<${Failure} error=${error} />` : null}
    ${names.length < 2 ? query.matrix ? null : html`<${Empty}><p>${t("compare.two")}</p><//>` : !found ? (error ? null : html`<${Loading} />`) : html`
      <${Results} found=${found} />
      ${charts.length ? html`<${CurveControls} query=${query} />` : null}
      <div class="plots">${charts.map((chart) => html`<${Chart} key=${chart.name} title=${chart.name} series=${chart.series} marks=${[]} axis=${view.axis} log=${view.log && chart.name !== "lr"} group="compare" />`)}</div>
      <${Differences} found=${found} />`}`;
}

function Results({ found }) {
  const metrics = [...new Set(found.flatMap(({ run }) => Object.keys(run.metrics ?? {})))].slice(0, 8);
  const memory = (run) => Object.values(run.report?.peak_memory ?? {}).filter((value) => typeof value === "number");
  return html`<div class="wide" style=${{ marginBottom: "1rem" }}><table class="cards"><thead><tr><th scope="col">${t("runs.name")}</th><th scope="col">${t("runs.status")}</th>
      ${metrics.map((name) => html`<th scope="col" class="number">${metricName(name)}</th>`)}
      <th scope="col" class="number">${t("run.speed")}</th><th scope="col" class="number">${t("run.took")}</th><th scope="col" class="number">${t("compare.memory")}</th><th scope="col">${t("runs.how")}</th></tr></thead>
    <tbody>${found.map(({ run }, i) => html`<tr key=${run.name}>
      <td class="name"><span class="swatch" style=${{ background: `var(${COLORS[i % COLORS.length]})` }}></span><a href=${link(["runs", run.name])} translate=${false}>${run.name}</a></td><td><${State} of=${run.status} /></td>
      ${metrics.map((name) => html`<td class="number" data-label=${metricName(name)}>${figure(run.metrics?.[name])}</td>`)}
      <td class="number" data-label=${t("run.speed")}>${figure(run.report?.samples_per_second ?? run.samples_per_second, 3)}</td><td class="number" data-label=${t("run.took")}>${duration(run.report?.seconds)}</td>
      <td class="number" data-label=${t("compare.memory")}>${memory(run).length ? bytes(Math.max(...memory(run))) : ""}</td><td class="small quiet" translate=${false}>${[run.engine, run.precision].filter(Boolean).join(", ")}</td></tr>`)}</tbody></table></div>`;
}

function Differences({ found }) {
  const flat = found.map(({ run }) => flattened(run.config ?? {}));
  const paths = [...new Set(flat.flatMap((each) => [...each.keys()]))].sort();
  const differ = paths.filter((path) => !OWN.includes(path) && new Set(flat.map((each) => each.get(path) ?? "")).size > 1);
  return html`<h2 style=${{ marginTop: "1.2rem" }}>${t("compare.differs")}</h2>
    ${differ.length ? html`<div class="wide"><table><thead><tr><th scope="col">${t("compare.field")}</th>${found.map(({ run }) => html`<th scope="col" translate=${false}>${run.name}</th>`)}</tr></thead>
      <tbody>${differ.map((path) => html`<tr key=${path}><td><code>${path}</code></td>${flat.map((each) => html`<td class="mono small" translate=${false}>${each.get(path) ?? ""}</td>`)}</tr>`)}</tbody></table></div>`
    : html`<p class="quiet">${t("compare.same")}</p>`}`;
}

function flattened(value, prefix = "", found = new Map()) {
  for (const [name, each] of Object.entries(value)) {
    if (each !== null && typeof each === "object" && !Array.isArray(each)) flattened(each, `${prefix}${name}.`, found);
    else found.set(prefix + name, asText(each));
  }
  return found;
}
