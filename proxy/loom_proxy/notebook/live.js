// The front end of a live cell: HTML that goes on changing, and a run with its curve and controls.
const MUTED = "opacity:.75;font-size:90%";
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 640, HEIGHT = 200, LEFT = 56, BOTTOM = 20;
const STATES = { running: "#1a7f37", completed: "#1a7f37", paused: "#8a5a00", crashed: "#cf222e", lost: "#cf222e" };

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const short = (number) => Number(number.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

function curve(points, name) {
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", style: `width:100%;max-width:${WIDTH}px` });
  const known = points.filter(([, y]) => y !== null);
  svg.setAttribute("aria-label", known.length ? `${name}: ${short(known[known.length - 1][1])}` : `${name}: no points yet`);
  if (!known.length) return svg;
  const xs = known.map((point) => point[0]), ys = known.map((point) => point[1]);
  const [x0, x1, y0, y1] = [xs[0], xs[xs.length - 1], Math.min(...ys), Math.max(...ys)];
  const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - 8);
  const y = (value) => 8 + (1 - (value - y0) / (y1 - y0 || 1)) * (HEIGHT - BOTTOM - 16);
  const label = { fill: "currentColor", "font-size": "11", opacity: ".75" };
  for (const [value, place] of [[y1, 12], [y0, HEIGHT - BOTTOM - 4]])
    svg.append(drawn("text", { ...label, x: LEFT - 6, y: place, "text-anchor": "end" }, short(value)));
  svg.append(drawn("text", { ...label, x: LEFT, y: HEIGHT - 4 }, `step ${x0.toLocaleString("en")}`));
  svg.append(drawn("text", { ...label, x: WIDTH - 8, y: HEIGHT - 4, "text-anchor": "end" }, x1.toLocaleString("en")));
  let path = "", last = null;
  for (const [at, value] of points) {
    // A gap is drawn where a value is none, or the step falls back.
    if (value === null) last = null;
    else {
      path += `${last === null || at < last ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      last = at;
    }
  }
  svg.append(drawn("path", { d: path, fill: "none", stroke: "#2f6fde", "stroke-width": "1.5" }));
  return svg;
}

function render({ model, el }) {
  const box = element("div", { class: "loom-live", style: "margin:2px 0" });
  const html = element("div");
  const panel = element("div", { style: "margin-top:4px" });
  const said = element("div", { role: "status", style: `${MUTED};min-height:1.4em` });
  box.append(html, panel, said);
  el.append(box);

  const head = element("div"), chart = element("div"), controls = element("div", { style: "display:flex;gap:6px;flex-wrap:wrap" });
  const bar = element("progress", { "aria-label": "progress", max: "1", style: "width:100%;max-width:640px" });
  const metric = element("select", { "aria-label": "metric" });
  const which = element("select", { "aria-label": "run" });
  const send = (message) => model.send(message);
  metric.addEventListener("change", () => send({ metric: metric.value }));
  which.addEventListener("change", () => send({ run: which.value }));
  const buttons = {};
  for (const kind of ["pause", "resume", "stop"]) {
    buttons[kind] = element("button", { type: "button" }, kind);
    buttons[kind].addEventListener("click", () => send({ command: kind }));
    controls.append(buttons[kind]);
  }
  const rate = element("input", { "aria-label": "learning rate", size: "9", inputmode: "decimal" });
  const set = element("button", { type: "submit" }, "set");
  const form = element("form", { style: "display:flex;gap:4px;align-items:center" }, "learning rate ", rate, set);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send({ command: "learning_rate", value: rate.value });
  });
  controls.append(form);
  panel.append(head, bar, chart, controls);

  function options(select, values, chosen) {
    const key = JSON.stringify(values);
    if (select.dataset.key !== key) {
      select.dataset.key = key;
      select.replaceChildren(...values.map(([value, text]) => element("option", { value }, text)));
    }
    if (document.activeElement !== select) select.value = chosen;
    select.style.display = values.length > 1 ? "" : "none";
  }

  function draw() {
    const state = model.get("state");
    if (html.dataset.shown !== state.html) {
      html.dataset.shown = state.html;
      html.innerHTML = state.html; // made by this kernel, which escapes what others wrote
    }
    const run = state.run;
    panel.style.display = run ? "" : "none";
    said.textContent = state.said || "";
    if (!run) return;
    const title = element("b", {}, run.name);
    const badge = element("span", { style: `padding:1px 7px;border-radius:3px;color:#fff;background:${STATES[run.state] || "#59636e"}` }, run.state);
    const steps = run.step === null ? "" : `step ${run.step.toLocaleString("en")}${run.max_step ? ` of ${run.max_step.toLocaleString("en")}` : ""}`;
    head.replaceChildren(which, " ", title, " ", badge, " ", element("span", { style: MUTED }, `${steps} ${run.detail}`), " ", metric);
    options(which, state.runs, run.id);
    options(metric, run.metrics.map((name) => [name, name]), run.metric);
    bar.style.display = run.max_step ? "" : "none";
    bar.value = run.max_step ? run.step / run.max_step : 0;
    chart.replaceChildren(curve(run.points, run.metric));
    controls.style.display = run.living ? "flex" : "none";
    for (const kind of Object.keys(buttons)) buttons[kind].disabled = !state.may;
    buttons.pause.disabled ||= run.state === "paused";
    buttons.resume.disabled ||= run.state !== "paused";
    set.disabled = rate.disabled = !state.may || run.rate === null;
    if (document.activeElement !== rate && run.rate !== null && rate.dataset.of !== String(run.rate)) {
      rate.dataset.of = rate.value = String(run.rate);
    }
  }

  model.on("change:state", draw);
  draw();
  // A cell that nobody sees is not kept up to date.
  const seen = new IntersectionObserver((entries) => send({ visible: entries[entries.length - 1].isIntersecting }));
  seen.observe(box);
  return () => {
    seen.disconnect();
    model.off("change:state", draw);
    send({ visible: false });
  };
}

export default { render };
