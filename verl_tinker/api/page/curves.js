// The live runs and the curves of their metrics, as SVG that is made here.
import { drawing, make } from "./elements.js";

const HIDDEN = new Set(["tokens", "weights_version"]);
const FIRST = ["loss", "grad_norm", "sampler_kl"];
const NAMES = { grad_norm: "gradient norm", sampler_kl: "sampler against trainer (nats)" };
const WIDTH = 300, HEIGHT = 100, MOST = 2000;

const short = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)
  ? String(Number(value.toPrecision(4))) : value.toExponential(2));

export class Curves {
  points = new Map();
  runs = new Map();

  clear() {
    this.points.clear();
  }

  show(place, runs, points) {
    for (const [run, added] of Object.entries(points)) {
      const all = [...(this.points.get(run) ?? []), ...added];
      this.points.set(run, all.slice(-MOST));
    }
    const live = new Set(runs.map((run) => run.run_id));
    for (const [id, card] of this.runs) {
      if (live.has(id)) continue;
      card.element.remove();
      this.runs.delete(id);
      this.points.delete(id);
    }
    place.querySelector(".none")?.remove();
    if (!runs.length) place.append(make("p", { className: "none", textContent: "No live run." }));
    for (const run of runs) {
      if (!this.runs.has(run.run_id)) this.runs.set(run.run_id, new Card(place, run));
      this.runs.get(run.run_id).show(run, this.points.get(run.run_id) ?? []);
    }
  }
}

class Card {
  charts = new Map();

  constructor(place, run) {
    this.facts = make("p", { className: "facts" });
    this.grid = make("div", { className: "charts" });
    const title = make("h3", { textContent: run.name ? `${run.name} (${run.run_id})` : run.run_id });
    this.element = make("article", { className: "run", ariaLabel: `Run ${run.run_id}` }, title, this.facts, this.grid);
    place.append(this.element);
  }

  show(run, points) {
    const shape = run.lora_rank ? `adapter of rank ${run.lora_rank}` : "all weights";
    const now = run.running ?? (run.place === "disk" ? "parked on disk" : "rests");
    const waiting = run.waiting ? `, ${run.waiting} waiting` : "";
    this.facts.textContent =
      `${run.base_model}, ${shape}, step ${run.steps}, weights version ${run.weights_version}; ${now}${waiting}`;
    const named = new Set(points.flatMap((point) => Object.keys(point.values)).filter((name) => !HIDDEN.has(name)));
    const others = [...named].filter((name) => !FIRST.includes(name)).sort();
    const names = [...FIRST.filter((name) => named.has(name)), ...others];
    for (const name of names) {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(this.grid, run.run_id, name));
      this.charts.get(name).show(points.filter((point) => name in point.values)
        .map((point) => [point.step, point.values[name]]));
    }
  }
}

class Chart {
  at = null;

  constructor(place, run, name) {
    this.name = NAMES[name] ?? name;
    this.run = run;
    this.value = make("output");
    this.svg = drawing("svg", {
      class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 });
    this.line = drawing("path", { class: "line" });
    this.mark = drawing("line", { class: "mark", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg.append(drawing("rect", { class: "frame", width: WIDTH, height: HEIGHT }), this.line, this.mark);
    this.from = make("span");
    this.to = make("span");
    this.top = make("span", { className: "high" });
    this.bottom = make("span", { className: "low" });
    place.append(make("figure", {},
      make("figcaption", {}, make("span", { textContent: this.name }), this.value),
      make("div", { className: "plot" }, this.svg, this.top, this.bottom),
      make("div", { className: "range" }, this.from, this.to)));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.read(Math.round(((event.clientX - box.left) / box.width) * (this.data.length - 1)));
    });
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("blur", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const last = this.data.length - 1;
    const keys = {
      ArrowLeft: (this.at ?? last + 1) - 1, ArrowRight: (this.at ?? last) + 1, Home: 0, End: last, Escape: null };
    const to = keys[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.read(to);
  }

  read(at) {
    this.at = at === null || !this.data.length ? null : Math.min(Math.max(at, 0), this.data.length - 1);
    this.tell();
  }

  show(data) {
    this.data = data;
    const values = data.map(([, value]) => value);
    this.low = Math.min(...values);
    this.high = Math.max(...values);
    const [first, last] = [data[0][0], data[data.length - 1][0]];
    this.x = (step) => (last === first ? WIDTH / 2 : ((step - first) / (last - first)) * WIDTH);
    const scale = this.high === this.low ? 0 : (HEIGHT - 8) / (this.high - this.low);
    const y = (value) => (scale ? HEIGHT - 4 - (value - this.low) * scale : HEIGHT / 2);
    const dots = data.map(([step, value]) => `${this.x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    // One point alone would be no line to see.
    this.line.setAttribute("d", dots.length > 1 ? `M${dots.join("L")}` : `M0 ${HEIGHT / 2}H${WIDTH}`);
    this.from.textContent = `step ${first}`;
    this.to.textContent = `${last}`;
    this.top.textContent = short(this.high);
    this.bottom.textContent = this.high === this.low ? "" : short(this.low);
    this.tell();
  }

  tell() {
    const [step, value] = this.data[this.at ?? this.data.length - 1];
    this.value.textContent = this.at === null ? short(value) : `step ${step}: ${short(value)}`;
    this.mark.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    this.mark.setAttribute("x1", this.x(step));
    this.mark.setAttribute("x2", this.x(step));
    const range = `between ${short(this.low)} and ${short(this.high)}`;
    this.svg.setAttribute("aria-label", `${this.name} of ${this.run}: ${short(value)} at step ${step}, ${range}`);
  }
}
