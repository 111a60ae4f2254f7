// What changes on the server, over one event stream a browser, which one tab holds and passes on: a browser opens six
// connections to a host.
import { html, Store, useStore } from "./base.js";
import { t } from "./language.js";

export const live = new Store({ runs: new Map(), queue: null, loaded: false, reached: true });
const channel = new BroadcastChannel(`drivetrain ${location.pathname}`);
let source = null;
let release = null;

export function begin() {
  channel.onmessage = ({ data }) => (data.kind === "snapshot?" ? pass() : take(data));
  channel.postMessage({ kind: "snapshot?" }); // whoever holds the stream answers at once
  lead();
  document.addEventListener("visibilitychange", () => (document.hidden ? wanted.value || hand() : lead()));
}

// The lock is held by one tab; the others wait in line for it. A hidden tab lets go of it.
function lead() {
  if (release || document.hidden) return;
  release = () => {};
  if (!navigator.locks) return open(); // absent where the page came over plain HTTP from another machine: a stream a tab
  navigator.locks.request(`drivetrain ${location.pathname}`, () => new Promise((end) => {
    if (document.hidden) { release = null; return end(); }
    release = end;
    open();
  }));
}

function hand() {
  source?.close();
  source = null;
  release?.();
  release = null;
}

function open() {
  source = new EventSource("api/events");
  for (const kind of ["snapshot", "runs", "queue"]) {
    source.addEventListener(kind, (event) => {
      const data = { kind, data: JSON.parse(event.data) };
      take(data);
      channel.postMessage(data);
    });
  }
  source.onopen = () => reach(true);
  source.onerror = () => reach(false); // it connects again by itself, unless the server refused
}

function reach(reached) {
  if (live.value.reached !== reached) {
    live.set({ ...live.value, reached });
    channel.postMessage({ kind: "reached", data: reached });
  }
  if (!reached && source?.readyState === EventSource.CLOSED) {
    hand();
    setTimeout(lead, 3000);
  }
}

function pass() {
  if (source && live.value.loaded) {
    channel.postMessage({ kind: "snapshot", data: { runs: [...live.value.runs.values()], queue: live.value.queue } });
  }
}

function take({ kind, data }) {
  const now = live.value;
  if (kind === "snapshot") {
    live.set({ runs: new Map(data.runs.map((run) => [run.name, run])), queue: data.queue, loaded: true, reached: true });
  } else if (kind === "reached") {
    live.set({ ...now, reached: data });
  } else if (kind === "queue") {
    live.set({ ...now, queue: data, reached: true });
  } else if (kind === "runs") {
    const runs = new Map(now.runs);
    for (const run of data.changed) runs.set(run.name, run);
    for (const name of data.gone) runs.delete(name);
    live.set({ ...now, runs, reached: true });
  }
}

// Notices of the browser of what has ended, where its user wants them.

const LIVE = ["queued", "running", "stopping"];
const isOffered = "Notification" in globalThis; // not where the page came over plain HTTP from another machine
const wanted = new Store(isOffered && Notification.permission === "granted" && recall());
let states = new Map(); // of the entries of the queue, as they were

live.watch(({ queue }) => {
  const ended = (queue?.entries ?? []).filter((each) => LIVE.includes(states.get(each.id)) && !LIVE.includes(each.state));
  states = new Map(queue?.entries.map((each) => [each.id, each.state]));
  if (!wanted.value || !source) return; // of several tabs, the one that holds the stream tells
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
