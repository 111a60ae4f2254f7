// All runs: what waits and what is running, then the history.
import { get, html, link, post, query, route, settle, useEffect, useState, useStore } from "../base.js";
import { bytes, figure, language, moment, said, t } from "../language.js";
import { live, Notices } from "../live.js";
import { canEnd, Empty, Failure, Loading, metricName, Note, Progress, Said, State } from "../parts.js";

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

// The queue: what runs, what waits and why, in which order, on which devices.

function Queue({ queue, runs, me }) {
  const [error, setError] = useState(null);
  const entries = queue.entries.filter((each) => ["running", "stopping", "queued"].includes(each.state));
  const waiting = entries.filter((each) => each.state === "queued");
  const may = me.user.role !== "viewer";
  const act = (work) => work.then(() => setError(null), setError);
  const move = (entry, by) => {
    const ids = waiting.map((each) => each.id);
    const place = ids.indexOf(entry.id);
    ids.splice(place, 1);
    ids.splice(place + by, 0, entry.id);
    act(post("queue/order", { ids }));
  };
  return html`<section class="box" aria-labelledby="queue"><div class="head"><h2 id="queue" class="grow">${t("queue.title")}</h2>
      ${may ? html`<button onClick=${() => act(post("queue/settings", { paused: !queue.settings.paused }))}>${t(queue.settings.paused ? "queue.go_on" : "queue.pause")}</button>` : null}</div>
    ${error ? html`<${Failure} error=${error} />` : null}
    ${queue.settings.paused ? html`<${Note} tone="warn"><p>${t("queue.paused")} ${queue.settings.paused_because ?? ""}</p><//>` : null}
    ${entries.length ? html`<div class="wide"><table class="cards"><tbody>${entries.map((entry) => html`<tr key=${entry.id}>
        <td class="name"><a href=${entry.verb === "compare" ? link(["compare"], { matrix: entry.run }) : link(["runs", entry.run])} translate=${false}>${entry.run}</a> <span class="quiet small">${entry.verb === "train" ? "" : t(`verb.${entry.verb}`)}</span></td>
        <td><${State} of=${entry.state} /></td>
        <td>${entry.verb === "train" && entry.state !== "queued" && runs.get(entry.run) ? html`<${Progress} run=${runs.get(entry.run)} />` : html`<span class="quiet small"><${Said} text=${entry.reason ?? ""} /></span>`}</td>
        <td class="small quiet">${entry.devices.map((each) => (each === "cpu" ? "CPU" : `GPU ${each}`)).join(t("list"))}</td>
        <td>${may && entry.state === "queued" ? html`<span class="buttons">
          <button class="plain" disabled=${waiting[0] === entry} onClick=${() => move(entry, -1)} aria-label=${t("queue.up", { name: entry.run })}>↑</button>
          <button class="plain" disabled=${waiting.at(-1) === entry} onClick=${() => move(entry, 1)} aria-label=${t("queue.down", { name: entry.run })}>↓</button>
          <button onClick=${() => act(post(`queue/${entry.id}/cancel`))}>${t("queue.cancel")}</button></span>` : null}
          ${may && canEnd(entry) ? html`<button onClick=${() => act(post(`queue/${entry.id}/stop`))} data-end=${entry.id} aria-label=${t("queue.end_one", { name: entry.run })}>${t("queue.end")}</button>` : null}</td></tr>`)}</tbody></table></div>`
      : html`<p class="quiet">${t("queue.empty")}</p>`}
    <div class="small quiet" style=${{ display: "flex", flexWrap: "wrap", gap: ".2rem 1.5rem", marginTop: ".6rem" }}>${queue.devices.map((each) => html`
      <span key=${each.id}>${said(each.name)}${each.memory_bytes ? `${t("colon")}${each.used_bytes === null ? bytes(each.memory_bytes) : t("queue.memory", { used: bytes(each.used_bytes), all: bytes(each.memory_bytes) })}` : ""}${each.others ? `${t("list")}${t("queue.others")}` : ""}</span>`)}
      ${queue.disk ? html`<span class=${queue.disk.is_low ? "badge bad" : ""}>${t("queue.disk", { free: bytes(queue.disk.free_bytes) })}</span>` : null}</div>
    ${may ? html`<div class="controls" style=${{ margin: ".6rem 0 0" }}>
      <label><input type="checkbox" checked=${queue.settings.go_on_after_failure} onChange=${(event) => act(post("queue/settings", { go_on_after_failure: event.target.checked }))} /> ${t("queue.go_on_after_failure")}</label>
      <${Notices} />
      <label>${t("queue.at_once")} <input type="number" min="1" max="64" style=${{ width: "4.5rem" }} value=${queue.settings.at_once_cpu} onChange=${(event) => event.target.value && act(post("queue/settings", { at_once_cpu: Number(event.target.value) }))} /></label></div>` : null}
  </section>`;
}
