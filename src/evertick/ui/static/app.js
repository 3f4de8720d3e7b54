// What every page has: live parts, times, toasts, dialogs, the theme, the keyboard, and the session's token with each change.

import { keepLive, refresh, soon } from "./live.js";
import { keepTimes, showTimes } from "./times.js";
import { keepKeys } from "./keys.js";

const TOAST_MS = 8000, STORED = "evertick.said";
const FIELD = "form :is(input:not([type=hidden], [type=radio]:not(:checked)), textarea, select, button)";

// Live parts first: they remember what the server wrote before the times are put into words.
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
document.addEventListener("htmx:sendError", () => toast("The server did not answer: nothing was changed, as far as we know. Try again.", true));
document.addEventListener("htmx:afterRequest", (event) => event.detail.requestConfig.verb === "get" || soon());
document.addEventListener("htmx:afterSettle", (event) => {
  showTimes(event.target);
  // A form that came back: the focus was on its button, which is gone, and belongs to the first field that is wrong.
  if (event.target.matches("form") && event.detail.requestConfig?.verb === "post") {
    (event.target.querySelector("[aria-invalid=true]") ?? event.target.querySelector("[type=submit]"))?.focus();
  }
});

// On a phone the menu and the views of a page are lines that scroll: where one is shall be seen.
for (const line of document.querySelectorAll(".menu, .tabs")) {
  const here = line.querySelector("[aria-current]");
  if (here && line.scrollWidth > line.clientWidth) line.scrollLeft = here.offsetLeft - line.offsetLeft - (line.clientWidth - here.offsetWidth) / 2;
}

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
  if (event.target.matches("dialog[open]")) event.target.close(); // beside the box
  if (event.target.closest("[data-theme-switch]")) switchTheme();
});

// A browser gives the focus back to what had it, unless that is gone: the page may have been read anew behind the dialog.
function showDialog(opener) {
  const box = document.getElementById(opener.dataset.opens);
  if (!box || box.open) return;
  opener.focus({ preventScroll: true }); // a letter may have pressed it
  box.addEventListener("close", () => {
    const held = document.activeElement;
    if (opener.isConnected || (held !== document.body && !box.contains(held))) return;
    document.querySelector(`[data-opens="${CSS.escape(box.id)}"]`)?.focus({ preventScroll: true });
  }, { once: true });
  box.showModal();
  box.querySelector(FIELD)?.focus(); // and not the button that closes it, which comes first
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("evertick.theme", root.dataset.theme);
}

// A confirmation that looks like the rest, can be read aloud, and is answered by Enter or Escape.
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
  no.textContent = "Do nothing";
  yes.onclick = () => { box.close(); event.detail.issueRequest(true); };
  no.onclick = () => box.close();
  box.onclose = () => box.remove();
  row.append(yes, no);
  box.append(text, row);
  document.body.append(box);
  box.showModal();
  yes.focus();
});
