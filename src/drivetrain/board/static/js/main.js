// The frame of the page: its head, the languages, and which page an address shows.
import { get, html, render, route, useEffect, useErrorBoundary, useRef, useState, useStore } from "./base.js";
import { choose, language, LANGUAGES, preferred, t } from "./language.js";
import { begin, live } from "./live.js";
import { Failure, Loading, Note } from "./parts.js";

// address, text of the link, file; a file is loaded when its page is first shown
const PAGES = [
  ["new", "page.new", () => import("./pages/new_run.js")],
  ["runs", "page.runs", () => import("./pages/runs.js")],
  ["compare", "page.compare", () => import("./pages/compare.js")],
  ["evaluate", "page.evaluate", async () => ({ default: (await import("./pages/use.js")).Evaluate })],
  ["chat", "page.chat", () => import("./pages/chat.js")],
  ["export", "page.export", async () => ({ default: (await import("./pages/use.js")).Export })],
  ["machine", "page.machine", () => import("./pages/machine.js")],
];
const RUN = () => import("./pages/run.js");
const loaderOf = ([place = "new", name]) => (place === "runs" && name ? RUN : PAGES.find(([key]) => key === place)?.[2]);

// all that the first page needs is asked for at once
const asked = get("me");
asked.catch(() => {}); // the page shows it
loaderOf(route.value.parts)?.().catch(() => {}); // likewise

function Page() {
  useStore(language);
  const { parts } = useStore(route);
  const { reached } = useStore(live);
  const [me, setMe] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => { asked.then(setMe, setError); }, []);
  const place = parts[0] ?? "new";
  return html`
    <a class="skip" href="#content" onClick=${toContent}>${t("skip")}</a>
    <header class="top">
      <a class="brand" href="#/new"><img src="static/icon.svg" alt="" />Drivetrain</a>
      <nav aria-label=${t("pages")}>${PAGES.map(([key, text]) => html`
        <a key=${key} href=${`#/${key}`} aria-current=${place === key ? "page" : null}>${t(text)}</a>`)}</nav>
      <div class="tools"><${Languages} /><${Theme} /></div>
    </header>
    <main id="content" tabindex="-1">
      ${reached ? null : html`<${Note} tone="warn"><p role="status">${t("error.unreachable")}</p><//>`}
      ${error ? html`<${Failure} error=${error} />` : me ? html`<${Content} parts=${parts} me=${me} />` : html`<${Loading} />`}
    </main>`;
}

function Content({ parts, me }) {
  const [, name] = parts;
  const load = loaderOf(parts);
  const [loaded, setLoaded] = useState({});
  const [broken, mend] = useErrorBoundary((error) => console.error(error));
  const first = useRef(true);
  useEffect(() => {
    let current = true;
    mend();
    load?.().then((module) => current && setLoaded({ load, page: module.default }));
    if (!first.current) toContent(); // a screen reader begins with the new page
    first.current = false;
    scrollTo(0, 0);
    return () => { current = false; };
  }, [load, name]);
  if (!load) return html`<${Note} tone="bad"><p>${t("error.no_page")}</p><//>`;
  if (broken) return html`<${Failure} error=${broken} />`;
  return loaded.load === load ? html`<${loaded.page} key=${name} name=${name} me=${me} />` : html`<${Loading} />`;
}

function toContent(event) {
  event?.preventDefault();
  document.getElementById("content")?.focus({ preventScroll: true });
}

function Languages() {
  const now = useStore(language);
  const other = now === "en" ? "zh" : "en";
  return html`<button class="plain" lang=${other === "zh" ? "zh-CN" : "en"} onClick=${() => choose(other)}>${LANGUAGES[other]}</button>`;
}

function Theme() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const [isDark, setDark] = useState(dark());
  const turn = () => {
    root.dataset.theme = isDark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* lasts until a reload */ }
    setDark(!isDark);
    dispatchEvent(new Event("theme"));
  };
  return html`<button class="plain" onClick=${turn} aria-label=${t(isDark ? "theme.light" : "theme.dark")} title=${t(isDark ? "theme.light" : "theme.dark")}>${isDark ? "☀" : "☾"}</button>`;
}

try {
  const kept = localStorage.getItem("theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch { /* the system's choice */ }
await choose(preferred());
begin();
document.getElementById("page").replaceChildren();
render(html`<${Page} />`, document.getElementById("page"));
