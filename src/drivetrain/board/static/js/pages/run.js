// One run: where it stands, its curves, its log, its checkpoints, and what can be done with it.
import { get, html, link, part, post, remove, route, settle, useEffect, useMemo, useRef, useState, useStore } from "../base.js";
import { Chart, chartsOf, CurveControls, curveView, placeOf, useCurve } from "../curves.js";
import { asText } from "../draft.js";
import { bytes, duration, figure, language, moment, said, t, textOr, whole } from "../language.js";
import { live } from "../live.js";
import { Confirm, Copy, Failure, kindOf, Loading, LogTail, Name, Note, Progress, Said, State, Tabs, useAnswer } from "../parts.js";

const ENDED = ["completed", "stopped_early", "interrupted", "failed", "refused", "lost", "cancelled", "unknown"];
const SILENT = 600; // seconds without a new line of events, after which the page says so
const TABS = ["curves", "samples", "log", "checkpoints", "config", "notes"];
const ANSWERS = 40; // that are shown, the newest

export default function Run({ name, me }) {
  useStore(language);
  const now = useStore(live);
  const { query } = useStore(route);
  const fresh = now.runs.get(name);
  // checkpoints come with evaluations; what else a run leaves is asked for every ten seconds, to which `changed` is cut
  const [details, error, again] = useAnswer(() => get(`runs/${part(name)}`), [name, fresh?.status, fresh?.entry, JSON.stringify(fresh?.metrics), fresh?.changed?.slice(0, 18)]);
  const run = details ? { ...details, ...fresh } : fresh;
  if (error && !details) return html`<h1 translate=${false}>${name}</h1><${Failure} error=${error} />`;
  if (!run) return html`<${Loading} />`;
  const tabs = TABS.filter((each) => each !== "samples" || run.workload?.startsWith("language_model"));
  const tab = tabs.includes(query.tab) ? query.tab : "curves";
  return html`
    <div class="head"><div class="grow"><h1 translate=${false}>${run.name}</h1><p class="quiet small" style=${{ margin: 0 }}><span>${kindOf(run)}</span>${[run.model, run.engine, run.precision].filter(Boolean).map((each) => html` · <${Name}>${each}<//>`)}</p></div>
      <${State} of=${run.status} /></div>
    <div class="box"><div class="head" style=${{ margin: 0 }}>
      <div class="grow"><${Progress} run=${run} /></div>
      <${Facts} run=${run} />
      ${details ? html`<${Actions} run=${run} actions=${details.actions} me=${me} again=${again} />` : null}</div></div>
    <${Silence} run=${run} />
    ${details ? html`<${Trouble} run=${run} events=${details.events} />` : null}
    <${Tabs} label=${t("run.views")} value=${tab} options=${tabs.map((each) => [each, t(`run.${each}`)])} onChoose=${(key) => settle({ tab: key })} />
    ${tab === "curves" ? html`<${Curves} name=${name} run=${run} query=${query} />` : null}
    ${tab === "samples" ? html`<${Samples} name=${name} sign=${run.changed?.slice(0, 18)} />` : null}
    ${tab === "log" ? html`<${LogTail} name=${name} live=${!ENDED.includes(run.status)} entry=${run.entry} />` : null}
    ${tab === "checkpoints" && details ? html`<${Checkpoints} of=${details} />` : null}
    ${tab === "notes" && details ? html`<${Notes} of=${details} me=${me} again=${again} />` : null}
    ${tab === "config" && details ? html`<${Config} of=${details} />` : null}`;
}

function Facts({ run }) {
  const shown = [["chart.loss", figure(run.loss)], ...Object.entries(run.metrics ?? {}).filter(([name]) => name !== "loss").slice(0, 2).map(([name, value]) => [`chart.${name}`, figure(value), name]),
    ["run.speed", run.samples_per_second ? figure(run.samples_per_second, 3) : ""]].filter(([, value]) => value !== "");
  return html`<div style=${{ display: "flex", flexWrap: "wrap", gap: ".2rem 1.4rem" }}>${shown.map(([key, value, name]) => html`<div key=${key}>
    <div class="small quiet">${textOr(key, name?.replaceAll("_", " "))}</div><b>${value}</b></div>`)}</div>`;
}

function Actions({ run, actions, me, again }) {
  const [asked, setAsked] = useState(null);
  const key = useRef(crypto.getRandomValues(new Uint32Array(4)).join("-")); // a resume that is sent twice starts one process
  const base = `runs/${part(run.name)}`;
  const can = (what) => me.user.role !== "viewer" && run.can.includes(what);
  const done = () => { setAsked(null); again(); };
  const ways = {
    stop: [() => post(`${base}/stop`), "main", false], kill: [() => post(`${base}/kill`), "danger", true],
    resume: [() => post(`${base}/resume`, { key: `${key.current} ${run.entry}` }), run.status === "completed" ? "" : "main", false],
    delete: [async () => { await remove(base); location.hash = link(["runs"]); }, "danger", true],
  };
  return html`<div class="buttons">${Object.entries(ways).filter(([what]) => can(what)).map(([what, [, look]]) => html`
      <button key=${what} class=${what === "delete" ? "" : look} data-action=${what} onClick=${() => setAsked(what)}>${t(`run.${what}`)}</button>`)}
    ${can("clone") ? html`<a class="button" href=${link(["new"], { from: run.name })}>${t("run.clone")}</a>` : null}
    ${can("predict") ? html`<a class="button" href=${link(["evaluate"], { run: run.name })}>${t("run.evaluate")}</a>` : null}
    ${can("predict") && run.workload?.startsWith("language_model") ? html`<a class="button" href=${link(["chat"], { left: run.name })}>${t("page.chat")}</a>` : null}
    ${can("export") ? html`<a class="button" href=${link(["export"], { run: run.name })}>${t("page.export")}</a>` : null}
    <a class="button" href=${`api/${base}/report`} download data-report>${t("run.report")}</a></div>
    ${asked ? html`<${Confirm} title=${t(`run.${asked}_ask`, { name: run.name })} text=${[said(actions[asked]), asked === "delete" ? t("run.frees", { size: bytes(run.bytes) }) : ""].filter(Boolean).join(" ")} action=${t(`run.${asked}`)} danger=${ways[asked][2]}
      onYes=${async () => { await ways[asked][0](); done(); }} onNo=${() => setAsked(null)} />` : null}`;
}

// A run that works without a word: a long evaluation, or it hangs.
function Silence({ run }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => { const timer = setInterval(() => setNow(Date.now()), 15_000); return () => clearInterval(timer); }, []);
  const seconds = (now - Date.parse(run.changed)) / 1000;
  if (run.status !== "running" || !(seconds > SILENT)) return null;
  return html`<${Note} tone="warn"><p data-silent>${t("run.silent", { time: duration(seconds) })}</p><//>`;
}

function Trouble({ run, events }) {
  const bad = ["failed", "refused", "lost"].includes(run.status);
  const told = events.filter((each) => ["warning", "trouble", "anomaly"].some((kind) => each.event?.includes(kind)) && !run.message?.includes(each.message));
  if (!bad && !told.length) return run.status === "queued" && run.message ? html`<${Note}><p><${Said} text=${run.message} /></p><//>` : null;
  return html`<div>${bad ? html`<${Note} tone="bad"><p><b>${t(`run.why_${run.status}`)}</b></p><p style=${{ whiteSpace: "pre-wrap" }}><${Said} text=${run.message?.replace(/^\w+Error: /, "")} /></p>
      <details style=${{ marginTop: ".5rem" }}><summary>${t("run.log_end")}</summary><${LogTail} name=${run.name} live=${false} entry=${run.entry} short=${true} /></details><//>` : null}
    ${told.length ? html`<${Note} tone="warn"><ul>${told.slice(-5).map((each) => html`<li>${each.step === undefined ? "" : `${t("run.step", { step: whole(each.step) })}${t("colon")}`}<${Said} text=${(each.message ?? each.event).replace(/^step \d+: /, "")} /></li>`)}</ul><//>` : null}</div>`;
}

function Curves({ name, run, query }) {
  const [curve, error] = useCurve(name, run.cursor);
  const view = curveView(query, [curve]);
  const { log, weight, axis } = view;
  const charts = useMemo(() => (curve ? chartsOf(curve, axis, weight) : []), [curve, axis, weight]);
  const marks = useMemo(() => (curve ? curve.marks.map((mark) => ({ ...mark, x: placeOf(mark, curve, axis) })) : []), [curve, axis]);
  if (error && !curve) return html`<${Failure} error=${error} />`;
  if (!curve) return html`<${Loading} />`;
  if (!charts.length) return html`<p class="quiet">${t("run.no_points")}</p>`;
  return html`<${CurveControls} view=${view} />
    <div class="plots">${charts.map((chart) => html`<${Chart} key=${chart.name} title=${chart.name} series=${chart.series} marks=${marks} axis=${axis} log=${log && chart.name !== "lr"} group=${name} />`)}</div>
    ${marks.length ? html`<p class="quiet small">${t("chart.marks")}</p>` : null}`;
}

// Answers of the model, the newest first.
function Samples({ name, sign }) {
  const [found, error] = useAnswer(() => get(`runs/${part(name)}/samples?last=${ANSWERS}`), [name, sign]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  if (!found.samples.length) return html`<p class="quiet">${t("sample.none")}</p>`;
  return html`${found.samples.toReversed().map((each) => html`<article class="box" data-sample>
    <p class="small quiet">${[t("run.step", { step: whole(each.step) }), ...["reward", "advantage"].filter((key) => key in each).map((key) => `${t(`sample.${key}`)} ${figure(each[key])}`),
      ...Object.entries(each.rewards ?? {}).map(([key, value]) => `${key} ${figure(value)}`)].join(" · ")}</p>
    <dl class="pairs">${["prompt", "answer", "reference_model", "reference"].filter((key) => each[key]).map((key) => html`<dt>${t(`sample.${key}`)}</dt><dd class="tokens">${asText(each[key])}</dd>`)}</dl></article>`)}`;
}

function Checkpoints({ of }) {
  const base = `api/runs/${part(of.name)}/files/`;
  return html`${of.checkpoints.length ? html`<div class="wide"><table><thead><tr><th scope="col">${t("checkpoint.name")}</th><th scope="col" class="number">${t("axis.step")}</th><th scope="col" class="number">${t("checkpoint.size")}</th><td></td></tr></thead>
      <tbody>${of.checkpoints.map((each) => html`<tr key=${each.name}><td><code>${each.name}</code></td><td class="number">${whole(each.step)}</td><td class="number">${bytes(each.bytes)}</td>
        <td>${each.best ? html`<span class="badge good">${t("checkpoint.best")}</span> ` : null}${each.last ? html`<span class="badge">${t("checkpoint.last")}</span>` : null}</td></tr>`)}</tbody></table></div>`
    : html`<p class="quiet">${t("checkpoint.none")}</p>`}
    <details style=${{ marginTop: "1rem" }}><summary>${t("run.files", { n: of.files.length, size: bytes(of.bytes) })}</summary>
      <ul>${of.files.map((each) => html`<li key=${each.path}><a href=${base + each.path.split("/").map(part).join("/")} download translate=${false}>${each.path}</a> <span class="quiet small">${bytes(each.bytes)}</span></li>`)}</ul></details>`;
}

function Notes({ of, me, again }) {
  const [tags, setTags] = useState(of.tags.join(", "));
  const [note, setNote] = useState(of.note);
  const [saved, setSaved] = useState(null);
  const save = (event) => {
    event.preventDefault();
    post(`runs/${part(of.name)}/tags`, { tags: tags.split(/[,，]/).map((each) => each.trim()).filter(Boolean), note }).then(() => { setSaved(true); again(); }, setSaved);
  };
  const mayNot = me.user.role === "viewer";
  return html`<form onSubmit=${save} style=${{ maxWidth: "40rem" }}>
    <div class="field"><label for="tags">${t("run.tags")}</label><input id="tags" value=${tags} disabled=${mayNot} onInput=${(event) => { setTags(event.target.value); setSaved(null); }} /><p class="doc">${t("run.tags_about")}</p></div>
    <div class="field" style=${{ margin: ".8rem 0" }}><label for="note">${t("run.note")}</label><textarea id="note" rows="5" value=${note} disabled=${mayNot} onInput=${(event) => { setNote(event.target.value); setSaved(null); }}></textarea></div>
    ${mayNot ? null : html`<button class="main">${t("save")}</button> <span role="status">${saved === true ? t("saved") : ""}</span>`}
    ${saved instanceof Error ? html`<${Failure} error=${saved} />` : null}</form>`;
}

function Config({ of }) {
  const entry = of.entries.find((each) => each.verb === "train");
  return html`<div class="buttons" style=${{ marginBottom: ".6rem" }}><${Copy} text=${of.yaml} /></div><pre>${of.yaml}</pre>
    <dl class="pairs" style=${{ marginTop: "1rem" }}>
      ${entry ? html`<dt>${t("run.command")}</dt><dd><code>${entry.command}</code></dd>` : null}
      <dt>${t("run.created")}</dt><dd>${moment(of.created)}</dd>
      ${of.report?.seconds ? html`<dt>${t("run.took")}</dt><dd>${duration(of.report.seconds)}</dd>` : null}
      ${Object.entries(of.environment ?? {}).filter(([, value]) => ["string", "number"].includes(typeof value)).map(([key, value]) => html`<dt>${textOr(`environment.${key}`, key.replaceAll("_", " "))}</dt><dd translate=${false}>${key === "memory_bytes" ? bytes(value) : value}</dd>`)}</dl>`;
}
