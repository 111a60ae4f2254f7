// A notice of the browser when something that ran here has ended, also while the page is hidden, where its user wants one.
import { html } from "./html.js";
import { t } from "./language.js";
import { holds, keepOpen, live } from "./live.js";
import { Store, useStore } from "./store.js";

const LIVE = ["queued", "running", "stopping"];
const isOffered = "Notification" in globalThis; // not where the page came over plain HTTP from another machine
const wanted = new Store(isOffered && Notification.permission === "granted" && recall());
let states = new Map(); // of the entries of the queue, as they were
keepOpen(() => wanted.value);

live.watch(({ queue }) => {
  const ended = (queue?.entries ?? []).filter((each) => LIVE.includes(states.get(each.id)) && !LIVE.includes(each.state));
  states = new Map(queue?.entries.map((each) => [each.id, each.state]));
  if (!wanted.value || !holds()) return; // of several tabs, one tells
  for (const each of ended) {
    const what = each.verb === "train" ? each.run : `${each.run} (${t(`verb.${each.verb}`)})`;
    new Notification("Drivetrain", { body: `${what}${t("colon")}${t(`state.${each.state}`)}`, tag: each.id, icon: "static/icon.svg" });
  }
});

export function Notices() {
  const on = useStore(wanted);
  if (!isOffered) return null;
  const turn = async ({ target }) => {
    wanted.set(target.checked && (await Notification.requestPermission()) === "granted");
    target.checked = wanted.value; // refused: it springs back
    try { localStorage.setItem("notices", wanted.value ? "1" : ""); } catch { /* lasts until a reload */ }
  };
  return html`<label><input type="checkbox" checked=${on} onChange=${turn} data-notices /> ${t("queue.notices")}</label>`;
}

function recall() {
  try { return localStorage.getItem("notices") === "1"; } catch { return false; }
}
