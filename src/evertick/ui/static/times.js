// Shows timestamps in the selected time zone, by default the browser's, and keeps relative ones current: "12 s ago", "in 5 min". The title has the exact time.

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const timeZone = zoneOf(document.documentElement.dataset.zone);
const day = new Intl.DateTimeFormat(undefined, { timeZone, weekday: "short", day: "numeric", month: "short" });
const year = new Intl.DateTimeFormat(undefined, { timeZone, day: "numeric", month: "short", year: "numeric" });
const clock = new Intl.DateTimeFormat(undefined, { timeZone, hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const precise = new Intl.DateTimeFormat("en-GB", { timeZone, hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23" });
const exact = new Intl.DateTimeFormat(undefined, { timeZone, dateStyle: "full", timeStyle: "long" });

/** The selected zone if the browser knows it; undefined is the browser's own. */
function zoneOf(name) {
  try {
    return name ? new Intl.DateTimeFormat(undefined, { timeZone: name }).resolvedOptions().timeZone : undefined;
  } catch {
    return undefined;
  }
}

/** With milliseconds, for lines of a log. */
export const preciseClock = (instant) => precise.format(instant);

export function rough(seconds) {
  const [size, unit] = UNITS.find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

export function relative(instant, now) {
  const seconds = (instant - now) / 1000;
  if (Math.abs(seconds) < 1) return "now";
  return seconds > 0 ? `in ${rough(seconds)}` : `${rough(-seconds)} ago`;
}

export function length(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const place = UNITS.findIndex(([size]) => seconds >= size);
  const [size, unit] = UNITS[place], [nextSize, nextUnit] = UNITS[place + 1];
  const rest = Math.floor((seconds % size) / nextSize);
  return `${Math.floor(seconds / size)} ${unit}` + (rest ? ` ${rest} ${nextUnit}` : "");
}

export function clockOf(instant, now) {
  const isToday = year.format(instant) === year.format(now);
  const isNear = Math.abs(instant - now) < 300 * 86400e3;
  return (isToday ? "" : `${(isNear ? day : year).format(instant)} `) + clock.format(instant);
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function showTimes(root = document) {
  const now = new Date();
  for (const element of root.querySelectorAll("time[data-as]")) {
    const instant = new Date(element.dateTime);
    const how = element.dataset.as;
    if (how === "relative") put(element, relative(instant, now));
    else if (how === "clock") put(element, clockOf(instant, now));
    else put(element, `${clockOf(instant, now)} (${relative(instant, now)})`);
    if (!element.dataset.exact) {
      element.dataset.exact = "yes";
      element.title = `${exact.format(instant)} · ${element.title}`;
    }
  }
  for (const element of root.querySelectorAll("[data-since]")) {
    put(element, length(Math.max(0, (now - new Date(element.dataset.since)) / 1000)));
  }
}

export function keepTimes() {
  showTimes();
  setInterval(() => document.hidden || showTimes(), 1000);
}
