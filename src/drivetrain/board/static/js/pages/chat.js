// Chats with a run's model, alone or beside another run's or its own base: each question goes to both.
import { get, html, post, remove, route, settle, stream, useEffect, useRef, useState, useStore } from "../base.js";
import { language, locale, t } from "../language.js";
import { live } from "../live.js";
import { Empty, Failure, Said, State } from "../parts.js";

const SAMPLING = [["temperature", "0.7"], ["top_p", "1"], ["max_tokens", "256"], ["seed", ""]];
const EXAMPLE = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';
const BASE = ":base"; // a choice of what stands beside; no run is called so

export default function Chat({ me }) {
  useStore(language);
  const { runs } = useStore(live);
  const { query } = useStore(route);
  const names = [...runs.values()].filter((run) => run.workload?.startsWith("language_model") && run.step).map((run) => run.name);
  const [settings, setSettings] = useState(Object.fromEntries(SAMPLING));
  const [system, setSystem] = useState("");
  const [written, setWritten] = useState(""); // functions, as JSON
  const [text, setText] = useState("");
  const tools = functions(written);
  const hasBase = Boolean(runs.get(query.left)?.has_base);
  const withBase = query.right === BASE && hasBase;
  const left = useModel(query.left, withBase);
  const other = useModel(query.right === BASE ? "" : query.right, false);
  const talks = [useTalk(left, false, settings, system, tools), useTalk(left, true, settings, system, tools), useTalk(other, false, settings, system, tools)];
  const columns = [{ model: left, talk: talks[0], title: query.left ?? "" },
    ...(withBase ? [{ model: left, talk: talks[1], title: t("chat.base_of", { name: query.left }), ofBase: true }] : []),
    ...(query.right && query.right !== BASE ? [{ model: other, talk: talks[2], title: query.right }] : [])];
  const ready = columns.every(({ talk }) => talk.ready);
  const busy = columns.some(({ talk }) => talk.busy);
  const asking = columns.filter(({ talk }) => talk.asks);
  const message = asking.length ? t("chat.result_of", { name: asking[0].talk.asks.function.name }) : t("chat.message");
  if (me.user.role === "viewer") return html`<p class="quiet">${t("viewer")}</p>`;
  const send = (event) => {
    event.preventDefault();
    if (!text.trim() || !ready || busy || tools === null) return;
    for (const { talk } of asking.length ? asking : columns) talk.send(text);
    setText("");
  };
  const choose = async (side, name) => {
    const stays = side === "left" ? [] : [left];
    for (const model of [left, other]) if (model.entry && !stays.includes(model)) await model.unload();
    for (const talk of talks) talk.clear();
    settle(side === "left" ? { left: name, right: query.right === BASE || query.right === name ? "" : query.right } : { right: name });
  };
  return html`<div class="head"><h1 class="grow">${t("page.chat")}</h1></div>
    ${names.length ? html`<div class="box fields">
        <div class="field"><label for="model-0">${t("chat.model")}</label><select id="model-0" value=${query.left ?? ""} onChange=${(event) => choose("left", event.target.value)}>
          <option value="">${t("use.choose")}</option>${names.map((each) => html`<option value=${each}>${each}</option>`)}</select></div>
        <div class="field"><label for="model-1">${t("chat.beside")}</label><select id="model-1" value=${query.right ?? ""} disabled=${!query.left} onChange=${(event) => choose("right", event.target.value)}>
          <option value="">${t("chat.alone")}</option>${hasBase ? html`<option value=${BASE}>${t("chat.base")}</option>` : null}
          ${names.filter((each) => each !== query.left).map((each) => html`<option value=${each}>${each}</option>`)}</select></div></div>
      ${query.left ? html`<div class=${columns.length > 1 ? "sides" : ""}>${columns.map((each, i) => html`<${Column} key=${each.title} of=${each} id=${i} />`)}</div>` : html`<p class="quiet">${t("chat.about")}</p>`}
      <form onSubmit=${send}><label for="message" class="hidden">${message}</label>
        <textarea id="message" rows="3" placeholder=${message} value=${text} onInput=${(event) => setText(event.target.value)}
          onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); }}></textarea>
        <div class="buttons" style=${{ margin: ".5rem 0" }}>${busy ? html`<button type="button" onClick=${() => columns.forEach(({ talk }) => talk.stop())}>${t("chat.stop")}</button>` : html`<button class="main" disabled=${!ready || !text.trim() || tools === null}>${t("chat.send")}</button>`}
          <button type="button" onClick=${() => talks.forEach((talk) => talk.clear())}>${t("chat.clear")}</button></div></form>
      <details class="box"><summary>${t("chat.settings")}</summary><div class="fields" style=${{ marginTop: ".6rem" }}>
        <div class="field long"><label for="system">${t("chat.system")}</label><textarea id="system" rows="2" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea></div>
        <div class="field long"><label for="tools">${t("chat.tools")}</label><textarea id="tools" class="code" rows="2" spellcheck=${false} placeholder=${EXAMPLE} value=${written} aria-invalid=${tools === null ? "true" : null} aria-describedby="tools-doc" onInput=${(event) => setWritten(event.target.value)}></textarea>
          <p class="doc" id="tools-doc">${t(tools === null ? "chat.tools_wrong" : "chat.tools_about")}</p></div>
        ${SAMPLING.map(([name]) => html`<div class="field"><label for=${`s-${name}`}>${t(`chat.${name}`)}</label><input id=${`s-${name}`} inputmode="decimal" value=${settings[name]} onInput=${(event) => setSettings({ ...settings, [name]: event.target.value })} /></div>`)}</div></details>`
    : html`<${Empty}><p>${t("chat.none")}</p><//>`}`;
}

// Returns the functions that a text lists; undefined for none, and null for a text that is no list.
function functions(text) {
  if (!text.trim()) return undefined;
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? found : null;
  } catch { return null; }
}

function Column({ of: { model, talk, title, ofBase }, id }) {
  const end = useRef();
  useEffect(() => { if (talk.messages.length) end.current?.scrollIntoView?.({ block: "nearest" }); }, [talk.messages]);
  return html`<section class="box" aria-labelledby=${`column-${id}`} data-column=${id}><div class="head" style=${{ marginBottom: ".3rem" }}><h2 id=${`column-${id}`} class="grow" translate=${Boolean(ofBase)}>${title}</h2>
      ${ofBase ? null : model.entry ? html`<button type="button" onClick=${model.unload}>${t("chat.unload")}</button>` : html`<button type="button" class="main" onClick=${model.load} data-load>${t("chat.load")}</button>`}</div>
    <p class="small quiet" role="status"><${Standing} model=${model} ofBase=${ofBase} ready=${talk.ready} /></p>
    ${model.error && !ofBase ? html`<${Failure} error=${model.error} />` : null}
    <div class="messages" role="log" aria-live="polite" tabindex="0" aria-label=${title}>${talk.messages.map((each, i) => html`<div key=${i} class=${`message ${each.role}`}><b class="small">${t(`chat.${each.role}`)}</b>
      ${each.thought ? html`<div class="quiet small">${each.thought}</div>` : null}<div class="tokens">${each.content}</div>${(each.calls ?? []).map((call) => html`<pre class="command" data-call>${call.function.name}(${call.function.arguments})</pre>`)}${each.note ? html`<span class="quiet small"><${Said} text=${each.note} /></span>` : null}</div>`)}<i ref=${end}></i></div></section>`;
}

// Says where a column's model stands, and why it waits.
function Standing({ model, ofBase, ready }) {
  const { entry } = model;
  if (ready) return t(ofBase ? "chat.base_ready" : "chat.ready");
  if (!entry) return t(ofBase ? "chat.base_about" : "chat.about");
  if (ofBase && !entry.withBase) {
    const again = async () => { await model.unload(); await model.load(); };
    return html`${t("chat.base_again")} <button type="button" onClick=${again} data-again>${t("chat.again")}</button>`;
  }
  if (OVER.includes(entry.state)) return html`<${State} of=${entry.state} /> <${Said} text=${entry.reason ?? ""} />`;
  return html`<${State} of=${entry.state} /> ${entry.waits ? why(entry.waits) : t("chat.loading")}`;
}

function why(waits) {
  const holders = waits.behind.map((each) => t("chat.holds", { verb: t(`verb.${each.verb}`), run: each.run }));
  const by = new Intl.ListFormat(locale()).format(holders);
  return by ? t("chat.waits_behind", { by }) : t(`chat.waits_${waits.for}`);
}

// A model that answers, loaded in a process of its own, and a conversation with it.

const OVER = ["failed", "refused", "lost", "cancelled", "interrupted", "completed"];

// withBase: whether the same weights answer without the run's adapter too.
function useModel(name, withBase) {
  const [entry, setEntry] = useState(null);
  const [error, setError] = useState(null);
  const ready = Boolean(entry?.ready);
  // an answer that comes after the model was unloaded changes nothing
  const look = () => get(`chat/${entry.id}`).then((found) => setEntry((now) => (now?.id === found.id ? { ...found, withBase: now.withBase } : now)), setError);
  useEffect(() => {
    if (!entry || ready || OVER.includes(entry.state)) return undefined;
    const timer = setTimeout(look, 1000);
    return () => clearTimeout(timer);
  }, [entry]);
  const load = () => {
    setError(null);
    return post("chat", { key: [...crypto.getRandomValues(new Uint32Array(4))].join("-"), model: name, checkpoint: "last", with_base: withBase })
      .then((found) => setEntry({ ...found, withBase }), setError);
  };
  const unload = () => remove(`chat/${entry.id}`).then(() => setEntry(null), setError);
  return { name, entry, ready, error, setError, look, load, unload };
}

// ofBase: whether the model's base is asked in its place.
function useTalk(model, ofBase, settings, system, tools) {
  const [messages, setMessages] = useState([]);
  const [busy, setBusy] = useState(null);
  const ready = model.ready && (!ofBase || Boolean(model.entry?.withBase));
  const asks = awaited(messages);
  const send = async (content) => {
    if (!ready) return undefined;
    const said = asks ? { role: "tool", content, call: asks } : { role: "user", content };
    const before = [...messages, said];
    if (awaited(before)) return setMessages(before); // of several functions the next one's result
    const answer = { role: "assistant", content: "", thought: "", calls: [] };
    const control = new AbortController();
    const show = () => setMessages([...before, { ...answer }]);
    setBusy(control);
    model.setError(null);
    show();
    const asked = [...(system.trim() ? [{ role: "system", content: system }] : []), ...before.filter((each, i) => !isEmpty(each) && !isEmpty(before[i + 1])).map(sent)];
    const sampling = Object.fromEntries(Object.entries(settings).filter(([, value]) => value.trim() !== "").map(([key, value]) => [key, isNaN(value) ? value : Number(value)]));
    try {
      await stream(`chat/${model.entry.id}/reply`, { messages: asked, sampling, of_base: ofBase, tools }, (kind, data) => {
        if (kind === "piece") {
          answer.content += data.text ?? "";
          answer.thought += data.thought ?? "";
          answer.calls.push(...(data.calls ?? [])); // each comes whole
        }
        if (kind === "end") answer.note = t("chat.end", { n: data.tokens, time: data.seconds.toFixed(1) });
        if (kind === "failed") answer.note = data.message;
        show();
      }, control.signal);
      answer.note ??= t("chat.cut"); // no end came
      model.look(); // its process may have ended
    } catch (refused) {
      if (refused.name === "AbortError") answer.note = t("chat.stopped");
      else model.setError(refused);
    }
    show();
    return setBusy(null);
  };
  return { ready, busy, messages, asks, send, stop: () => busy?.abort(), clear: () => setMessages([]) };
}

// Returns the first function call without a result since the last answer.
function awaited(messages) {
  const last = messages.findLastIndex((each) => each.role === "assistant");
  const given = messages.slice(last + 1).map((each) => each.call?.id);
  return messages[last]?.calls?.find((each) => !given.includes(each.id));
}

// An answer without a word, which no model takes back: it and its question are left out.
const isEmpty = (each) => each?.role === "assistant" && !each.content.trim() && !each.calls?.length;

// Returns a message in the form of OpenAI's API.
function sent({ role, content, calls, call }) {
  if (call) return { role, content, tool_call_id: call.id };
  return calls?.length ? { role, content, tool_calls: calls.map(({ id, type, function: called }) => ({ id, type, function: called })) } : { role, content };
}
