// A chart by uPlot: colours of the page's theme, a cursor that all charts of a page share, zoom by dragging (double click
// undoes it), and vertical marks.
import { html, useEffect, useRef, useState } from "./html.js";
import { t } from "./language.js";
import { duration, figure, whole } from "./numbers.js";
import { metricName } from "./parts.js";

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
      { stroke: ink, grid, ticks: grid, size: 30, ...(axis === "step" || axis === "samples" ? { incrs: WHOLE } : {}), font: "12px system-ui", values: (_, ticks) => ticks.map(x) },
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
