// The long check beside Start: it reads the data, builds the model and plans memory, time and disk. Each part is shown as
// soon as it is known.
import { get, post } from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { t, textOr } from "./language.js";
import { bytes, duration, figure, whole } from "./numbers.js";
import { Bar, Failure, Note, Problems, Said } from "./parts.js";

const EVERY = 1000; // milliseconds after which is asked what is known

export function FullCheck({ draft, state }) {
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
