// A comparison that was started from a form: its state, and its table and advice when it is done.
import { Advice } from "./advice.js";
import { get, part, post, remove } from "./api.js";
import { html, useState } from "./html.js";
import { logTongue, t, textOr } from "./language.js";
import { live } from "./live.js";
import { bytes, figure, moment } from "./numbers.js";
import { Confirm, Failure, Loading, metricName, Note, Said, State, useAnswer } from "./parts.js";
import { link, settle } from "./route.js";
import { useStore } from "./store.js";

const LIVE = ["queued", "running", "stopping"];
const SHOWN = { // columns by their key in comparison.json, and how a figure is written
  seconds: (value) => `${figure(value, 3)} s`, samples_per_second: (value) => figure(value, 3), speed_up: (value) => figure(value, 3),
  peak_allocated_bytes: bytes, peak_tensor_bytes: bytes, peak_resident_bytes: bytes, utilisation_mean: share,
};
const HIDDEN = /^(status|reason|seeds|emulated|utilisation_peak|largest_loss_difference|skipped_steps|.*_spread|.*_deviation)$/;

export function Matrices({ chosen, me }) {
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
