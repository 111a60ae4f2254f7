// Permanent links: the page's address behind the #, such as #/runs/digits?tab=log.
import { Store } from "./store.js";

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
