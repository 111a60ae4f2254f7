// All runs: what waits and what is running, then the history.
import { get, query } from "../api.js";
import { html, useEffect, useState } from "../html.js";
import { language, t } from "../language.js";
import { live } from "../live.js";
import { figure, moment } from "../numbers.js";
import { Empty, Failure, Loading, metricName, State } from "../parts.js";
import { Progress } from "../progress.js";
import { Queue } from "../queue.js";
import { link, route, settle } from "../route.js";
import { useStore } from "../store.js";

const STATUSES = ["running", "queued", "completed", "interrupted", "failed"];

export default function Runs({ me }) {
  useStore(language);
  const now = useStore(live);
  const { query: asked } = useStore(route);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const filter = { search: asked.search, status: asked.status, tag: asked.tag };
  useEffect(() => {
    const waiting = setTimeout(() => get(`runs${query({ ...filter, limit: 200 })}`).then((answer) => { setFound(answer); setError(null); }, setError), asked.search ? 200 : 0);
    return () => clearTimeout(waiting);
  }, [asked.search, asked.status, asked.tag, now.runs.size]);
  const rows = found?.runs.map((run) => now.runs.get(run.name) ?? run);
  return html`
    <div class="head"><h1 class="grow">${t("page.runs")}</h1><a class="button main" href="#/new">${t("page.new")}</a></div>
    ${now.queue ? html`<${Queue} queue=${now.queue} runs=${now.runs} me=${me} />` : null}
    <h2>${t("runs.history")}</h2>
    <div class="controls">
      <input type="search" style=${{ maxWidth: "20rem" }} aria-label=${t("runs.search")} placeholder=${t("runs.search")} value=${asked.search ?? ""} onInput=${(event) => settle({ search: event.target.value })} />
      <label>${t("runs.status")} <select value=${asked.status ?? ""} onChange=${(event) => settle({ status: event.target.value })}>
        <option value="">${t("runs.any")}</option>${STATUSES.map((each) => html`<option value=${each}>${t(`state.${each}`)}</option>`)}</select></label>
      ${found?.tags.length ? html`<label>${t("runs.tag")} <select value=${asked.tag ?? ""} onChange=${(event) => settle({ tag: event.target.value })}>
        <option value="">${t("runs.any")}</option>${found.tags.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>` : null}
    </div>
    ${error ? html`<${Failure} error=${error} />` : !rows ? html`<${Loading} />`
      : rows.length ? html`<${Table} rows=${rows} />` : html`<${Empty}><p>${t(asked.search || asked.status || asked.tag ? "runs.none_found" : "runs.none")}</p><//>`}
    ${found && found.total > rows.length ? html`<p class="quiet small">${t("runs.more", { n: rows.length, total: found.total })}</p>` : null}`;
}

function Table({ rows }) {
  const [chosen, setChosen] = useState([]);
  const choose = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  return html`<div class=${chosen.length > 1 ? "buttons start" : "buttons"} data-chosen>${chosen.length > 1 ? html`<a class="button main" href=${link(["compare"], { runs: chosen.join("/") })}>${t("runs.compare", { n: chosen.length })}</a>` : html`<span class="quiet small">${t("runs.choose")}</span>`}</div>
    <div class="wide"><table class="cards"><thead><tr>
    <th scope="col">${t("runs.name")}</th><th scope="col">${t("runs.status")}</th><th scope="col">${t("runs.progress")}</th>
    <th scope="col" class="number">${t("chart.loss")}</th><th scope="col">${t("runs.result")}</th><th scope="col">${t("runs.how")}</th><th scope="col">${t("runs.changed")}</th></tr></thead>
    <tbody>${rows.map((run) => html`<tr key=${run.name}>
      <td class="name"><input type="checkbox" aria-label=${t("runs.choose_one", { name: run.name })} checked=${chosen.includes(run.name)} onChange=${() => choose(run.name)} /> <a href=${link(["runs", run.name])} translate=${false}>${run.name}</a> ${run.tags.map((tag) => html`<span class="badge">${tag}</span> `)}</td>
      <td><${State} of=${run.status} /></td>
      <td><${Progress} run=${run} /></td>
      <td class="number" data-label=${t("chart.loss")}>${figure(run.loss)}</td>
      <td class="small">${Object.entries(run.metrics ?? {}).filter(([name]) => name !== "loss").slice(0, 2).map(([name, value]) => `${metricName(name)} ${figure(value)}`).join(t("list"))}</td>
      <td class="small quiet" translate=${false}>${[run.engine, run.precision].filter(Boolean).join(", ")}</td>
      <td class="small quiet">${moment(run.changed)}</td></tr>`)}</tbody></table></div>`;
}
