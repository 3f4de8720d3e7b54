// The graph of a DAG: drag to move, wheel or + and - to zoom, arrow keys to go from task to task. State changes update colors in
// place without a new layout.
//
// The graph is a compositor layer. Moving it is one transform and needs no repaint, whatever the number of tasks. Zooming scales
// the layer, too; it is redrawn sharp once, when the zooming stops.

const LARGEST = 3;
const SMALLEST = 0.05;
const READABLE = 0.55;
const REST_MS = 140;

class GraphView {
  constructor(root) {
    this.root = root;
    this.box = root.querySelector("[data-graph-box]");
    this.svg = this.box.querySelector("svg");
    this.width = Number(this.svg.dataset.width);
    this.height = Number(this.svg.dataset.height);
    this.x = 0;
    this.y = 0;
    this.scale = 1;
    this.drawn = 1; // the scale at which the layer was last drawn
    this.frame = 0;
    this.rest = 0;
    this.drag = null;
    root.classList.add("is-live");
    this.listen();
    this.fit();
  }

  listen() {
    this.box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey && !this.root.contains(document.activeElement)) return;
      event.preventDefault();
      const at = this.box.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 400), event.clientX - at.left, event.clientY - at.top);
    }, { passive: false });
    this.box.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.drag = { x: event.clientX - this.x, y: event.clientY - this.y, from: [event.clientX, event.clientY], isMoved: false };
    });
    this.box.addEventListener("pointermove", (event) => {
      if (!this.drag) return;
      if (!this.drag.isMoved && Math.hypot(event.clientX - this.drag.from[0], event.clientY - this.drag.from[1]) < 4) return;
      if (!this.drag.isMoved) this.box.setPointerCapture(event.pointerId);
      this.drag.isMoved = true;
      this.x = event.clientX - this.drag.x;
      this.y = event.clientY - this.drag.y;
      this.paint();
    });
    const release = () => {
      const wasMoved = this.drag?.isMoved;
      this.drag = null;
      if (wasMoved) this.box.addEventListener("click", (event) => event.preventDefault(), { once: true, capture: true });
    };
    this.box.addEventListener("pointerup", release);
    this.box.addEventListener("pointercancel", release);
    this.box.addEventListener("dragstart", (event) => event.preventDefault());
    this.root.addEventListener("click", (event) => {
      const button = event.target.closest("[data-graph-do]");
      if (button) this.do(button.dataset.graphDo);
    });
    this.root.addEventListener("keydown", (event) => this.pressed(event));
    this.svg.addEventListener("focusin", (event) => this.reveal(event.target));
    new ResizeObserver(() => this.isTouched || this.fit()).observe(this.box);
  }

  do(what) {
    const { clientWidth, clientHeight } = this.box;
    if (what === "in") this.zoom(1.3, clientWidth / 2, clientHeight / 2);
    if (what === "out") this.zoom(1 / 1.3, clientWidth / 2, clientHeight / 2);
    if (what === "fit") { this.isTouched = false; this.fit(); }
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const words = { "+": "in", "=": "in", "-": "out", 0: "fit" };
    if (words[event.key]) this.do(words[event.key]);
    else if (event.key.startsWith("Arrow") && event.target.closest(".graph-node")) this.walk(event.target.closest(".graph-node"), event.key);
    else return;
    event.preventDefault();
  }

  /** Moves the focus to the nearest task in that direction. */
  walk(from, key) {
    const here = [Number(from.dataset.x), Number(from.dataset.y)];
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
    let best = null;
    let least = Infinity;
    for (const node of this.nodes()) {
      const x = Number(node.dataset.x) - here[0];
      const y = Number(node.dataset.y) - here[1];
      const along = x * dx + y * dy;
      if (along <= 1) continue;
      const distance = along + 3 * Math.abs(x * dy + y * dx);
      if (distance < least) { least = distance; best = node; }
    }
    best?.focus();
  }

  nodes() {
    this.all ??= [...this.svg.querySelectorAll(".graph-node")];
    return this.all;
  }

  reveal(target) {
    const node = target.closest?.(".graph-node");
    if (!node || this.drag) return;
    const x = Number(node.dataset.x) * this.scale + this.x;
    const y = Number(node.dataset.y) * this.scale + this.y;
    const { clientWidth, clientHeight } = this.box;
    if (x > 40 && y > 20 && x < clientWidth - 120 && y < clientHeight - 40) return;
    this.x = clientWidth / 2 - Number(node.dataset.x) * this.scale;
    this.y = clientHeight / 2 - Number(node.dataset.y) * this.scale;
    this.paint();
  }

  zoom(factor, x, y) {
    const scale = Math.min(LARGEST, Math.max(SMALLEST, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.isTouched = true;
    this.paint();
  }

  /** Shows the whole graph if it is still readable at that size, otherwise its beginning. */
  fit() {
    const { clientWidth, clientHeight } = this.box;
    if (!clientWidth || !clientHeight) return;
    const whole = Math.min(clientWidth / this.width, clientHeight / this.height);
    this.scale = Math.min(1, Math.max(whole, READABLE));
    this.x = Math.max(0, (clientWidth - this.width * this.scale) / 2);
    this.y = Math.max(0, (clientHeight - this.height * this.scale) / 2);
    if (this.height * this.scale > clientHeight) this.y = (clientHeight - this.height * this.scale) / 2;
    this.paint();
  }

  paint() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      // Redraw immediately the first time, and when the layer is scaled up by 2 or more, because it would look blurred.
      const ratio = this.scale / this.drawn;
      if (!this.root.dataset.ready || ratio > 2 || ratio < 0.5) this.draw();
      else if (ratio !== 1) {
        clearTimeout(this.rest);
        this.rest = setTimeout(() => { this.draw(); this.paint(); }, REST_MS);
      }
      this.svg.style.transform = `translate(${this.x.toFixed(1)}px, ${this.y.toFixed(1)}px) scale(${(this.scale / this.drawn).toFixed(4)})`;
      this.root.dataset.ready = "yes";
    });
  }

  draw() {
    this.drawn = this.scale;
    this.svg.setAttribute("width", (this.width * this.scale).toFixed(1));
    this.svg.setAttribute("height", (this.height * this.scale).toFixed(1));
  }

  /** New states: {"idx": {state, count, title}}. */
  recolour(states) {
    for (const node of this.nodes()) {
      const now = states[node.dataset.idx];
      if (!now || now.state === node.dataset.state) {
        if (now) this.retitle(node, now);
        continue;
      }
      node.classList.replace(`s-${node.dataset.state}`, `s-${now.state}`);
      node.dataset.state = now.state;
      this.retitle(node, now);
    }
  }

  retitle(node, now) {
    const title = node.querySelector("title");
    if (title.textContent !== now.title) {
      title.textContent = now.title;
      node.setAttribute("aria-label", now.title);
    }
    const count = node.querySelector(".graph-count");
    if (count && count.textContent !== now.count) count.textContent = now.count;
    const mark = node.querySelector(".graph-mark");
    if (mark && mark.textContent !== now.mark) mark.textContent = now.mark;
  }

  async refresh() {
    if (this.isAsking || !this.root.dataset.states) return;
    this.isAsking = true;
    try {
      const answer = await fetch(this.root.dataset.states, { headers: { Accept: "application/json" } });
      if (answer.ok) this.recolour(await answer.json());
    } catch {
      // live.js reports the lost connection; the next hint retries.
    } finally {
      this.isAsking = false;
    }
  }
}

function begin(scope) {
  for (const root of scope.querySelectorAll("[data-graph]")) {
    if (root.dataset.begun) continue;
    root.dataset.begun = "yes";
    root.view = new GraphView(root);
  }
}

begin(document);
document.addEventListener("htmx:load", (event) => begin(event.target));

// On a hint of the stream or a replaced part of the page, fetch the task states once, after a short delay.
const ASK_MS = 300;
let asking = 0;
function soon() {
  asking ||= setTimeout(() => {
    asking = 0;
    document.querySelectorAll("[data-graph]").forEach((root) => root.view?.refresh());
  }, ASK_MS);
}
for (const name of ["live:task", "live:run", "evertick:placed"]) document.body.addEventListener(name, soon);
