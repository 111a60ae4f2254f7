// The run file that is being written: its YAML text, into which the server writes what the form changes.
import { get, part, post, Store } from "./base.js";

const WAIT = 250; // milliseconds without a change, after which the text is checked
const AGAIN = 3000; // milliseconds until a server that could not be reached is asked again

export class Draft extends Store {
  constructor() {
    super({ yaml: "", values: {}, resolved: null, problems: [], notices: [], ready: false, busy: false, source: null, error: null });
    this.key = newKey();
    this.waiting = none();
    this.last = Promise.resolve();
    this.version = 0;
  }

  patch(values) { this.set({ ...this.value, ...values }); }

  // source: {recipe} or {from}, where the text comes from; the one kept in this tab is taken up again
  async open(source) {
    const kept = recall();
    if (kept && (!source.recipe && !source.from || same(kept.source, source))) {
      this.key = kept.key;
      this.patch({ source: kept.source });
      this.waiting = kept.waiting ?? none();
      return this.write(kept.yaml, true);
    }
    if (source.from) return this.begin((await get(`runs/${part(source.from)}`)).yaml, source);
    if (source.recipe) {
      const { recipes } = await get("recipes");
      const found = recipes.find((each) => each.name === source.recipe);
      if (found) return this.begin(named(found.yaml, found.name), source);
    }
  }

  begin(yaml, source) {
    this.waiting = none(); // they were of another text
    this.patch({ source });
    return this.write(yaml);
  }

  // Takes a text as it was typed.
  write(yaml, keepsKey = false) {
    this.keep(yaml, keepsKey);
    this.later();
  }

  // Sets a field; undefined removes it. Several changes in a moment are written together.
  change(path, value) {
    delete this.waiting.set[path];
    this.waiting.remove = this.waiting.remove.filter((each) => each !== path);
    if (value === undefined) this.waiting.remove.push(path);
    else this.waiting.set[path] = value;
    this.patch({ values: this.awaited(this.value.values) });
    this.save();
    this.later();
  }

  // Asks the server after a pause, one request after the other.
  later(wait = WAIT) {
    this.patch({ busy: true });
    const version = (this.version += 1);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.last = this.last.then(() => this.settle(() => version === this.version)); }, wait);
  }

  async settle(current) {
    try {
      const { yaml } = this.value;
      if (Object.keys(this.waiting.set).length || this.waiting.remove.length) {
        if (!(await this.edit(yaml))) return this.later(); // a text was typed meanwhile, into which they are written next
      } else {
        const { values } = await post("parse", { yaml });
        if (current()) this.patch({ values: this.awaited(values) });
      }
      if (current()) await this.check(this.value.yaml, current);
    } catch (error) {
      if (!current()) return;
      const problems = error.problems ?? [];
      this.patch({ ready: false, problems, busy: false, error: problems.length ? null : error });
      if (passes(error)) this.again(error);
    }
  }

  // Writes the changes that wait into a text. What does not reach the server is sent again later.
  async edit(yaml) {
    const changes = this.waiting;
    this.waiting = none();
    let edited = null;
    try {
      edited = await post("edit", { yaml, ...changes });
    } catch (error) {
      if (passes(error)) this.restore(changes);
      throw error;
    }
    if (this.value.yaml !== yaml) {
      this.restore(changes);
      return false;
    }
    this.keep(edited.yaml);
    this.patch({ values: this.awaited(edited.values) });
    return true;
  }

  // Returns values with the changes that wait, so that a control keeps what was clicked.
  awaited(values) {
    const removed = this.waiting.remove.reduce((found, path) => withValue(found, path, undefined), values);
    return Object.entries(this.waiting.set).reduce((found, [path, value]) => withValue(found, path, value), removed);
  }

  restore({ set, remove }) {
    const later = this.waiting;
    const kept = Object.entries(set).filter(([path]) => !later.remove.includes(path));
    this.waiting = { set: { ...Object.fromEntries(kept), ...later.set }, remove: [...new Set([...remove.filter((path) => !(path in later.set)), ...later.remove])] };
    this.save();
  }

  // Asks anew after a while; the error stays in sight until the server answers.
  again(error) {
    this.later(AGAIN);
    this.patch({ busy: false, error });
  }

  async check(yaml, current) {
    const { ready, problems, notices, resolved } = await post("check", { yaml });
    if (current()) this.patch({ ready, problems, notices, resolved: resolved ?? this.value.resolved, busy: false, error: null });
  }

  keep(yaml, keepsKey = false) {
    if (!keepsKey && yaml !== this.value.yaml) this.key = newKey();
    this.patch({ yaml });
    this.save();
  }

  save() {
    try {
      sessionStorage.setItem("draft", JSON.stringify({ yaml: this.value.yaml, source: this.value.source, key: this.key, waiting: this.waiting }));
    } catch { /* storage is closed or full: a reload begins anew */ }
  }

  started() {
    this.key = newKey();
    this.keep(this.value.yaml, true);
  }
}

const none = () => ({ set: {}, remove: [] });

// Returns whether an error is the server's or the network's of the moment.
const passes = (error) => error.status === 0 || error.status === 429 || error.status >= 500;

function recall() {
  try { return JSON.parse(sessionStorage.getItem("draft")); } catch { return null; }
}

// A run is called after its recipe, in a line below the comment that begins the file.
function named(yaml, name) {
  if (/^name:/m.test(yaml)) return yaml;
  const lines = yaml.split("\n");
  const first = lines.findIndex((line) => !line.startsWith("#"));
  return [...lines.slice(0, first), `name: ${name}`, ...lines.slice(first)].join("\n");
}

const same = (a, b) => a && a.recipe === b.recipe && a.from === b.from;

// crypto.randomUUID is absent where the page came over plain HTTP from another machine
export function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
}

// Values of a run file: nested mappings, read by dotted paths, and typed as text.

// Returns what stands at a path; a text in a block's place is its kind (engine: ddp).
export function at(values, path) {
  let value = values;
  for (const name of path.split(".")) {
    if (value === null || value === undefined) return undefined;
    if (typeof value !== "object") return name === "name" ? value : undefined;
    value = value[name];
  }
  return value;
}

// Returns values with one replaced, or (undefined) taken out. A text in a block's place is short for its kind.
function withValue(values, path, value) {
  const [name, ...rest] = path.split(".");
  const { [name]: own, ...others } = values ?? {};
  if (!rest.length) return value === undefined ? others : { ...values, [name]: value };
  const inner = typeof own === "string" ? { name: own } : own;
  return inner === undefined && value === undefined ? values : { ...values, [name]: withValue(inner, rest.join("."), value) };
}

// Returns whether the chosen block has this field. own: the file's values; resolved: with all defaults, or null while it
// has errors.
export function exists(field, own, resolved) {
  return (field.when ?? []).every(({ path, is }) => {
    const value = at(own, path) ?? at(resolved, path); // a change shows before it is checked, and while there are errors
    return is.includes(value);
  });
}

export function asText(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value) && value.every((each) => each === null || typeof each !== "object")) return value.map(String).join(", ");
  if (Array.isArray(value)) return `[\n${value.map((each) => `  ${JSON.stringify(each)}`).join(",\n")}\n]`;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Returns the value that a typed text means for a field, or the text, for the checker to refuse.
export function fromText(field, text) {
  const trimmed = text.trim();
  if (field.type === "integer" || field.type === "number") return numberOr(trimmed);
  if (field.type === "text") return text;
  if (/^[[{]/.test(trimmed)) {
    try { return JSON.parse(trimmed); } catch { return text; }
  }
  if (field.type === "list") return trimmed.split(/[,，]/).map((each) => each.trim()).filter(Boolean).map(plain);
  return plain(trimmed);
}

function plain(text) {
  if (text === "true" || text === "false") return text === "true";
  return text === "null" ? null : numberOr(text);
}

function numberOr(text) {
  const number = Number(text);
  return text !== "" && Number.isFinite(number) ? number : text;
}
