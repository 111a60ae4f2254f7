// What the curves of a run show, made of the columns that the server sends.
import { get, html, part, settle, Store, useEffect, useMemo, useRef, useState, useStore } from "./base.js";
import { duration, figure, t, textOr, whole } from "./language.js";
import { Choice, metricName } from "./parts.js";

// Exponential moving average without the pull towards its beginning (Kingma and Ba 2015, section 3). weight: 0 is the
// raw line. What is not a number is passed over.
function smoothed(values, weight) {
  let [sum, share] = [0, 1];
  return values.map((value) => {
    if (typeof value !== "number") return null;
    sum = sum * weight + value * (1 - weight);
    share *= weight;
    return sum / (1 - share);
  });
}

const numbers = (values) => values.map((value) => (typeof value === "number" ? value : null)); // "nan" leaves a gap

// The curve of a run as far as this tab has it. Of tabs at the same point the first one that gets the lock asks for what
// is new, and passes it on.
class Growing extends Store {
  constructor(name) {
    super([null, null]); // the curve, the error
    this.name = name;
    this.channel = new BroadcastChannel(`drivetrain curve ${location.pathname} ${name}`);
    this.channel.onmessage = ({ data }) => this.take(data);
    this.see = () => this.ask();
    document.addEventListener("visibilitychange", this.see);
  }

  // sign: of the file as it is now. While an answer is awaited it may change again, and that may be the last change.
  ask(sign = this.wanted) {
    this.wanted = sign;
    if (document.hidden) return; // it is asked for when somebody looks
    this.work ??= this.catchUp().then((error) => error && this.set([this.value[0], error])).finally(() => { this.work = null; });
  }

  async catchUp() {
    try {
      do {
        await (navigator.locks && this.cursor ? navigator.locks.request(this.channel.name, () => this.fetch()) : this.fetch());
      } while (this.at !== this.wanted && !this.closed);
    } catch (error) { return error; }
  }

  async fetch() {
    await new Promise((done) => setTimeout(done)); // what another tab passed on comes first
    const [sign, after] = [this.wanted, this.cursor];
    if (after && this.at === sign) return;
    const answer = await get(`runs/${part(this.name)}/curve?most=2000${after ? `&after=${part(after)}` : ""}`);
    this.take({ sign, after, answer });
    if (after) this.channel.postMessage({ sign, after, answer });
  }

  take({ sign, after, answer }) {
    if (after !== this.cursor) return;
    this.at = sign;
    this.cursor = answer.cursor;
    this.set([extended(this.value[0], answer), null]);
  }

  close() {
    this.closed = true;
    this.channel.close();
    document.removeEventListener("visibilitychange", this.see);
  }
}

// Returns [curve, error] of a run. sign: changes when the file of its events does.
export function useCurve(name, sign) {
  const curve = useMemo(() => new Growing(name), [name]);
  useEffect(() => () => curve.close(), [curve]);
  useEffect(() => curve.ask(sign), [curve, sign]);
  return useStore(curve);
}

// Appends what came since; `reset` throws away what was there.
function extended(before, answer) {
  if (!before || answer.reset) return answer;
  const columns = {};
  const gaps = before.columns.step.map(() => null); // of what the points before did not have
  for (const [name, values] of Object.entries(answer.columns)) columns[name] = [...(before.columns[name] ?? gaps), ...values];
  return { ...answer, columns, evaluations: [...before.evaluations, ...answer.evaluations], marks: [...before.marks, ...answer.marks] };
}

const isNumber = (value) => typeof value === "number";

function trained(curve, name, axis, weight, color) {
  const { columns } = curve;
  if (!columns[name]?.some(isNumber)) return [];
  const x = columns[axis] ?? columns.step;
  const dots = !columns[name].some((value, i) => isNumber(value) && isNumber(columns[name][i + 1])); // a line needs two neighbours
  const raw = { x, y: numbers(columns[name]), color, raw: weight > 0 && !dots, dots };
  return weight > 0 ? [raw, { x, y: smoothed(columns[name], weight), color, smooth: true }] : [raw];
}

const inGibibytes = (all) => all.map((series) => ({ ...series, y: series.y.map((value) => (value === null ? null : value / 2 ** 30)) }));

// The share of time that each part of the training took, a line each.
function parts(curve, axis) {
  return Object.keys(curve.columns).filter((name) => name.startsWith("time_") && curve.columns[name].some(isNumber)).flatMap((name, i) =>
    trained(curve, name, axis, 0, `--c${i % 6}`).map((series) => ({ ...series, name: textOr(`chart.${name}`, name.slice(5).replaceAll("_", " ")) })));
}

// How busy the device is, of several ranks a line each.
function utilisation(curve, axis) {
  const ranks = Object.keys(curve.columns).filter((name) => /^utilisation_\d+$/.test(name));
  if (!ranks.length) return trained(curve, "utilisation", axis, 0, "--c1");
  return ranks.flatMap((name, rank) => trained(curve, name, axis, 0, `--c${rank % 6}`).map((series) => ({ ...series, name: t("chart.rank", { rank }), dash: rank >= 6 })));
}

function evaluated(curve, name, axis, color) {
  const own = curve.evaluations.filter((each) => isNumber(each.metrics[name]));
  return own.length ? [{ evaluation: true, x: own.map((each) => each[axis] ?? each.step), y: own.map((each) => each.metrics[name]), color, dots: true }] : [];
}

const metricsOf = (curves) => [...new Set(curves.flatMap((curve) => curve.evaluations.flatMap((each) => Object.keys(each.metrics))))].filter((name) => name !== "loss");

// Returns the charts of a run: [{name, series}]. axis: the column of x; weight: of the smoothing.
export function chartsOf(curve, axis, weight) {
  return [
    { name: "loss", series: [...trained(curve, "loss", axis, weight, "--c0"), ...evaluated(curve, "loss", axis, "--c1")] },
    ...metricsOf([curve]).map((name) => ({ name, series: evaluated(curve, name, axis, "--c2") })),
    { name: "lr", series: trained(curve, "lr", axis, 0, "--c3") },
    { name: "grad_norm", series: trained(curve, "grad_norm", axis, weight, "--c4") },
    { name: "memory", series: inGibibytes(trained(curve, "memory", axis, 0, "--c5")) },
    { name: "utilisation", series: utilisation(curve, axis) },
    { name: "time_by_part", series: parts(curve, axis) },
    { name: "samples_per_second", series: trained(curve, "samples_per_second", axis, weight, "--c2") },
  ].filter((chart) => chart.series.length);
}

// Returns the charts of several runs, [{run, curve}], a colour each.
export function comparedCharts(found, axis, weight, colors) {
  const each = (series) => found.flatMap(({ run, curve }, i) => series(curve, colors[i % colors.length])
    .map((own) => ({ ...own, name: run.name, dash: i >= colors.length })));
  return [
    { name: "loss", series: each((curve, color) => trained(curve, "loss", axis, weight, color).slice(-1)) },
    { name: "evaluation_loss", series: each((curve, color) => evaluated(curve, "loss", axis, color)) },
    ...metricsOf(found.map(({ curve }) => curve)).map((name) => ({ name, series: each((curve, color) => evaluated(curve, name, axis, color)) })),
    ...["lr", "grad_norm", "memory", "utilisation", "samples_per_second"].map((name) => ({
      name, series: each((curve, color) => (name === "memory" ? inGibibytes : (own) => own)(trained(curve, name, axis, name === "grad_norm" ? weight : 0, color)).slice(-1)) })),
  ].filter((chart) => chart.series.length);
}

// Returns the x of a mark, of which the server names the step.
export function placeOf(mark, curve, axis) {
  if (axis === "step") return mark.step;
  const steps = curve.columns.step;
  const values = curve.columns[axis];
  if (!steps?.length || !values) return null;
  let place = steps.findIndex((step) => step >= mark.step);
  if (place < 0) place = steps.length - 1;
  return typeof values[place] === "number" ? values[place] : null;
}

// How curves are shown; the choice stands in the page's address.

const AXES = ["step", "epoch", "samples", "tokens", "seconds"];

// curves: those that are shown; not all of them have tokens.
export function curveView(query, curves) {
  const axes = AXES.filter((name) => name !== "tokens" || curves.some((curve) => curve?.columns.tokens?.some(isNumber)));
  return { axes, axis: axes.includes(query.x) ? query.x : "step", log: query.log === "1", weight: Math.min(Number(query.smooth ?? 0.6) || 0, 0.99) };
}

export function CurveControls({ view: { axes, axis, log, weight } }) {
  return html`<div class="controls">
    <span><span class="quiet">${t("chart.x")}</span> <${Choice} label=${t("chart.x")} value=${axis} onChoose=${(x) => settle({ x })} options=${axes.map((each) => [each, t(`axis.${each}`)])} /></span>
    <label><input type="checkbox" checked=${log} onChange=${(event) => settle({ log: event.target.checked ? "1" : "" })} /> ${t("chart.log")}</label>
    <label>${t("chart.smooth")} <input type="range" min="0" max="0.98" step="0.02" value=${weight} onInput=${(event) => settle({ smooth: event.target.value })} /></label>
    <span class="quiet small mouse">${t("chart.zoom")}</span></div>`;
}

// A chart by uPlot, with a cursor that all charts of a page share; dragging zooms, a double click undoes it.

let library = null;

function uplot() {
  library ??= new Promise((done, failed) => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "static/vendor/uplot.css" });
    const script = Object.assign(document.createElement("script"), { src: "static/vendor/uplot.js" });
    script.onload = () => done(globalThis.uPlot);
    script.onerror = () => failed(new Error(script.src));
    document.head.append(style, script);
  });
  return library;
}

const probe = document.createElement("i");

function color(name) {
  if (!probe.isConnected) document.body.append(Object.assign(probe, { hidden: true }));
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const WHOLE = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)); // distances of ticks
const MARKS = { checkpoint: "--edge", best: "--good", restart: "--accent", trouble: "--bad", warning: "--warn" };

export function Chart({ title, series, marks, axis, log, group }) {
  const place = useRef();
  const chart = useRef(null);
  const [legend, setLegend] = useState(null);
  const [theme, setTheme] = useState(0);
  const shape = JSON.stringify([series.map((each) => [each.name, each.color, each.smooth, each.evaluation, each.raw]), axis, log, group, theme]);
  const latest = useRef();
  latest.current = { series, marks };
  useEffect(() => {
    const again = () => setTheme((n) => n + 1);
    const media = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", again);
    media.addEventListener("change", again);
    return () => { removeEventListener("theme", again); media.removeEventListener("change", again); };
  }, []);
  useEffect(() => {
    let gone = false;
    let observer;
    uplot().then((uPlot) => {
      if (gone) return;
      chart.current = new uPlot(options(uPlot, { place: place.current, series, axis, log, group, latest, setLegend }), data(uPlot, series), place.current);
      observer = new ResizeObserver(() => chart.current?.setSize(sizeOf(place.current)));
      observer.observe(place.current);
    });
    return () => { gone = true; observer?.disconnect(); chart.current?.destroy(); chart.current = null; };
  }, [shape]);
  useEffect(() => {
    const now = chart.current;
    if (!now) return;
    const { min, max } = now.scales.x;
    const zoomed = min > now.data[0][0] || max < now.data[0].at(-1);
    now.setData(data(globalThis.uPlot, series), !zoomed);
    if (zoomed) now.redraw();
  }, [series, marks]);
  const ends = series.map((each) => each.y.findLast((value) => value !== null && value !== undefined));
  return html`<figure data-chart=${title}>
    <figcaption><span>${metricName(title)}</span>${series.map((each, i) => (each.raw ? null : html`
      <span class="key" key=${i}><i style=${{ color: `var(${each.color})` }}></i>${each.name ? html`<span translate=${false}>${each.name}</span>` : t(each.evaluation ? "chart.evaluated" : each.smooth ? "chart.smoothed" : "chart.trained")}
        <b>${figure(legend ? legend[i] : ends[i])}</b></span>`))}</figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${t("chart.about", { name: metricName(title), value: figure(ends.at(-1)) })}></div></figure>`;
}

// the range of a single point, which uPlot would put into the middle of a much longer one
const aroundOne = (value) => [Math.min(value, 0), Math.max(value * 1.1, 1)];

const sizeOf = (place) => ({ width: Math.max(place.clientWidth, 100), height: Math.max(place.clientHeight, 100) });

function data(uPlot, series) {
  return series.length === 1 ? [series[0].x, series[0].y] : uPlot.join(series.map((each) => [each.x, each.y]), series.map((each) => [each.dots ? 2 : 1]));
}

function options(uPlot, { place, series, axis, log, group, latest, setLegend }) {
  const [ink, line] = [color("--quiet"), color("--line")];
  const grid = { stroke: line, width: 1 };
  const x = (value) => (axis === "seconds" ? duration(value) : Number.isInteger(value) ? whole(value) : figure(value, 3));
  return {
    ...sizeOf(place),
    cursor: { sync: { key: group, setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
    legend: { show: false },
    scales: { x: { time: false, range: (own, min, max) => (own.data[0].length === 1 ? aroundOne(own.data[0][0]) : [min, max]) }, y: log ? { distr: 3 } : {} },
    axes: [
      { stroke: ink, grid, ticks: grid, size: 30, ...(["step", "samples", "tokens"].includes(axis) ? { incrs: WHOLE } : {}), font: "12px system-ui", values: (_, ticks) => ticks.map(x) },
      { stroke: ink, grid, ticks: grid, size: 58, font: "12px system-ui", values: (_, ticks) => ticks.map((value) => (value === null ? "" : tick(value))) },
    ],
    series: [{}, ...series.map((each) => ({
      stroke: color(each.color), width: each.raw ? 1 : 2, alpha: each.raw ? 0.3 : 1, dash: each.dash ? [6, 4] : [], spanGaps: Boolean(each.dots),
      points: { show: Boolean(each.dots) || each.y.length < 3, size: 6, fill: color(each.color) },
    }))],
    hooks: {
      setCursor: [(now) => setLegend(now.cursor.idx === null || now.cursor.idx === undefined ? null : series.map((_, i) => nearest(now.data[i + 1], now.cursor.idx)))],
      draw: [(now) => drawMarks(now, latest.current.marks)],
    },
  };
}

// a short figure: there is room for seven signs
const tick = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? Number(value.toPrecision(2)).toExponential() : figure(value, 3));

// the value at the cursor, or the last one before it
function nearest(values, place) {
  while (place > 0 && (values[place] === null || values[place] === undefined)) place -= 1;
  return values[place];
}

function drawMarks(chart, marks) {
  const { ctx } = chart;
  const { left, top, width, height } = chart.bbox;
  ctx.save();
  for (const { x, kind } of marks) {
    if (x === null) continue;
    const at = chart.valToPos(x, "x", true);
    if (at < left || at > left + width) continue;
    ctx.strokeStyle = color(MARKS[kind] ?? "--edge");
    ctx.lineWidth = devicePixelRatio * (kind === "checkpoint" ? 1 : 1.5);
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
    ctx.stroke();
  }
  ctx.restore();
}
