// The browser sends no session cookie when the user follows a link from another site. A fetch from this page sends it: if the
// user is already signed in, go to the requested page.
const form = document.querySelector("form[data-wanted]");
const isRefused = document.querySelector("[role=alert]") !== null;
const answer = isRefused ? null : await fetch(form.dataset.wanted, { redirect: "manual" }).catch(() => null);
if (answer?.ok) location.replace(form.dataset.wanted);
