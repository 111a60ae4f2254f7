// Several runs beside one another: curves, results, and the settings in which they differ.
import { get, go, html, link, part, post, remove, route, settle, useEffect, useMemo, useRef, useState, useStore } from "../base.js";
import { Chart, comparedCharts, CurveControls, curveView } from "../curves.js";
import { asText } from "../draft.js";
import { bytes, duration, figure, language, logTongue, moment, t, textOr, textsOf } from "../language.js";
import { live } from "../live.js";
import { Confirm, Empty, Failure, Loading, metricName, Note, Said, State, useAnswer } from "../parts.js";

const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
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
  const view = curveView(query, (found ?? []).map(({ curve }) => curve));
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
      ${charts.length ? html`<${CurveControls} view=${view} />` : null}
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

// A comparison that was started from a form: its state, and its table and advice when it is done.

const LIVE = ["queued", "running", "stopping"];
const SHOWN = { // columns by their key in comparison.json, and how a figure is written
  seconds: (value) => `${figure(value, 3)} s`, samples_per_second: (value) => figure(value, 3), speed_up: (value) => figure(value, 3),
  peak_allocated_bytes: bytes, peak_tensor_bytes: bytes, peak_resident_bytes: bytes, utilisation_mean: share,
};
const HIDDEN = /^(status|reason|seeds|emulated|utilisation_peak|largest_loss_difference|skipped_steps|.*_spread|.*_deviation)$/;

function Matrices({ chosen, me }) {
  const { queue } = useStore(live);
  const moved = queue?.entries.filter((each) => each.verb === "compare").map((each) => `${each.id} ${each.state}`).join(" ");
  const [answer, error, again] = useAnswer(() => get("comparisons"), [moved]);
  if (error && !answer) return html`<${Failure} error=${error} />`;
  const found = answer?.comparisons ?? [];
  if (!found.length) return null;
  return html`<details class="box quietbox" open=${Boolean(chosen)}><summary><b>${t("matrix.title")}</b> <span class="quiet" translate=${false}>${chosen ?? ""}</span></summary>
      <ul class="choices">${found.map((each) => html`<li key=${each.name}><a href=${link(["compare"], { matrix: each.name })} aria-current=${each.name === chosen ? "page" : null} translate=${false}>${each.name}</a> <${State} of=${each.state} /> <span class="quiet small">${moment(each.created)}</span></li>`)}</ul></details>
    ${chosen ? html`<${Matrix} key=${chosen} name=${chosen} moved=${moved} me=${me} again=${again} />` : null}`;
}

function Matrix({ name, moved, me, again }) {
  const [of, error] = useAnswer(() => get(`comparisons/${part(name)}`), [name, moved]);
  const [asked, setAsked] = useState(false);
  const [refused, setRefused] = useState(null);
  if (error && !of) return html`<${Failure} error=${error} />`;
  if (!of) return html`<${Loading} />`;
  const { entry, result } = of;
  const isLive = entry && LIVE.includes(entry.state);
  const may = me.user.role !== "viewer";
  const end = () => post(`queue/${entry.id}/${entry.state === "queued" ? "cancel" : "stop"}`).then(() => setRefused(null), setRefused);
  const forget = async () => { await remove(`comparisons/${part(name)}`); settle({ matrix: "" }); again(); };
  return html`<section class="box" aria-labelledby="matrix"><div class="head"><h2 id="matrix" class="grow" translate=${false}>${name}</h2>${entry ? html`<${State} of=${entry.state} />` : null}
      ${result ? html`<a class="button" href=${`api/comparisons/${part(name)}/page`} download data-page>${t("matrix.page")}</a>` : null}
      ${isLive && may ? html`<button type="button" onClick=${end} data-end=${entry.id}>${t("queue.end")}</button>` : null}
      ${may && !isLive ? html`<button type="button" onClick=${() => setAsked(true)} data-forget>${t("run.delete")}</button>` : null}</div>
    ${entry?.reason && !result ? html`<${Note} tone=${isLive ? "" : "bad"}><p><${Said} text=${entry.reason} /></p><//>` : null}
    ${refused ? html`<${Failure} error=${refused} />` : null}
    ${entry && !result ? html`<${Log} id=${entry.id} state=${entry.state} />` : null}
    ${result ? html`<${Table} of=${result} /><${Advice} of=${result} />` : null}
    ${asked ? html`<${Confirm} title=${t("run.delete_ask", { name })} text=${t("matrix.deletes")} action=${t("run.delete")} danger=${true} onYes=${forget} onNo=${() => setAsked(false)} />` : null}</section>`;
}

const columnName = (key) => textOr(`matrix.${key}`, metricName(key));

function Table({ of }) {
  const columns = [...new Set(of.rows.flatMap((row) => Object.keys(row)))].filter((key) => !of.axes.includes(key) && !HIDDEN.test(key) && of.rows.some((row) => typeof row[key] === "number"));
  return html`<div class="wide"><table class="cards" data-matrix><thead><tr>${of.axes.map((axis) => html`<th scope="col">${textOr(`label.${axis}`, axis)}</th>`)}
      ${columns.map((key) => html`<th scope="col" class="number">${columnName(key)}</th>`)}<th scope="col">${t("runs.status")}</th></tr></thead>
    <tbody>${of.rows.map((row) => html`<tr>${of.axes.map((axis) => html`<td class="name" translate=${false}>${row[axis]}</td>`)}
      ${columns.map((key) => html`<td class="number" data-label=${columnName(key)}>${typeof row[key] === "number" ? (SHOWN[key] ?? figure)(row[key]) : ""}</td>`)}
      <td class="small">${textOr(`state.${row.status}`, row.status)}${row.reason ? html`${t("colon")}<${Said} text=${row.reason} />` : ""}</td></tr>`)}</tbody></table></div>`;
}

// What it prints while it works: a line a run.
function Log({ id, state }) {
  const { queue } = useStore(live);
  const [answer, error] = useAnswer(() => get(`queue/${id}/log`), [id, state, queue]);
  const text = answer?.text.trimEnd().split("\n").slice(-20).join("\n") ?? "";
  if (error) return html`<${Failure} error=${error} />`;
  return text ? html`<pre class="log" lang=${logTongue()} tabindex="0" role="log" aria-label=${t("run.log")}>${text}</pre>` : html`<p class="quiet" role="status">${t("log.waiting")}</p>`;
}

function share(value) { return `${figure(value * 100, 3)} %`; }

// Starts a comparison: the run file once for each engine, precision and further value, each a row.

const OFFERED = ["engine", "precision"]; // axes to tick; others are typed

export function MatrixForm({ schema, state }) {
  const [chosen, setChosen] = useState({ engine: [], precision: [] });
  const [others, setOthers] = useState("");
  const [seeds, setSeeds] = useState("1");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const key = useRef(crypto.getRandomValues(new Uint32Array(4)).join("-"));
  const axes = [...OFFERED.filter((axis) => chosen[axis].length).map((axis) => `${axis}=${chosen[axis].join(",")}`),
    ...others.split(/\s+/).filter(Boolean)];
  const several = axes.filter((axis) => axis.includes(",")).length > 0;
  const choose = (axis, value, on) => setChosen({ ...chosen, [axis]: on ? [...chosen[axis], value] : chosen[axis].filter((each) => each !== value) });
  const start = async () => {
    setBusy(true);
    setError(null);
    try {
      // sent twice by a broken network it is one comparison, changed and sent again it is another one
      const entry = await post("comparisons", { key: `${key.current} ${digest([state.yaml, ...axes, seeds].join(" "))}`, yaml: state.yaml, axes, seeds: Number(seeds) || 1 });
      go(["compare"], { matrix: entry.run });
    } catch (refused) { setError(refused); } finally { setBusy(false); }
  };
  return html`<p class="quiet small">${t("matrix.about")}</p>
    ${OFFERED.map((axis) => html`<fieldset><legend>${t(`label.${axis}`)}</legend><div class="choices">${namesOf(schema, axis).map((value) => html`
      <label key=${value}><input type="checkbox" checked=${chosen[axis].includes(value)} onChange=${(event) => choose(axis, value, event.target.checked)} data-axis=${`${axis}=${value}`} /> <span translate=${false}>${value}</span></label>`)}</div></fieldset>`)}
    <div class="field"><label for="matrix-others">${t("matrix.others")}</label><input id="matrix-others" class="code" value=${others} placeholder="optimizer.lr=0.1,0.05 processes=2" spellcheck=${false} onInput=${(event) => setOthers(event.target.value)} /></div>
    <div class="field"><label for="matrix-seeds">${t("matrix.seeds")}</label><input id="matrix-seeds" inputmode="numeric" value=${seeds} onInput=${(event) => setSeeds(event.target.value)} /></div>
    <div class="buttons" style=${{ marginTop: ".6rem" }}><button type="button" class="main" disabled=${!state.ready || busy || !several} onClick=${start} data-start-matrix>${t("matrix.start")}</button></div>
    ${error ? html`<${Failure} error=${error} />` : null}`;
}

const namesOf = (schema, axis) => (schema.fields.find((field) => field.path === axis)?.choices ?? []).filter((value) => value !== "auto");

// A short sum of a text (FNV-1a), to tell one form from another.
function digest(text) {
  let sum = 0x811c9dc5;
  for (const letter of text) sum = Math.imul(sum ^ letter.codePointAt(0), 0x01000193);
  return (sum >>> 0).toString(16);
}

// The advice of a comparison: statements as data, of which each language but English, the server's, has a text.

const FILES = { zh: "zh.advice" };

function Advice({ of }) {
  const file = FILES[language.value];
  const [texts, error] = useAnswer(() => (file ? textsOf(file) : Promise.resolve(null)), [file]);
  if (file && !texts && !error) return null;
  if (texts && of.statements) return html`<${Note}><p data-advice>${of.statements.map((each) => written(each, texts)).join("")}</p><//>`;
  // a comparison of an earlier version has its advice in English alone
  return html`<${Note}>${file ? html`<p class="small">${t("matrix.advice")}</p>` : null}<p data-advice lang=${file ? "en" : undefined}>${of.advice}</p><//>`;
}

// Returns a value in a language: a text, {says, values}, or several in a row, {by, items}.
function written(value, texts) {
  if (typeof value === "string") return value;
  if (value.by) {
    const [between, last] = texts[`by.${value.by}`].split("|");
    const items = value.items.map((each) => written(each, texts));
    return [items.slice(0, -1).join(between), ...items.slice(-1)].filter(Boolean).join(last);
  }
  return texts[value.says].replace(/\{(\w+)\}/g, (_, name) => (name === "metric" ? metricName(value.values.metric) : written(value.values[name], texts)));
}
