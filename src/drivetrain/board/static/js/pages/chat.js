// Chats with a run's model, or with two side by side that get the same messages.
import { get, post, remove, stream } from "../api.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { language, t } from "../language.js";
import { live } from "../live.js";
import { Empty, Failure, State } from "../parts.js";
import { route, settle } from "../route.js";
import { useStore } from "../store.js";

const SAMPLING = [["temperature", "0.7"], ["top_p", "1"], ["max_tokens", "256"], ["seed", ""]];
const OVER = ["failed", "refused", "lost", "cancelled", "interrupted", "completed"];

export default function Chat({ me }) {
  useStore(language);
  const { runs } = useStore(live);
  const { query } = useStore(route);
  const names = [...runs.values()].filter((run) => run.workload?.startsWith("language_model") && run.step).map((run) => run.name);
  const [settings, setSettings] = useState(Object.fromEntries(SAMPLING));
  const [system, setSystem] = useState("");
  const [text, setText] = useState("");
  const sides = [useSide(query.left, settings, system), useSide(query.right, settings, system)];
  const shown = query.two === "1" ? sides : sides.slice(0, 1);
  const ready = shown.some((side) => side.ready);
  const busy = shown.some((side) => side.busy);
  if (me.user.role === "viewer") return html`<p class="quiet">${t("viewer")}</p>`;
  const send = (event) => {
    event.preventDefault();
    if (!text.trim() || !ready || busy) return;
    for (const side of shown) side.send(text);
    setText("");
  };
  return html`<div class="head"><h1 class="grow">${t("page.chat")}</h1>
      <label><input type="checkbox" checked=${query.two === "1"} onChange=${(event) => settle({ two: event.target.checked ? "1" : "" })} /> ${t("chat.two")}</label></div>
    ${names.length ? html`<div class=${shown.length > 1 ? "sides" : ""}>${shown.map((side, i) => html`<${Side} key=${i} side=${side} names=${names} name=${query[["left", "right"][i]]} onChoose=${(name) => settle({ [["left", "right"][i]]: name })} id=${i} />`)}</div>
      <form onSubmit=${send}><label for="message" class="hidden">${t("chat.message")}</label>
        <textarea id="message" rows="3" placeholder=${t("chat.message")} value=${text} onInput=${(event) => setText(event.target.value)}
          onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea>
        <div class="buttons" style=${{ margin: ".5rem 0" }}>${busy ? html`<button type="button" onClick=${() => shown.forEach((side) => side.stop())}>${t("chat.stop")}</button>` : html`<button class="main" disabled=${!ready || !text.trim()}>${t("chat.send")}</button>`}
          <button type="button" onClick=${() => shown.forEach((side) => side.clear())}>${t("chat.clear")}</button></div></form>
      <details class="box"><summary>${t("chat.settings")}</summary><div class="fields" style=${{ marginTop: ".6rem" }}>
        <div class="field long"><label for="system">${t("chat.system")}</label><textarea id="system" rows="2" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea></div>
        ${SAMPLING.map(([name]) => html`<div class="field"><label for=${`s-${name}`}>${t(`chat.${name}`)}</label><input id=${`s-${name}`} inputmode="decimal" value=${settings[name]} onInput=${(event) => setSettings({ ...settings, [name]: event.target.value })} /></div>`)}</div></details>`
    : html`<${Empty}><p>${t("chat.none")}</p><//>`}`;
}

function Side({ side, names, name, onChoose, id }) {
  const end = useRef();
  useEffect(() => { end.current?.scrollIntoView?.({ block: "nearest" }); }, [side.messages]);
  return html`<section class="box"><div class="with"><label for=${`model-${id}`} class="hidden">${t("use.choose")}</label>
      <select id=${`model-${id}`} value=${name ?? ""} onChange=${(event) => onChoose(event.target.value)}><option value="">${t("use.choose")}</option>${names.map((each) => html`<option value=${each}>${each}</option>`)}</select>
      ${side.entry ? html`<button type="button" onClick=${side.unload}>${t("chat.unload")}</button>` : html`<button type="button" class="main" disabled=${!name} onClick=${side.load} data-load>${t("chat.load")}</button>`}</div>
    <p class="small quiet" role="status">${side.entry ? (side.ready ? t("chat.ready") : html`<${State} of=${side.entry.state} /> ${side.entry.reason ?? t("chat.loading")}`) : t("chat.about")}</p>
    ${side.error ? html`<${Failure} error=${side.error} />` : null}
    <div class="messages" role="log" aria-live="polite" tabindex="0" aria-label=${t("page.chat")}>${side.messages.map((each, i) => html`<div key=${i} class=${`message ${each.role}`}><b class="small">${t(`chat.${each.role}`)}</b>
      ${each.thought ? html`<div class="quiet small">${each.thought}</div>` : null}<div class="tokens">${each.content}</div>${each.note ? html`<span class="quiet small">${each.note}</span>` : null}</div>`)}<i ref=${end}></i></div></section>`;
}

// A model that answers: loaded in a process of its own, asked, and unloaded.
function useSide(name, settings, system) {
  const [entry, setEntry] = useState(null);
  const [error, setError] = useState(null);
  const [messages, setMessages] = useState([]);
  const [busy, setBusy] = useState(null);
  const ready = Boolean(entry?.ready);
  // an answer that comes after the model was unloaded changes nothing
  const look = () => get(`chat/${entry.id}`).then((found) => setEntry((now) => (now?.id === found.id ? found : now)), setError);
  useEffect(() => {
    if (!entry || ready || OVER.includes(entry.state)) return undefined;
    const timer = setTimeout(look, 1000);
    return () => clearTimeout(timer);
  }, [entry]);
  const load = () => {
    setError(null);
    post("chat", { key: [...crypto.getRandomValues(new Uint32Array(4))].join("-"), model: name, checkpoint: "last" }).then(setEntry, setError);
  };
  const unload = () => remove(`chat/${entry.id}`).then(() => setEntry(null), setError);
  const send = async (content) => {
    if (!ready) return;
    const before = [...messages, { role: "user", content }];
    const answer = { role: "assistant", content: "", thought: "" };
    const control = new AbortController();
    const show = () => setMessages([...before, { ...answer }]);
    setBusy(control);
    setError(null);
    show();
    const asked = [...(system.trim() ? [{ role: "system", content: system }] : []), ...before.map(({ role, content: own }) => ({ role, content: own }))];
    const sampling = Object.fromEntries(Object.entries(settings).filter(([, value]) => value.trim() !== "").map(([key, value]) => [key, Number(value)]));
    try {
      await stream(`chat/${entry.id}/reply`, { messages: asked, sampling }, (kind, data) => {
        if (kind === "piece") { answer.content += data.text ?? ""; answer.thought += data.thought ?? ""; }
        if (kind === "end") answer.note = t("chat.end", { n: data.tokens, time: data.seconds.toFixed(1) });
        if (kind === "failed") answer.note = data.message;
        show();
      }, control.signal);
      answer.note ??= t("chat.cut"); // an answer ends with one of the two
      show();
      look(); // its process may have ended
    } catch (refused) {
      if (refused.name !== "AbortError") setError(refused);
    }
    setBusy(null);
  };
  return { entry, ready, error, messages, busy, load, unload, send, stop: () => busy?.abort(), clear: () => setMessages([]) };
}
