// The form of a run file: common fields first, all others behind a search and under their block's heading.
import { html, useMemo, useState } from "./html.js";
import { documentation, t } from "./language.js";
import { Field, labelOf } from "./field.js";
import { at, exists } from "./values.js";

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

// A block is a switch where it may be absent, and a value of its own where it may be a list; else its fields stand for it.
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
export function search(fields, wanted) {
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
