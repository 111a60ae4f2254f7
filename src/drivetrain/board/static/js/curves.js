// What the curves of a run show, made of the columns that the server sends.
import { textOr } from "./language.js";

// Exponential moving average without the pull towards its beginning (Kingma and Ba 2015, section 3). weight: 0 is the
// raw line. What is not a number is passed over.
export function smoothed(values, weight) {
  let [sum, share] = [0, 1];
  return values.map((value) => {
    if (typeof value !== "number") return null;
    sum = sum * weight + value * (1 - weight);
    share *= weight;
    return sum / (1 - share);
  });
}

export const numbers = (values) => values.map((value) => (typeof value === "number" ? value : null)); // "nan" leaves a gap

// Appends what came since; `reset` throws away what was there.
export function extended(before, answer) {
  if (!before || answer.reset) return answer;
  const columns = {};
  for (const [name, values] of Object.entries(answer.columns)) columns[name] = [...(before.columns[name] ?? []), ...values];
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
    { name: "utilisation", series: trained(curve, "utilisation", axis, 0, "--c1") },
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
