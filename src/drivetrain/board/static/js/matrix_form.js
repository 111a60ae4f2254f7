// Starts a comparison: the run file once for each engine, precision and further value, each a row.
import { post } from "./api.js";
import { html, useRef, useState } from "./html.js";
import { t } from "./language.js";
import { Failure } from "./parts.js";
import { go } from "./route.js";

const OFFERED = ["engine", "precision"]; // axes to tick; others are typed

export default function MatrixForm({ schema, state }) {
  const [chosen, setChosen] = useState({ engine: [], precision: [] });
  const [others, setOthers] = useState("");
  const [seeds, setSeeds] = useState("1");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const key = useRef(crypto.getRandomValues(new Uint32Array(4)).join("-"));
  const axes = [...OFFERED.filter((axis) => chosen[axis].length).map((axis) => `${axis}=${chosen[axis].join(",")}`),
    ...others.split(/\s+/).filter(Boolean)];
  const several = axes.filter((axis) => axis.includes(",")).length > 0;
  const choose = (axis, value, on) => setChosen({ ...chosen, [axis]: on ? [...chosen[axis], value] : chosen[axis].filter((each) => each !== value) });
  const start = async () => {
    setBusy(true);
    setError(null);
    try {
      // sent twice by a broken network it is one comparison, changed and sent again it is another one
      const entry = await post("comparisons", { key: `${key.current} ${digest([state.yaml, ...axes, seeds].join(" "))}`, yaml: state.yaml, axes, seeds: Number(seeds) || 1 });
      go(["compare"], { matrix: entry.run });
    } catch (refused) { setError(refused); } finally { setBusy(false); }
  };
  return html`<p class="quiet small">${t("matrix.about")}</p>
    ${OFFERED.map((axis) => html`<fieldset><legend>${t(`label.${axis}`)}</legend><div class="choices">${namesOf(schema, axis).map((value) => html`
      <label key=${value}><input type="checkbox" checked=${chosen[axis].includes(value)} onChange=${(event) => choose(axis, value, event.target.checked)} data-axis=${`${axis}=${value}`} /> <span translate=${false}>${value}</span></label>`)}</div></fieldset>`)}
    <div class="field"><label for="matrix-others">${t("matrix.others")}</label><input id="matrix-others" class="code" value=${others} placeholder="optimizer.lr=0.1,0.05 processes=2" spellcheck=${false} onInput=${(event) => setOthers(event.target.value)} /></div>
    <div class="field"><label for="matrix-seeds">${t("matrix.seeds")}</label><input id="matrix-seeds" inputmode="numeric" value=${seeds} onInput=${(event) => setSeeds(event.target.value)} /></div>
    <div class="buttons" style=${{ marginTop: ".6rem" }}><button type="button" class="main" disabled=${!state.ready || busy || !several} onClick=${start} data-start-matrix>${t("matrix.start")}</button></div>
    ${error ? html`<${Failure} error=${error} />` : null}`;
}

const namesOf = (schema, axis) => (schema.fields.find((field) => field.path === axis)?.choices ?? []).filter((value) => value !== "auto");

// A short sum of a text (FNV-1a), to tell one form from another.
function digest(text) {
  let sum = 0x811c9dc5;
  for (const letter of text) sum = Math.imul(sum ^ letter.codePointAt(0), 0x01000193);
  return (sum >>> 0).toString(16);
}
