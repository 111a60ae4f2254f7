// Small parts that several pages use.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { said, t, textOr, tongue } from "./language.js";

export const TONES = {
  queued: "", starting: "live", running: "live", stopping: "warn", completed: "good", stopped_early: "good",
  interrupted: "warn", failed: "bad", refused: "bad", lost: "bad", cancelled: "", unknown: "",
};

export const State = ({ of }) => html`<span class=${`badge ${TONES[of] ?? ""}`}>${t(`state.${of}`)}</span>`;

// What the server says, in the page's language where there is a translation.
export const Said = ({ text }) => html`<span lang=${tongue(text)}>${said(text)}</span>`;

// A name that is written so in every language: of a run, a file, an option. translate is a property of elements, true or false.
export const Name = ({ children }) => html`<span translate=${false}>${children}</span>`;

// The kind of a run's task: "language_model sft" is what the server calls one.
export const kindOf = (run) => run.workload?.split(" ").map((word) => textOr(`kind.${word}`, word)).join(" ");

export const metricName = (name) => textOr(`chart.${name}`, name.replaceAll("_", " "));

// The browser's own control says "Choose File" in the browser's language.
export function FileInput({ id, many, accept, disabled, onPick }) {
  const [names, setNames] = useState([]);
  const pick = (event) => {
    const files = [...event.target.files];
    setNames(files.map((file) => file.name));
    if (files.length) onPick(files);
    event.target.value = ""; // the same file again, corrected meanwhile, is a change too
  };
  return html`<span class="file"><input id=${id} class="hidden" type="file" multiple=${many} accept=${accept} disabled=${disabled} onChange=${pick} />
    <label for=${id} class="button">${t("files.browse")}</label> <span class="quiet small" translate=${false}>${names.join(", ")}</span></span>`;
}

export const Note = ({ tone = "", children }) => html`<div class=${`note ${tone}`} role=${tone === "bad" ? "alert" : null}>${children}</div>`;

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export const Loading = () => html`<p class="quiet" role="status">${t("loading")}</p>`;

export function Failure({ error }) {
  return html`<${Note} tone="bad">
    ${error.code === "unreachable" ? html`<p>${t("error.unreachable")}</p>` : html`<p><${Said} text=${error.message} /></p>`}
    ${error.problems?.length ? html`<${Problems} of=${error.problems} />` : null}
  <//>`;
}

// lines: whether the reader sees the text, in which each problem has a line
export function Problems({ of, choose, lines }) {
  return html`<ul>${of.map((each) => html`<li>
    ${choose ? html`<button class="plain" onClick=${() => choose(each)}><code>${each.field}</code>${lines && each.line ? html`<span>${t("list")}${t("problem.line", { line: each.line })}</span>` : null}</button>` : html`<code>${each.field}</code> `}
    <${Said} text=${each.why} />${t("stop")} <span class="quiet"><${Said} text=${each.fix} /></span></li>`)}</ul>`;
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
