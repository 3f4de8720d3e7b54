// The log of a task: a bounded, moving window of its lines. Lines become text nodes, never markup.
//
// The server returns lines after or before a position (`next`, `first`). The page holds at most MOST_NODES lines: when lines are
// added at one end, lines out of sight at the other end are removed. New lines of a running task arrive through a stream; while
// there is no stream, the script polls.

import { preciseClock } from "./times.js";

const MOST_NODES = 3600;
const ASK_MS = 2000;
const RETRY_MS = 10000;
const MOST_ATTEMPTS = 50;
const NEAR_PIXELS = 600;
// A count reads 2 MB of log per request: beyond 100 MB the number is shown as a minimum.
const MOST_COUNTS = 50;
const ANSI = /\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])/g;
// Characters that reorder or hide adjacent text are shown as their code points.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

// Levels that are shown by another name, as on the command line.
const LEVEL_WORDS = { OUT: "stdout", ERR: "stderr", RAW: "output", RENDER: "template", MARK: "evertick" };

// The folder of a bundle in a traceback: without it, the file and the line number are in view.
const BUNDLE_PATH = /(?<=File ")\/[^"\n]{0,500}\/[0-9a-f]{64}\//g;

function visible(text) {
  return text.replace(UNSEEN, (mark) => `⟨U+${mark.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Terminal colors as classes. `codes` as in ESC[1;31m; returns the style that applies from there on. */
export function styled(style, codes) {
  const next = { ...style };
  const numbers = codes.split(";").map((code) => Number(code || 0));
  for (let n = 0; n < numbers.length; n += 1) {
    const code = numbers[n];
    if (code === 0) for (const name of Object.keys(next)) delete next[name];
    else if (code === 1) next.bold = "ansi-bold";
    else if (code === 2) next.bold = "ansi-dim";
    else if (code === 3) next.italic = "ansi-italic";
    else if (code === 4) next.underline = "ansi-underline";
    else if (code === 22) delete next.bold;
    else if (code === 23) delete next.italic;
    else if (code === 24) delete next.underline;
    else if (code >= 30 && code <= 37) next.ink = `ansi-ink-${code - 30}`;
    else if (code >= 90 && code <= 97) next.ink = `ansi-ink-${code - 82}`;
    else if (code === 39) delete next.ink;
    else if (code >= 40 && code <= 47) next.ground = `ansi-ground-${code - 40}`;
    else if (code >= 100 && code <= 107) next.ground = `ansi-ground-${code - 92}`;
    else if (code === 49) delete next.ground;
    else if (code === 38 || code === 48) {
      // Of 256 colors only the sixteen named ones are shown; other text keeps the default color.
      const number = numbers[n + 1] === 5 ? numbers[n + 2] : -1;
      if (number >= 0 && number < 16) next[code === 38 ? "ink" : "ground"] = `ansi-${code === 38 ? "ink" : "ground"}-${number}`;
      n += numbers[n + 1] === 5 ? 2 : 4;
    }
  }
  return next;
}

/** Text with terminal colors as nodes. */
export function coloured(text) {
  const nodes = [];
  let style = {};
  let from = 0;
  const add = (piece) => {
    if (!piece) return;
    const classes = Object.values(style);
    if (classes.length === 0) {
      nodes.push(document.createTextNode(visible(piece)));
      return;
    }
    const span = document.createElement("span");
    span.className = classes.join(" ");
    span.textContent = visible(piece);
    nodes.push(span);
  };
  for (const found of text.matchAll(ANSI)) {
    add(text.slice(from, found.index));
    if (found[2] === "m" && nodes.length < 200) style = styled(style, found[1]);
    from = found.index + found[0].length;
  }
  add(text.slice(from));
  return nodes;
}

function row(line) {
  const item = document.createElement("li");
  item.className = `log-line log-${line.level.toLowerCase()}`;
  item.dataset.place = line.place;
  const time = document.createElement("time");
  if (line.at) {
    time.dateTime = line.at;
    time.title = line.at;
    time.textContent = preciseClock(new Date(line.at));
  }
  const level = document.createElement("span");
  level.className = "log-level";
  level.textContent = LEVEL_WORDS[line.level] ?? line.level;
  const text = document.createElement("span");
  text.className = "log-text";
  text.append(...coloured(line.text.replace(BUNDLE_PATH, "")));
  if (line.is_late) text.append(" (late)");
  item.append(time, level, text);
  item.nodes = 4 + 2 * text.childNodes.length;
  return item;
}

/** Compares two positions: negative if the first one is earlier. */
function compared(one, other) {
  const [a, b] = [one, other].map((place) => place.split(".").map(Number));
  return a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
}

class LogView {
  constructor(root) {
    this.root = root;
    this.url = root.dataset.url;
    this.stream = null;
    this.list = root.querySelector("ol");
    this.status = root.querySelector("[data-log-status]");
    this.find = root.querySelector("[data-log-find]");
    this.level = root.querySelector("[data-log-level]");
    this.slider = root.querySelector("[data-log-slider]");
    this.followButton = root.querySelector("[data-log-follow]");
    this.first = null;
    this.next = null;
    this.isStart = false;
    this.isEnd = false;
    this.isOver = false;
    this.isFollowing = root.dataset.follow === "yes";
    this.turn = 0;
    this.nodes = 0;
    this.busy = false;
    this.listen();
    this.show({ back: "1" }, "end").then(() => this.hear());
  }

  listen() {
    this.list.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.list.addEventListener("wheel", (event) => event.deltaY < 0 && this.follow(false), { passive: true });
    this.list.addEventListener("keydown", (event) => {
      if (["ArrowUp", "PageUp", "Home"].includes(event.key)) this.follow(false);
      if (event.key === "Home") this.show({ at: "0.0.0" }, "start");
      if (event.key === "End") this.show({ back: "1" }, "end");
      if (["Home", "End"].includes(event.key)) event.preventDefault();
    });
    let wait = 0;
    this.find.addEventListener("input", () => {
      clearTimeout(wait);
      wait = setTimeout(() => this.sift(), 250);
    });
    this.level.addEventListener("change", () => this.sift());
    this.slider.addEventListener("change", () => this.seek(Number(this.slider.value) / 1000));
    this.root.addEventListener("click", (event) => {
      const button = event.target.closest("[data-log-do]");
      if (button) this.do(button.dataset.logDo, button.dataset.place);
    });
    setInterval(() => this.more().then(() => this.fill()), ASK_MS);
    // A task that ended may run again: notify the rest of the page.
    document.addEventListener("evertick:placed", () => this.isOver && this.extend().then(() => this.hear()));
    document.addEventListener("visibilitychange", () => document.hidden ? this.hangUp() : this.extend().then(() => this.hear()));
    window.addEventListener("pagehide", () => this.hangUp());
  }

  /** Streams new lines, starting at the end of the last fetched window. */
  hear() {
    if (this.stream || this.isOver || document.hidden || this.next === null) return;
    // With too many attempts (a sensor has one per poke) their end positions do not fit the stream's URL, so the script polls.
    if ((this.sizes ?? []).length > MOST_ATTEMPTS) return;
    const after = (this.sizes ?? []).map(([epoch, size, last]) => `${epoch}.${last}.${size}`).join(",");
    const query = new URLSearchParams({ follow: "true", map_index: this.root.dataset.mapIndex, ...(after && { after }) });
    const opened = new EventSource(`${this.root.dataset.stream}?${query}`);
    this.stream = opened;
    opened.onopen = () => { this.root.dataset.heard = "yes"; };
    opened.addEventListener("lines", (event) => this.grown(JSON.parse(event.data), event.lastEventId));
    opened.addEventListener("end", () => { this.hangUp(); this.extend(); });
    opened.onerror = () => {
      // After an error response the browser does not reconnect, so the script does, and polls until then.
      if (opened.readyState !== EventSource.CLOSED) return;
      this.hangUp();
      setTimeout(() => this.hear(), RETRY_MS);
    };
  }

  hangUp() {
    this.stream?.close();
    this.stream = null;
    delete this.root.dataset.heard;
  }

  /** Adds a newly stored chunk; `id` contains for each attempt where its last chunk begins and ends. */
  grown({ epoch, lines, is_late }, id) {
    const [, seq, until] = id.split(",").map((part) => part.split(".").map(Number)).find(([number]) => number === epoch);
    this.sizes = [...(this.sizes ?? []).filter(([number]) => number !== epoch), [epoch, until, seq]].sort((a, b) => a[0] - b[0]);
    if (!this.isEnd) { this.tell(); return; } // fetched when the user scrolls there
    if (this.busy || this.find.value || this.level.value) { this.extend(); return; }
    const placed = lines.map((line, number) => ({ ...line, is_late, place: `${epoch}.${seq}.${number}` }));
    const news = placed.filter((line) => compared(line.place, this.next) >= 0);
    if (news.length === 0) return;
    this.next = `${epoch}.${seq}.${lines.length}`;
    this.add(news, false);
    if (this.isFollowing) this.list.scrollTop = this.list.scrollHeight;
    this.tell();
  }

  do(what, place) {
    if (what === "start") { this.follow(false); this.show({ at: "0.0.0" }, "start"); }
    if (what === "end") this.show({ back: "1" }, "end");
    if (what === "follow") this.follow(!this.isFollowing);
    if (what === "error") this.firstError();
    if (what === "attempt") { this.follow(false); this.show({ at: place }, "start"); }
    if (what === "wrap") {
      const button = this.root.querySelector("[data-log-do=wrap]");
      button.setAttribute("aria-pressed", String(this.list.classList.toggle("log-wraps")));
    }
  }

  follow(isOn) {
    if (this.isFollowing === isOn) return;
    this.isFollowing = isOn;
    this.followButton.setAttribute("aria-pressed", String(isOn));
    if (isOn) this.show({ back: "1" }, "end");
  }

  sift() {
    // A search starts at the beginning of the log; without one the newest lines are shown.
    if (this.find.value || this.level.value) { this.follow(false); this.show({ at: "0.0.0" }, "start"); }
    else this.show({ back: "1" }, "end");
  }

  async ask(query, isPlain = false) {
    const params = new URLSearchParams({ ...query, map_index: this.root.dataset.mapIndex });
    if (!isPlain && this.find.value) params.set("find", this.find.value);
    if (!isPlain && this.level.value) params.set("level", this.level.value);
    const answer = await fetch(`${this.url}?${params}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) {
      const told = await answer.json().catch(() => null);
      throw new Error(told?.detail ?? `the server answered ${answer.status}`);
    }
    return answer.json();
  }

  async attempt(work) {
    try {
      await work();
      this.tell();
    } catch (error) {
      this.status.textContent = `Connection lost (${error.message}): retrying.`;
    }
  }

  /** Replaces the displayed lines. */
  async show(query, edge) {
    const turn = (this.turn += 1);
    await this.attempt(async () => {
      let found = await this.ask(query);
      // A search may need several requests before a line matches.
      for (let n = 0; n < 50 && found.lines.length === 0 && !found.is_end && !query.back; n += 1) {
        found = await this.ask({ at: found.next });
        if (turn !== this.turn) return;
      }
      if (turn !== this.turn) return;
      this.list.replaceChildren();
      this.nodes = 0;
      this.first = found.first;
      this.next = found.next;
      this.isStart = found.is_start;
      this.isEnd = found.is_end;
      this.isOver = found.is_over;
      this.sizes = found.sizes;
      this.add(found.lines, false);
      this.list.scrollTop = edge === "end" ? this.list.scrollHeight : 0;
      this.placeSlider();
    });
    if (turn !== this.turn) return;
    this.count(turn);
    await this.fill();
  }

  /** Loads more until the pane can scroll, or the log has no more lines in that direction. */
  async fill() {
    for (let goesOn = this.first !== null; goesOn;) {
      const { scrollTop, scrollHeight, clientHeight } = this.list;
      if (scrollTop < NEAR_PIXELS && !this.isStart) goesOn = await this.before();
      else if (scrollHeight - scrollTop - clientHeight < NEAR_PIXELS && !this.isEnd) goesOn = await this.extend();
      else goesOn = false;
    }
  }

  /** Counts the lines that match the search; of a growing log, also those that were added since. */
  async count(turn) {
    const isNew = this.countedTurn !== turn;
    if (isNew) Object.assign(this, { countedTurn: turn, hits: null, counted: "0.0.0" });
    if (!this.find.value && !this.level.value) return;
    if (this.isCounting && !isNew) { this.isUncounted = true; return; }
    this.isCounting = true;
    let sum = this.hits?.number ?? 0, isEnd = false;
    for (let n = 0; n < MOST_COUNTS && (!isEnd || this.isUncounted); n += 1) {
      this.isUncounted = false;
      const found = await this.ask({ at: this.counted, count: "1" }).catch(() => null);
      if (turn !== this.turn) return;
      if (found === null) break;
      sum += found.hits;
      this.counted = found.next;
      isEnd = found.is_end;
    }
    this.isCounting = false;
    this.hits = { number: sum, isAll: isEnd };
    this.tell();
  }

  add(lines, isBefore) {
    const rows = lines.map(row);
    for (const item of rows) this.nodes += item.nodes;
    if (isBefore) {
      const height = this.list.scrollHeight;
      this.list.prepend(...rows);
      this.list.scrollTop += this.list.scrollHeight - height;
    } else this.list.append(...rows);
    while (this.nodes > MOST_NODES && this.list.childElementCount > 1) {
      const gone = isBefore ? this.list.lastElementChild : this.list.firstElementChild;
      // Lines near the visible ones stay: they would be loaded again at once.
      const { scrollTop, clientHeight, offsetTop } = this.list;
      const top = gone.offsetTop - offsetTop;
      if (isBefore ? top < scrollTop + clientHeight + NEAR_PIXELS : top + gone.offsetHeight > scrollTop - NEAR_PIXELS) break;
      this.nodes -= gone.nodes;
      const height = this.list.scrollHeight;
      gone.remove();
      if (isBefore) {
        this.next = gone.dataset.place;
        this.isEnd = false;
      } else {
        this.list.scrollTop -= height - this.list.scrollHeight;
        this.first = this.list.firstElementChild.dataset.place;
        this.isStart = false;
      }
    }
  }

  async more() {
    // The log is complete if its end was fetched after the task ended.
    if (this.stream?.readyState === EventSource.OPEN) return;
    if (this.busy || !this.isEnd || this.isOver || document.hidden || this.next === null) return;
    await this.extend();
  }

  /** Loads the lines after the shown ones; returns whether that worked. */
  async extend() {
    if (this.next === null) return false;
    if (this.busy) { this.isAgain = true; return false; }
    this.busy = true;
    let isDone = false;
    const turn = this.turn;
    await this.attempt(async () => {
      const found = await this.ask({ at: this.next });
      if (turn !== this.turn) return;
      isDone = true;
      this.next = found.next;
      this.isEnd = found.is_end;
      this.isOver = found.is_over;
      this.sizes = found.sizes;
      this.add(found.lines, false);
      if (this.isFollowing) this.list.scrollTop = this.list.scrollHeight;
      this.count(turn);
    });
    this.busy = false;
    this.goOn();
    return isDone;
  }

  /** Fetches once more if new lines were reported during a fetch. */
  goOn() {
    if (!this.isAgain) return;
    this.isAgain = false;
    this.extend();
  }

  /** Loads the lines before the shown ones; returns whether that worked. */
  async before() {
    if (this.busy || this.isStart || this.first === null) return false;
    this.busy = true;
    let isDone = false;
    const turn = this.turn;
    await this.attempt(async () => {
      const found = await this.ask({ at: this.first, back: "1" });
      if (turn !== this.turn) return;
      isDone = true;
      this.first = found.first;
      this.isStart = found.is_start;
      this.add(found.lines, true);
    });
    this.busy = false;
    this.goOn();
    return isDone;
  }

  scrolled() {
    this.fill();
    this.placeSlider();
  }

  seek(share) {
    this.follow(false);
    const total = (this.sizes ?? []).reduce((sum, [, size]) => sum + size, 0);
    let rest = Math.floor(total * share);
    for (const [epoch, size] of this.sizes ?? []) {
      if (rest <= size) { this.show({ at: `${epoch}.${rest}.0` }, "start"); return; }
      rest -= size;
    }
  }

  placeSlider() {
    const top = this.list.firstElementChild;
    if (!top || document.activeElement === this.slider) return;
    const [at, offset] = top.dataset.place.split(".").map(Number);
    let before = 0;
    let total = 0;
    for (const [epoch, size] of this.sizes ?? []) {
      if (epoch < at) before += size;
      total += size;
    }
    this.slider.value = String(total ? Math.round((1000 * (before + offset)) / total) : 0);
  }

  async firstError() {
    this.follow(false);
    await this.attempt(async () => {
      let found = await this.ask({ at: "0.0.0", level: "error" }, true);
      for (let n = 0; n < 50 && found.lines.length === 0 && !found.is_end; n += 1) found = await this.ask({ at: found.next, level: "error" }, true);
      if (found.lines.length === 0) {
        this.note = "There are no lines of level ERROR.";
        return;
      }
      const place = found.lines[0].place;
      this.level.value = "";
      this.find.value = "";
      await this.show({ at: place }, "start");
      const line = [...this.list.children].find((item) => item.dataset.place === place);
      if (line) {
        line.classList.add("log-found");
        this.list.scrollTop = line.offsetTop - this.list.offsetTop - this.list.clientHeight / 3;
      }
    });
  }

  tell() {
    const note = this.note ?? "";
    this.note = undefined;
    const bytes = (this.sizes ?? []).reduce((sum, [, size]) => sum + size, 0);
    const size = bytes < 10_000 ? `${bytes} bytes` : bytes < 1e7 ? `${Math.round(bytes / 1000)} kB` : `${Math.round(bytes / 1e6)} MB`;
    const hits = this.hits && `${this.hits.isAll ? "" : "at least "}${this.hits.number} matching line${this.hits.number === 1 ? "" : "s"}`;
    const state = this.hits?.number ? hits : this.list.childElementCount === 0 ? (this.find.value || this.level.value ? "No line matches." : this.isOver ? "The log is empty." : "No output yet.") : size;
    this.status.textContent = [note, state, this.isOver ? "" : "live"].filter(Boolean).join(" · ");
    this.slider.hidden = this.isStart && this.isEnd && !this.find.value && !this.level.value;
    this.root.dataset.ready = "yes";
  }
}

function begin(scope) {
  for (const root of scope.querySelectorAll("[data-log]")) {
    if (root.dataset.begun) continue;
    root.dataset.begun = "yes";
    root.view = new LogView(root);
  }
}

begin(document);
document.addEventListener("htmx:load", (event) => begin(event.target));
