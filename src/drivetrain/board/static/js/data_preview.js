// What a run would see of its data: rows with their trained tokens coloured, pictures, and how many rows a class has.
import { post } from "./api.js";
import { html, useState } from "./html.js";
import { t } from "./language.js";
import { whole } from "./numbers.js";
import { Bar, Choice, Failure, Loading, useAnswer } from "./parts.js";

const ROWS = 20;

export function DataPreview({ state }) {
  const [set, setSet] = useState("train");
  const [offset, setOffset] = useState(0);
  const [found, error] = useAnswer(() => (state.ready ? post("data/preview", { yaml: state.yaml, set, rows: ROWS, offset }) : Promise.resolve(null)), [state.yaml, state.ready, set, offset]);
  const total = set === "train" ? found?.total : found?.evaluation_total ?? found?.total;
  const choose = (name) => { setSet(name); setOffset(0); };
  if (!state.ready && !found) return html`<p class="quiet">${t("new.problems", { n: state.problems.length })}</p>`;
  return html`<p class="quiet small">${t("data.about")}</p>
    <div class="controls"><${Choice} label=${t("data.set")} value=${set} options=${["train", "evaluation"].map((each) => [each, t(`data.${each}`)])} onChoose=${choose} />
      ${found ? html`<span class="quiet">${t("data.total", { n: whole(total) })}</span>` : null}</div>
    ${error ? html`<${Failure} error=${error} />` : !found ? html`<${Loading} />` : html`
      ${found.classes ? html`<${Classes} of=${found.classes} set=${set} />` : null}
      <${Rows} of=${found.rows} />
      <div class="buttons" style=${{ marginTop: ".8rem" }}>${offset ? html`<button onClick=${() => setOffset(0)}>${t("data.first")}</button>` : null}
        ${offset + found.rows.length < total ? html`<button onClick=${() => setOffset(offset + ROWS)}>${t("data.more")}</button>` : null}</div>`}`;
}

function Classes({ of, set }) {
  const most = Math.max(1, ...of.map((each) => each[set] ?? 0));
  return html`<section class="box"><h2>${t("data.counts")}</h2><div class="classes">${of.map((each) => html`
    <span class="small">${each.name}</span><${Bar} share=${(each[set] ?? 0) / most} label=${each.name} /><span class="small quiet">${whole(each[set] ?? 0)}</span>`)}</div></section>`;
}

function Rows({ of }) {
  if (of.length && of.every((row) => row.picture)) {
    return html`<div class="pictures">${of.map((row) => html`<figure key=${row.number}><img src=${row.picture} alt=${row.label ?? ""} loading="lazy" /><span class="small">${row.label}</span></figure>`)}</div>`;
  }
  return html`${of.map((row) => html`<div class="box row" key=${row.number}>
    <div class="small quiet">${row.label === null ? "" : html`<b>${row.label}</b> `}${row.length === null ? "" : t("data.tokens", { n: whole(row.length) })}
      ${row.cut ? html` <span class="badge warn">${t("data.cut")}</span>` : null}</div>
    ${row.sides ? row.sides.map((side) => html`<h3>${t(`data.${side.name}`)}</h3><${Tokens} of=${side.segments} />`) : row.segments ? html`<${Tokens} of=${row.segments} />` : html`<div class="tokens">${row.text}</div>`}</div>`)}`;
}

const Tokens = ({ of }) => html`<div class="tokens" tabindex="0">${of.map((each) => (each.trained ? html`<mark>${each.text}</mark>` : html`<span>${each.text}</span>`))}</div>`;
