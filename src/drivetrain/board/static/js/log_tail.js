// The end of a run's log, which grows while the run does.
import { get, part, query } from "./api.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { logTongue, t } from "./language.js";
import { Copy, Failure } from "./parts.js";

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
