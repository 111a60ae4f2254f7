// Values of a run file: nested mappings, read by dotted paths, and typed as text.

// Returns what stands at a path; a text where a block is expected is short for its kind (engine: ddp).
export function at(values, path) {
  let value = values;
  for (const name of path.split(".")) {
    if (value === null || value === undefined) return undefined;
    if (typeof value !== "object") return name === "name" ? value : undefined;
    value = value[name];
  }
  return value;
}

// Returns values with one of them replaced, or (undefined) taken out. A text in the place of a block is short for its kind.
export function withValue(values, path, value) {
  const [name, ...rest] = path.split(".");
  const { [name]: own, ...others } = values ?? {};
  if (!rest.length) return value === undefined ? others : { ...values, [name]: value };
  const inner = typeof own === "string" ? { name: own } : own;
  return inner === undefined && value === undefined ? values : { ...values, [name]: withValue(inner, rest.join("."), value) };
}

// Returns whether the fields of a block that a run file chose include this one. own: the file's values; resolved: with
// all defaults, or null while the file has errors.
export function exists(field, own, resolved) {
  return (field.when ?? []).every(({ path, is }) => {
    const value = at(own, path) ?? at(resolved, path); // a change shows before it is checked, and while there are errors
    return is.includes(value);
  });
}

export function asText(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value) && value.every((each) => each === null || typeof each !== "object")) return value.map(String).join(", ");
  if (Array.isArray(value)) return `[\n${value.map((each) => `  ${JSON.stringify(each)}`).join(",\n")}\n]`;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Returns the value that a typed text means for a field. What it cannot mean stays a text, for the checker to refuse.
export function fromText(field, text) {
  const trimmed = text.trim();
  if (field.type === "integer" || field.type === "number") return numberOr(trimmed);
  if (field.type === "text") return text;
  if (/^[[{]/.test(trimmed)) {
    try { return JSON.parse(trimmed); } catch { return text; }
  }
  if (field.type === "list") return trimmed.split(/[,，]/).map((each) => each.trim()).filter(Boolean).map(plain);
  return plain(trimmed);
}

function plain(text) {
  if (text === "true" || text === "false") return text === "true";
  return text === "null" ? null : numberOr(text);
}

function numberOr(text) {
  const number = Number(text);
  return text !== "" && Number.isFinite(number) ? number : text;
}
