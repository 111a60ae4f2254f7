// The advice of a comparison in the language of the page: statements as data, of which each language but English has a
// text. English is what the server says.
import { html } from "./html.js";
import { language, t, textsOf } from "./language.js";
import { metricName, Note, useAnswer } from "./parts.js";

const FILES = { zh: "zh.advice" };

export function Advice({ of }) {
  const file = FILES[language.value];
  const [texts, error] = useAnswer(() => (file ? textsOf(file) : Promise.resolve(null)), [file]);
  if (file && !texts && !error) return null;
  if (texts && of.statements) return html`<${Note}><p data-advice>${of.statements.map((each) => written(each, texts)).join("")}</p><//>`;
  // a comparison of an earlier version has its advice in English alone
  return html`<${Note}>${file ? html`<p class="small">${t("matrix.advice")}</p>` : null}<p data-advice lang=${file ? "en" : undefined}>${of.advice}</p><//>`;
}

// Returns a value in a language: a text, {says, values}, or several in a row, {by, items}.
function written(value, texts) {
  if (typeof value === "string") return value;
  if (value.by) {
    const [between, last] = texts[`by.${value.by}`].split("|");
    const items = value.items.map((each) => written(each, texts));
    return [items.slice(0, -1).join(between), ...items.slice(-1)].filter(Boolean).join(last);
  }
  return texts[value.says].replace(/\{(\w+)\}/g, (_, name) => (name === "metric" ? metricName(value.values.metric) : written(value.values[name], texts)));
}
