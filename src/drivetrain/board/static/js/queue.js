// The queue: what runs, what waits and why, in which order, on which devices.
import { post } from "./api.js";
import { html, useState } from "./html.js";
import { said, t } from "./language.js";
import { bytes } from "./numbers.js";
import { Notices } from "./notices.js";
import { Failure, Note, Said, State } from "./parts.js";
import { Progress } from "./progress.js";
import { link } from "./route.js";

// A training is ended on its run's page, which says what is saved; the others leave nothing to save.
export const canEnd = (entry) => entry.verb !== "train" && ["running", "stopping"].includes(entry.state);

export function Queue({ queue, runs, me }) {
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
