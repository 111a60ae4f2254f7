// The two catalogues of texts, static/text/*.json; a switch redraws the page without a reload. The documentation of fields
// comes with the schema, in English; zh.fields.json has that of the common ones.
import { Store } from "./store.js";

export const LANGUAGES = { en: "English", zh: "中文" };
const TAGS = { en: "en", zh: "zh-CN" };
const FILES = { en: ["en"], zh: ["zh", "zh.fields"] };
const catalogues = {};
export const language = new Store("en");

export async function choose(name) {
  catalogues[name] ??= Object.assign({}, ...await Promise.all(FILES[name].map(async (file) => (await fetch(`static/text/${file}.json`)).json())));
  document.documentElement.lang = TAGS[name];
  remember(name);
  language.set(name);
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

export const locale = () => TAGS[language.value];

function remember(name) {
  try { localStorage.setItem("language", name); } catch { /* storage is closed to the page: the choice lasts until a reload */ }
}

function recall() {
  try { return localStorage.getItem("language"); } catch { return null; }
}
