// What the pointer, the keys and the slider do.

function onCursor(chart) {
  const { left } = chart.cursor;
  if (moving || left == null || left < 0 || !state.plan.count) return void (tip && (tip.hidden = true));
  const op = opAt(edgesOf(state.plan, state.axis), chart.posToVal(left, "x")),
    { plan } = state,
    { module, line } = placeOf(plan.where(op));
  tip.replaceChildren(
    ...[`${plan.name(op)} · ${plan.fn(op)}`, module, line, mb(plan.total[op])]
      .filter(Boolean)
      .map((text) => el("div", null, text)),
  );
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
  const edges = edgesOf(state.plan, state.axis),
    half = (state.high - state.low) / 2,
    middle = (edges[state.op] + edges[state.op + 1]) / 2;
  if (middle < state.low || middle > state.high) show(middle - half, middle + half);
}

/** Tell the story of a buffer. */
function tell(life) {
  state.life = life;
  showStory(storyOf(state.plan, life, data.kinds));
}

/** List the buffers of a group. */
function tellGroup(group) {
  state.life = null;
  showStory(groupStory(state.plan, group, tell));
}

function showStory(parts) {
  const story = byId("story"),
    close = el(
      "button",
      { type: "button", onclick: () => ((story.hidden = true), (state.life = null), mark()) },
      "Close",
    );
  story.replaceChildren(...parts, close);
  story.hidden = false;
  story.focus({ preventScroll: true });
  story.scrollIntoView({ block: "nearest" });
  mark();
}

/** Show the table of the buffers at the op; with `words`, those in whose row they stand. */
function showAll(words) {
  state.held = true;
  byId("which").value = "Buffers at this op";
  if (typeof words === "string") byId("filter").value = words;
  tables.show();
  mark();
  byId("which").focus();
}

function onSelect(chart) {
  const { left, width } = chart.select;
  if (width < 4) return;
  const low = chart.posToVal(left, "x"),
    high = chart.posToVal(left + width, "x");
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
  const edges = edgesOf(state.plan, state.axis),
    middle = (edges[state.op] + edges[state.op + 1]) / 2,
    half = ((state.high - state.low) * factor) / 2;
  show(middle - half, middle + half);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { op, plan } = state,
    page = Math.max(1, Math.round((plan.count * (state.high - state.low)) / endOf() / 20));
  const goals = {
    ArrowLeft: op - 1,
    ArrowDown: op - 1,
    ArrowRight: op + 1,
    ArrowUp: op + 1,
    PageUp: op - page,
    PageDown: op + page,
    Home: 0,
    End: plan.count - 1,
  };
  if (event.key in goals) {
    moving = true;
    hold(goals[event.key]);
    moving = false;
    for (const name of ["Buffers at this op", "Modules at this op"]) tables.showIf(name);
    announce();
  } else if (event.key === "+" || event.key === "=") closer(0.5);
  else if (event.key === "-") closer(2);
  else if (event.key === "0") onWhole();
  else if (event.key === "Escape") ((state.held = false), mark());
  else return;
  event.preventDefault();
}

function announce() {
  const { plan, op } = state,
    place = plan.where(op) || "no module";
  byId("said").textContent =
    `Op ${op + 1} of ${plan.count}: ${plan.name(op)}, ${plan.fn(op)}, ${place}, ` +
    `${mb(plan.total[op])} on the device`;
}
