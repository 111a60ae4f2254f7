// Chooses a run that has checkpoints, and one of them; the choice stands in the page's address.
import { get, part } from "./api.js";
import { html } from "./html.js";
import { t } from "./language.js";
import { live } from "./live.js";
import { Failure, useAnswer } from "./parts.js";
import { settle } from "./route.js";
import { useStore } from "./store.js";

const WITHOUT = ["queued", "starting", "refused", "cancelled"]; // states of runs that have no checkpoint

export function useModel(query) {
  const { runs } = useStore(live);
  const names = [...runs.values()].filter((run) => !WITHOUT.includes(run.status)).map((run) => run.name);
  const name = query.run ?? "";
  const [run, error] = useAnswer(() => (name ? get(`runs/${part(name)}`) : Promise.resolve(null)), [name, runs.get(name)?.status]);
  const offered = run?.checkpoints ?? [];
  const checkpoint = query.checkpoint ?? (offered.some((each) => each.best) ? "best" : "last");
  return { names, name, run: run?.name === name ? run : null, error, offered, checkpoint };
}

export function ModelChoice({ model }) {
  const named = model.offered.map((each) => [each.name, `${each.name}${each.best ? `, ${t("checkpoint.best")}` : ""}${each.last ? `, ${t("checkpoint.last")}` : ""}`]);
  return html`<div class="box fields">
    <div class="field"><label for="run">${t("runs.name")}</label><select id="run" value=${model.name} onChange=${(event) => settle({ run: event.target.value, checkpoint: "" })}>
      <option value="">${t("use.choose")}</option>${model.names.map((each) => html`<option value=${each}>${each}</option>`)}</select></div>
    ${model.run ? html`<div class="field"><label for="checkpoint">${t("checkpoint.name")}</label><select id="checkpoint" value=${model.checkpoint} onChange=${(event) => settle({ checkpoint: event.target.value })}>
      ${model.offered.some((each) => each.best) ? html`<option value="best">${t("checkpoint.best")}</option>` : null}<option value="last">${t("checkpoint.last")}</option>
      ${named.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></div>` : null}
    ${model.error ? html`<${Failure} error=${model.error} />` : null}
    ${model.run && !model.offered.length ? html`<p class="quiet">${t("checkpoint.none")}</p>` : null}</div>`;
}
