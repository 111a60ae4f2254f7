// How curves are shown; the choice stands in the page's address.
import { html } from "./html.js";
import { t } from "./language.js";
import { Choice } from "./parts.js";
import { settle } from "./route.js";

const AXES = ["step", "epoch", "samples", "seconds"];

export const curveView = (query) => ({
  log: query.log === "1",
  weight: Math.min(Number(query.smooth ?? 0.6) || 0, 0.99),
  axis: AXES.includes(query.x) ? query.x : "step",
});

export function CurveControls({ query }) {
  const { log, weight, axis } = curveView(query);
  return html`<div class="controls">
    <span><span class="quiet">${t("chart.x")}</span> <${Choice} label=${t("chart.x")} value=${axis} onChoose=${(x) => settle({ x })} options=${AXES.map((each) => [each, t(`axis.${each}`)])} /></span>
    <label><input type="checkbox" checked=${log} onChange=${(event) => settle({ log: event.target.checked ? "1" : "" })} /> ${t("chart.log")}</label>
    <label>${t("chart.smooth")} <input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${(event) => settle({ smooth: event.target.value })} /></label>
    <span class="quiet small mouse">${t("chart.zoom")}</span></div>`;
}
