// An editor of the run file's YAML, by CodeMirror: line numbers, colours, undo. It is loaded with its tab alone, and lives
// in a shadow root, where its styles are sheets that the page's policy allows. Without it a plain text field is there.
import { html, useEffect, useRef, useState } from "./html.js";
import { t } from "./language.js";

let library = null;

export function YamlEditor({ draft, yaml }) {
  const place = useRef();
  const view = useRef();
  const [isPlain, setPlain] = useState(false);
  useEffect(() => {
    let gone = false;
    library ??= import("../vendor/codemirror.js");
    library.then((found) => { if (!gone) view.current = made(found, place.current, draft); }, () => { library = null; if (!gone) setPlain(true); });
    return () => { gone = true; view.current?.destroy(); };
  }, []);
  useEffect(() => { if (view.current) show(view.current, draft.value.yaml); }, [yaml]); // the draft's own text: a key may have been pressed since
  if (isPlain) return html`<${Plain} draft=${draft} yaml=${yaml} />`;
  return html`<p class="quiet small">${t("new.yaml_about")}</p><div ref=${place} class="editor" data-editor></div>`;
}

function Plain({ draft, yaml }) {
  const [typed, setTyped] = useState(null);
  return html`<label for="yaml" class="quiet small">${t("new.yaml_about")}</label>
    <textarea id="yaml" class="code" rows="28" spellcheck=${false} value=${typed ?? yaml} aria-describedby="problems"
      onInput=${(event) => { setTyped(event.target.value); draft.write(event.target.value); }} onBlur=${() => setTyped(null)}></textarea>`;
}

function made(code, place, draft) {
  const root = place.shadowRoot ?? place.attachShadow({ mode: "open" });
  const { EditorView, keymap } = code;
  const view = new EditorView({
    doc: draft.value.yaml, root, parent: root,
    extensions: [
      code.lineNumbers(), code.history(), code.indentOnInput(), code.bracketMatching(), code.indentUnit.of("  "), code.yaml(),
      code.syntaxHighlighting(colors(code)), keymap.of([...code.defaultKeymap, ...code.historyKeymap]), // Tab leaves, as in a form
      EditorView.contentAttributes.of({ id: "yaml", "aria-label": t("new.yaml") }), look(EditorView),
      EditorView.updateListener.of(({ docChanged, state }) => {
        const text = state.doc.toString();
        if (docChanged && text !== draft.value.yaml) draft.write(text);
      }),
    ],
  });
  place.view = view; // for those who look at the page by its console
  return view;
}

// Brings in a text that the form changed: only what differs, so that the cursor stays where it is.
function show(view, text) {
  const now = view.state.doc.toString();
  if (now === text) return;
  let from = 0;
  while (from < Math.min(now.length, text.length) && now[from] === text[from]) from += 1;
  let end = 0;
  while (end < Math.min(now.length, text.length) - from && now.at(-1 - end) === text.at(-1 - end)) end += 1;
  view.dispatch({ changes: { from, to: now.length - end, insert: text.slice(from, text.length - end) } });
}

const colors = ({ HighlightStyle, tags }) => HighlightStyle.define([
  { tag: tags.definition(tags.propertyName), color: "var(--accent)" },
  { tag: [tags.lineComment, tags.comment], color: "var(--quiet)", fontStyle: "italic" },
  { tag: [tags.string, tags.special(tags.string)], color: "var(--good)" },
  { tag: [tags.keyword, tags.typeName, tags.labelName], color: "var(--warn)" },
]);

const look = (EditorView) => EditorView.theme({
  "&": { color: "var(--ink)", backgroundColor: "var(--paper)", border: "1px solid var(--edge)", borderRadius: "6px", fontSize: "13px" },
  "&.cm-focused": { outline: "2px solid var(--accent)", outlineOffset: "2px" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.55", minHeight: "26rem", overflow: "auto" },
  ".cm-content": { caretColor: "var(--ink)", minHeight: "26rem" },
  ".cm-gutters": { minHeight: "26rem", color: "var(--quiet)", backgroundColor: "var(--softer)", borderRight: "1px solid var(--line)" },
  "&.cm-focused .cm-matchingBracket": { backgroundColor: "var(--accent-soft)" },
});
