// A field of a run file: its name, a control for its type, its documentation, and what is wrong with it.
import { html, useEffect, useRef, useState } from "./html.js";
import { documentation, label, t } from "./language.js";
import { FilePicker } from "./file_picker.js";
import { Said } from "./parts.js";
import { asText, at, fromText } from "./values.js";

const FILES = /\.(train|evaluation|path|registry|tokenizer|image_folder)$/; // fields that take a file or a folder
const FEW = 4; // choices: with more, a field that takes other values too is a list of them all the same

export const labelOf = (field) => label(field.path);

export function Field({ field, draft, state, problems }) {
  const own = ownValue(field, state.values);
  const isSet = own !== undefined;
  const id = `field-${field.path.replaceAll(".", "-")}`;
  const change = (value) => draft.change(field.path, value);
  const long = isStructure(field, own);
  const described = [`${id}-doc`, problems.length ? `${id}-error` : ""].join(" ").trim();
  return html`<div class=${`field ${isSet ? "set" : ""} ${long ? "long" : ""}`} data-field=${field.path}>
    <div class="name"><label for=${id}>${labelOf(field)}${field.required ? html`<span class="quiet" title=${t("field.required")}> *</span>` : null}</label>
      <span class="path" translate=${false}>${field.path}</span>
      ${isSet ? html`<button type="button" class="plain" onClick=${() => change(undefined)} aria-label=${t("field.reset_one", { name: labelOf(field) })}>${t("field.reset")}</button>` : null}</div>
    <${Control} field=${field} id=${id} own=${own} state=${state} change=${change} described=${described} invalid=${problems.length > 0} />
    ${problems.length ? html`<div class="error" id=${`${id}-error`} role="status">${problems.map((each) => html`<div><b><${Said} text=${each.why} /></b>${t("stop")} <${Said} text=${each.fix} /></div>`)}</div>` : null}
    <p class="doc" id=${`${id}-doc`}>${documentation(field)}</p>
  </div>`;
}

// A block of which the field is the short name (engine: {name: ddp}) shows that name.
function ownValue(field, values) {
  const own = at(values, field.path);
  return field.choices?.length && own?.name ? own.name : own;
}

const holdsBlocks = (own) => (Array.isArray(own) ? own.some(holdsBlocks) : own !== null && typeof own === "object");

const isStructure = (field, own) => field.type === "mapping" || (field.type === "block" && field.many) || holdsBlocks(own);

function Control({ field, id, own, state, change, described, invalid }) {
  const common = { id, "aria-describedby": described, "aria-invalid": invalid ? "true" : null };
  const standing = ownValue(field, state.resolved) ?? field.default;
  if (field.type === "boolean") {
    return html`<div class="check"><input type="checkbox" ...${common} checked=${own ?? standing ?? false} onChange=${(event) => change(event.target.checked)} />
      <span class="quiet small">${(own ?? standing) ? t("field.on") : t("field.off")}</span></div>`;
  }
  if (field.type === "block" && !field.many || field.path === "adapter" && !Array.isArray(own)) return html`<${Switch} ...${{ own, change, common }} />`;
  if (field.choices?.length && (field.type === "choice" || field.choices.length > FEW)) return html`<${Options} ...${{ field, own, standing, change, common }} />`;
  return html`<${Typed} ...${{ field, own, standing, change, common }} />`;
}

// Adds a block to the run, or takes it out; its fields then stand beside it.
function Switch({ own, change, common }) {
  const on = (own ?? null) !== null; // without it there is no block
  return html`<div class="check"><input type="checkbox" role="switch" ...${common} checked=${on} onChange=${(event) => change(event.target.checked ? {} : undefined)} />
    <span class="quiet small">${on ? t("field.on") : t("field.off")}</span></div>`;
}

function Options({ field, own, standing, change, common }) {
  const known = own === undefined || field.choices.includes(own);
  const none = standing === undefined || standing === null ? t("field.none") : t("field.default", { value: asText(standing) });
  return html`<select ...${common} value=${own === undefined ? "" : asText(own)} onChange=${(event) => change(event.target.value === "" ? undefined : fromText({ type: "any" }, event.target.value))}>
    <option value="">${none}</option>
    ${known ? null : html`<option value=${asText(own)}>${asText(own)}</option>`}
    ${field.choices.map((each) => html`<option value=${asText(each)}>${asText(each)}</option>`)}</select>`;
}

// A text control keeps what is typed while it has the focus, so that a check that comes back does not overwrite it.
function Typed({ field, own, standing, change, common }) {
  const [typed, setTyped] = useState(null);
  const shown = typed ?? asText(own);
  const input = useRef();
  useEffect(() => { if (document.activeElement !== input.current) setTyped(null); }, [own]);
  const write = (event) => {
    setTyped(event.target.value);
    change(event.target.value.trim() === "" ? undefined : fromText(field, event.target.value));
  };
  const holder = standing === undefined || standing === null ? "" : t("field.default", { value: asText(standing) });
  const number = field.type === "integer" || field.type === "number";
  const offered = field.choices ?? field.suggestions ?? [];
  const list = offered.length ? `${common.id}-choices` : null;
  if (isStructure(field, own) && typeof own !== "string") {
    return html`<textarea ref=${input} class="code" rows=${Math.max(2, shown.split("\n").length)} ...${common} value=${shown} placeholder=${holder || "{}"} onInput=${write} onBlur=${() => setTyped(null)} spellcheck=${false}></textarea>`;
  }
  return html`<div class="with"><input ref=${input} type="text" ...${common} value=${shown} inputmode=${number ? "decimal" : null} placeholder=${holder} list=${list} onInput=${write}
      onBlur=${() => setTyped(null)} spellcheck=${false} autocomplete="off" />${FILES.test(field.path) ? html`<${FilePicker} label=${labelOf(field)} onPick=${change} />` : null}</div>
    ${list ? html`<datalist id=${list}>${offered.map((each) => html`<option value=${asText(each)} />`)}</datalist>` : null}`;
}
