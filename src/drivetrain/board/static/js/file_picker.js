// Chooses a file or folder on the server, among the folders that it shows.
import { get, query } from "./api.js";
import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { t } from "./language.js";
import { bytes } from "./numbers.js";
import { Failure, Loading, Note, useAnswer } from "./parts.js";

export function FilePicker({ label, onPick }) {
  const [open, setOpen] = useState(false);
  return html`<button type="button" onClick=${() => setOpen(true)} aria-label=${`${t("files.choose")}: ${label}`}>${t("files.pick")}</button>
    ${open ? html`<${Dialog} onPick=${(path) => { setOpen(false); onPick(path); }} onClose=${() => setOpen(false)} />` : null}`;
}

function Dialog({ onPick, onClose }) {
  const dialog = useRef();
  const [path, setPath] = useState("");
  const [found, error] = useAnswer(() => get(`files${query({ path })}`), [path]);
  useLayoutEffect(() => { dialog.current.showModal(); }, []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="files">
    <h2 id="files">${t("files.choose")}</h2>
    ${error ? html`<${Failure} error=${error} />` : null}
    ${found ? html`<p class="small"><code>${found.path}</code></p>
      <div class="buttons">${found.parent !== null ? html`<button type="button" onClick=${() => setPath(found.parent)}>↑ ${t("files.up")}</button>` : null}
        <button type="button" onClick=${() => onPick(found.path)}>${t("files.here")}</button></div>
      <ul class="files" tabindex="0">${found.entries.map((each) => html`<li key=${each.path}><button type="button" class="plain" onClick=${() => (each.folder ? setPath(each.path) : onPick(each.path))}>
        <span aria-hidden="true">${each.folder ? "▸" : "·"}</span> <span translate=${false}>${each.name}</span>${each.folder ? "/" : ""}</button> <span class="quiet small">${each.folder ? "" : bytes(each.bytes)}</span></li>`)}</ul>
      ${found.entries.length ? null : html`<p class="quiet">${t("files.empty")}</p>`}
      ${found.cut ? html`<${Note}><p>${t("files.cut")}</p><//>` : null}
      ${found.roots.length > 1 ? html`<div class="buttons">${found.roots.map((each) => html`<button type="button" class="plain" onClick=${() => setPath(each)}><code>${each}</code></button>`)}</div>` : null}
      <p class="quiet small">${t("files.outside", { folders: found.roots.join(", ") })}</p>` : html`<${Loading} />`}
    <div class="buttons"><button type="button" onClick=${() => dialog.current.close()}>${t("cancel")}</button></div></dialog>`;
}
