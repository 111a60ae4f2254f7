// Numbers, sizes and times as people read them.
import { locale, t } from "./language.js";

export function figure(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value); // "nan", "inf"
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
  return value.toLocaleString(locale(), { maximumSignificantDigits: Math.max(digits, Math.abs(value) >= 1 ? Math.trunc(Math.log10(Math.abs(value))) + 1 : 1) });
}

export const whole = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString(locale()));

export function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) { value /= 1024; step += 1; }
  return `${value.toLocaleString(locale(), { maximumFractionDigits: step && value < 100 ? 1 : 0 })} ${units[step]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return t("time.seconds", { n: Math.round(seconds) });
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return t("time.minutes", { n: minutes });
  if (minutes < 2880) return t("time.hours", { n: Math.floor(minutes / 60), m: minutes % 60 });
  return t("time.days", { n: Math.floor(minutes / 1440), h: Math.floor((minutes % 1440) / 60) });
}

export function moment(text) {
  if (!text) return "";
  const date = new Date(text);
  const today = date.toDateString() === new Date().toDateString();
  return date.toLocaleString(locale(), today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
}
