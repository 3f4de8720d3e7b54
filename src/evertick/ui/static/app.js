// Loaded by every page: live parts, times, toasts, dialogs, theme, keyboard shortcuts, and the CSRF token for each change.

import { keepLive, refresh, soon } from "./live.js";
import { keepTimes, showTimes } from "./times.js";
import { keepKeys } from "./keys.js";

const TOAST_MS = 8000, STORED = "evertick.said";
const FIELD = "form :is(input:not([type=hidden], [type=radio]:not(:checked)), textarea, select, button)";

// Live parts first: they record the server's HTML before times.js changes the timestamps.
keepLive();
keepTimes();
keepKeys();

export function toast(text, isBad = false) {
  const box = document.createElement("div");
  box.className = isBad ? "toast bad" : "toast";
  box.textContent = text;
  if (isBad) box.setAttribute("role", "alert");
  const close = document.createElement("button");
  close.type = "button";
  close.className = "button quiet";
  close.textContent = "×";
  close.setAttribute("aria-label", "Dismiss");
  close.onclick = () => box.remove();
  box.append(close);
  document.getElementById("toasts")?.append(box);
  if (!isBad) setTimeout(() => box.remove(), TOAST_MS);
}

document.addEventListener("htmx:configRequest", (event) => {
  const token = document.querySelector("meta[name=csrf-token]")?.content;
  if (token) event.detail.headers["X-CSRF-Token"] = token;
});
document.addEventListener("evertick:done", (event) => {
  const { text, stays } = event.detail;
  for (const open of document.querySelectorAll("dialog[open]")) open.close();
  if (stays) sessionStorage.setItem(STORED, text);
  else { toast(text); refresh(); }
});
document.addEventListener("evertick:failed", (event) => toast(event.detail.text, true));
document.addEventListener("evertick:signed-out", () => location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`));
document.addEventListener("htmx:sendError", () => toast("The server did not respond. The change may not have been applied. Try again.", true));
document.addEventListener("htmx:afterRequest", (event) => event.detail.requestConfig.verb === "get" || soon());
document.addEventListener("htmx:afterSettle", (event) => {
  showTimes(event.target);
  // A form was replaced, and with it the focused button: move the focus to the first invalid field.
  if (event.target.matches("form") && event.detail.requestConfig?.verb === "post") {
    (event.target.querySelector("[aria-invalid=true]") ?? event.target.querySelector("[type=submit]"))?.focus();
  }
});

// On a phone the menu and the tabs scroll horizontally: scroll the current entry into view.
for (const line of document.querySelectorAll(".menu, .tabs")) {
  const here = line.querySelector("[aria-current]");
  if (here && line.scrollWidth > line.clientWidth) line.scrollLeft = here.offsetLeft - line.offsetLeft - (line.clientWidth - here.offsetWidth) / 2;
}

// Charts that are wider than a phone open at their newest end.
for (const box of document.querySelectorAll("[data-newest]")) box.scrollLeft = box.scrollWidth;

const stored = sessionStorage.getItem(STORED);
if (stored) {
  sessionStorage.removeItem(STORED);
  toast(stored);
}

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-opens]");
  if (opener) showDialog(opener);
  const closer = event.target.closest("[data-closes]");
  if (closer) closer.closest("dialog")?.close();
  if (event.target.matches("dialog[open]")) event.target.close(); // a click on the backdrop
  if (event.target.closest("[data-theme-switch]")) switchTheme();
});

// Browsers return the focus to the opener of a dialog, unless a refresh replaced it while the dialog was open.
function showDialog(opener) {
  const box = document.getElementById(opener.dataset.opens);
  if (!box || box.open) return;
  opener.focus({ preventScroll: true }); // a keyboard shortcut does not focus the button
  box.addEventListener("close", () => {
    const held = document.activeElement;
    if (opener.isConnected || (held !== document.body && !box.contains(held))) return;
    document.querySelector(`[data-opens="${CSS.escape(box.id)}"]`)?.focus({ preventScroll: true });
  }, { once: true });
  box.showModal();
  box.querySelector(FIELD)?.focus(); // not the close button, which comes first
}

// Check boxes of rows, and the bar of actions for the selected ones.
function countChosen() {
  const bar = document.querySelector("[data-bulk]");
  if (!bar) return;
  const boxes = [...document.querySelectorAll("[name=chosen]")], count = boxes.filter((box) => box.checked).length;
  bar.hidden = count === 0;
  bar.querySelector("[data-bulk-count]").textContent = `${count} selected`;
  for (const all of document.querySelectorAll("[data-choose-all]")) {
    all.checked = count > 0 && count === boxes.length;
    all.indeterminate = count > 0 && count < boxes.length;
  }
}
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-choose-all]")) for (const box of document.querySelectorAll("[name=chosen]")) box.checked = event.target.checked;
  if (event.target.matches("[data-choose-all], [name=chosen]")) countChosen();
});
for (const name of ["evertick:placed", "htmx:afterSettle", "pageshow"]) window.addEventListener(name, countChosen);
document.addEventListener("evertick:done", () => {
  for (const box of document.querySelectorAll("[name=chosen]:checked")) box.checked = false;
  countChosen();
});

// The list of zones is long: it is filled when the user opens it.
const zones = document.querySelector("[data-zone-select]");
if (zones) {
  const own = Intl.DateTimeFormat().resolvedOptions().timeZone;
  zones.options[0].textContent = `${own} (browser)`;
  const shown = document.querySelector("[data-zone-name]");
  if (shown && !zones.value) shown.textContent = own;
  for (const name of ["pointerdown", "focus"]) zones.addEventListener(name, fillZones, { once: true });
  zones.addEventListener("change", () => {
    document.cookie = `evertick_zone=${zones.value}; path=/; SameSite=Lax; max-age=${zones.value ? 31536000 : 0}`;
    location.reload();
  });
}

function fillZones() {
  const known = new Set([...zones.options].map((option) => option.value));
  zones.append(...Intl.supportedValuesOf("timeZone").filter((name) => !known.has(name)).map((name) => new Option(name)));
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("evertick.theme", root.dataset.theme);
}

// Replaces the browser's confirm() by an accessible dialog in the style of the page; Enter confirms, Escape cancels.
document.addEventListener("htmx:confirm", (event) => {
  if (!event.detail.question) return;
  event.preventDefault();
  const box = document.createElement("dialog");
  box.className = "dialog";
  const text = document.createElement("p");
  text.textContent = event.detail.question;
  const row = document.createElement("div");
  row.className = "actions";
  const yes = document.createElement("button"), no = document.createElement("button");
  yes.type = no.type = "button";
  yes.className = "button primary";
  no.className = "button";
  yes.textContent = event.detail.elt.textContent.trim();
  no.textContent = "Go back";
  yes.onclick = () => { box.close(); event.detail.issueRequest(true); };
  no.onclick = () => box.close();
  box.onclose = () => box.remove();
  row.append(yes, no);
  box.append(text, row);
  document.body.append(box);
  box.showModal();
  yes.focus();
});
