// Small parts that several pages use.
import { get, html, part, post, query, settle, upload, useEffect, useLayoutEffect, useRef, useState, useStore } from "./base.js";
import { bytes, duration, logTongue, said, t, textOr, tongue, whole } from "./language.js";
import { live } from "./live.js";

// A training is ended on its run's page, which says what is saved; the others leave nothing to save.
export const canEnd = (entry) => entry.verb !== "train" && ["running", "stopping"].includes(entry.state);

const TONES = {
  queued: "", starting: "live", running: "live", stopping: "warn", completed: "good", stopped_early: "good",
  interrupted: "warn", failed: "bad", refused: "bad", lost: "bad", cancelled: "", unknown: "",
};

export const State = ({ of }) => html`<span class=${`badge ${TONES[of] ?? ""}`}>${t(`state.${of}`)}</span>`;

// What the server says, in the page's language where there is a translation.
export const Said = ({ text }) => html`<span lang=${tongue(text)}>${said(text)}</span>`;

// A name that no browser translates: of a run, a file, an option.
export const Name = ({ children }) => html`<span translate=${false}>${children}</span>`;

// The kind of a run's task: "language_model sft" is what the server calls one.
export const kindOf = (run) => run.workload?.split(" ").map((word) => textOr(`kind.${word}`, word)).join(" ");

export const metricName = (name) => textOr(`chart.${name}`, name.replaceAll("_", " "));

// The browser's own control says "Choose File" in the browser's language.
export function FileInput({ id, many, accept, disabled, text, onPick }) {
  const [names, setNames] = useState([]);
  const pick = (event) => {
    const files = [...event.target.files];
    setNames(files.map((file) => file.name));
    if (files.length) onPick(files);
    event.target.value = ""; // the same file again, corrected meanwhile, is a change too
  };
  return html`<span class="file"><input id=${id} class="hidden" type="file" multiple=${many} accept=${accept} disabled=${disabled} onChange=${pick} />
    <label for=${id} class="button">${text ?? t("files.browse")}</label> <span class="quiet small" translate=${false}>${names.join(", ")}</span></span>`;
}

export const Note = ({ tone = "", children }) => html`<div class=${`note ${tone}`} role=${tone === "bad" ? "alert" : null}>${children}</div>`;

export const Empty = ({ children }) => html`<div class="empty">${children}</div>`;

export const Loading = () => html`<p class="quiet" role="status">${t("loading")}</p>`;

export function Failure({ error }) {
  return html`<${Note} tone="bad">
    ${error.problems?.length ? html`<${Problems} of=${error.problems} />` : html`<p>${error.code === "unreachable" ? t("error.unreachable") : html`<${Said} text=${error.message} />`}</p>`}
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

// How far a run is, and when it will end.

export function Progress({ run }) {
  if (!run.total_steps) return html`<span class="quiet small">${run.step ? whole(run.step) : ""}</span>`;
  const share = (run.step ?? 0) / run.total_steps;
  const tone = { completed: "good", failed: "bad", lost: "bad" }[run.status] ?? "";
  return html`<${Bar} share=${share} tone=${tone} label=${t("run.progress")} />
    <span class="small quiet">${t("run.step_of", { step: whole(run.step ?? 0), total: whole(run.total_steps) })}${run.remaining_seconds && run.status === "running" ? `, ${t("run.left", { time: duration(run.remaining_seconds) })}` : ""}</span>`;
}

// The end of a run's log, which grows while the run does.

const MOST = 200000; // characters kept in the page
const EVERY = 1500; // milliseconds

export function LogTail({ name, live, entry, short }) {
  const [text, setText] = useState(null);
  const [error, setError] = useState(null);
  const box = useRef();
  const atEnd = useRef(true);
  useEffect(() => {
    let gone = false;
    let timer;
    let after;
    setText(null);
    const ask = async () => {
      try {
        const answer = await get(`runs/${part(name)}/log${query({ after, most: 65536 })}`);
        if (gone) return;
        const first = after === undefined;
        after = answer.next;
        setText((before) => (first ? answer.text : before + answer.text).slice(-MOST));
        setError(null);
        if (after < answer.size && !first) return ask();
        if (answer.ended) return;
      } catch (refused) {
        if (gone) return;
        setError(refused);
        if (refused.code === "no_log" && !live) return;
      }
      timer = setTimeout(ask, EVERY);
    };
    ask();
    return () => { gone = true; clearTimeout(timer); };
  }, [name, entry, live]);
  useLayoutEffect(() => { if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight; }, [text]);
  if (error?.code === "no_log") return html`<p class="quiet">${t("log.none")}</p>`;
  if (error && text === null) return html`<${Failure} error=${error} />`;
  if (text === "" || text === null) return html`<p class="quiet" role="status">${t(live ? "log.waiting" : "log.empty")}</p>`;
  const shown = short ? text.trimEnd().split("\n").slice(-20).join("\n") : text;
  return html`<div>
    <pre class="log" lang=${logTongue()} ref=${box} tabindex="0" role="log" aria-label=${t("run.log")} onScroll=${(event) => { atEnd.current = event.target.scrollTop + event.target.clientHeight > event.target.scrollHeight - 20; }}>${shown}</pre>
    ${short ? null : html`<div class="buttons" style=${{ marginTop: ".5rem" }}><${Copy} text=${text} /></div>`}</div>`;
}

// Chooses a file or folder on the server, among the folders that it shows.

export function FilePicker({ label, onPick }) {
  const [open, setOpen] = useState(false);
  return html`<button type="button" onClick=${() => setOpen(true)} aria-label=${`${t("files.choose")}: ${label}`}>${t("files.pick")}</button>
    ${open ? html`<${Dialog} onPick=${(path) => { setOpen(false); onPick(path); }} onClose=${() => setOpen(false)} />` : null}`;
}

function Dialog({ onPick, onClose }) {
  const dialog = useRef();
  const [path, setPath] = useState("");
  const [found, error] = useAnswer(() => get(`files${query({ path })}`), [path]);
  const [failed, setFailed] = useState(null);
  const add = ([file]) => upload(`uploads${query({ name: file.name, folder: found.path })}`, file).then((kept) => onPick(kept.path), setFailed);
  useLayoutEffect(() => { dialog.current.showModal(); }, []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="files">
    <h2 id="files">${t("files.choose")}</h2>
    ${failed ? html`<${Failure} error=${failed} />` : null}
    ${error ? html`<${Failure} error=${error} />` : null}
    ${found ? html`<p class="small"><code>${found.path}</code></p>
      <div class="buttons">${found.parent !== null ? html`<button type="button" onClick=${() => setPath(found.parent)}>↑ ${t("files.up")}</button>` : null}
        <button type="button" onClick=${() => onPick(found.path)}>${t("files.here")}</button><${FileInput} id="add" text=${t("files.add")} onPick=${add} /></div>
      <ul class="files" tabindex="0">${found.entries.map((each) => html`<li key=${each.path}><button type="button" class="plain" onClick=${() => (each.folder ? setPath(each.path) : onPick(each.path))}>
        <span aria-hidden="true">${each.folder ? "▸" : "·"}</span> <span translate=${false}>${each.name}</span>${each.folder ? "/" : ""}</button> <span class="quiet small">${each.folder ? "" : bytes(each.bytes)}</span></li>`)}</ul>
      ${found.entries.length ? null : html`<p class="quiet">${t("files.empty")}</p>`}
      ${found.cut ? html`<${Note}><p>${t("files.cut")}</p><//>` : null}
      ${found.roots.length > 1 ? html`<div class="buttons">${found.roots.map((each) => html`<button type="button" class="plain" onClick=${() => setPath(each)}><code>${each}</code></button>`)}</div>` : null}
      <p class="quiet small">${t("files.outside", { folders: found.roots.join(", ") })}</p>` : html`<${Loading} />`}
    <div class="buttons"><button type="button" onClick=${() => dialog.current.close()}>${t("cancel")}</button></div></dialog>`;
}

// A job beside training (evaluate, predict, export), in the same queue; its result is shown at its end.

const ENDED = ["completed", "interrupted", "failed", "refused", "cancelled", "lost"];

// Returns [entry, error, start]; entry has `result` once it has ended. start: takes what sends the request with a key.
export function useJob() {
  const { queue } = useStore(live);
  const [entry, setEntry] = useState(null);
  const [error, setError] = useState(null);
  const sending = useRef(false);
  const fresh = queue?.entries.find((each) => each.id === entry?.id);
  useEffect(() => {
    if (entry && fresh && fresh.state !== entry.state) get(`queue/${entry.id}`).then(setEntry, setError);
  }, [fresh?.state]);
  const start = async (send) => {
    if (sending.current) return;
    sending.current = true;
    setError(null);
    try {
      setEntry(await send([...crypto.getRandomValues(new Uint32Array(4))].join("-")));
    } catch (refused) { setError(refused); } finally { sending.current = false; }
  };
  return [entry, error, start];
}

const isEnded = (entry) => ENDED.includes(entry.state);

export function Job({ entry, error, children }) {
  const [refused, setRefused] = useState(null);
  const end = (how) => post(`queue/${entry.id}/${how}`).then(() => setRefused(null), setRefused);
  return html`<div aria-live="polite" style=${{ marginTop: ".8rem" }}>
    ${error ?? refused ? html`<${Failure} error=${error ?? refused} />` : null}
    ${entry ? html`<p><${State} of=${entry.state} /> <span class="quiet small"><${Said} text=${entry.reason ?? ""} /></span>
        ${canEnd(entry) ? html` <button type="button" onClick=${() => end("stop")} data-end=${entry.id}>${t("queue.end")}</button>` : null}
        ${entry.state === "queued" ? html` <button type="button" onClick=${() => end("cancel")}>${t("queue.cancel")}</button>` : null}</p>
      ${isEnded(entry) && entry.state !== "completed" ? html`<${Log} id=${entry.id} />` : null}
      ${entry.state === "completed" && entry.result ? children(entry.result) : null}` : null}</div>`;
}

function Log({ id }) {
  const [text, setText] = useState("");
  useEffect(() => { get(`queue/${id}/log`).then((answer) => setText(answer.text), (refused) => setText(said(refused.message))); }, [id]);
  return html`<${Note} tone="bad"><pre class="log" lang=${logTongue()}>${text.trimEnd().split("\n").slice(-25).join("\n")}</pre><//>`;
}

// Chooses a run that has checkpoints, and one of them; the choice stands in the page's address.

const WITHOUT = ["queued", "starting", "refused", "cancelled"]; // states of runs that have no checkpoint

export function useModel(query) {
  const { runs } = useStore(live);
  const names = [...runs.values()].filter((run) => !WITHOUT.includes(run.status)).map((run) => run.name);
  const name = query.run ?? "";
  const [run, error] = useAnswer(() => (name ? get(`runs/${part(name)}`) : Promise.resolve(null)), [name, runs.get(name)?.status]);
  const offered = run?.checkpoints ?? [];
  const checkpoint = query.checkpoint ?? (offered.some((each) => each.best) ? "best" : "last");
  return { names, name, run: run?.name === name ? run : null, error, offered, checkpoint };
}

export function ModelChoice({ model }) {
  const named = model.offered.map((each) => [each.name, `${each.name}${each.best ? `, ${t("checkpoint.best")}` : ""}${each.last ? `, ${t("checkpoint.last")}` : ""}`]);
  return html`<div class="box fields">
    <div class="field"><label for="run">${t("runs.name")}</label><select id="run" value=${model.name} onChange=${(event) => settle({ run: event.target.value, checkpoint: "" })}>
      <option value="">${t("use.choose")}</option>${model.names.map((each) => html`<option value=${each}>${each}</option>`)}</select></div>
    ${model.run ? html`<div class="field"><label for="checkpoint">${t("checkpoint.name")}</label><select id="checkpoint" value=${model.checkpoint} onChange=${(event) => settle({ checkpoint: event.target.value })}>
      ${model.offered.some((each) => each.best) ? html`<option value="best">${t("checkpoint.best")}</option>` : null}<option value="last">${t("checkpoint.last")}</option>
      ${named.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></div>` : null}
    ${model.error ? html`<${Failure} error=${model.error} />` : null}
    ${model.run && !model.offered.length ? html`<p class="quiet">${t("checkpoint.none")}</p>` : null}</div>`;
}
