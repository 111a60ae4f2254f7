// What a trained run is used for: evaluation, predictions, export.
import { get, html, part, post, route, upload, useState, useStore } from "../base.js";
import { asText } from "../draft.js";
import { figure, language, said, t, textOr, whole } from "../language.js";
import { Failure, FileInput, FilePicker, Job, metricName, ModelChoice, Name, Note, useAnswer, useJob, useModel } from "../parts.js";

const MOST_CLASSES = 5; // shown of a row; the file has all

export const Evaluate = ({ me }) => html`<${Page} me=${me} title="page.evaluate">${(model) => html`<${Evaluation} key=${`e ${model.name}`} model=${model} /><${Prediction} key=${`p ${model.name}`} model=${model} />`}<//>`;

export const Export = ({ me }) => html`<${Page} me=${me} title="page.export">${(model) => html`<${Format} key=${model.name} model=${model} />`}<//>`;

// A page on a model that is chosen at its top.
function Page({ me, title, children }) {
  useStore(language);
  const { query } = useStore(route);
  const model = useModel(query);
  return html`<div class="head"><h1 class="grow">${t(title)}</h1></div>
    <${ModelChoice} model=${model} />
    ${model.run && model.offered.length > 0 && me.user.role !== "viewer" ? children(model) : null}`;
}

function Evaluation({ model }) {
  const [data, setData] = useState("");
  const [entry, error, start] = useJob();
  const ask = () => start((key) => post(`runs/${part(model.name)}/evaluate`, { key, checkpoint: model.checkpoint, data: data.trim() || null }));
  return html`<section class="box"><h2>${t("use.evaluate")}</h2>
    <div class="field"><label for="data">${t("use.data")}</label><div class="with"><input id="data" value=${data} onInput=${(event) => setData(event.target.value)} spellcheck=${false} /><${FilePicker} label=${t("use.data")} onPick=${setData} /></div>
      <p class="doc">${t("use.data_about")}</p></div>
    <div class="buttons" style=${{ marginTop: ".6rem" }}><button class="main" onClick=${ask} data-evaluate>${t("use.evaluate_now")}</button></div>
    <${Job} entry=${entry} error=${error}>${(result) => html`<dl class="pairs">${Object.entries(result.metrics ?? result).filter(([, value]) => typeof value === "number").map(([name, value]) => html`<dt>${metricName(name)}</dt><dd><b>${figure(value)}</b></dd>`)}</dl>`}<//></section>`;
}

function Prediction({ model }) {
  const [texts, setTexts] = useState("");
  const [failed, setFailed] = useState(null);
  const [entry, error, start] = useJob();
  const isImage = model.run.workload === "image_classification";
  const send = (inputs) => start((key) => post(`runs/${part(model.name)}/predict`, { key, checkpoint: model.checkpoint, ...inputs }));
  const take = async (given) => {
    if (!given) return;
    setFailed(null);
    try {
      const { id } = await upload(`uploads?name=${part(given.name)}`, given);
      await send({ upload: id });
    } catch (refused) { setFailed(refused); }
  };
  const drop = (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); };
  return html`<section class="box" onDragOver=${(event) => event.preventDefault()} onDrop=${drop}><h2>${t("use.predict")}</h2>
    <div class="field"><label for="upload">${t(isImage ? "use.upload_picture" : "use.upload")}</label><${FileInput} id="upload" onPick=${([chosen]) => take(chosen)} /><p class="doc">${t(isImage ? "use.upload_picture_about" : "use.upload_about")}</p></div>
    ${isImage ? null : html`<div class="field" style=${{ marginTop: ".8rem" }}><label for="texts">${t("use.texts")}</label><textarea id="texts" rows="4" value=${texts} onInput=${(event) => setTexts(event.target.value)}></textarea></div>
    <div class="buttons" style=${{ marginTop: ".6rem" }}><button class="main" disabled=${!texts.trim()} onClick=${() => send({ rows: texts.split("\n").filter((each) => each.trim()) })} data-predict>${t("use.predict_now")}</button></div>`}
    ${failed ? html`<${Failure} error=${failed} />` : null}
    <${Job} entry=${entry} error=${error}>${(result) => html`<${Predictions} of=${result} />`}<//></section>`;
}

// Figures of classes are an object of numbers: those of the likeliest classes come first.
function shown(value) {
  if (typeof value === "number") return figure(value);
  const pairs = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [];
  if (!pairs.length || pairs.some(([, each]) => typeof each !== "number")) return asText(value);
  const sorted = pairs.sort(([, a], [, b]) => b - a);
  return sorted.slice(0, MOST_CLASSES).map(([name, each]) => `${name} ${figure(each, 3)}`).join(t("list")) + (sorted.length > MOST_CLASSES ? " …" : "");
}

function Predictions({ of }) {
  return html`<p class="buttons"><a class="button" href=${of.csv} download>CSV</a><a class="button" href=${of.download} download>JSON Lines</a><span class="quiet">${t("data.total", { n: whole(of.total) })}</span></p>
    <div class="wide"><table class="cards"><thead><tr>${of.columns.map((name) => html`<th scope="col">${textOr(`column.${name}`, html`<${Name}>${name}<//>`)}</th>`)}</tr></thead>
      <tbody>${of.rows.map((row) => html`<tr>${of.columns.map((name) => html`<td class=${name === "text" ? "text" : "entry"} data-label=${textOr(`column.${name}`, name)}>${name === "sample" ? said(shown(row[name])) : shown(row[name])}</td>`)}</tr>`)}</tbody></table></div>
    ${of.rows.length < of.total ? html`<${Note}><p>${t("use.rest")}</p><//>` : null}`;
}

const KINDS = { text_classification: "text classifier", image_classification: "image classifier", module: "own model" }; // as formats name them

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
