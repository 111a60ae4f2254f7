// A model that answers, loaded in a process of its own, and a conversation with it.
import { get, post, remove, stream } from "./api.js";
import { useEffect, useState } from "./html.js";
import { t } from "./language.js";

export const OVER = ["failed", "refused", "lost", "cancelled", "interrupted", "completed"];

// withBase: whether the same weights answer without the run's adapter too.
export function useModel(name, withBase) {
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
export function useTalk(model, ofBase, settings, system, tools) {
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
    const sampling = Object.fromEntries(Object.entries(settings).filter(([, value]) => value.trim() !== "").map(([key, value]) => [key, Number(value)]));
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
      answer.note ??= t("chat.cut"); // an answer ends with one of the two
      show();
      model.look(); // its process may have ended
    } catch (refused) {
      if (refused.name !== "AbortError") model.setError(refused);
    }
    return setBusy(null);
  };
  return { ready, busy, messages, asks, send, stop: () => busy?.abort(), clear: () => setMessages([]) };
}

// Returns the function call whose result the model waits for: the first one without a result since the last answer.
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
