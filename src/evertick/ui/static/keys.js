// Keyboard shortcuts: ? help, / search, g and a letter to open a page, j and k to select rows, Enter to open one, and the
// letters of buttons with data-key. Ignored while the user types, and with Ctrl, Alt or Meta, which belong to the browser.

const GO_MS = 1200;
let goUntil = 0;

const isTyping = (element) => element.matches("input:not([type=checkbox]), textarea, select, [contenteditable]");
const isSeen = (element) => element.offsetParent !== null && !element.disabled;

function rows() {
  return [...document.querySelectorAll("[data-row]")].filter(isSeen);
}

function step(distance) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("current"));
  const next = all[at < 0 ? (distance > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + distance, 0), all.length - 1)];
  for (const row of all) row.classList.remove("current");
  next.classList.add("current");
  next.scrollIntoView({ block: "nearest" });
  (next.matches("a, button") ? next : next.querySelector("a, button"))?.focus({ preventScroll: true });
}

function press(key) {
  const row = document.querySelector("[data-row].current");
  const button = [...(row?.querySelectorAll(`[data-key="${CSS.escape(key)}"]`) ?? []),
    ...document.querySelectorAll(`[data-key="${CSS.escape(key)}"]:not([data-row] *)`)].find(isSeen);
  if (!button) return false;
  button.click();
  return true;
}

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey) return;
  if (isTyping(event.target)) {
    // Leave the field and keep its content: by default, browsers clear a search field on Escape.
    if (event.key === "Escape" && !event.target.closest("dialog")) {
      event.preventDefault();
      event.target.blur();
    }
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (Date.now() < goUntil) {
    goUntil = 0;
    const link = document.querySelector(`[data-go="${CSS.escape(event.key)}"]`);
    if (link) { event.preventDefault(); link.click(); return; }
  }
  let isOurs = true;
  if (event.key === "g") goUntil = Date.now() + GO_MS;
  else if (event.key === "?") document.getElementById("keys")?.showModal();
  else if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else isOurs = event.key.length === 1 && press(event.key);
  if (isOurs) event.preventDefault();
}

export function keepKeys() {
  document.addEventListener("keydown", onKey);
}
