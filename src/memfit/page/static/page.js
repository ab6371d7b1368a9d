// The page: it sends the question that stands in its address to memfit, and shows what memfit said.

import { add, wire } from "/static/views.js";

const $ = id => document.getElementById(id);
const FORM = ["model", "gpu", "task", "method", "sequence-length", "effective-batch", "trainer", "host-memory", "gpu-memory", "reserve"];
const SIZES = ["prompt-length", "completion-length", "images"];
const VIEWS = ["answer", "timeline", "ladder", "map", "explain", "compare", "learn"];
const PAUSE = 350;  // milliseconds after the last move of a slider until the whole plan is asked again

const url = new URLSearchParams(location.search);
const token = url.get("token") ?? "";
const DATA = ["data", "data-name"];  // a training file: the key of one that was sent, and its own name
const OWN = ["token", "view", "against", "over"];  // of the page itself, not of the question
let question = new Map([...url].filter(([name]) => !OWN.includes(name)));
let against = url.get("against") ?? "";  // the answer that was kept, as a question
let view = VIEWS.includes(url.get("view")) ? url.get("view") : "answer";
let over = url.get("over") ?? "";  // the axes of the map
let entry = "", opened = false;  // the entry of Learn in the address, and whether the reader has been taken there
let found = null;  // the last plan
const drawn = new Map();  // view -> the question that it shows

// ---- asking --------------------------------------------------------------------------------------------------------

const running = new Map();  // what is asked -> the one request of its kind that still counts

function begin(what) {
  running.get(what)?.abort();
  const control = new AbortController();
  running.set(what, control);
  return control.signal;
}

async function ask(what, words) {
  const signal = begin(what), answer = await answered(what, words, signal);
  if (!answer.unread) return answer;
  const cancel = () => { running.get("data")?.abort(); status("cancelled"); };
  const read = await long("data", words, (text, share) => status(text, share, cancel));  // as samples of this task
  status();
  return read.error ? read : answered(what, words, signal);
}

async function answered(what, words, signal) {
  const answer = await fetch(`/ask/${what}?${new URLSearchParams(words)}`, { headers: { "X-Memfit-Token": token }, signal });
  if (answer.status !== 200 && answer.status !== 422) return { error: (await answer.text()).trim() || answer.statusText };
  return answer.json();
}

async function long(kind, words, tell) {
  const signal = begin(kind === "trace" ? "plan" : kind);
  const answer = await fetch(`/long/${kind}?${new URLSearchParams(words)}`, { headers: { "X-Memfit-Token": token }, signal });
  if (answer.status === 422) return answer.json();
  if (!answer.ok) return { error: (await answer.text()).trim() };
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return { error: "the answer broke off", hint: "is memfit page still running?" };
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const said = JSON.parse(line);
      if (!("progress" in said)) return said;
      tell(said.progress, said.share);
    }
  }
}

function send(file, signal, tell) {
  // The one way in which Chromium's network service reads the file itself: fetch copies it through two more processes
  // and takes 2.5 times as long.
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", `/drop?name=${encodeURIComponent(file.name)}`);
    request.setRequestHeader("X-Memfit-Token", token);
    request.responseType = "json";
    request.upload.onprogress = e => e.lengthComputable && tell(e.loaded / e.total);
    request.onload = () => resolve(request.response ?? { error: request.statusText });
    request.onerror = () => reject(new TypeError("the connection broke off"));
    request.onabort = () => reject(new DOMException("cancelled", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}

let stop = null;  // what the Cancel button does

function status(text = "", share = null, cancel = null) {
  const box = $("status"), shown = box.querySelector("progress");
  stop = cancel;
  if (shown && share !== null && cancel) {  // in place: a new button would lose a click under way, and the focus
    shown.value = share;
    shown.nextSibling.data = ` ${text} `;
    return;
  }
  box.replaceChildren();
  if (share !== null) {
    const bar = add(box, "progress");
    bar.max = 1;
    bar.value = share;
  }
  box.append(share === null ? text : ` ${text} `);
  if (cancel) add(box, "button", "Cancel").addEventListener("click", () => stop?.());
}

function problem(answer) {
  const box = document.createElement("div");
  box.className = "problem";
  box.setAttribute("role", "alert");
  add(box, "p", answer.error);
  if (answer.hint) add(box, "p", `hint: ${answer.hint}`, "dim");
  return box;
}

// Answers are HTML that memfit escaped; the page's policy runs no script in it.
function show(section, answer) {
  if (answer.error) section.replaceChildren(problem(answer));
  else section.innerHTML = answer.html;
  wire(section);
  linked(section);
  for (const cell of section.querySelectorAll("[data-over]")) {
    cell.setAttribute("tabindex", 0);
    cell.setAttribute("role", "button");
  }
}

function linked(section) {  // the words that Learn has an entry for
  for (const word of section.querySelectorAll("a[data-term]")) word.href = `#learn-${word.dataset.term}`;
}

// ---- the question --------------------------------------------------------------------------------------------------

function address() {
  const words = new URLSearchParams({ token });
  for (const [name, value] of question) words.set(name, value);
  if (view !== "answer") words.set("view", view);
  if (against) words.set("against", against);
  if (over) words.set("over", over);
  return `?${words}`;
}

function remember(push) {
  history[push ? "pushState" : "replaceState"](null, "", address() + (view === "learn" ? entry : ""));
}

function fill() {
  for (const name of FORM) $(name).value = question.get(name) ?? "";
  if (question.has("config")) $("model").placeholder = `dropped: ${question.get("config-name") ?? "config.json"}`;
  $("more").open = FORM.slice(4).some(name => question.has(name));
  $("over").value = over;
  $("data").hidden = question.has("data");
  $("no-data").hidden = !question.has("data");
  const named = question.get("data-name") ?? "the file";
  $("no-data").textContent = `${named} ✕`;
  $("no-data").setAttribute("aria-label", `plan without ${named}`);
  const pins = $("pins");
  pins.replaceChildren();
  for (const [name, value] of question)
    if (![...FORM.slice(0, 4), ...DATA].includes(name) && !name.startsWith("config")) {
      const pin = add(pins, "button", `${name} ${value} ✕`);
      pin.type = "button";
      pin.setAttribute("aria-label", `let the planner choose ${name}, now ${value}`);
      pin.addEventListener("click", () => { question.delete(name); answerAll(true); });
    }
}

async function answerAll(push = false) {
  remember(push);
  fill();
  if (!question.get("model") && !question.has("config")) { status(document.body.dataset.followed ? "" : "Name a model, or drop its config.json here."); showView(); return; }
  const words = [...question];
  running.get("estimate")?.abort();
  document.querySelectorAll("#content > section:not(#view-explain)").forEach(section => section.classList.add("stale"));
  status("asking …");
  try {
    let answer = await ask("plan", words);
    if (answer.trace) {
      const cancel = () => { running.get("plan").abort(); status("cancelled"); };
      status(`${answer.title}: running the trainer on a virtual card`, 0, cancel);
      answer = await long("trace", words, (text, share) => status(text, share, cancel));
    }
    status();  // before the view is shown, which may say more
    take(answer);
  } catch (error) {
    if (error.name !== "AbortError") { take({ error: "memfit does not answer", hint: "is memfit page still running?" }); status(); }
  }
}

function take(answer) {
  found = answer.error ? null : answer;
  drawn.clear();
  document.querySelectorAll("#content > section").forEach(section => section.classList.remove("stale"));
  show($("view-answer"), answer);
  drawn.set("answer", address());
  if (found) $("view-ladder").innerHTML = answer.ladder || "<p class=dim>The plain recipe fits: no technique was needed.</p>";
  else for (const id of ["view-ladder", "predicted", "mapped", ...(against ? ["compared"] : [])]) show($(id), answer);
  $("cards-by-price").replaceChildren();
  document.title = found ? `${answer.title} - memfit` : "memfit";
  sliders();
  elsewhere();
  showView();
}

function elsewhere() {
  $("elsewhere").hidden = !found;
  if (!found) return;
  written("command", found.command);
  $("python").textContent = found.python;
  $("python-box").hidden = !found.python;
  written("next", found.next.join("\n"));
  $("next-box").hidden = !found.next.length;
  $("files-box").hidden = !found.files;
  $("download").href = `/files?${new URLSearchParams([["token", token], ...question])}`;
  $("saved").textContent = "";
}

function written(id, commands) {  // a line breaks between words, never inside --flag
  $(id).replaceChildren(...commands.split(/(\s+)/).map(text => {
    if (!text.includes("-")) return text;
    return Object.assign(document.createElement("span"), { textContent: text, className: "whole" });
  }));
}

document.querySelectorAll("[data-copies]").forEach(button => button.addEventListener("click", async () => {
  await navigator.clipboard.writeText($(button.dataset.copies).textContent);
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}));

// ---- sliders -------------------------------------------------------------------------------------------------------

let pause = 0;

function sliders() {
  const box = $("sliders"), rows = found?.sliders ?? [];
  for (const range of box.querySelectorAll("input"))
    if (!rows.some(row => `slide-${row.name}` === range.id)) range.parentElement.remove();
  rows.forEach((row, place) => {
    const range = $(`slide-${row.name}`) ?? slider(box, row, place);  // one that the pointer holds stays where it is
    const now = row.values.indexOf(Number(question.get(row.name)));  // it may have moved on since it was asked
    range.row = row;
    Object.assign(range, { max: row.values.length - 1, value: now < 0 ? row.values.indexOf(row.now) : now });
    told(range);
  });
}

function slider(box, row, place) {
  const div = add(box, "div", "", "slider"), label = add(div, "label", row.label), range = add(div, "input");
  box.insertBefore(div, box.children[place]);
  add(label, "output");
  Object.assign(range, { type: "range", id: `slide-${row.name}`, min: 0, step: 1 });
  label.htmlFor = range.id;
  range.addEventListener("input", () => { told(range); moved(range.row, String(range.row.values[range.value])); });
  return range;
}

function told(range) {
  const text = range.row.values[range.value].toLocaleString("en");
  range.parentElement.querySelector("output").textContent = text;
  range.setAttribute("aria-valuetext", text);
}

function moved(row, value) {
  if (row.name === "num-gpus") uncounted();
  question.set(row.name, value);
  clearTimeout(pause);
  pause = setTimeout(() => answerAll(true), PAUSE);
  if (row.quick && row.name !== "images") quickly(row.name, value);
}

function uncounted() {  // the number of cards stands in a word of its own
  if (question.get("gpu")) question.set("gpu", question.get("gpu").replace(/^\d+ ?x ?/i, ""));
}

async function quickly(name, value) {
  const words = { ...found.recipe, ...Object.fromEntries(question), "effective-batch": found.batch, changed: name, [name]: value };
  try {
    const answer = await ask("estimate", Object.entries(words));
    if (answer.error) { show($("view-answer"), answer); return; }
    const level = document.querySelector("[name=level]:checked")?.value;
    const section = $("view-answer"), head = section.querySelector("h1")?.outerHTML ?? "";
    section.innerHTML = head + answer.html;
    linked(section);
    if (level) section.querySelector(`[name=level][value=${level}]`).checked = true;
    written("command", answer.command);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

// ---- views ---------------------------------------------------------------------------------------------------------

async function showView() {
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view;
    $(`tab-${name}`).setAttribute("aria-selected", name === view);
    $(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  }
  $("elsewhere").hidden = !found || ["explain", "compare", "learn"].includes(view);
  if (view === "learn") learn();
  const file = given.get(view);
  if (file && file.asked !== wordsOf(file)) reread(file);
  $("kept").textContent = against ? "kept: the answer below is compared with it" : "";
  if (!found || !["timeline", "map", ...(against ? ["compare"] : [])].includes(view) || drawn.get(view) === address()) return;
  const section = $({ compare: "compared", timeline: "predicted", map: "mapped" }[view] ?? `view-${view}`), wanted = view;
  if (found.source !== "formula" && wanted !== "compare") {  // a map would take a trace for each of its cells
    show(section, { html: found.timeline && wanted === "timeline" ? found.timeline
      : "<p class=dim>No formula counts this task, and a map would take a trace for every cell.</p>" });
    drawn.set(wanted, address());
    return;
  }
  section.classList.add("stale");
  status("drawing …");
  try {
    const words = { ...found.recipe, ...Object.fromEntries(question) };
    if (wanted === "compare") words.against = against;
    const asked = found.source === "formula" ? ask : (kind, pairs) => long(kind, pairs, status);
    show(section, await asked({ map: "sweep" }[wanted] ?? wanted, Object.entries(wanted === "map" ? { ...words, over } : words)));
    drawn.set(wanted, address());
    if (wanted === "map") show($("cards-by-price"), await ask("cards", Object.entries(words)));
    status();
  } catch (error) {
    if (error.name === "AbortError") return;  // a newer question draws it
    throw error;
  }
  section.classList.remove("stale");
}

function choose(name) {
  [view, entry] = [name, ""];
  remember(false);
  showView();
}

$("views").addEventListener("click", e => e.target.dataset.view && choose(e.target.dataset.view));
$("views").addEventListener("keydown", e => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  if (!step) return;
  choose(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length]);
  $(`tab-${view}`).focus();
});

function apply(target) {  // a rung of the ladder or a cell of the map sets its values
  const over = target.closest?.("[data-over]")?.dataset.over;
  if (!over) return;
  const pairs = over.startsWith("{") ? Object.entries(JSON.parse(over)) : over.split(",").map(pair => pair.split("="));
  for (const [name, value] of pairs) question.set(name.replaceAll("_", "-"), value);
  if (pairs.some(([name]) => name === "num_gpus")) uncounted();
  view = "answer";
  answerAll(true);
}

$("content").addEventListener("click", e => apply(e.target));
$("content").addEventListener("keydown", e => {
  if ((e.key === "Enter" || e.key === " ") && e.target.dataset?.over) { e.preventDefault(); apply(e.target); }
});

$("ask").addEventListener("submit", e => {
  e.preventDefault();
  const before = question.get("model"), task = question.get("task"), length = question.get("sequence-length");
  for (const name of FORM) $(name).value.trim() ? question.set(name, $(name).value.trim()) : question.delete(name);
  if ($("model").value.trim()) for (const name of ["config", "config-name"]) question.delete(name);
  if (question.get("model") !== before)  // what was set for another model is not meant for this one
    question = new Map([...question].filter(([name]) => [...FORM, ...DATA].includes(name) || name.startsWith("config")));
  if (question.get("task") !== task) {  // nor are the sizes of another task's samples
    SIZES.forEach(name => question.delete(name));
    if (question.get("sequence-length") === length) question.delete("sequence-length");
  }
  answerAll(true);
});
for (const name of ["task", "method", "trainer"]) $(name).addEventListener("change", () => $("ask").requestSubmit());

window.addEventListener("popstate", () => {
  const words = new URLSearchParams(location.search);
  question = new Map([...words].filter(([name]) => !OWN.includes(name)));
  against = words.get("against") ?? "";
  over = words.get("over") ?? "";
  view = VIEWS.includes(words.get("view")) ? words.get("view") : "answer";
  enter(location.hash);
  answerAll();
});

// ---- files ---------------------------------------------------------------------------------------------------------

$("save").addEventListener("submit", async e => {
  e.preventDefault();
  $("saved").textContent = "writing …";
  const body = JSON.stringify({ ...Object.fromEntries(question), folder: $("folder").value });
  const answer = await fetch("/save", { method: "POST", body, headers: { "X-Memfit-Token": token, "Content-Type": "application/json" } });
  const said = await answer.json();
  $("saved").textContent = said.error ? `${said.error} ${said.hint ? `(${said.hint})` : ""}` : `wrote ${said.written.join(", ")}`;
});

async function packed(text) {  // deflated and in base64, so that the address holds the whole question
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(Array.from(bytes, b => String.fromCharCode(b)).join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function useData(file) {  // plan with a training file
  const cancel = () => { running.get("drop")?.abort(); status("cancelled"); }, tell = share => status(`sending ${file.name}`, share, cancel);
  try {
    const signal = begin("drop");
    tell(0);
    const answer = await send(file, signal, tell);
    status();
    if (!answer.file) { take(answer); return; }
    question.set("data", answer.file);
    question.set("data-name", file.name);
    view = "answer";
    answerAll(true);
  } catch (error) {
    if (error.name !== "AbortError") { take({ error: "memfit does not answer", hint: "is memfit page still running?" }); status(); }
  }
}

$("data").addEventListener("change", () => {
  const file = $("data").files[0];
  $("data").value = "";  // so that the same file can be chosen again
  if (file) useData(file);
});
$("no-data").addEventListener("click", () => {
  DATA.forEach(name => question.delete(name));
  answerAll(true);
  $("data").focus();
});
$("over").addEventListener("change", () => { over = $("over").value; remember(true); showView(); });

const SAMPLES = /\.(jsonl|ndjson|csv|tsv|parquet)$/i;  // files of these names are data wherever they are dropped, others on the field

const dropping = on => document.body.classList.toggle("dropping", on);
window.addEventListener("dragover", e => { e.preventDefault(); dropping(true); });
window.addEventListener("dragleave", e => e.relatedTarget === null && dropping(false));
window.addEventListener("drop", async e => {
  e.preventDefault();
  dropping(false);
  const files = [...e.dataTransfer.files], file = files[0];
  if (!file) return;
  if (e.target.closest?.("#data-box")) { useData(file); return; }
  const text = file.size <= 1 << 18 ? await file.text() : "", config = configOf(text);
  if (!config) {
    if (/config\.json$/i.test(file.name)) { choose("answer"); take({ error: `${file.name} is no config.json of a model`, hint: "drop the one that lies beside its weights" }); }
    else if (view === "compare") read("compare", [file], $("compared"), exact);
    else if (view !== "explain" && await isWatched(file)) { choose("timeline"); read("watched", [file], $("watched"), () => found ? exact() : {}); }
    else if (view === "timeline") read("lanes", files, $("watched"), () => ({ gpu: question.get("gpu") ?? "" }));
    else if (view !== "explain" && SAMPLES.test(file.name)) useData(file);
    else explain(files);
    return;
  }
  for (const name of ["model", "task"]) question.delete(name);
  question.set("config", await packed(text));
  question.set("config-name", String(config._name_or_path || config.model_type).split("/").pop());
  view = "answer";
  answerAll(true);
});

function configOf(text) {  // a model's config.json, which may hold numbers that Python alone writes; null for any other file
  try {
    const read = JSON.parse(text.replace(/("(?:[^"\\]|\\.)*")|-?\b(?:NaN|Infinity)\b/g, (_, string) => string ?? "null"));
    return read && (read.model_type || read.architectures) ? read : null;
  } catch { return null; }
}

// ---- compare -------------------------------------------------------------------------------------------------------

$("keep").addEventListener("click", () => {
  if (!found) return;
  against = String(new URLSearchParams(exact()));
  given.delete("compare");
  remember(true);
  showView();
});
$("measured").addEventListener("change", e => e.target.files[0] && read("compare", [e.target.files[0]], $("compared"), exact));

const exact = () => ({ ...found?.recipe, ...Object.fromEntries(question) });

// ---- watched runs and ranks -----------------------------------------------------------------------------------------

const EVERY = 1000;  // milliseconds between two looks at the log of a run
let seen = "";  // the state of the log that is shown, and the prediction over which

async function follow() {
  const words = found?.source === "formula" ? Object.entries(exact()) : [];
  const key = JSON.stringify(words);
  let pause = EVERY;
  try {
    const begun = performance.now();
    const said = await fetch(`/follow?${new URLSearchParams([...words, ["seen", seen.endsWith(key) ? seen.slice(0, -key.length) : ""]])}`,
      { headers: { "X-Memfit-Token": token } });
    if (said.status === 200) {
      const answer = await said.json();
      seen = (answer.seen ?? "") + key;
      followed(answer);
    }
    pause = Math.min(Math.max(EVERY, 2 * (performance.now() - begun)), 5 * EVERY);  // a long log is read less often
  } catch { if (!$("watched").querySelector(".problem")) $("watched").prepend(problem({ error: "memfit has stopped, as it does when the run ends", hint: "below is what was last seen" })); }
  setTimeout(follow, pause);
}

let pointed = null;  // where the pointer is in the picture of the run
$("watched").addEventListener("pointermove", e => { pointed = e.target.closest(".plot") && e; });
$("watched").addEventListener("pointerleave", () => { pointed = null; });

function followed(answer) {  // a newer picture takes neither the keyboard nor what is said under the pointer
  const box = $("watched"), focused = box.querySelector(".plot:focus");
  show(box, answer);
  const plot = box.querySelector(".plot");
  if (focused) plot?.focus({ preventScroll: true });
  if (pointed) plot?.dispatchEvent(new PointerEvent("pointermove", pointed));
}

const isWatched = async file => (await file.slice(0, 64).text()).startsWith('{"schema":"memfit.watch/');

// ---- explain -------------------------------------------------------------------------------------------------------

async function explain(files) {
  choose("explain");
  const named = () => question.has("model") || question.has("config");
  await read("explain", files, $("explained"), () => $("failed-model").checked && named() ? Object.fromEntries(question) : {});
}

const given = new Map();  // view -> the files that it shows, and what they were asked with
const wordsOf = file => String(new URLSearchParams(file.words()));

async function read(kind, files, box, words) {  // send files, and show what memfit says of them
  if (kind === "compare") { against = ""; remember(false); }
  await reread({ kind, files, box, words });
}

async function reread(file) {  // again, where what they are asked with has changed
  const { kind, files, box } = file;
  given.set(view, file);
  file.asked = wordsOf(file);
  box.classList.add("stale");
  const cancel = () => { running.get(kind)?.abort(); status("cancelled"); };
  try {
    const signal = begin(kind), keys = file.keys ?? [];
    let answer = {};
    for (const one of file.keys ? [] : files) {
      const tell = share => status(`sending ${one.name}`, share, cancel);
      tell(0);
      answer = await send(one, signal, tell);
      if (answer.error) break;
      keys.push(["file", answer.file]);
    }
    if (!answer.error) {
      file.keys = keys;
      status("reading it", 0.05, cancel);  // which may have begun before it was sent
      answer = await long(kind, [...new URLSearchParams(file.asked), ...keys], (text, share) => status(text, share, cancel));
    }
    show(box, answer);
    status();
  } catch (error) {
    if (error.name !== "AbortError") { show(box, { error: "memfit does not answer", hint: "is memfit page still running?" }); status(); }
  }
  box.classList.remove("stale");
}

$("failure").addEventListener("submit", e => {
  e.preventDefault();
  const files = [...$("failed-file").files], text = $("failed-text").value;
  if (text.trim()) explain([new File([text], "pasted.log")]);
  else if (files.length) explain(files);
});
$("failed-model").addEventListener("change", () => showView());
$("failed-file").addEventListener("change", e => e.target.files.length && explain([...e.target.files]));

// ---- learn ---------------------------------------------------------------------------------------------------------

function enter(hash) {  // an address may name an entry of Learn
  if (!hash.startsWith("#learn")) return;
  [entry, opened, view] = [hash, false, "learn"];
}

async function learn() {
  const section = $("view-learn"), key = address() + (found?.source ?? "");
  try {
    if (drawn.get("learn") !== key) {
      section.classList.add("stale");
      if (!section.firstChild) add(section, "p", "computing …", "dim");
      const recipe = found?.source === "formula" ? [["recipe", JSON.stringify(found.recipe)]] : [];
      show(section, await ask("learn", [...question, ...recipe]));
      drawn.set("learn", key);
      for (const form of section.querySelectorAll(".question")) recall(form);
      section.classList.remove("stale");
    }
    const target = opened ? null : document.getElementById(entry.slice(1));
    if (!target || view !== "learn") return;
    opened = true;
    if (target.hidden) {  // by a search of the glossary
      $("glossary-filter").value = "";
      for (const row of target.parentElement.children) row.hidden = false;
    }
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
    target.scrollIntoView();
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

document.addEventListener("click", e => {
  const link = e.target.closest?.('a[href^="#learn"]');
  if (!link || e.ctrlKey || e.metaKey || e.shiftKey) return;
  e.preventDefault();
  enter(link.getAttribute("href"));
  remember(true);
  showView();
});

const ANSWERS = "memfit-answers";  // what a reader answered, by run and question

function answers() {
  try { return JSON.parse(localStorage.getItem(ANSWERS)) ?? {}; } catch { return {}; }
}

const field = form => form.querySelector("input[type=radio]:checked") ?? form.querySelector("input:not([type=radio])");
const name = form => `${form.closest("[data-run]").dataset.run}: ${form.querySelector("input").name}`;

function recall(form) {
  const said = answers()[name(form)];
  if (said === undefined) return;
  for (const input of form.querySelectorAll("input"))
    if (input.type === "radio") input.checked = input.value === said;
    else input.value = said;
  judge(form, said);
}

function judge(form, said) {
  const { answer, within } = form.dataset, share = Number(within);
  const number = Number(said.replace(/,(?=\d{3}(\D|$))/g, "").replace(",", "."));
  const right = share ? Math.abs(number - answer) <= share * answer : said === answer;
  form.dataset.right = right;
  form.querySelector("output").textContent = right ? "✓ right" : "✗ not right yet";
  const all = form.parentElement;
  all.querySelector(".score").textContent = `${all.querySelectorAll("[data-right=true]").length} of ${all.querySelectorAll("form").length} right`;
}

$("view-learn").addEventListener("submit", e => {
  e.preventDefault();
  const said = field(e.target)?.value.trim();
  if (!said) return;
  try { localStorage.setItem(ANSWERS, JSON.stringify({ ...answers(), [name(e.target)]: said })); } catch { /* no room, or not allowed */ }
  judge(e.target, said);
});

$("view-learn").addEventListener("input", e => {
  if (!e.target.dataset.filter) return;
  const wanted = e.target.value.trim().toLowerCase();
  for (const row of $(e.target.dataset.filter).children) row.hidden = !row.textContent.toLowerCase().includes(wanted);
});

enter(location.hash);
fill();
answerAll();
if (document.body.dataset.followed) follow();
