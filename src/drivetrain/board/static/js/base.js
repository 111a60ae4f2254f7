// What every file stands on: Preact, values that components watch, permanent links, requests.

import { useEffect, useState } from "../vendor/htm-preact.js";

export { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useErrorBoundary }
  from "../vendor/htm-preact.js";

// A value that several components watch.
export class Store {
  constructor(value) {
    this.value = value;
    this.watchers = new Set();
  }

  set(value) {
    this.value = value;
    for (const watcher of [...this.watchers]) watcher(value);
  }

  watch(watcher) {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

export function useStore(store) {
  const [value, set] = useState(store.value);
  useEffect(() => {
    set(store.value); // it may have changed between drawing and watching
    return store.watch((changed) => set(() => changed));
  }, [store]);
  return value;
}

// Permanent links: the page's address behind the #, such as #/runs/digits?tab=log.

function read() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(safely);
  return { parts, query: Object.fromEntries(new URLSearchParams(search ?? "")) };
}

function safely(text) {
  try { return decodeURIComponent(text); } catch { return text; } // someone's half-copied link
}

export const route = new Store(read());
addEventListener("hashchange", () => route.set(read()));

export function link(parts, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== "" && value !== null);
  return `#/${parts.map(encodeURIComponent).join("/")}${kept.length ? `?${new URLSearchParams(kept)}` : ""}`;
}

export const go = (parts, query) => { location.hash = link(parts, query); };

// Changes the address without a new entry in the browser's history.
export function settle(query) {
  const { parts, query: before } = route.value;
  history.replaceState(null, "", link(parts, { ...before, ...query }));
  route.set(read());
}

// Requests: addresses are relative to the page, which may stand behind a subpath.

class Refused extends Error {
  // status (0: no server), code, problems ([{field, why, fix}]), and keys of an import that may be dropped
  constructor(status, message, code, problems, accepts) {
    super(message);
    this.status = status;
    this.code = code;
    this.problems = problems ?? [];
    this.accepts = accepts ?? [];
  }
}

async function ask(method, path, body, options = {}) {
  let answer;
  try {
    const headers = body === undefined ? {} : { "content-type": options.type ?? "application/json" };
    const sent = body === undefined || options.type ? body : JSON.stringify(body);
    answer = await fetch(`api/${path}`, { method, headers, body: sent, signal: options.signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "", "unreachable");
  }
  if (answer.status === 401) {
    location.replace("login");
    return new Promise(() => {}); // the page is leaving
  }
  if (answer.ok && options.raw) return answer;
  const text = await answer.text();
  let data = null;
  try { data = text ? JSON.parse(text) : null; } catch { /* a proxy's page of its own, reported below */ }
  if (answer.ok) return data;
  const error = data?.error ?? {};
  throw new Refused(answer.status, error.message ?? `HTTP ${answer.status}`, error.code, data?.problems, data?.accepts);
}

export const get = (path, options) => ask("GET", path, undefined, options);
export const post = (path, body = {}, options) => ask("POST", path, body, options);
export const upload = (path, body) => ask("POST", path, body, { type: "application/octet-stream" });
export const remove = (path) => ask("DELETE", path);
export const part = encodeURIComponent;

export function query(values) {
  const kept = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
}

// Sends a request whose answer is a stream of events, and calls `take` with the name and data of each.
export async function stream(path, body, take, signal) {
  const answer = await ask("POST", path, body, { raw: true, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = /^data: (.*)$/m.exec(event)?.[1]; // a comment has none
      if (data !== undefined) take(/^event: (.*)$/m.exec(event)?.[1] ?? "message", JSON.parse(data));
    }
  }
}
