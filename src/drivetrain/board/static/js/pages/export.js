// Exports a checkpoint, and shows what its verification found.
import { get, part, post } from "../api.js";
import { html, useState } from "../html.js";
import { Job, useJob } from "../job.js";
import { language, said, t } from "../language.js";
import { ModelChoice, useModel } from "../model_choice.js";
import { Failure, Note, useAnswer } from "../parts.js";
import { route } from "../route.js";
import { useStore } from "../store.js";

const KINDS = { text_classification: "text classifier", image_classification: "image classifier", module: "own model" }; // as formats name them

export default function Export({ me }) {
  useStore(language);
  const { query } = useStore(route);
  const model = useModel(query);
  const ready = model.run && model.offered.length > 0 && me.user.role !== "viewer";
  return html`<div class="head"><h1 class="grow">${t("page.export")}</h1></div>
    <${ModelChoice} model=${model} />
    ${ready ? html`<${Format} key=${model.name} model=${model} />` : null}`;
}

function Format({ model }) {
  const [formats, failed] = useAnswer(() => get("formats"), []);
  const [chosen, setChosen] = useState(null);
  const [entry, error, start] = useJob();
  const format = chosen ?? formats?.formats[0]?.name;
  const fits = (each) => !(each.needs_adapter && !model.run.config?.adapter) && !(KINDS[model.run.workload?.split(" ")[0]] in each.refuses);
  const ask = () => start((key) => post(`runs/${part(model.name)}/export`, { key, checkpoint: model.checkpoint, format }));
  return html`<section class="box"><h2>${t("export.format")}</h2>
    ${failed ? html`<${Failure} error=${failed} />` : null}
    <div class="recipes" role="group" aria-label=${t("export.format")}>${(formats?.formats ?? []).map((each) => html`<button type="button" class="recipe" key=${each.name} aria-pressed=${String(each.name === format)} disabled=${!fits(each)} onClick=${() => setChosen(each.name)}>
      <b translate=${false}>${each.name}</b><span>${fits(each) ? said(each.says) : t(each.needs_adapter ? "export.needs_adapter" : "export.not_this_model")}</span></button>`)}</div>
    <p class="quiet small">${t("export.about")}</p>
    <button class="main" disabled=${!format} onClick=${ask} data-export>${t("export.now")}</button>
    <${Job} entry=${entry} error=${error}>${(result) => html`<${Verdict} of=${result} run=${model.name} />`}<//></section>`;
}

function Verdict({ of, run }) {
  const place = (file) => `api/runs/${part(run)}/files/${`${of.inner}/${file}`.split("/").map(part).join("/")}`;
  return html`<${Note} tone=${of.verdict === "verified" ? "good" : "warn"}><p><b>${t(of.verdict === "verified" ? "export.verified" : "export.over")}</b></p><//>
    <p class="small"><code>${of.folder}</code></p>
    <ul>${of.files.map((file) => html`<li><a href=${place(file)} download translate=${false}>${file}</a></li>`)}</ul>
    <details><summary>${t("export.report")}</summary><pre>${JSON.stringify(of.report, null, 2)}</pre></details>`;
}
