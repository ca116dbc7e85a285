// The state of the page: the plan, the op, and what of the step is shown. The scripts before it share its scope.

const SHOWN = 14; // groups of buffers in the list beside the chart

performance.mark("begin");
const data = JSON.parse(byId("data").textContent);
const plans = [],
  planAt = (number) => (plans[number] ??= planOf(data, number));
const state = {
  data,
  plan: planAt(0),
  beside: data.beside === null ? null : planAt(data.beside),
  axis: "op",
  low: 0,
  high: 1,
  op: 0,
  held: false,
  life: null,
  stop: null,
  kinds: [],
  width: 0,
  withBudget: false,
  onCursor,
  onDraw: mark,
  onSelect,
  onWhole,
  onStop,
  hold,
  tell,
  showAll,
};
let memory = null,
  queues = null,
  tables = null,
  drawBudgets = () => {},
  pin = null,
  band = null,
  tip = null,
  moving = false;

/** Return the end of the axis. */
function endOf() {
  if (state.axis === "op") return Math.max(1, state.plan.count);
  return (
    Math.max(state.plan.us, state.plan.captured.begins.at(-1), state.beside?.us ?? 0, state.plan.measured_us ?? 0) || 1
  );
}

/** Draw both charts again, after the plan, the axis, the part that is shown or the colours changed. */
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

/** Make an op the current one, and show it. */
function at(op) {
  const { plan } = state,
    step = byId("step");
  state.op = op = Math.max(0, Math.min(plan.count - 1, op));
  if (!plan.count) return;
  const { module, line } = placeOf(plan.where(op)),
    phase = ["forward", "backward", "update"][plan.ops.phase[op]];
  byId("op-title").textContent = `Op ${op + 1} of ${plan.count}: ${plan.name(op)}`;
  byId("op").replaceChildren(
    ...facts([
      ["op", plan.fn(op)],
      ["module", module],
      ["line", line],
      ["phase", plan.ops.again[op] ? `${phase}, recomputed` : phase],
      ["begins", `${ms(plan.begins[op])}, takes ${ms(plan.ops.tenths[op] / 10)}`],
      ["bytes", `${mb(plan.total[op])} on the device`],
      ["workspace", plan.ops.workspace[op] ? `${mb(plan.ops.workspace[op])} of these` : ""],
    ]),
  );
  for (const { kind, k } of state.kinds)
    byId("kinds").querySelector(`[data-kind="${kind}"] .bytes`).textContent = mb(plan.byKind[k][op]);
  const { count, found } = largestGroups(plan, op, SHOWN),
    shown = found.reduce((sum, { members }) => sum + members.length, 0);
  byId("live-title").textContent = `On the device while it runs: ${count} buffers`;
  byId("live").replaceChildren(
    ...found.map((group) =>
      el(
        "li",
        null,
        el(
          "button",
          { type: "button", onclick: () => (group.members.length > 1 ? tellGroup(group) : tell(group.members[0])) },
          swatch(data.kinds[plan.lives.kind[group.members[0]]]),
          el("span", { class: "what" }, group.title),
          el("span", { class: "bytes" }, `${group.members.length > 1 ? `${group.members.length} x, ` : ""}${mb(group.nbytes)}`),
        ),
      ),
    ),
    ...(count > shown
      ? [el("li", null, el("button", { type: "button", onclick: showAll }, `and ${count - shown} more, in the table`))]
      : []),
  );
  byId("lives").replaceChildren(...barsOf(state));
  step.setAttribute("aria-valuemax", plan.count);
  step.setAttribute("aria-valuenow", op + 1);
  step.setAttribute("aria-valuetext", `op ${op + 1} of ${plan.count}`);
  mark();
}

/** Put the line of the held op and the band of the chosen buffer where they are on the axis. */
function mark() {
  const { plan, life, low, high } = state,
    edges = edgesOf(plan, state.axis);
  const left = (x) => ((Math.max(low, Math.min(high, x)) - low) / (high - low)) * state.width;
  const middle = (edges[state.op] + edges[state.op + 1]) / 2;
  pin.hidden = (!state.held && state.op !== plan.peakIndex) || middle < low || middle > high; // the peak is marked at load
  pin.style.left = `${left(middle)}px`;
  band.hidden = life === null;
  if (life === null) return;
  const from = left(edges[plan.lives.first[life]]),
    to = left(edges[plan.lives.first[life] + plan.lives.length[life] + 1]);
  band.style.left = `${from}px`;
  band.style.width = `${Math.max(0, to - from)}px`;
}

/** Show a part of the axis. */
function show(low, high) {
  const end = endOf(),
    width = Math.min(end, Math.max(high - low, state.axis === "op" ? 4 : end / 1e6));
  state.low = Math.max(0, Math.min(end - width, low));
  state.high = state.low + width;
  draw();
}

byId("step").addEventListener("keydown", onKey);
for (const radio of document.getElementsByName("axis"))
  radio.addEventListener("change", () => ((state.axis = radio.value), show(0, endOf())));
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
