// Imports configurations of other software: uploads them, begins a new run with what they become, and lists each key's fate.
import { post } from "./api.js";
import { html, useState } from "./html.js";
import { t } from "./language.js";
import { Failure, FileInput, Note, Said } from "./parts.js";
import { go } from "./route.js";

const SHOWN = ["changed", "refused", "later"]; // fates that a user has to look at; the others are folded

export default function ImportFiles({ draft }) {
  const [files, setFiles] = useState(null);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const ask = async (texts, without) => {
    setBusy(true);
    setError(null);
    setFound(null);
    try {
      const answer = await post("import", { files: texts, without });
      setFound(answer);
      draft.begin(answer.yaml, { imported: Object.keys(texts)[0] });
      go(["new"]);
    } catch (refused) { setError(refused); } finally { setBusy(false); }
  };
  const take = async (chosen) => {
    const read = await Promise.all(chosen.map(async (file) => [file.name, await file.text()]));
    const texts = Object.fromEntries(read);
    setFiles(texts);
    ask(texts, []);
  };
  return html`<div class="field" style=${{ marginTop: ".8rem" }}><label for="import">${t("import.files")}</label>
      <${FileInput} id="import" many=${true} accept=".yaml,.yml,.json,.py" disabled=${busy} onPick=${take} /><p class="doc">${t("import.about")}</p></div>
    <div aria-live="polite">${busy ? html`<p class="quiet small">${t("loading")}</p>` : null}
      ${error ? html`<${Failure} error=${error} />` : null}
      ${error?.accepts?.length ? html`<${Note} tone="warn"><p>${t("import.drops")}</p><p><button type="button" onClick=${() => ask(files, error.accepts)} data-accept>${t("import.without", { keys: error.accepts.join(", ") })}</button></p><//>` : null}
      ${found ? html`<${Found} of=${found} />` : null}</div>`;
}

function Found({ of }) {
  const looked = of.notes.filter((note) => SHOWN.includes(note.fate));
  const others = of.notes.filter((note) => !SHOWN.includes(note.fate));
  return html`<p role="status" data-imported>${t("import.done", { n: of.notes.length })}</p>
    ${of.missing.length ? html`<${Note} tone="warn"><p>${t("import.missing")}</p><ul>${of.missing.map((each) => html`<li><${Said} text=${each} /></li>`)}</ul><//>` : null}
    ${looked.length ? html`<${Fates} of=${looked} />` : null}
    ${others.length ? html`<details style=${{ marginTop: ".5rem" }}><summary>${t("import.others", { n: others.length })}</summary><${Fates} of=${others} /></details>` : null}`;
}

const Fates = ({ of }) => html`<div class="wide"><table><thead><tr><th scope="col">${t("import.key")}</th><th scope="col">${t("import.fate")}</th><th scope="col">${t("import.why")}</th></tr></thead>
  <tbody>${of.map((note) => html`<tr><td><code>${note.key}</code></td><td><span class=${`badge ${note.fate === "refused" ? "bad" : SHOWN.includes(note.fate) ? "warn" : ""}`}>${t(`fate.${note.fate}`)}</span></td><td class="small"><${Said} text=${note.why} /></td></tr>`)}</tbody></table></div>`;
