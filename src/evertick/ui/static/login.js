// A link from another site reaches us without the session's cookie. From here the browser sends it: whoever is signed in goes on.
const form = document.querySelector("form[data-wanted]");
const answer = await fetch("/auth/session", { headers: { Accept: "application/json" } }).catch(() => null);
if (answer?.ok && !document.querySelector("[role=alert]")) location.replace(form.dataset.wanted);
