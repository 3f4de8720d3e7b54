// Before anything is drawn: the reader's choice of dark or light, if they made one.
const chosen = localStorage.getItem("evertick.theme");
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
