// Collapses groups of the grid. Collapsed groups stay collapsed when the grid is refreshed.

const grid = () => document.getElementById("grid");
const key = () => `evertick.folded.${grid().dataset.dag}`;
const folded = () => new Set(JSON.parse(localStorage.getItem(key()) ?? "[]"));

function show() {
  const closed = folded();
  for (const line of grid().querySelectorAll("[data-line]")) {
    line.hidden = line.dataset.inside.split(" ").some((group) => group && closed.has(group));
  }
  for (const button of grid().querySelectorAll("[data-folds]")) {
    button.setAttribute("aria-expanded", String(!closed.has(button.dataset.folds)));
  }
}

function keepFolded(closed) {
  localStorage.setItem(key(), JSON.stringify([...closed]));
  show();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-folds]");
  if (button) {
    const closed = folded();
    closed.has(button.dataset.folds) ? closed.delete(button.dataset.folds) : closed.add(button.dataset.folds);
    keepFolded(closed);
  } else if (event.target.closest("[data-fold-all]")) {
    const all = [...grid().querySelectorAll("[data-folds]")].map((each) => each.dataset.folds);
    keepFolded(folded().size ? [] : all);
  }
});
document.addEventListener("evertick:placed", show);
document.addEventListener("htmx:afterSettle", show);
show();
