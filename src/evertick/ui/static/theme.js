// Applies the saved theme, dark or light, before the first paint, and reports the browser's time zone.
const chosen = localStorage.getItem("evertick.theme");
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
// The server renders times in the browser's time zone, unless the user selects another one.
document.cookie = `evertick_browser_zone=${Intl.DateTimeFormat().resolvedOptions().timeZone}; path=/; max-age=31536000; SameSite=Lax`;
