// Keeps a page current without a reload. The server sends one stream of hints; on a hint the script fetches the page again and
// replaces the parts with data-live="run task dag" that have changed. Focus, opened details and typed text are preserved.
// Without the stream the page is fetched every two seconds.

import { showTimes } from "./times.js";

const HINTS = ["run", "task", "dag", "schedule", "backfill", "pool", "runner"];
const MOST_NAMED = 50;
const DEBOUNCE_MS = 300, SPACING_MS = 1000, POLL_MS = 2000, RETRY_MS = 10000, LONGEST_RETRY_MS = 30000;

let stream = null, poll = null, pending = null, lastRead = 0, isReading = false, isAgain = false, failures = 0;
const written = new WeakMap(); // part → its HTML from the server, before times.js changed it

const parts = () => [...document.querySelectorAll("[data-live][id]")];

function remember() {
  for (const part of parts()) written.has(part) || written.set(part, part.innerHTML);
}

function concerns(part, name, hint) {
  const { live, liveDag, liveRun } = part.dataset;
  // A hint about a schedule also refreshes parts about DAGs.
  const word = name === "schedule" ? "dag" : name;
  return (live === "" || live.split(" ").some((each) => each === name || each === word))
    && (!liveDag || !hint.dag || liveDag === hint.dag) && (!liveRun || !hint.run_id || liveRun === String(hint.run_id));
}

function setLost(isLost) {
  const banner = document.getElementById("lost");
  if (!banner || banner.hidden === !isLost) return;
  banner.hidden = !isLost;
}

const FOCUSABLE = "a, button, input, select, summary, [tabindex='0']";

// An identifier of a control that does not depend on its position.
const named = (control) => `${control.tagName} ${control.getAttribute("href") ?? control.getAttribute("aria-label") ?? control.textContent.trim()}`;

// Finds the focused control again: by id, by its position in its row, or by its identifier.
function focused(part) {
  const active = document.activeElement;
  if (!part.contains(active) || active === part) return () => null;
  if (active.id) return () => document.getElementById(active.id);
  const row = active.closest("[data-row]");
  if (!row || !part.contains(row)) {
    const name = named(active);
    return () => [...part.querySelectorAll(FOCUSABLE)].find((each) => named(each) === name);
  }
  const place = [...row.querySelectorAll(FOCUSABLE)].indexOf(active), key = row.dataset.row;
  return () => part.querySelector(`[data-row="${CSS.escape(key)}"]`)?.querySelectorAll(FOCUSABLE)[place];
}

function keep(part) {
  const folds = [...part.querySelectorAll("details[id]")].map((each) => [each.id, each.open]);
  const scrolled = [...part.querySelectorAll("[id]")].filter((each) => each.scrollLeft || each.scrollTop)
    .map((each) => [each.id, each.scrollLeft, each.scrollTop]);
  const current = part.querySelector("[data-row].current")?.dataset.row;
  const said = part.querySelector("[data-said]")?.textContent;
  const chosen = [...part.querySelectorAll("[name=chosen]:checked")].map((each) => each.value);
  const again = focused(part);
  return () => {
    for (const [id, isOpen] of folds) part.querySelector(`#${CSS.escape(id)}`)?.toggleAttribute("open", isOpen);
    for (const [id, left, top] of scrolled) part.querySelector(`#${CSS.escape(id)}`)?.scrollTo(left, top);
    if (current) part.querySelector(`[data-row="${CSS.escape(current)}"]`)?.classList.add("current");
    for (const box of part.querySelectorAll("[name=chosen]")) box.checked = chosen.includes(box.value);
    again()?.focus({ preventScroll: true });
    const now = part.querySelector("[data-said]")?.textContent;
    if (now && now !== said) document.getElementById("said").textContent = now;
  };
}

function isBusy(part) {
  const active = document.activeElement;
  const isTyping = part.contains(active) && active.matches("input:not([type=checkbox]), textarea, select");
  // Keep a button while its request is in flight: htmx dispatches the events of the response on it.
  return isTyping || part.querySelector("dialog[open], .htmx-request") !== null;
}

function place(fresh) {
  for (const part of parts()) {
    const next = fresh.getElementById(part.id);
    if (!next || isBusy(part)) continue;
    const text = next.innerHTML;
    if (written.get(part) === text) continue;
    const restore = keep(part);
    part.replaceChildren(...document.importNode(next, true).childNodes);
    written.set(part, text);
    window.htmx?.process(part);
    showTimes(part);
    restore();
    part.dispatchEvent(new CustomEvent("evertick:placed", { bubbles: true }));
  }
}

// Fetches the page again, at most once a second; hints that arrive during a fetch cause one more.
export async function refresh() {
  if (isReading) { isAgain = true; return; }
  if (!parts().length) return;
  isReading = true;
  const address = location.href;
  try {
    const answer = await fetch(address, { headers: { Accept: "text/html", "X-Live": "1" }, redirect: "manual" });
    if (answer.type === "opaqueredirect") { location.reload(); return; }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    // If a search changed the URL in the meantime, the response belongs to the previous page.
    if (location.href === address) place(new DOMParser().parseFromString(text, "text/html"));
    else isAgain = true;
    failures = 0;
    setLost(false);
    if (stream?.readyState === EventSource.OPEN) stopPolling();
  } catch {
    failures += 1;
    setLost(true);
    startPolling();
  } finally {
    lastRead = Date.now();
    isReading = false;
  }
  if (isAgain) { isAgain = false; soon(); }
}

export function soon() {
  if (pending || document.hidden) return;
  const wait = Math.max(DEBOUNCE_MS, lastRead + SPACING_MS - Date.now());
  pending = setTimeout(() => { pending = null; refresh(); }, wait);
}

function startPolling() {
  if (poll) return;
  const again = () => {
    const wait = Math.min(POLL_MS * 2 ** Math.min(failures, 4), LONGEST_RETRY_MS);
    poll = setTimeout(async () => { if (!document.hidden) await refresh(); again(); }, wait);
  };
  again();
}

function stopPolling() {
  clearTimeout(poll);
  poll = null;
}

// The DAGs and runs that the parts of this page name; if a part names none, all.
function address() {
  const wanted = new URLSearchParams();
  for (const { dataset } of parts()) {
    if (dataset.liveRun) wanted.append("run", dataset.liveRun);
    else if (dataset.liveDag) wanted.append("dag", dataset.liveDag);
    else return "/api/v1/events";
  }
  const unique = new URLSearchParams([...new Set([...wanted].map(String))].map((each) => each.split(",")));
  return unique.size && unique.size <= MOST_NAMED ? `/api/v1/events?${unique}` : "/api/v1/events";
}

function listen() {
  if (stream || document.hidden) return;
  const opened = new EventSource(address());
  stream = opened;
  opened.onopen = () => { stopPolling(); setLost(false); soon(); };
  opened.onerror = () => {
    startPolling();
    // After an error response the browser does not reconnect, so the script does.
    if (opened.readyState === EventSource.CLOSED) { hangUp(); setTimeout(listen, RETRY_MS); }
  };
  opened.addEventListener("reset", soon);
  opened.addEventListener("end", () => { hangUp(); refresh(); setTimeout(listen, RETRY_MS); });
  for (const name of HINTS) {
    opened.addEventListener(name, (event) => {
      let hint = {};
      try { hint = JSON.parse(event.data); } catch { /* a hint without detail concerns everything */ }
      document.body.dispatchEvent(new CustomEvent(`live:${name}`, { detail: hint }));
      if (parts().some((part) => concerns(part, name, hint))) soon();
    });
  }
}

function hangUp() {
  stream?.close();
  stream = null;
}

// Browsers allow six connections to a host across all tabs, so a hidden tab closes its stream.
function onSight() {
  if (document.hidden) hangUp();
  else { listen(); soon(); }
}

export function keepLive() {
  remember();
  if (!parts().length && !document.querySelector("[data-hints]")) return;
  listen();
  // Some changes cause no hint, for example a crashed scheduler: such parts are refreshed at an interval.
  const every = Math.min(...parts().map((part) => Number(part.dataset.every) || Infinity));
  if (every < Infinity) setInterval(soon, every * 1000);
  document.addEventListener("visibilitychange", onSight);
  window.addEventListener("online", soon);
  window.addEventListener("pagehide", hangUp);
  window.addEventListener("pageshow", (event) => event.persisted && listen());
}
