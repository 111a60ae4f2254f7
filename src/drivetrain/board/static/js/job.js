// A job that a page started beside training (evaluate, predict, export): it goes through the same queue, and its result
// is shown when it has ended.
import { get, post } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { logTongue, said, t } from "./language.js";
import { live } from "./live.js";
import { Failure, Note, Said, State } from "./parts.js";
import { canEnd } from "./queue.js";
import { useStore } from "./store.js";

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

export const isEnded = (entry) => ENDED.includes(entry.state);

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

