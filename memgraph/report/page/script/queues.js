// The timeline below: what compute runs, and the copies and collectives on their queues.

const LANES = { compute: "compute", out: "copies out", back: "copies back", net: "network" };
const WORK = {
  forward: "forward",
  backward: "backward",
  again: "recompute",
  update: "update",
  wait: "compute waits",
  copy: "begins a copy",
  out: "copy out",
  back: "copy back",
  net: "collective",
};
const AGAIN = Object.keys(WORK).indexOf("again");
const WAITS = /^memgraph\.(free|wait|reduced|gathered)\./,
  BEGINS = /^memgraph\.(offload|reload|gather|reduce_scatter)\./;

/** Return the kind of work of each op, as places in the keys of WORK. */
function workOf(plan) {
  if (plan.work) return plan.work;
  const kinds = Object.keys(WORK),
    ofPhase = [0, 1, kinds.indexOf("update")],
    { fn, again, phase } = plan.ops,
    ofFn = new Int8Array(plan.strings.length);
  for (const place of new Set(fn)) {
    const text = plan.strings[place];
    ofFn[place] = WAITS.test(text) ? kinds.indexOf("wait") : BEGINS.test(text) ? kinds.indexOf("copy") : -1;
  }
  plan.work = new Uint8Array(plan.count);
  for (let i = 0; i < fn.length; i++)
    plan.work[i] = ofFn[fn[i]] >= 0 ? ofFn[fn[i]] : again[i] ? AGAIN : ofPhase[phase[i]];
  return plan.work;
}

/** Return the names of the queues that anything runs on, compute first. */
const queuesOf = (plan, queues) => queues.filter((name, q) => q === 0 || plan.copies.queue.includes(q));

/** Draw the timeline of `state.plan` into `place`, and return it. */
function queuesChart(state, place, width) {
  const { plan, low, high, data } = state,
    lanes = queuesOf(plan, data.queues),
    count = lanes.length;
  const centres = lanes.map((_, lane) => count - lane - 0.5);
  return new uPlot(
    {
      width,
      height: 58 + 26 * count,
      padding: [4, EDGE, 0, 0],
      legend: { show: false },
      cursor: cursorOf(state),
      series: [{}, { points: { show: false }, paths: () => null }],
      scales: { x: { time: false, range: () => [low, high] }, y: { range: () => [0, count] } },
      axes: [
        xAxis(state),
        {
          ...axisLook(),
          size: GUTTER,
          grid: { show: false },
          ticks: { show: false },
          splits: () => centres,
          values: () => lanes.map((name) => LANES[name]),
        },
      ],
      hooks: { draw: [(chart) => drawLanes(chart, state, lanes)], setSelect: [state.onSelect] },
    },
    [
      [low, high],
      [null, null],
    ],
    place,
  );
}

function drawLanes(chart, state, lanes) {
  const { ctx, bbox } = chart,
    { plan } = state,
    height = bbox.height / lanes.length;
  const top = (lane) => bbox.top + lane * height + 0.15 * height;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  drawCompute(chart, state, top(0), 0.7 * height);
  const { count, queue, begin: begins, tenths } = plan.copies;
  for (let i = 0; i < count; i++) {
    const name = state.data.queues[queue[i]],
      [begin, end] = spanOf(state, begins[i] / 10, (begins[i] + tenths[i]) / 10);
    if (end < state.low || begin > state.high) continue;
    const x = chart.valToPos(begin, "x", true),
      width = Math.max(1, chart.valToPos(end, "x", true) - x);
    ctx.fillStyle = colour(name);
    ctx.fillRect(x, top(lanes.indexOf(name)), width > 4 ? width - 1 : width, 0.7 * height); // a gap between two copies
  }
  ctx.restore();
}

/** Draw what compute does; in a pixel of several ops, the one that takes longest. */
function drawCompute({ ctx, bbox }, state, y, height) {
  const { plan, axis, low, high } = state,
    work = workOf(plan),
    kinds = Object.keys(WORK),
    { tenths } = plan.ops;
  const found = largest(edgesOf(plan, axis), tenths, low, high, bbox.width);
  for (let x = 0; x < found.length;) {
    const i = found[x];
    let end = x + 1;
    while (end < found.length && (found[end] === i || (i >= 0 && found[end] >= 0 && work[found[end]] === work[i])))
      end++;
    if (i >= 0) {
      ctx.fillStyle = colour(kinds[work[i]]);
      ctx.fillRect(bbox.left + x, y, end - x, height);
    }
    x = end;
  }
}

/** Return a span of time as places on the axis. */
function spanOf({ plan, axis }, begin, end) {
  if (axis === "time") return [begin, end];
  const place = (us) => {
    const i = opAt(plan.begins, us),
      length = plan.begins[i + 1] - plan.begins[i];
    return i + (length > 0 ? Math.min(1, (us - plan.begins[i]) / length) : 0);
  };
  return [place(begin), place(end)];
}

/** Return the kinds of work that the plan has, with their names. */
function workIn(state) {
  const kinds = Object.keys(WORK),
    work = new Set(workOf(state.plan));
  const queues = new Set(queuesOf(state.plan, state.data.queues).slice(1));
  return kinds.filter((kind, k) => work.has(k) || queues.has(kind));
}
