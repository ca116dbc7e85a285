// The chart of memory: bytes of each kind on top of each other, the step as it is behind them, and the budget.

// From the bottom to the top: what is there throughout, then what comes and goes.
const STACK = [
  "parameter",
  "buffer",
  "state",
  "input",
  "gradient",
  "output",
  "tangent",
  "activation",
  "temporary",
  "workspace",
  "staging",
];
const GUTTER = 76; // pixels of the left axis, the same in both charts
const EDGE = 12; // pixels right of them

/** Return the largest of `values` at the ops that a chart shows, one a pixel. */
const topOf = (found, values) => found.reduce((top, i) => (i < 0 ? top : Math.max(top, values[i])), 0);

/** Return the unit of an axis of bytes: what a value is divided by, and its name. */
const unitOf = (top) => (top >= 2e9 ? [1e9, "GB"] : top >= 2e5 ? [1e6, "MB"] : top >= 2e3 ? [1e3, "kB"] : [1, "B"]);

/** Draw the chart of `state.plan` into `place`, and return it. */
function memoryChart(state, place, width) {
  const { plan, axis, low, high, data } = state,
    count = Math.max(50, width - GUTTER - EDGE);
  const other = state.beside;
  const found = largest(edgesOf(plan, axis), plan.total, low, high, count);
  const xs = Array.from({ length: count + 1 }, (_, i) => low + ((high - low) * i) / count);
  const foundBehind = largest(capturedEdges(plan, axis), plan.captured.total, low, high, count),
    foundBeside = other ? largest(besideEdges(plan, other, axis), other.total, low, high, count) : [];
  const behind = curveOf(foundBehind, plan.captured.total);
  const shown = STACK.map((kind) => [kind, data.kinds.indexOf(kind)]).filter(([, k]) => plan.has[k]);
  const layers = [],
    sum = new Float64Array(found.length);
  for (const [kind, k] of shown) {
    for (let at = 0; at < found.length; at++) if (found[at] >= 0) sum[at] += plan.byKind[k][found[at]];
    layers.unshift({ kind, curve: toTheEdge(Array.from(sum, (each, at) => (found[at] < 0 ? null : each))) });
  }
  // As high as what is shown; a line that is more than twice as high would press the curves to the ground.
  const top = Math.max(
    topOf(found, plan.total),
    topOf(foundBehind, plan.captured.total),
    other ? topOf(foundBeside, other.total) : 0,
    1,
  );
  const isNear = (nbytes) => nbytes !== null && nbytes <= 2 * top;
  const most = 1.08 * Math.max(top, ...[plan.budget, plan.measured].filter(isNear));
  const stepped = uPlot.paths.stepped({ align: 1 }),
    page = colour("page");
  const line = (name, dash) => ({ stroke: colour(name), width: 1.5, dash, paths: stepped, points: { show: false } });
  const series = [
    {},
    { ...line("asitis"), fill: colour("asitis-area") },
    ...layers.map(({ kind }) => ({
      stroke: page,
      width: 0.5,
      fill: colour(kind),
      paths: stepped,
      points: { show: false },
    })),
    line("asitis", [2, 2]),
  ];
  const curves = [xs, behind, ...layers.map((layer) => layer.curve), behind];
  if (other) {
    series.push(line("beside", [8, 3]));
    curves.push(curveOf(foundBeside, other.total));
  }
  const [unit, unitName] = unitOf(most);
  const chart = new uPlot(
    {
      width,
      height: 360,
      padding: [14, EDGE, 0, 0],
      legend: { show: false },
      series,
      cursor: cursorOf(state),
      scales: { x: { time: false, range: () => [low, high] }, y: { range: () => [0, most] } },
      axes: [
        xAxis(state),
        {
          ...axisLook(),
          label: `On the device, ${unitName}`,
          size: GUTTER - 22,
          labelSize: 22,
          values: (_, splits) => splits.map((split) => `${+(split / unit).toFixed(2)}`),
        },
      ],
      hooks: {
        draw: [(chart) => drawLevels(chart, state), state.onDraw],
        setCursor: [state.onCursor],
        setSelect: [state.onSelect],
      },
    },
    curves,
    place,
  );
  state.kinds = shown.map(([kind, k]) => ({ kind, k }));
  state.withBudget = isNear(plan.budget);
  return chart;
}

/** Draw lines of bytes across the chart, and on an axis of time the proven bound and the step as it is. */
function drawLevels(chart, state) {
  const { plan, axis, stop } = state,
    { left, top, width, height } = chart.bbox;
  const level = (nbytes, name, dash, label) => {
    if (nbytes == null || nbytes > chart.scales.y.max) return;
    const y = Math.round(chart.valToPos(nbytes, "y", true));
    stroke(chart, colour(name), dash, left, y, left + width, y);
    if (label) drawLabel(chart, label, left + width - 4, y - 3, "right", colour(name));
  };
  const mark = (us, name, word, row) => {
    if (!us || us < state.low || us > state.high) return;
    const x = Math.round(chart.valToPos(us, "x", true)),
      right = us < (state.low + state.high) / 2;
    stroke(chart, colour(name), [4, 3], x, top, x, top + height);
    drawLabel(
      chart,
      `${word} ${ms(us)}`,
      x + (right ? 4 : -4),
      top + height - 6 - 18 * row * devicePixelRatio,
      right ? "left" : "right",
      colour(name),
    );
  };
  if (stop && stop.plan === null && stop.us !== null) {
    level(stop.budget, "beside", [], `budget ${mb(stop.budget)}`);
    level(stop.peak, "beside", [3, 3]);
  }
  if (state.withBudget) level(plan.budget, "budget", [], `budget ${mb(plan.budget)}`);
  level(plan.measured, "measured", [6, 4]);
  if (axis !== "time") return;
  mark(plan.bound_us, "bound", "bound", 0);
  mark(plan.measured_us, "measured", "measured", 1);
}

function stroke({ ctx }, style, dash, x0, y0, x1, y1) {
  ctx.save();
  ctx.strokeStyle = style;
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
  ctx.restore();
}

/** Draw a label on a ground of the page's colour, so that it can be read over any area. */
function drawLabel({ ctx }, text, x, y, align, style) {
  const size = 12 * devicePixelRatio;
  ctx.save();
  ctx.font = `600 ${size}px system-ui, sans-serif`;
  ctx.textAlign = align;
  ctx.textBaseline = "bottom";
  const width = ctx.measureText(text).width + 6 * devicePixelRatio;
  ctx.fillStyle = colour("page");
  ctx.globalAlpha = 0.85;
  ctx.fillRect(align === "right" ? x - width + 3 : x - 3, y - size - 1, width, size + 2);
  ctx.globalAlpha = 1;
  ctx.fillStyle = style;
  ctx.fillText(text, x, y);
  ctx.restore();
}

const axisLook = () => ({
  stroke: colour("ink"),
  font: "12px system-ui, sans-serif",
  labelFont: "12px system-ui, sans-serif",
  grid: { stroke: colour("grid"), width: 1 },
  ticks: { stroke: colour("edge"), width: 1 },
});

/** Return the axis of ops or of time. */
function xAxis({ axis, low, high }) {
  const unit = axis === "time" ? (high - low >= 2e6 ? 1e6 : high - low >= 2e3 ? 1e3 : 1) : 1;
  const name =
    axis === "time" ? `Time, ${{ 1e6: "s", 1e3: "ms", 1: "µs" }[unit]}` : "Op, in the order in which they run";
  return {
    ...axisLook(),
    label: name,
    labelSize: 18,
    size: 30,
    incrs: axis === "time" ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5],
    values: (_, splits) => splits.map((split) => `${+(split / unit).toFixed(3)}`),
  };
}

const cursorOf = (state) => ({
  y: false,
  points: { show: false },
  sync: { key: "step" },
  focus: { prox: -1 },
  drag: { x: true, y: false, setScale: false, dist: 4 },
  bind: { dblclick: () => () => state.onWhole() },
});
