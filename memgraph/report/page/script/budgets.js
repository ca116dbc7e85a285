// The slider over the budgets of a sweep, and the time of the step by budget.

/** Show the slider, if there are budgets to move between; `state.onStop` gets the one that is chosen. */
function showBudgets(state) {
  const { stops } = state.data;
  if (!stops.length) return () => {};
  const slider = byId("budget"),
    own = stops.findIndex((stop) => stop.plan === 0);
  byId("budgets").hidden = false;
  byId("budget-lines").replaceChildren(
    ...[
      ["measured", "solid", "time of the step"],
      ["bound", "dashed", "proven bound"],
      ["budget", "solid", "the chosen budget"],
    ].map(([name, dash, text]) => el("li", null, swatch(name, dash), text)),
  );
  slider.max = stops.length - 1;
  slider.value = own;
  let chart = null,
    at = own;
  function say() {
    const stop = stops[at];
    const text =
      stop.us === null
        ? "no plan fits"
        : `peak ${mb(stop.peak)}, step ${ms(stop.us)} (${percent(stop.overhead)}), bound ${ms(stop.lower_bound)}, ` +
          `${stop.decisions} decisions: ${share(stop.kept)} kept, ${share(stop.recomputed)} recomputed, ` +
          `${share(stop.offloaded)} offloaded`;
    byId("budget-says").textContent =
      `${mb(stop.budget)}: ${text}` +
      (stop.plan === null ? ". The charts and tables below are of the plan of the report." : "");
    slider.setAttribute("aria-valuetext", `${mb(stop.budget)}: ${text}`);
  }
  function draw() {
    chart?.destroy();
    chart = budgetChart(stops, () => stops[at], byId("budgets-chart"));
  }
  slider.addEventListener("input", () => {
    at = +slider.value;
    say();
    chart.redraw(false, false);
    state.onStop(stops[at]);
  });
  say();
  return draw;
}

const share = (each) => `${(each * 100).toFixed(0)}%`;

function budgetChart(stops, current, place) {
  const fitting = stops.filter((stop) => stop.us !== null).sort((a, b) => a.budget - b.budget);
  const times = fitting.map((stop) => stop.us / 1e3),
    bounds = fitting.map((stop) => stop.lower_bound / 1e3);
  const points = { show: true, size: 6 },
    most = Math.max(...times, 0) * 1.1;
  const budgets = stops.map((stop) => stop.budget / 1e6),
    low = Math.min(...budgets),
    high = Math.max(...budgets),
    pad = (high - low || high) * 0.04;
  return new uPlot(
    {
      width: Math.min(760, place.clientWidth || 760),
      height: 190,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false, range: () => [low - pad, high + pad] }, y: { range: () => [0, most || 1] } },
      series: [
        {},
        { stroke: colour("measured"), width: 2, points },
        { stroke: colour("bound"), width: 1.5, dash: [4, 3], points: { show: false } },
      ],
      axes: [
        { ...axisLook(), label: "Budget, MB", labelSize: 18, size: 30 },
        { ...axisLook(), label: "Time, ms", size: 54, labelSize: 22 },
      ],
      hooks: {
        draw: [
          (chart) => {
            const x = Math.round(chart.valToPos(current().budget / 1e6, "x", true));
            stroke(chart, colour("budget"), [], x, chart.bbox.top, x, chart.bbox.top + chart.bbox.height);
          },
        ],
      },
    },
    [fitting.map((stop) => stop.budget / 1e6), times, bounds],
    place,
  );
}
