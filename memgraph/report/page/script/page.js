// The state of the page: the plan, the op, and what of the step is shown; and the events that change it.

const SHOWN = 10; // buffers in the list beside the chart

performance.mark("begin");
const data = JSON.parse(byId("data").textContent);
const plans = [], planAt = (number) => (plans[number] ??= planOf(data, number));
const state = {
  data, plan: planAt(0), beside: data.beside === null ? null : planAt(data.beside), axis: "op", low: 0, high: 1,
  op: 0, held: false, life: null, stop: null, kinds: [], width: 0, withBudget: false, onCursor, onDraw: mark, onSelect, onWhole, onStop, hold, tell,
};
let memory = null, queues = null, tables = null, drawBudgets = () => {}, pin = null, band = null, tip = null, moving = false;

/** Return the end of the axis. */
function endOf() {
  if (state.axis === "op") return Math.max(1, state.plan.count);
  return Math.max(state.plan.us, state.plan.captured.begins.at(-1), state.beside?.us ?? 0, state.plan.measured_us ?? 0) || 1;
}

/** Draw both charts anew, after the plan, the axis, the part that is shown or the colours changed. */
function draw() {
  const width = byId("left").clientWidth;
  memory?.destroy();
  queues?.destroy();
  state.width = width - GUTTER - EDGE;
  memory = memoryChart(state, byId("memory"), width);
  queues = queuesChart(state, byId("queues"), width);
  Object.assign(byId("memory"), { chart: memory }); // for whoever looks at it from the console
  [pin, band, tip] = ["pin", "life", "tip"].map((name) => el("div", { class: name, hidden: "" }));
  memory.over.append(band, pin, tip);
  queues.over.style.cursor = memory.over.style.cursor = "crosshair";
  for (const chart of [memory, queues]) chart.over.addEventListener("click", onClick);
  memory.over.addEventListener("mouseleave", () => (tip.hidden = true));
  legends();
  at(state.op);
}

function legends() {
  const { plan, beside, stop } = state;
  byId("kinds").replaceChildren(...state.kinds.map(({ kind }) => el("li", { "data-kind": kind }, swatch(kind), `${kind} `, el("span", { class: "bytes" }))));
  const lines = [
    ["budget", "solid", `budget ${mb(plan.budget)}${state.withBudget ? "" : ", above the chart"}`],
    ["measured", "dashed", plan.measured === null ? null : `measured peak ${mb(plan.measured)}`],
    ["asitis", "solid", `the step as it is, peak ${mb(plan.as_it_is.peak)}`],
    ["beside", "dashed", beside && `the plan beside, peak ${mb(beside.peak)}`],
    ["beside", "dotted", stop && stop.plan === null && stop.us !== null && `peak under ${mb(stop.budget)}: ${mb(stop.peak)}`],
    ["measured", "dashed", state.axis === "time" && plan.measured_us !== null && `measured step ${ms(plan.measured_us)}`],
    ["bound", "dashed", state.axis === "time" && plan.bound_us ? `no plan of its class takes less: ${ms(plan.bound_us)}` : null],
  ];
  byId("lines").replaceChildren(...lines.filter(([, , text]) => text).map(([name, dash, text]) => el("li", null, swatch(name, dash), text)));
  byId("work").replaceChildren(...workIn(state).map((kind) => el("li", null, swatch(kind), WORK[kind])));
}

/** Show what the header says of a plan, or of a budget that has no plan here. */
function figures() {
  const { plan, stop } = state, other = stop && stop.plan === null ? stop : null;
  const us = other ? other.us : plan.us + plan.pages_us, bound = other ? other.lower_bound : plan.bound_us;
  const shown = [
    ["Forecast peak", other ? mb(other.peak) : mb(plan.peak), other && other.us === null ? "the smallest that a plan was found for" : ""],
    ["Measured peak", other || plan.measured === null ? "not yet" : mb(plan.measured), ""],
    ["Budget", mb(other ? other.budget : plan.budget), ""],
    ["Step, forecast", us === null ? "no plan" : ms(us), us === null || !plan.as_it_is.us ? "" : `${percent(us / plan.as_it_is.us - 1)}${!plan.pages_us ? " on the step as it is" : other ? ", without new pages" : `; new pages ${ms(plan.pages_us)}`}`],
    ["Step, measured", other || plan.measured_us === null ? "not yet" : ms(plan.measured_us), ""],
    ["Proven bound", bound ? ms(bound) : "none", other || !bound ? "" : `this plan is ${(plan.gap * 100).toFixed(1)}% above`],
    ["As it is", ms(plan.as_it_is.us), mb(plan.as_it_is.peak)],
    ["Decisions", `${other ? other.decisions : plan.decided_count}`, ""],
  ];
  byId("figures").replaceChildren(...shown.map(([name, text, more]) => el("div", null, el("dt", null, name), el("dd", null, text, ...(more ? [el("small", null, more)] : [])))));
  byId("verdict").textContent = other ? `at ${mb(other.budget)}: ${other.us === null ? "does not fit" : `fits: forecast ${mb(other.peak)}, budget ${mb(other.budget)}`}` : plan.verdict;
  byId("others").replaceChildren(...plan.others.map((line) => el("li", null, line)));
}

/** Make an op the current one, and show it. */
function at(op) {
  const { plan } = state, step = byId("step");
  state.op = op = Math.max(0, Math.min(plan.count - 1, op));
  if (!plan.count) return;
  const { module, line } = placeOf(plan.where(op)), phase = ["forward", "backward", "update"][plan.ops.phase[op]];
  byId("op-title").textContent = `Op ${op + 1} of ${plan.count}: ${plan.name(op)}`;
  byId("op").replaceChildren(...facts([
    ["op", plan.fn(op)], ["module", module], ["line", line], ["phase", plan.ops.again[op] ? `${phase}, recomputed` : phase],
    ["begins", `${ms(plan.begins[op])}, takes ${ms(plan.ops.tenths[op] / 10)}`],
    ["bytes", `${mb(plan.total[op])} on the device${plan.ops.workspace[op] ? `, of it ${mb(plan.ops.workspace[op])} workspace` : ""}`],
  ]));
  for (const { kind, k } of state.kinds) byId("kinds").querySelector(`[data-kind="${kind}"] .bytes`).textContent = mb(plan.byKind[k][op]);
  const { count, found } = largestAt(plan, op, SHOWN);
  byId("live-title").textContent = `On the device while it runs: ${count} buffers`;
  byId("live").replaceChildren(
    ...found.map((life) => el("li", null, el("button", { type: "button", onclick: () => tell(life) }, swatch(data.kinds[plan.lives.kind[life]]), el("span", { class: "what" }, titleOf(plan, plan.lives.maker[life])), el("span", { class: "bytes" }, mb(plan.lives.nbytes[life]))))),
    ...(count > found.length ? [el("li", null, el("button", { type: "button", onclick: showAll }, `and ${count - found.length} more, in the table`))] : []),
  );
  step.setAttribute("aria-valuemax", plan.count);
  step.setAttribute("aria-valuenow", op + 1);
  step.setAttribute("aria-valuetext", `op ${op + 1} of ${plan.count}`);
  mark();
}

/** Put the line of the held op and the band of the chosen buffer where they are on the axis. */
function mark() {
  const { plan, life, low, high } = state, edges = edgesOf(plan, state.axis);
  const left = (x) => ((Math.max(low, Math.min(high, x)) - low) / (high - low)) * state.width;
  const middle = (edges[state.op] + edges[state.op + 1]) / 2;
  pin.hidden = !state.held || middle < low || middle > high;
  pin.style.left = `${left(middle)}px`;
  band.hidden = life === null;
  if (life === null) return;
  const from = left(edges[plan.lives.first[life]]), to = left(edges[plan.lives.first[life] + plan.lives.length[life] + 1]);
  band.style.left = `${from}px`;
  band.style.width = `${Math.max(0, to - from)}px`;
}

function onCursor(chart) {
  const { left } = chart.cursor;
  if (moving || left == null || left < 0 || !state.plan.count) return void (tip && (tip.hidden = true));
  const op = opAt(edgesOf(state.plan, state.axis), chart.posToVal(left, "x")), { plan } = state, { module, line } = placeOf(plan.where(op));
  tip.replaceChildren(...[`${plan.name(op)} · ${plan.fn(op)}`, module, line, mb(plan.total[op])].filter(Boolean).map((text) => el("div", null, text)));
  tip.hidden = false;
  const over = state.width;
  tip.style.left = left < over / 2 ? `${left + 12}px` : "auto";
  tip.style.right = left < over / 2 ? "auto" : `${over - left + 12}px`;
  if (!state.held && op !== state.op) at(op);
}

function onClick() {
  const { left } = memory.cursor;
  if (left == null || left < 0 || memory.select.width > 0) return;
  const op = opAt(edgesOf(state.plan, state.axis), memory.posToVal(left, "x"));
  state.held = !(state.held && Math.abs(op - state.op) * state.width < 6 * (state.high - state.low));
  at(op);
}

/** Hold an op that a table or a key chose, and show the part of the step that it lies in. */
function hold(op) {
  state.held = true;
  at(op);
  const edges = edgesOf(state.plan, state.axis), half = (state.high - state.low) / 2, middle = (edges[state.op] + edges[state.op + 1]) / 2;
  if (middle < state.low || middle > state.high) show(middle - half, middle + half);
}

/** Tell the story of a buffer. */
function tell(life) {
  state.life = life;
  const story = byId("story"), close = el("button", { type: "button", onclick: () => ((story.hidden = true), (state.life = null), mark()) }, "Close");
  story.replaceChildren(...storyOf(state.plan, life, data.kinds), close);
  story.hidden = false;
  story.focus({ preventScroll: true });
  story.scrollIntoView({ block: "nearest" });
  mark();
}

function showAll() {
  state.held = true;
  byId("which").value = "Buffers at this op";
  tables.show();
  mark();
  byId("which").focus();
}

/** Show a part of the axis. */
function show(low, high) {
  const end = endOf(), width = Math.min(end, Math.max(high - low, state.axis === "op" ? 4 : end / 1e6));
  state.low = Math.max(0, Math.min(end - width, low));
  state.high = state.low + width;
  draw();
}

function onSelect(chart) {
  const { left, width } = chart.select;
  if (width < 4) return;
  const low = chart.posToVal(left, "x"), high = chart.posToVal(left + width, "x");
  queueMicrotask(() => show(low, high)); // the chart that is dragged over has to end its own work first
}

function onWhole() {
  queueMicrotask(() => show(0, endOf()));
}

function onStop(stop) {
  state.stop = stop;
  if (stop.plan !== null && state.plan !== planAt(stop.plan)) {
    state.plan = planAt(stop.plan);
    state.life = null;
    byId("story").hidden = true;
  }
  figures();
  show(0, endOf());
  tables.show();
}

/** Look closer by a factor, around the current op. */
function closer(factor) {
  const edges = edgesOf(state.plan, state.axis), middle = (edges[state.op] + edges[state.op + 1]) / 2, half = ((state.high - state.low) * factor) / 2;
  show(middle - half, middle + half);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { op, plan } = state, page = Math.max(1, Math.round((plan.count * (state.high - state.low)) / endOf() / 20));
  const goals = { ArrowLeft: op - 1, ArrowDown: op - 1, ArrowRight: op + 1, ArrowUp: op + 1, PageUp: op - page, PageDown: op + page, Home: 0, End: plan.count - 1 };
  if (event.key in goals) {
    moving = true;
    hold(goals[event.key]);
    moving = false;
    tables.showIf("Buffers at this op");
    announce();
  } else if (event.key === "+" || event.key === "=") closer(0.5);
  else if (event.key === "-") closer(2);
  else if (event.key === "0") onWhole();
  else if (event.key === "Escape") ((state.held = false), mark());
  else return;
  event.preventDefault();
}

function announce() {
  const { plan, op } = state;
  byId("said").textContent = `Op ${op + 1} of ${plan.count}: ${plan.name(op)}, ${plan.fn(op)}, ${plan.where(op) || "no module"}, ${mb(plan.total[op])} on the device`;
}

byId("step").addEventListener("keydown", onKey);
for (const radio of document.getElementsByName("axis")) radio.addEventListener("change", () => ((state.axis = radio.value), show(0, endOf())));
byId("closer").addEventListener("click", () => closer(0.5));
byId("wider").addEventListener("click", () => closer(2));
byId("all").addEventListener("click", onWhole);
byId("peak").addEventListener("click", () => (hold(state.plan.peakIndex), announce()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (colours.clear(), draw(), drawBudgets()));
addEventListener("resize", () => (draw(), drawBudgets()));
tables = showTables(state);
drawBudgets = showBudgets(state);
state.op = state.plan.peakIndex;
figures();
show(0, endOf());
drawBudgets();
queueMicrotask(() => performance.mark("drawn")); // uPlot draws in a task of this kind, which is ahead of it
requestAnimationFrame(() => setTimeout(tables.show)); // the charts are painted first
