// An editor of the run file's YAML, by CodeMirror, loaded with its tab alone. In a shadow root its styles are sheets that
// the page's policy allows. Without it a plain text field is there.
import { html, useEffect, useRef, useState } from "./base.js";
import { language, said, t } from "./language.js";

let library = null;
let goes = null; // to a problem, in the editor that is there

export const goToProblem = (problem) => goes?.(problem);

export function YamlEditor({ draft, yaml, problems }) {
  const place = useRef();
  const view = useRef();
  const [code, setCode] = useState(null);
  const [isPlain, setPlain] = useState(false);
  useEffect(() => {
    let gone = false;
    library ??= import("../vendor/codemirror.js");
    library.then((found) => {
      if (gone) return;
      view.current = made(found, place.current, draft);
      goes = ({ line, column }) => go(found, view.current, line, column);
      setCode(found);
    }, () => { library = null; if (!gone) setPlain(true); });
    return () => { gone = true; goes = null; view.current?.destroy(); };
  }, []);
  useEffect(() => { if (view.current) show(view.current, draft.value.yaml); }, [yaml]); // the draft's own text: a key may have been pressed since
  useEffect(() => { if (code) mark(code, view.current, problems); }, [code, problems, language.value]);
  if (isPlain) return html`<${Plain} draft=${draft} yaml=${yaml} />`;
  return html`<p class="quiet small">${t("new.yaml_about")}</p><div ref=${place} class="editor" data-editor></div>`;
}

function Plain({ draft, yaml }) {
  const [typed, setTyped] = useState(null);
  const place = useRef();
  useEffect(() => {
    goes = ({ line, column }) => {
      const at = place.current.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0) + column - 1;
      place.current.focus();
      place.current.setSelectionRange(at, at);
    };
    return () => { goes = null; };
  }, []);
  return html`<label for="yaml" class="quiet small">${t("new.yaml_about")}</label>
    <textarea id="yaml" ref=${place} class="code" rows="28" spellcheck=${false} value=${typed ?? yaml} aria-describedby="problems"
      onInput=${(event) => { setTyped(event.target.value); draft.write(event.target.value); }} onBlur=${() => setTyped(null)}></textarea>`;
}

function made(code, place, draft) {
  const root = place.shadowRoot ?? place.attachShadow({ mode: "open" });
  const { EditorView, keymap } = code;
  const problems = problemMarks(code);
  const view = new EditorView({
    doc: draft.value.yaml, root, parent: root,
    extensions: [
      code.lineNumbers(), code.history(), code.indentOnInput(), code.bracketMatching(), code.indentUnit.of("  "), code.yaml(),
      code.syntaxHighlighting(colors(code)), problems.field,
      keymap.of([{ key: "F8", run: (view) => next(code, view) }, ...code.defaultKeymap, ...code.historyKeymap]), // Tab leaves, as in a form
      EditorView.contentAttributes.of(({ state }) => ({ id: "yaml", "aria-label": t("new.yaml"), "aria-invalid": String(state.field(problems.field).size > 0) })), look(EditorView),
      EditorView.updateListener.of(({ docChanged, state }) => {
        const text = state.doc.toString();
        if (docChanged && text !== draft.value.yaml) draft.write(text);
      }),
    ],
  });
  view.problems = problems;
  place.view = view; // for those who look at the page by its console
  return view;
}

// Marks each problem's line and its part of it. Positions follow what is typed until the next check.
function problemMarks({ StateEffect, StateField, Decoration, EditorView, GutterMarker, RangeSet, gutterLineClass }) {
  const change = StateEffect.define();
  const numbered = new (class extends GutterMarker { elementClass = "problem-number"; })();
  const lines = (marks, doc) => {
    const found = new Set();
    marks.between(0, doc.length, (from) => { found.add(doc.lineAt(from).from); });
    return RangeSet.of([...found].sort((one, other) => one - other).map((from) => numbered.range(from)));
  };
  const field = StateField.define({
    create: () => Decoration.none,
    update: (marks, { changes, effects }) => effects.find((each) => each.is(change))?.value ?? marks.map(changes),
    provide: (own) => [EditorView.decorations.from(own), gutterLineClass.compute([own], (state) => lines(state.field(own), state.doc))],
  });
  return { change, field };
}

const isProblem = (mark) => Boolean(mark.spec.message);

// Shows the problems that the checker found in the text.
function mark({ Decoration }, view, problems) {
  const { doc } = view.state;
  const found = problems.filter((each) => each.line <= doc.lines).flatMap(({ line, column, end_column, field, why, fix }) => {
    const { from, to } = doc.line(line);
    const message = `${field}${t("colon")}${said(why)}${t("stop")} ${said(fix)}`;
    const [first, last] = [Math.min(from + column - 1, to), Math.min(from + end_column - 1, to)];
    const whole = Decoration.line({ class: "problem-line", ...(first < last ? {} : { message }) }).range(from); // a mark is never empty
    return first < last ? [whole, Decoration.mark({ class: "problem", attributes: { title: message }, message }).range(first, last)] : [whole];
  });
  view.dispatch({ effects: view.problems.change.of(Decoration.set(found, true)) });
}

// Goes to the next problem, and tells a screen reader which it is.
function next({ EditorView }, view) {
  const found = [];
  const { doc, selection } = view.state;
  view.state.field(view.problems.field).between(0, doc.length, (from, _, each) => { if (isProblem(each)) found.push([from, each.spec.message]); });
  if (!found.length) return false;
  const [anchor, message] = found.find(([from]) => from > selection.main.head) ?? found[0];
  view.dispatch({ selection: { anchor }, effects: [EditorView.scrollIntoView(anchor, { y: "center" }),
    EditorView.announce.of(`${t("problem.line", { line: doc.lineAt(anchor).number })}${t("colon")}${message}`)] });
  return true;
}

function go({ EditorView }, view, line, column) {
  const { from, to } = view.state.doc.line(Math.min(line, view.state.doc.lines));
  const anchor = Math.min(from + column - 1, to);
  view.dispatch({ selection: { anchor }, effects: EditorView.scrollIntoView(anchor, { y: "center" }) });
  view.focus();
}

// Brings in what the form changed, and no more: the cursor stays.
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
  ".problem-line": { backgroundColor: "var(--bad-soft)" },
  ".problem": { textDecoration: "underline wavy var(--bad)", textDecorationSkipInk: "none" },
  ".problem-number": { color: "var(--bad)", fontWeight: "700", backgroundColor: "var(--bad-soft)" },
});
