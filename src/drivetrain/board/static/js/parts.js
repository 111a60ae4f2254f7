// Small parts that several pages use.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { t } from "./language.js";

export const TONES = {
  queued: "", starting: "live", running: "live", stopping: "warn", completed: "good", stopped_early: "good",
  interrupted: "warn", failed: "bad", refused: "bad", lost: "bad", cancelled: "", unknown: "",
};

export const State = ({ of }) => html`<span class=${`badge ${TONES[of] ?? ""}`}>${t(`state.${of}`)}</span>`;

export const Note = ({ tone = "", children }) => html`<div class=${`note ${tone}`} role=${tone === "bad" ? "alert" : null}>${children}</div>`;

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export const Loading = () => html`<p class="quiet" role="status">${t("loading")}</p>`;

export function Failure({ error }) {
  return html`<${Note} tone="bad">
    <p>${error.code === "unreachable" ? t("error.unreachable") : error.message}</p>
    ${error.problems?.length ? html`<${Problems} of=${error.problems} />` : null}
  <//>`;
}

export function Problems({ of, choose }) {
  return html`<ul>${of.map((each) => html`<li>
    ${choose ? html`<button class="plain" onClick=${() => choose(each.field)}><code>${each.field}</code></button>` : html`<code>${each.field}</code> `}
    ${each.why}. <span class="quiet">${each.fix}</span></li>`)}</ul>`;
}

export function Bar({ share, tone = "", label }) {
  const percent = Math.round(Math.min(Math.max(share, 0), 1) * 100);
  return html`<div class=${`progress ${tone}`} role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${percent} aria-label=${label}>
    <div style=${{ width: `${percent}%` }}></div></div>`;
}

export function Choice({ label, value, options, onChoose }) {
  return html`<span class="choice" role="group" aria-label=${label}>${options.map(([key, text]) => html`
    <button type="button" key=${key} aria-pressed=${String(key === value)} onClick=${() => onChoose(key)}>${text}</button>`)}</span>`;
}

// Tabs by the pattern of WAI-ARIA: arrows move between them.
export function Tabs({ value, options, onChoose, label }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const place = options.findIndex(([key]) => key === value);
    const next = options[(place + step + options.length) % options.length][0];
    onChoose(next);
    event.currentTarget.querySelector(`[data-tab="${next}"]`).focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>${options.map(([key, text]) => html`
    <button type="button" role="tab" key=${key} data-tab=${key} aria-selected=${String(key === value)} tabindex=${key === value ? 0 : -1}
      onClick=${() => onChoose(key)}>${text}</button>`)}</div>`;
}

// Asks before something is done that cannot be taken back, with what will happen.
export function Confirm({ title, text, action, danger, onYes, onNo }) {
  const dialog = useRef();
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  useLayoutEffect(() => { dialog.current.showModal(); }, []);
  const yes = async () => {
    setBusy(true);
    try { await onYes(); } catch (refused) { setError(refused); setBusy(false); }
  };
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="asked">
    <h2 id="asked">${title}</h2>
    <p>${text}</p>
    ${error ? html`<${Failure} error=${error} />` : null}
    <div class="buttons">
      <button onClick=${() => dialog.current.close()}>${t("cancel")}</button>
      <button class=${danger ? "danger" : "main"} disabled=${busy} onClick=${yes}>${action}</button>
    </div></dialog>`;
}

export function Copy({ text, label }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await copied(text);
    setDone(true);
    setTimeout(() => setDone(false), 2000);
  };
  return html`<button type="button" onClick=${copy}><span aria-live="polite">${done ? t("copied") : label ?? t("copy")}</span></button>`;
}

// The clipboard is closed to pages that came over plain HTTP from another machine: there, a selection is copied.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// Returns [value, error, again]: what `work` answers, asked anew when one of `on` changes.
export function useAnswer(work, on) {
  const [state, set] = useState([null, null]);
  const [times, setTimes] = useState(0);
  useEffect(() => {
    let current = true;
    work().then((value) => current && set([value, null]), (error) => current && set(([value]) => [value, error]));
    return () => { current = false; };
  }, [...on, times]);
  return [...state, () => setTimes((n) => n + 1)];
}
