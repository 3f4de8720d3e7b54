// Applies the saved theme, dark or light, before the first paint.
const chosen = localStorage.getItem("evertick.theme");
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
