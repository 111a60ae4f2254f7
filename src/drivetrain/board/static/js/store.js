// A value that several components watch.
import { useEffect, useState } from "./html.js";

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
