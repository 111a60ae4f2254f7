// The texts of the page, static/text/*.json; a switch redraws the page. The server's are English: FIELDS names the file of
// fields in another language, loaded with the first form, and MESSAGES that of the rest, by their English forms, in which
// {names} stand for what differs.
import { Store } from "./base.js";

export const LANGUAGES = { en: "English", zh: "中文" };
const TAGS = { en: "en", zh: "zh-CN" };
const FIELDS = { zh: "zh.fields" };
const MESSAGES = { zh: "zh.messages" };
const NUMBERS = new Set(["count", "row", "rows", "line", "column"]);
const NESTED = new Set(["why", "where", "fix"]);
const catalogues = {};
// by language; fields: by path, a text, or one for each kind of the block that has the field; labels: by path or, of fields
// that are called the same everywhere, by the last name in it
const fields = {};
const messages = {}; // by language: [expression that matches the English form, names in it, text]
const documented = new Map(); // English documentation of a field → the field
let hasForm = false;
export const language = new Store("en");

export async function choose(name) {
  await load(name);
  document.documentElement.lang = TAGS[name];
  remember(name);
  language.set(name);
}

// Loads the documentation of fields in the language in use, and from now on in each that is chosen.
export async function loadFieldTexts() {
  hasForm = true;
  await load(language.value);
  return true;
}

async function load(name) {
  await Promise.all([
    keep(catalogues, name, () => read(name)),
    MESSAGES[name] && keep(messages, name, async () => Object.entries(await read(MESSAGES[name])).map(([form, text]) => [expression(form), text])),
    hasForm && FIELDS[name] && keep(fields, name, () => read(FIELDS[name])),
  ]);
}

async function keep(kept, name, work) { kept[name] ??= await work(); }

const files = {};

// Returns the texts of a file that one part of the page needs.
export async function textsOf(file) {
  files[file] ??= await read(file);
  return files[file];
}

async function read(file) {
  const answer = await fetch(`static/text/${file}.json`);
  if (!answer.ok) throw new Error(`no texts ${file}: HTTP ${answer.status}`);
  return answer.json();
}

export function preferred() {
  const kept = recall();
  if (kept in LANGUAGES) return kept;
  const wished = navigator.languages.map((each) => each.slice(0, 2).toLowerCase());
  return wished.find((each) => each in LANGUAGES) ?? "en";
}

// Returns the text of a key, with {names} replaced.
export function t(key, values = {}) {
  const text = catalogues[language.value]?.[key];
  if (text === undefined) throw new Error(`no text ${key} in ${language.value}`);
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

// Returns the text of a key that only some things have, or what stands for it.
export const textOr = (key, otherwise) => catalogues[language.value]?.[key] ?? otherwise;

// Returns the name of a field for people; in English that of a rare field is its name in the run file.
export function label(path) {
  const last = path.split(".").at(-1);
  const own = fields[language.value]?.labels;
  return textOr(`label.${path}`, own?.[path] ?? own?.[last] ?? last.replaceAll("_", " "));
}

// Returns the documentation of a field: in English until that of another language is loaded.
export function documentation(field) {
  const own = fields[language.value]?.fields[field.path];
  const text = typeof own === "object" ? field.when?.at(-1)?.is.map((kind) => own[kind]).find(Boolean) : own;
  return text ?? field.doc;
}

// Lets `said` find the documentation of fields, which the checker gives as advice.
export function knowFields(all) {
  for (const field of all) documented.set(field.doc, field);
}

// Returns what the server said in the language of the page, or as it said it. A log wraps its lines.
export function said(text) {
  const known = messages[language.value];
  if (!known || !text) return text;
  const field = documented.get(text);
  if (field) return documentation(field);
  for (const [form, own] of known) {
    const found = form.exec(text);
    if (found) return own.replace(/\{(\w+)\}/g, (_, name) => within(name, found.groups[name] ?? ""));
  }
  return text;
}

const within = (name, value) => (name === "state" ? textOr(`state.${value}`, value) : NESTED.has(name) ? said(value) : value);

function expression(form) {
  const plain = form.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replaceAll(" ", "\\s+");
  return new RegExp(`^${plain.replace(/\{(\w+)\}/g, (_, name) => `(?<${name}>${NUMBERS.has(name) ? "[\\d,.]+" : ".+?"})`)}$`, "s");
}

// Returns the language of the server's text where it is not the page's.
export const tongue = (text) => (language.value !== "en" && text && said(text) === text ? "en" : undefined);

// Returns the language of a log, which is always English, likewise.
export const logTongue = () => (language.value === "en" ? undefined : "en");

export const locale = () => TAGS[language.value];

function remember(name) {
  try { localStorage.setItem("language", name); } catch { /* the choice lasts until a reload */ }
}

function recall() {
  try { return localStorage.getItem("language"); } catch { return null; }
}

// Numbers, sizes and times as people read them.

export function figure(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value); // "nan", "inf"
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  return value.toLocaleString(locale(), { maximumSignificantDigits: Math.max(digits, Math.abs(value) >= 1 ? Math.trunc(Math.log10(Math.abs(value))) + 1 : 1) });
}

export const whole = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString(locale()));

export function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) { value /= 1024; step += 1; }
  return `${value.toLocaleString(locale(), { maximumFractionDigits: step && value < 100 ? 1 : 0 })} ${units[step]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return t("time.seconds", { n: Math.round(seconds) });
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return t("time.minutes", { n: minutes });
  if (minutes < 2880) return t("time.hours", { n: Math.floor(minutes / 60), m: minutes % 60 });
  return t("time.days", { n: Math.floor(minutes / 1440), h: Math.floor((minutes % 1440) / 60) });
}

export function moment(text) {
  if (!text) return "";
  const date = new Date(text);
  const today = date.toDateString() === new Date().toDateString();
  return date.toLocaleString(locale(), today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
}
