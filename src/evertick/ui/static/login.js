// A link from another site reaches us without the session's cookie. From here the browser sends it: whoever is signed in already
// gets the page that they wanted instead of a redirection to this one, and goes on.
const form = document.querySelector("form[data-wanted]");
const isRefused = document.querySelector("[role=alert]") !== null;
const answer = isRefused ? null : await fetch(form.dataset.wanted, { redirect: "manual" }).catch(() => null);
if (answer?.ok) location.replace(form.dataset.wanted);
