// A new run: a recipe to begin with, the form or the YAML, what the checker says, and Start.
import { get, post } from "../api.js";
import { DataPreview } from "../data_preview.js";
import { Draft, newKey } from "../draft.js";
import { Form } from "../form.js";
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { knowFields, language, loadFieldTexts, t, textOr } from "../language.js";
import { live } from "../live.js";
import { bytes } from "../numbers.js";
import { FullCheck } from "../full_check.js";
import { Copy, Failure, Loading, Note, Problems, Said, Tabs, useAnswer } from "../parts.js";
import { go, route, settle } from "../route.js";
import { useStore } from "../store.js";
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
  };
  const error = schemaError ?? recipesError;
  if (error) return html`<${Failure} error=${error} />`;
  if (!schema || !recipes) return html`<${Loading} />`;
  return html`
    <div class="head"><h1 class="grow">${t("new.title")}</h1></div>
    <${Recipes} of=${recipes.recipes} chosen=${state.source?.recipe} begun=${begun} />
    ${me.user.role === "viewer" ? null : html`<${Folded} title=${t("import.title")} look="quietbox" load=${() => import("../import_files.js")} draft=${draft} />`}
    ${begun ? html`<div class="columns">
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
function Folded({ title, load, look, ...given }) {
  const [Inner, setInner] = useState(null);
  const open = (event) => { if (event.target.open && !Inner) load().then((module) => setInner(() => module.default)); };
  return html`<details class=${`box ${look ?? ""}`} onToggle=${open}><summary><b>${title}</b></summary>${Inner ? html`<${Inner} ...${given} />` : null}</details>`;
}

function Beside({ draft, schema, state, me, tab, find }) {
  return html`<div class="box">
      <${Start} draft=${draft} state=${state} me=${me} />
      <div id="problems" aria-live="polite">${state.error ? html`<${Failure} error=${state.error} />` : null}
        ${state.problems.length ? html`<${Note} tone="bad"><p><b>${t("new.problems", { n: state.problems.length })}</b></p><${Problems} of=${state.problems} choose=${find} lines=${tab === "yaml"} /><//>`
          : state.ready && !state.busy ? html`<p class="quiet small" data-ready>${t("new.ready")}</p>` : null}
        ${state.notices.length ? html`<${Note} tone="warn"><ul>${state.notices.map((each) => html`<li><${Said} text=${notice(each)} /></li>`)}</ul><//>` : null}</div>
    </div>
    <${FullCheck} draft=${draft} state=${state} />
    ${me.user.role === "viewer" ? null : html`<${Folded} title=${t("matrix.instead")} load=${() => import("../matrix_form.js")} schema=${schema} state=${state} />`}
    <${Command} state=${state} />`;
}

const notice = (each) => (typeof each === "string" ? each : `${each.field}: ${each.why ?? ""} ${each.fix ?? ""}`);

function Start({ draft, state, me }) {
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
      <span class="quiet small" role="status">${state.busy ? t("new.checking") : state.problems.length ? t("new.problems", { n: state.problems.length }) : ""}</span></div>
    <${Devices} chosen=${devices} choose=${(found) => { setDevices(found); draft.key = newKey(); }} />
    ${error ? html`<${Failure} error=${error} />` : null}`;
}

// The GPUs that a run may have, where there are several; none of them ticked stands for any that is free.
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
