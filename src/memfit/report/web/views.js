// What the views do under the pointer and the keyboard. They are drawn by Python: nothing is computed here but places.

const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export function human(bytes) {
  for (const [unit, size] of UNITS)
    if (bytes >= size) return (bytes / size).toPrecision(bytes / size >= 1000 ? 4 : 3) + " " + unit;
  return bytes + " B";
}

export function add(parent, tag, text = "", className = "") {
  const made = parent.appendChild(document.createElement(tag));
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function swatch(parent, role) {
  const space = document.querySelector("svg").namespaceURI;
  const svg = parent.appendChild(document.createElementNS(space, "svg"));
  svg.setAttribute("class", "swatch");
  const box = svg.appendChild(document.createElementNS(space, "rect"));
  box.setAttribute("class", role);
  box.setAttribute("width", 11);
  box.setAttribute("height", 11);
}

function tip() {
  return document.getElementById("tip") ?? Object.assign(add(document.body, "div"), { id: "tip" });
}

function row(table, role, name, ...rest) {
  const line = add(table, "tr"), first = add(line, "td");
  if (role) swatch(first, role);
  first.append(name);
  rest.forEach(text => add(line, "td", text));
}

function wirePlot(plot) {
  const data = JSON.parse(plot.querySelector("script").textContent), last = data.columns.length - 1;
  const areas = plot.querySelector(".areas"), cursor = plot.querySelector(".cursor");
  if (last < 0) return;
  let at = 0;

  const roleAt = (column, bytes) => {  // the band under the pointer, or -1
    let sum = 0;
    return data.columns[column][1].findIndex(size => bytes < (sum += size));
  };

  function show(column, bytes, x, y) {
    at = Math.min(Math.max(column, 0), last);
    const [event, roles, , reserved, named] = data.columns[at], box = tip();
    const under = bytes === null ? -1 : roleAt(at, bytes), mark = data.marks.findLast(m => m[0] <= at);
    box.replaceChildren();
    add(box, "strong", `${data.what} ${event.toLocaleString("en")}` + (mark ? ` · ${mark[1]}: ${mark[2]}` : ""));
    const sums = add(box, "table");
    roles.forEach((size, n) => size && row(sums, data.roles[n][0], data.roles[n][1], human(size)));
    const slack = reserved - roles.reduce((a, b) => a + b, 0);
    if (slack) row(sums, "slack", `${data.edge}, no tensor`, human(slack));
    row(sums, "", data.edge, human(reserved));
    const tensors = named.map(n => data.tensors[n]).filter(t => under < 0 || t[2] === under)
      .sort((a, b) => b[1] - a[1]).slice(0, 10);
    if (tensors.length) {
      add(box, "div", under < 0 ? "largest tensors alive" : `largest ${data.roles[under][1]} alive`, "dim");
      const list = add(box, "table");
      for (const [label, size, role, born, stream] of tensors)
        row(list, data.roles[role][0], label || "(no name)", human(size),
            (born < 0 ? "from before" : `since ${born.toLocaleString("en")}`) + (stream ? `, stream ${stream}` : ""));
    }
    areas.classList.toggle("faded", under >= 0);
    for (const shape of areas.querySelectorAll("polygon"))
      shape.classList.toggle("lit", under >= 0 && shape.classList.contains(data.roles[under][0]));
    const place = plot.getBoundingClientRect(), left = place.left + at / Math.max(last, 1) * place.width;
    cursor.setAttribute("x1", `${100 * at / Math.max(last, 1)}%`);
    cursor.setAttribute("x2", `${100 * at / Math.max(last, 1)}%`);
    cursor.style.visibility = "visible";
    box.style.display = "block";
    const near = x ?? left, wide = box.offsetWidth, high = box.offsetHeight;
    box.style.left = `${Math.max(8, near + wide + 24 > innerWidth ? near - wide - 16 : near + 16)}px`;
    box.style.top = `${Math.max(8, Math.min((y ?? place.top + 20) - 20, innerHeight - high - 8))}px`;
  }

  function hide() {
    cursor.style.visibility = "hidden";
    tip().style.display = "none";
    areas.classList.remove("faded");
  }

  plot.addEventListener("pointermove", e => {
    const box = plot.getBoundingClientRect(), bytes = (box.bottom - e.clientY) / box.height * data.top;
    show(Math.round((e.clientX - box.left) / box.width * last), bytes, e.clientX, e.clientY);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -last, End: last }[e.key];
    if (e.key === "Escape") hide();
    if (step) { e.preventDefault(); show(at + step, null); }
  });
}

function wireFlame(search) {
  const flame = search.nextElementSibling, input = search.querySelector("input"), said = search.querySelector("output");
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    let found = 0;
    for (const box of flame.querySelectorAll("svg")) {
      const lit = wanted !== "" && box.querySelector("text").textContent.toLowerCase().includes(wanted);
      box.classList.toggle("lit", lit);
      found += lit;
    }
    flame.classList.toggle("searched", wanted !== "");
    said.textContent = wanted && `${found} found`;
  });
}

// Wire every view below an element that was just put on the page.
export function wire(root) {
  root.querySelectorAll("figure.plot").forEach(wirePlot);
  root.querySelectorAll(".flame-search").forEach(wireFlame);
}

if (document.querySelector("main.document")) wire(document);
