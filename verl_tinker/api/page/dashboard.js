// Shows what /api/v1/overview/events tells, once a second. Holds no state but the curves of the runs that it has seen.
import { Curves } from "./curves.js";
import { make, table } from "./elements.js";

const API = "api/v1";
const $ = (id) => document.getElementById(id);
const curves = new Curves();
let lastDrawn = {};

function draw(id, content, build) {
  // Only what has changed is drawn anew, so that the focus and a selection stay where they are.
  const key = JSON.stringify(content);
  if (lastDrawn[id] === key) return;
  lastDrawn[id] = key;
  $(id).replaceChildren(...build());
}

// Words

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

function span(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= length) return `${Math.round(seconds / length)} ${unit}`;
  return `${Math.max(0, Math.round(seconds))} s`;
}

const total = (counts) => Object.values(counts).reduce((sum, count) => sum + count, 0);

function say(text) {
  $("said").textContent = text;
  $("said").hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => ($("said").hidden = true), 8000);
}

// The server

const key = () => sessionStorage.getItem("key") ?? "";

async function ask(path, options = {}) {
  const answer = await fetch(`${API}/${path}`, { ...options, headers: key() ? { "X-API-Key": key() } : {} });
  if (answer.ok) return answer;
  const words = await answer.json().then((body) => body.detail, () => answer.statusText);
  throw Object.assign(new Error(words), { status: answer.status });
}

async function* events() {
  const reader = (await ask("overview/events")).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2))
      if (text.startsWith("data: ")) yield JSON.parse(text.slice(6, end));
  }
}

async function follow() {
  for (let wait = 1; ; wait = Math.min(wait * 2, 15)) {
    try {
      for await (const seen of events()) {
        show(seen);
        wait = 1;
      }
      state("gone", "no connection");
    } catch (error) {
      state("gone", error.status === 401 ? "needs a key" : "no connection");
      if (error.status === 401) await askKey(error.message);
    }
    // A server that comes back tells all of its curves anew.
    curves.clear();
    await new Promise((done) => setTimeout(done, wait * 1000));
  }
}

// What is shown

function state(kind, text) {
  if ($("state").textContent === text) return;
  $("state").className = `badge ${kind}`;
  $("state").textContent = text;
}

function show(seen) {
  const { server, load } = seen;
  const states = { ok: "ready", starting: `starting: ${server.phase}`, failed: `failed: ${server.reason}` };
  state(server.status, states[server.status]);
  const models = server.models.map((model) => model.name).join(", ");
  $("about").textContent = `${models}, up ${span(server.up_s)}, ${server.version}`;
  const rates = load.tokens_per_second;
  const held = total(seen.memory);
  draw("load", [load, held >> 20, server.weight_mismatches], () => [
    ["trained tokens/s", number(rates.trained)], ["sampled tokens/s", number(rates.sampled)],
    ["running", number(total(load.running)), words(load.running)],
    ["waiting", number(total(load.waiting)), words(load.waiting)],
    ["versions loaded", number(load.versions)], ["memory", size(held)],
    ...(server.weight_mismatches ? [["wrong weights refused", number(server.weight_mismatches)]] : []),
  ].map(([name, value, more]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }),
    ...(more ? [make("dd", { className: "more", textContent: more })] : []))));
  curves.show($("runs"), seen.runs, seen.points);
  queue(seen.operations);
  versions(seen.versions);
  draw("errors", seen.errors, () => table("Recent errors", [["when"], ["operation"], ["whose"], ["what"]],
    seen.errors.map((error) => [new Date(error.time * 1000).toLocaleTimeString(), `${error.kind} ${error.model_id ?? ""}`,
      make("span", { className: error.category, textContent: error.category }), error.text]),
    "None since the server started."));
  memory(seen);
}

const words = (counts) => Object.entries(counts).sort(([, a], [, b]) => b - a)
  .map(([kind, count]) => `${number(count)} ${kind}`).join(", ");

function queue(operations) {
  draw("queue", operations, () => table("Pending operations", [["operation"], ["run"], ["since", "number"], ["state"]],
    operations.map((one) => [one.kind, one.model_id ?? "", span(one.seconds), one.state]), "Nothing waits."));
}

function versions(found) {
  draw("versions", found, () => table("Versions and samplers",
    [["version", "number"], ["weights of"], ["kind"], ["in use", "number"], ["samplers"]],
    found.map((one) => [one.number, make("code", { textContent: one.of }), one.named ? "saved" : "snapshot", one.in_use,
      make("code", { textContent: one.samplers.join(", ") })]), "Only the base model answers."));
}

function memory({ memory: processes, gpus }) {
  const most = Math.max(...Object.values(processes), 1);
  const bar = (used, of, text) => make("div", { className: "bar", role: "img", ariaLabel: text },
    make("i", { style: `width: ${(100 * used / of).toFixed(1)}%` }));
  const rows = Object.entries(processes).sort(([, a], [, b]) => b - a)
    .map(([name, bytes]) => [name, bytes, most, size(bytes)]);
  for (const { gpu, used, total } of gpus) rows.push([`GPU ${gpu}`, used, total, `${size(used)} of ${size(total)}`]);
  draw("memory", rows, () => table("Memory", [["process"], ["resident", "number"], ["share"]],
    rows.map(([name, used, of, text]) => [name, text, bar(used, of, `${name}: ${text}`)]), ""));
}

// Checkpoints

const route = ({ tinker_path }) => {
  const [run, kind, name] = tinker_path.slice("tinker://".length).split("/");
  return `training_runs/${run}/checkpoints/${kind}/${name}`;
};

async function checkpoints() {
  let found;
  try {
    found = (await (await ask("checkpoints?limit=500")).json()).checkpoints;
  } catch {
    return; // The stream tells what is wrong.
  }
  draw("checkpoints", found, () => table("Checkpoints", [["path"], ["size", "number"], ["saved"], ["actions"]],
    found.map((one) => [make("code", { textContent: one.tinker_path }), size(one.size_bytes),
      new Date(one.time).toLocaleString(), actions(one)]), "None saved."));
}

function actions(checkpoint) {
  const path = checkpoint.tinker_path;
  const download = make("button", { type: "button", textContent: "Download", ariaLabel: `Download ${path}` });
  const remove = make("button", {
    type: "button", className: "danger", textContent: "Delete", ariaLabel: `Delete ${path}` });
  download.onclick = () => tried(async () => {
    // The redirect leads to a signed link, which needs no key and which the browser itself fetches.
    const stop = new AbortController();
    const answer = await ask(`${route(checkpoint)}/archive`, { signal: stop.signal });
    stop.abort();
    const name = path.split("/").slice(-1)[0];
    make("a", { href: answer.url, download: `${name}.tar` }).click();
  });
  remove.onclick = () => tried(async () => {
    $("delete-path").textContent = path;
    if ((await opened($("ask-delete"))) !== "delete") return;
    await ask(route(checkpoint), { method: "DELETE" });
    say(`Deleted ${path}`);
    await checkpoints();
  });
  return make("span", {}, download, " ", remove);
}

async function tried(work) {
  try {
    await work();
  } catch (error) {
    say(error.message);
  }
}

// Dialogs and settings

function opened(dialog) {
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

async function askKey(why) {
  if (why) $("ask-key-why").textContent = why;
  $("key-value").value = key();
  if ((await opened($("ask-key"))) === "use") {
    sessionStorage.setItem("key", $("key-value").value.trim());
    await checkpoints();
  }
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", dark);
}

$("key").onclick = async () => { await askKey(); location.reload(); };
$("theme").onclick = () => {
  const dark = $("theme").getAttribute("aria-pressed") !== "true";
  localStorage.setItem("dark", dark);
  theme(dark);
};
const chosen = localStorage.getItem("dark");
theme(chosen === null ? matchMedia("(prefers-color-scheme: dark)").matches : chosen === "true");
setInterval(checkpoints, 5000);
checkpoints();
follow();
