// Numbers and times as people read them. Units: bytes in binary steps, times in unix milliseconds.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNTS = ["", "k", "M", "G", "T"];
const NONE = "–";

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  const digits = unit === 0 ? (Number.isInteger(value) || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) < 10 ? 2 : 1)
    : Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
  return [value.toFixed(digits), units[unit]];
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function bytes(value) {
  if (!known(value)) return NONE;
  return scaled(value, 1024, BYTES).join("\u00a0");
}

export function count(value) {
  if (!known(value)) return NONE;
  if (Number.isInteger(value) && Math.abs(value) < 10_000) return value.toLocaleString("en-US");
  const [number, unit] = scaled(value, 1000, COUNTS);
  return unit ? `${number}\u00a0${unit}` : number;
}

export function percent(share) {
  if (!known(share)) return NONE;
  const value = share * 100;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)}\u00a0%`;
}

export function exact(value) {
  return known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 6 }) : NONE;
}

export function duration(ms) {
  if (!known(ms)) return NONE;
  if (ms < 1) return `${(ms * 1000).toFixed(0)}\u00a0µs`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)}\u00a0ms`;
  const s = ms / 1000;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : s.toFixed(0)}\u00a0s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes}\u00a0min ${Math.floor(s % 60)}\u00a0s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours}\u00a0h ${minutes % 60}\u00a0min`;
  return `${Math.floor(hours / 24)}\u00a0d ${hours % 24}\u00a0h`;
}

export function ago(ms, now = Date.now()) {
  return known(ms) && ms > 0 ? `${seconds(Math.max(0, now - ms))} ago` : NONE;
}

const two = (value) => String(value).padStart(2, "0");

/** A duration in whole seconds. */
export function seconds(ms) {
  return known(ms) && ms < 60_000 ? `${Math.floor(ms / 1000)}\u00a0s` : duration(ms);
}

/** Local time of day. */
export function clock(ms) {
  if (!known(ms) || ms <= 0) return NONE;
  const at = new Date(ms);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function date(ms) {
  if (!known(ms) || ms <= 0) return NONE;
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(ms)}`;
}

/** A value of a document as text; the end of its name gives the unit. */
export function named(name, value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (name === "pid") return String(value);
  if (typeof value === "number") {
    if (/bytes(_total)?$/.test(name)) return bytes(value);
    if (/(^|_)unix_ms$|(started|registered|last|begun)_ms$/.test(name)) return date(value);
    if (/_ms$/.test(name)) return duration(value);
    if (/_ns$/.test(name)) return duration(value / 1e6);
    if (/(^|_)s$/.test(name) && !/unix_s$/.test(name)) return duration(value * 1000);
    return exact(value);
  }
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** `peak_rss_bytes` as words: "Peak RSS". */
export function words(name) {
  const text = name.replace(/_(bytes|ms|ns|s)$/, "").replaceAll("_", " ").replace(/\b(rss|cpu|gc|id|tid|pid|l1|l2)\b/g, (word) => word.toUpperCase());
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The facts of an event as text, such as "tags l1 400; took 52 ms". */
export function factsText(facts) {
  return Object.entries(facts).filter(([, value]) => value !== "" && value !== null).map(([name, value]) => {
    if (name === "ok") return value ? "done" : "failed";
    if (name === "reason" || name === "message") return String(value);
    return `${words(name).toLowerCase()} ${named(name, value)}`;
  }).join("; ");
}
