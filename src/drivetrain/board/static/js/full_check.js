// The long check beside Start: it reads the data, builds the model and plans memory, time and disk.
import { post } from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { t, textOr } from "./language.js";
import { bytes, duration, figure, whole } from "./numbers.js";
import { Bar, Failure, Note, Problems, Said } from "./parts.js";

export function FullCheck({ state }) {
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => { setAnswer(null); setError(null); }, [state.yaml]); // it holds for the text that was checked
  const ask = async () => {
    setBusy(true);
    setError(null);
    try { setAnswer({ ...(await post("check/full", { yaml: state.yaml })), yaml: state.yaml }); } catch (refused) { setError(refused); }
    setBusy(false);
  };
  const shown = answer?.yaml === state.yaml ? answer : null;
  return html`<section class="box"><h2>${t("full.title")}</h2>
    <p class="quiet small">${t("full.about")}</p>
    <button onClick=${ask} disabled=${busy || !state.ready || state.busy} data-check>${t(busy ? "full.busy" : "full.ask")}</button>
    <div aria-live="polite" style=${{ marginTop: ".6rem" }}>
      ${error && error.code !== "superseded" ? html`<${Failure} error=${error} />` : null}
      ${shown ? html`<${Result} of=${shown} />` : null}</div></section>`;
}

function Result({ of }) {
  const { plan, data, model, checkpoints } = of;
  return html`${of.problems?.length ? html`<${Note} tone="bad"><${Problems} of=${of.problems} /><//>`
      : html`<${Note} tone=${plan?.fits === "no" ? "bad" : "good"}><p>${plan?.fits === "no" ? html`<${Said} text=${plan.verdict} />` : t("full.ready", { n: figure(of.seconds, 2) })}</p><//>`}
    ${plan?.allocated_bytes && plan.capacity_bytes ? html`<${Bar} share=${plan.allocated_bytes / plan.capacity_bytes} tone=${plan.fits === "no" ? "bad" : ""} label=${t("full.memory")} />` : null}
    <dl class="pairs small">
      ${plan?.allocated_bytes ? html`<dt>${t("full.memory")}</dt><dd>${t("full.memory_of", { used: bytes(plan.allocated_bytes), all: bytes(plan.capacity_bytes) })}</dd>` : null}
      ${plan?.step_seconds && of.steps ? html`<dt>${t("full.time")}</dt><dd>${duration(plan.step_seconds * of.steps)}</dd>` : null}
      ${checkpoints ? html`<dt>${t("full.disk")}</dt><dd>${t("full.disk_of", { used: bytes(checkpoints.bytes * checkpoints.kept), free: bytes(checkpoints.free_bytes) })}</dd>` : null}
      ${of.steps ? html`<dt>${t("full.steps")}</dt><dd>${of.steps_per_epoch ? t("full.steps_of", { n: whole(of.steps), each: whole(of.steps_per_epoch) }) : whole(of.steps)}</dd>` : null}
      ${model?.parameters ? html`<dt>${t("full.parameters")}</dt><dd>${t("full.trained_of", { trained: whole(model.trained_parameters), all: whole(model.parameters) })}</dd>` : null}
      ${Object.entries(data ?? {}).filter(([, value]) => ["string", "number"].includes(typeof value)).map(([name, value]) => html`<dt>${textOr(`full.data_${name}`, name.replaceAll("_", " "))}</dt><dd>${typeof value === "number" ? figure(value) : html`<${Said} text=${value} />`}</dd>`)}</dl>
    <p class="quiet small">${t("full.planned")}</p>`;
}
