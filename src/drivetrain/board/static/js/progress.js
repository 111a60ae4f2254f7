// How far a run is, and when it will end.
import { html } from "./html.js";
import { t } from "./language.js";
import { duration, whole } from "./numbers.js";
import { Bar } from "./parts.js";

export function Progress({ run }) {
  if (!run.total_steps) return html`<span class="quiet small">${run.step ? whole(run.step) : ""}</span>`;
  const share = (run.step ?? 0) / run.total_steps;
  const tone = { completed: "good", failed: "bad", lost: "bad" }[run.status] ?? "";
  return html`<${Bar} share=${share} tone=${tone} label=${t("run.progress")} />
    <span class="small quiet">${t("run.step_of", { step: whole(run.step ?? 0), total: whole(run.total_steps) })}${run.remaining_seconds && run.status === "running" ? `, ${t("run.left", { time: duration(run.remaining_seconds) })}` : ""}</span>`;
}
