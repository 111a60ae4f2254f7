// The form of a run file: common fields first, all others behind a search and under their block's heading.
import { html, useEffect, useMemo, useRef, useState } from "./base.js";
import { asText, at, exists, fromText } from "./draft.js";
import { documentation, label, t } from "./language.js";
import { FilePicker, Said } from "./parts.js";

const MOST_FOUND = 40;
const SECTIONS = { // the top-level keys of each section; the last one holds all others
  task: ["name", "workload"],
  adapter: ["adapter", "quantised_base", "quantisation_aware"],
  machine: ["engine", "precision", "processes", "nodes", "device", "memory_limit", "micro_batch_size"],
  training: null,
};

export function Form({ schema, draft, state, wanted, setWanted }) {
  const fields = useMemo(() => schema.fields.filter((field) => exists(field, state.values, state.resolved)), [schema, state.values, state.resolved]);
  const blocks = useMemo(() => fields.filter((field) => field.type === "block" && field.nullable && !field.present), [fields]);
  const problemsOf = problemsByField(fields, state.problems);
  const shown = (field) => html`<${Field} key=${`${field.path} ${JSON.stringify(field.when ?? [])}`} field=${field} draft=${draft} state=${state} problems=${problemsOf.get(field.path) ?? []} />`;
  const found = wanted ? search(fields, wanted) : null;
  const listed = fields.filter((field) => isListed(field) && isPresent(field, blocks, state));
  return html`
    <div class="box quietbox"><label for="search-fields" class="hidden">${t("form.search")}</label>
      <input id="search-fields" type="search" placeholder=${t("form.search_in", { n: fields.length })} value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></div>
    ${found ? html`<section aria-live="polite"><p class="quiet small">${t("form.found", { n: found.length })}</p><div class="fields">${found.slice(0, MOST_FOUND).map(shown)}</div></section>`
      : html`${sections(listed.filter((field) => field.common)).map(([name, own]) => html`
        <section class="box" key=${name}><h2>${t(`section.${name}`)}</h2><div class="fields">${own.map(shown)}</div></section>`)}
      <h2>${t("form.others")}</h2>
      ${sections(listed.filter((field) => !field.common)).map(([name, own]) => html`<${Rest} key=${name} name=${name} fields=${own} shown=${shown} />`)}`}`;
}

function Rest({ name, fields, shown }) {
  const [open, setOpen] = useState(false);
  return html`<details class="box" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary><b>${t(`section.${name}`)}</b> <span class="quiet small">${t("form.count", { n: fields.length })}</span></summary>
    ${open ? html`<div class="fields" style=${{ marginTop: ".8rem" }}>${fields.map(shown)}</div>` : null}</details>`;
}

// A block is a switch where it may be absent, and a value where it may be a list; else its fields stand for it.
const isListed = (field) => field.type !== "block" || field.many || (field.nullable && !field.present);

// Returns whether the blocks around a field are in the run.
function isPresent(field, blocks, { values }) {
  return blocks.every((block) => {
    if (!field.path.startsWith(`${block.path}.`)) return true;
    const value = at(values, block.path);
    return value !== undefined && value !== null && !Array.isArray(value);
  });
}

function sections(fields) {
  const placed = new Set(Object.values(SECTIONS).flatMap((groups) => groups ?? []));
  return Object.entries(SECTIONS).map(([name, groups]) => [name, fields.filter((field) => (groups ? groups.includes(field.group) : !placed.has(field.group)))])
    .filter(([, own]) => own.length);
}

// Fields whose path, name or documentation has every word, those with it in the path first.
function search(fields, wanted) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const rank = (field) => {
    const [path, rest] = [field.path.toLowerCase(), `${labelOf(field)} ${documentation(field)}`.toLowerCase()];
    if (!words.every((word) => path.includes(word) || rest.includes(word))) return 0;
    if (path === wanted || path.split(".").at(-1) === wanted) return 3;
    return words.every((word) => path.includes(word)) ? 2 : 1;
  };
  return fields.map((field) => [rank(field), field]).filter(([score]) => score).sort(([a], [b]) => b - a).map(([, field]) => field);
}

// A problem belongs to the field that it names, or to the nearest one around it that the form shows.
function problemsByField(fields, problems) {
  const paths = new Set(fields.map((field) => field.path));
  const found = new Map();
  for (const problem of problems) {
    let path = problem.field;
    while (path && !paths.has(path)) path = path.slice(0, Math.max(path.lastIndexOf("."), 0));
    if (path) found.set(path, [...(found.get(path) ?? []), problem]);
  }
  return found;
}

// A field of a run file: its name, a control for its type, its documentation, and what is wrong with it.

const FILES = /\.(train|evaluation|path|registry|tokenizer|image_folder)$/; // fields that take a file or a folder
const FEW = 4; // choices: with more, a field that takes other values too is a list of them all the same

const labelOf = (field) => label(field.path);

function Field({ field, draft, state, problems }) {
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

// A text control keeps what is typed while it has the focus.
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
