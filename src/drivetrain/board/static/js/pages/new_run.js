// A new run: a recipe to begin with, the form or the YAML, what the checker says, and Start.
import { get, go, html, post, route, settle, useEffect, useMemo, useRef, useState, useStore } from "../base.js";
import { Draft, newKey } from "../draft.js";
import { Form } from "../form.js";
import { bytes, duration, figure, knowFields, language, loadFieldTexts, t, textOr, whole } from "../language.js";
import { live } from "../live.js";
import { Bar, Choice, Copy, Failure, FileInput, Loading, Note, Problems, Said, Tabs, useAnswer } from "../parts.js";
import { goToProblem, YamlEditor } from "../yaml_editor.js";

export default function NewRun({ me }) {
  useStore(language);
  const { query } = useStore(route);
  const draft = useMemo(() => new Draft(), []);
  const state = useStore(draft);
  const [wanted, setWanted] = useState("");
  const [schema, schemaError] = useAnswer(() => get("schema"), []);
  const [recipes, recipesError] = useAnswer(() => get("recipes"), []);
  useEffect(() => { draft.open({ recipe: query.recipe, from: query.from }).catch((error) => draft.patch({ error })); }, [query.recipe, query.from]);
  useMemo(() => knowFields(schema?.fields ?? []), [schema]);
  const begun = state.yaml.trim() !== "";
  const [documented, undocumented] = useAnswer(() => (begun ? loadFieldTexts() : Promise.resolve(false)), [begun]);
  const tab = query.tab ?? "form";
  const find = (problem) => {
    if (tab === "yaml" && problem.line) return goToProblem(problem);
    settle({ tab: problem.field === BROKEN ? "yaml" : "form" });
    setWanted(problem.field === BROKEN ? "" : problem.field);
    scrollTo(0, 0);
  };
  const error = schemaError ?? recipesError;
  if (error) return html`<${Failure} error=${error} />`;
  if (!recipes) return html`<${Loading} />`;
  return html`
    <div class="head"><h1 class="grow">${t("new.title")}</h1></div>
    <${Recipes} of=${recipes.recipes} chosen=${state.source?.recipe} begun=${begun} />
    ${me.user.role === "viewer" ? null : html`<${Folded} title=${t("import.title")} look="quietbox" of=${() => ImportFiles} draft=${draft} />`}
    ${begun ? !schema ? html`<${Loading} />` : html`<div class="columns">
      <div>
        <${Tabs} label=${t("new.views")} value=${tab} options=${[["form", t("new.form")], ["yaml", t("new.yaml")], ["data", t("new.data")]]} onChoose=${(key) => settle({ tab: key })} />
        ${tab === "yaml" ? html`<${YamlEditor} draft=${draft} yaml=${state.yaml} problems=${state.problems} />` : tab === "data" ? html`<${DataPreview} state=${state} />` : !documented && !undocumented ? html`<${Loading} />` : html`<${Form} schema=${schema} draft=${draft} state=${state} wanted=${wanted} setWanted=${setWanted} />`}
      </div>
      <aside class="beside"><${Beside} draft=${draft} schema=${schema} state=${state} me=${me} tab=${tab} find=${find} /></aside>
    </div>` : html`<p class="quiet">${t("new.begin")}</p>`}`;
}

const BROKEN = "yaml"; // the field of a problem with a text that is no YAML
const FIRST = "digits"; // needs no data of the user's, and is trained in seconds

function Recipes({ of: all, chosen, begun }) {
  const of = [...all.filter((each) => each.name === FIRST), ...all.filter((each) => each.name !== FIRST)];
  const [open, setOpen] = useState(!begun);
  useEffect(() => { if (begun) setOpen(false); }, [chosen, begun]);
  const choose = (name) => { go(["new"], { recipe: name }); };
  return html`<details class="box quietbox" open=${open || !begun} onToggle=${(event) => setOpen(event.target.open)}>
    <summary><b>${t("new.recipes")}</b>${chosen ? html` <span class="quiet" translate=${false}>${chosen}</span>` : null}</summary>
    <div class="recipes" style=${{ margin: ".8rem 0 0" }} role="group" aria-label=${t("new.recipes")}>${of.map((each) => html`
      <button type="button" class="recipe" key=${each.name} data-recipe=${each.name} aria-pressed=${String(each.name === chosen)} onClick=${() => choose(each.name)}>
        <b translate=${false}>${each.name}</b><span>${textOr(`recipe.${each.name}`, each.title)}</span></button>`)}</div></details>`;
}

// What few need: its file is loaded when it is opened first.
function Folded({ title, of, look, ...given }) {
  const [Inner, setInner] = useState(null);
  const open = (event) => { if (event.target.open && !Inner) Promise.resolve(of()).then((found) => setInner(() => found)); };
  return html`<details class=${`box ${look ?? ""}`} onToggle=${open}><summary><b>${title}</b></summary>${Inner ? html`<${Inner} ...${given} />` : null}</details>`;
}

function Beside({ draft, schema, state, me, tab, find }) {
  return html`<div class="box">
      <${Start} draft=${draft} state=${state} me=${me} find=${find} />
      <div id="problems" aria-live="polite">${state.error ? html`<${Failure} error=${state.error} />` : null}
        ${state.problems.length ? html`<${Note} tone="bad"><p><b>${t("new.problems", { n: state.problems.length })}</b></p><${Problems} of=${state.problems} choose=${find} lines=${tab === "yaml"} /><//>`
          : state.ready && !state.busy ? html`<p class="quiet small" data-ready>${t("new.ready")}</p>` : null}
        ${state.notices.length ? html`<${Note} tone="warn"><ul>${state.notices.map((each) => html`<li><${Said} text=${notice(each)} /></li>`)}</ul><//>` : null}</div>
    </div>
    <${FullCheck} draft=${draft} state=${state} />
    ${me.user.role === "viewer" ? null : html`<${Folded} title=${t("matrix.instead")} of=${async () => (await import("./compare.js")).MatrixForm} schema=${schema} state=${state} />`}
    <${Command} state=${state} />`;
}

const notice = (each) => (typeof each === "string" ? each : `${each.field}: ${each.why ?? ""} ${each.fix ?? ""}`);

function Start({ draft, state, me, find }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [devices, setDevices] = useState([]);
  const sending = useRef(false); // a second click comes before the button is drawn as disabled
  if (me.user.role === "viewer") return html`<p class="quiet">${t("viewer")}</p>`;
  const start = async () => {
    if (sending.current) return;
    sending.current = true;
    setBusy(true);
    setError(null);
    try {
      const entry = await post("queue", { key: draft.key, yaml: state.yaml, devices: devices.length ? devices : null });
      draft.started();
      go(["runs", entry.run]);
    } catch (refused) {
      setError(refused);
    } finally {
      sending.current = false;
      setBusy(false);
    }
  };
  return html`<div class="buttons start">
      <button class="main big" disabled=${!state.ready || busy || state.busy} onClick=${start} data-start>${t(busy ? "new.starting" : "new.start")}</button>
      <span class="quiet small" role="status">${state.busy ? t("new.checking") : state.problems.length ? html`<button class="plain" onClick=${() => find(state.problems[0])}>${t("new.problems", { n: state.problems.length })}</button>` : ""}</span></div>
    <${Devices} chosen=${devices} choose=${(found) => { setDevices(found); draft.key = newKey(); }} />
    ${error ? html`<${Failure} error=${error} />` : null}`;
}

// The GPUs that a run may have, of several; none ticked: any that is free.
function Devices({ chosen, choose }) {
  const { queue } = useStore(live);
  const gpus = queue?.devices.filter((each) => each.id !== "cpu") ?? [];
  if (gpus.length < 2) return null;
  return html`<fieldset class="small"><legend>${t("new.devices")}</legend><div class="choices">${gpus.map((each) => html`
    <label key=${each.id}><input type="checkbox" data-device=${each.id} checked=${chosen.includes(each.id)} onChange=${({ target }) => choose(target.checked ? [...chosen, each.id] : chosen.filter((id) => id !== each.id))} />
      <span>GPU ${each.id} <span class="quiet" translate=${false}>${each.name}</span>${each.used_bytes === null ? "" : ` ${t("queue.memory", { used: bytes(each.used_bytes), all: bytes(each.memory_bytes) })}`}${each.others ? `${t("list")}${t("queue.others")}` : ""}</span></label>`)}</div></fieldset>`;
}

function Command({ state }) {
  const [open, setOpen] = useState(false);
  const [answer, error] = useAnswer(() => (open && state.ready ? post("command", { yaml: state.yaml, recipe: state.source?.recipe ?? null }) : Promise.resolve(null)), [open, state.yaml, state.ready]);
  return html`<details class="box" onToggle=${(event) => setOpen(event.target.open)}><summary>${t("new.command")}</summary>
    ${error ? html`<${Failure} error=${error} />` : answer ? html`
      <pre class="command" style=${{ margin: ".6rem 0" }}>${answer.lines.join("\n")}</pre>
      <div class="buttons"><${Copy} text=${answer.lines.join("\n")} />${answer.file ? html`<${Copy} text=${answer.file} label=${t("new.copy_file")} />` : null}</div>
      ${answer.file ? html`<p class="quiet small" style=${{ marginTop: ".4rem" }}>${t("new.command_file")}</p>` : null}` : null}</details>`;
}

// The long check beside Start: data, model, memory, time and disk, each shown as soon as it is known.

const EVERY = 1000; // milliseconds after which is asked what is known

function FullCheck({ draft, state }) {
  const [answer, setAnswer] = useState(null);
  const [error, setError] = useState(null);
  const [work, setWork] = useState(null); // while it works: the text, since when, and what is known
  useEffect(() => { setAnswer(null); setError(null); }, [state.yaml]); // it holds for the text that was checked
  useEffect(() => {
    if (!work) return undefined;
    const timer = setInterval(async () => {
      const { so_far: known } = await get("check/full").catch(() => ({})); // the answer itself says what went wrong
      setWork((now) => now && { ...now, seconds: (Date.now() - now.begun) / 1000, known: known ?? now.known });
    }, EVERY);
    return () => clearInterval(timer);
  }, [work?.begun]);
  const ask = async () => {
    const { yaml } = state;
    setWork({ yaml, begun: Date.now(), seconds: 0, known: null });
    setError(null);
    try { setAnswer({ ...(await post("check/full", { yaml })), yaml }); } catch (refused) { setError(refused); }
    setWork(null);
  };
  const known = work ? work.yaml === state.yaml && work.known : answer?.yaml === state.yaml && answer;
  return html`<section class="box"><h2>${t("full.title")}</h2>
    <p class="quiet small">${t("full.about")}</p>
    <button onClick=${ask} disabled=${work || !state.ready || state.busy} data-check>${t(work ? "full.busy" : "full.ask")}</button>
    ${work ? html`<p class="quiet small" data-next>${t(`full.next_${work.known?.next ?? "begin"}`)} ${duration(work.seconds)}</p>` : null}
    <div aria-live="polite" style=${{ marginTop: ".6rem" }}>
      ${error && error.code !== "superseded" ? html`<${Failure} error=${error} />` : null}
      ${known ? html`<${Result} of=${known} isWhole=${!work} />` : null}
      ${known && !work && known.plan && known.plan.fits !== "yes" ? html`<${Fixes} draft=${draft} yaml=${state.yaml} />` : null}</div></section>`;
}

// Searches ways in which a run that does not fit would, and puts a chosen one into the form.
function Fixes({ draft, yaml }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const search = async () => {
    setBusy(true);
    setError(null);
    try { setFound((await post("plan", { yaml })).fixes); } catch (refused) { setError(refused); }
    setBusy(false);
  };
  const use = (changes) => { for (const [path, value] of Object.entries(changes)) draft.change(path, value); };
  return html`<button type="button" onClick=${search} disabled=${busy} data-fixes>${t(busy ? "full.searching" : "full.search")}</button>
    ${error ? html`<${Failure} error=${error} />` : null}
    ${found?.length === 0 ? html`<p>${t("full.no_fix")}</p>` : null}
    ${found?.length ? html`<ul class="fixes">${found.map((each) => html`<li><code>${each.says}</code>${each.step_seconds ? ` ${t("full.a_step", { time: `${figure(each.step_seconds, 2)} s` })}` : ""} <button type="button" onClick=${() => use(each.set)}>${t("full.use")}</button></li>`)}</ul>` : null}`;
}

function Result({ of, isWhole }) {
  const { plan, data, model, checkpoints } = of;
  const fits = plan?.fits !== "no";
  return html`${of.problems?.length ? html`<${Note} tone="bad"><${Problems} of=${of.problems} /><//>`
      : isWhole ? html`<${Note} tone=${fits ? "good" : "bad"}><p>${fits ? t("full.ready", { n: figure(of.seconds, 2) }) : html`<${Said} text=${plan.verdict} />`}</p><//>` : null}
    ${plan?.allocated_bytes && plan.capacity_bytes ? html`<${Bar} share=${plan.allocated_bytes / plan.capacity_bytes} tone=${fits ? "" : "bad"} label=${t("full.memory")} />` : null}
    <dl class="pairs small">
      ${plan?.allocated_bytes ? html`<dt>${t("full.memory")}</dt><dd>${t("full.memory_of", { used: bytes(plan.allocated_bytes), all: bytes(plan.capacity_bytes) })}</dd>` : null}
      ${plan?.step_seconds && of.steps ? html`<dt>${t("full.time")}</dt><dd>${duration(plan.step_seconds * of.steps)}</dd>` : plan && of.steps ? html`<dt>${t("full.time")}</dt><dd>${t("full.no_time")}</dd>` : null}
      ${checkpoints ? html`<dt>${t("full.disk")}</dt><dd>${t("full.disk_of", { used: bytes(checkpoints.bytes * checkpoints.kept), free: bytes(checkpoints.free_bytes) })}</dd>` : null}
      ${of.steps ? html`<dt>${t("full.steps")}</dt><dd>${of.steps_per_epoch ? t("full.steps_of", { n: whole(of.steps), each: whole(of.steps_per_epoch) }) : whole(of.steps)}</dd>` : null}
      ${model?.parameters ? html`<dt>${t("full.parameters")}</dt><dd>${t("full.trained_of", { trained: whole(model.trained_parameters), all: whole(model.parameters) })}</dd>` : null}
      ${Object.entries(data ?? {}).filter(([, value]) => ["string", "number"].includes(typeof value)).map(([name, value]) => html`<dt>${textOr(`full.data_${name}`, name.replaceAll("_", " "))}</dt><dd>${typeof value === "number" ? figure(value) : html`<${Said} text=${value} />`}</dd>`)}</dl>
    ${plan ? html`<p class="quiet small">${t("full.planned")}</p>` : null}`;
}

// What a run would see of its data: rows with trained tokens coloured, pictures, and rows by class.

const ROWS = 20;

function DataPreview({ state }) {
  const [set, setSet] = useState("train");
  const [offset, setOffset] = useState(0);
  const [found, error] = useAnswer(() => (state.ready ? post("data/preview", { yaml: state.yaml, set, rows: ROWS, offset }) : Promise.resolve(null)), [state.yaml, state.ready, set, offset]);
  const total = set === "train" ? found?.total : found?.evaluation_total ?? found?.total;
  const choose = (name) => { setSet(name); setOffset(0); };
  if (!found && state.busy) return html`<${Loading} />`;
  if (!state.ready && !found) return html`<p class="quiet">${t("new.problems", { n: state.problems.length })}</p>`;
  return html`<p class="quiet small">${t("data.about")}</p>
    <div class="controls"><${Choice} label=${t("data.set")} value=${set} options=${["train", "evaluation"].map((each) => [each, t(`data.${each}`)])} onChoose=${choose} />
      ${found ? html`<span class="quiet">${t("data.total", { n: whole(total) })}</span>` : null}</div>
    ${error ? html`<${Failure} error=${error} />` : !found ? html`<${Loading} />` : html`
      ${found.classes ? html`<${Classes} of=${found.classes} set=${set} />` : null}
      <${Rows} of=${found.rows} />
      <div class="buttons" style=${{ marginTop: ".8rem" }}>${offset ? html`<button onClick=${() => setOffset(0)}>${t("data.first")}</button>` : null}
        ${offset + found.rows.length < total ? html`<button onClick=${() => setOffset(offset + ROWS)}>${t("data.more")}</button>` : null}</div>`}`;
}

function Classes({ of, set }) {
  const most = Math.max(1, ...of.map((each) => each[set] ?? 0));
  return html`<section class="box"><h2>${t("data.counts")}</h2><div class="classes">${of.map((each) => html`
    <span class="small">${each.name}</span><${Bar} share=${(each[set] ?? 0) / most} label=${each.name} /><span class="small quiet">${whole(each[set] ?? 0)}</span>`)}</div></section>`;
}

function Rows({ of }) {
  if (of.length && of.every((row) => row.picture)) {
    return html`<div class="pictures">${of.map((row) => html`<figure key=${row.number}><img src=${row.picture} alt=${row.label ?? ""} loading="lazy" /><span class="small">${row.label}</span></figure>`)}</div>`;
  }
  return html`${of.map((row) => html`<div class="box row" key=${row.number}>
    <div class="small quiet">${row.label === null ? "" : html`<b>${row.label}</b> `}${row.length === null ? "" : t("data.tokens", { n: whole(row.length) })}
      ${row.cut ? html` <span class="badge warn">${t("data.cut")}</span>` : null}</div>
    ${row.sides ? row.sides.map((side) => html`<h3>${t(`data.${side.name}`)}</h3><${Tokens} of=${side.segments} />`) : row.segments ? html`<${Tokens} of=${row.segments} />` : html`<div class="tokens">${row.text}</div>`}</div>`)}`;
}

const Tokens = ({ of }) => html`<div class="tokens" tabindex="0">${of.map((each) => (each.trained ? html`<mark>${each.text}</mark>` : html`<span>${each.text}</span>`))}</div>`;

// Begins a new run with configurations of other software, and lists each key's fate.

const SHOWN = ["changed", "refused", "later"]; // fates that a user has to look at; the others are folded

function ImportFiles({ draft }) {
  const [files, setFiles] = useState(null);
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const ask = async (texts, without) => {
    setBusy(true);
    setError(null);
    setFound(null);
    try {
      const answer = await post("import", { files: texts, without });
      setFound(answer);
      draft.begin(answer.yaml, { imported: Object.keys(texts)[0] });
      go(["new"]);
    } catch (refused) { setError(refused); } finally { setBusy(false); }
  };
  const take = async (chosen) => {
    const read = await Promise.all(chosen.map(async (file) => [file.name, await file.text()]));
    const texts = Object.fromEntries(read);
    setFiles(texts);
    ask(texts, []);
  };
  return html`<div class="field" style=${{ marginTop: ".8rem" }}><label for="import">${t("import.files")}</label>
      <${FileInput} id="import" many=${true} accept=".yaml,.yml,.json,.py" disabled=${busy} onPick=${take} /><p class="doc">${t("import.about")}</p></div>
    <div aria-live="polite">${busy ? html`<p class="quiet small">${t("loading")}</p>` : null}
      ${error ? html`<${Failure} error=${error} />` : null}
      ${error?.accepts?.length ? html`<${Note} tone="warn"><p>${t("import.drops")}</p><p><button type="button" onClick=${() => ask(files, error.accepts)} data-accept>${t("import.without", { keys: error.accepts.join(", ") })}</button></p><//>` : null}
      ${found ? html`<${Found} of=${found} />` : null}</div>`;
}

function Found({ of }) {
  const looked = of.notes.filter((note) => SHOWN.includes(note.fate));
  const others = of.notes.filter((note) => !SHOWN.includes(note.fate));
  return html`<p role="status" data-imported>${t("import.done", { n: of.notes.length })}</p>
    ${of.missing.length ? html`<${Note} tone="warn"><p>${t("import.missing")}</p><ul>${of.missing.map((each) => html`<li><${Said} text=${each} /></li>`)}</ul><//>` : null}
    ${looked.length ? html`<${Fates} of=${looked} />` : null}
    ${others.length ? html`<details style=${{ marginTop: ".5rem" }}><summary>${t("import.others", { n: others.length })}</summary><${Fates} of=${others} /></details>` : null}`;
}

const Fates = ({ of }) => html`<div class="wide"><table><thead><tr><th scope="col">${t("import.key")}</th><th scope="col">${t("import.fate")}</th><th scope="col">${t("import.why")}</th></tr></thead>
  <tbody>${of.map((note) => html`<tr><td><code>${note.key}</code></td><td><span class=${`badge ${note.fate === "refused" ? "bad" : SHOWN.includes(note.fate) ? "warn" : ""}`}>${t(`fate.${note.fate}`)}</span></td><td class="small"><${Said} text=${note.why} /></td></tr>`)}</tbody></table></div>`;
