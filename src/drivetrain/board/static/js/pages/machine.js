// The machine: its devices and who uses them, where files are, and who is logged in.
import { html, link, post, useStore } from "../base.js";
import { bytes, language, said, t } from "../language.js";
import { live } from "../live.js";
import { Bar, Loading, Name } from "../parts.js";

export default function Machine({ me }) {
  useStore(language);
  const { queue } = useStore(live);
  if (!queue) return html`<${Loading} />`;
  const runOf = new Map(queue.entries.map((each) => [each.id, each.run]));
  const leave = async () => { await post("logout"); location.replace("login"); };
  return html`<div class="head"><h1 class="grow">${t("page.machine")}</h1></div>
    <div class="devices">${queue.devices.map((each) => html`<section class="box" key=${each.id}><h2>${said(each.name)}</h2>
      ${each.memory_bytes && each.used_bytes !== null ? html`<${Bar} share=${each.used_bytes / each.memory_bytes} label=${t("chart.memory")} />
        <p class="small quiet">${t("queue.memory", { used: bytes(each.used_bytes), all: bytes(each.memory_bytes) })}</p>` : null}
      <dl class="pairs">
        ${each.utilisation === null ? null : html`<dt>${t("machine.busy")}</dt><dd>${Math.round(each.utilisation * 100)} %</dd>`}
        <dt>${t("machine.runs")}</dt><dd>${each.entries.length ? each.entries.map((id) => html`<a href=${link(["runs", runOf.get(id) ?? ""])}>${runOf.get(id) ?? id}</a> `) : t("machine.none")}</dd>
        ${each.others ? html`<dt>${t("machine.others")}</dt><dd>${t("queue.others")}</dd>` : null}</dl></section>`)}</div>
    <section class="box"><h2>${t("machine.access")}</h2>
      <p>${t("machine.warning")}</p>
      <dl class="pairs"><dt>${t("machine.user")}</dt><dd><${Name}>${me.user.name}<//>${t("list")}${t(`role.${me.user.role}`)}</dd>
        <dt>${t("machine.host")}</dt><dd translate=${false}>${me.host}</dd><dt>${t("machine.version")}</dt><dd translate=${false}>Drivetrain ${me.version}, Python ${me.python}</dd>
        <dt>${t("machine.folder")}</dt><dd><code>${me.runs_folder}</code></dd><dt>${t("machine.data")}</dt><dd>${me.data_folders.map((each) => html`<div><code>${each}</code></div>`)}</dd>
        <dt>${t("machine.packages")}</dt><dd translate=${false}>${me.packages.join(", ")}</dd></dl>
      <div class="buttons" style=${{ marginTop: ".8rem" }}><button onClick=${leave}>${t("machine.leave")}</button></div></section>`;
}
