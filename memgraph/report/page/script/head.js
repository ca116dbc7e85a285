// What stands above the charts: the figures of the step, and the legends.

function legends() {
  const { plan, beside, stop } = state;
  byId("kinds").replaceChildren(
    ...state.kinds.map(({ kind }) =>
      el("li", { "data-kind": kind }, swatch(kind), `${kind} `, el("span", { class: "bytes" })),
    ),
  );
  const lines = [
    ["budget", "solid", `budget ${mb(plan.budget)}${state.withBudget ? "" : ", above the chart"}`],
    ["measured", "dashed", plan.measured === null ? null : `measured peak ${mb(plan.measured)}`],
    ["asitis", "solid", `the step as it is, peak ${mb(plan.as_it_is.peak)}`],
    ["beside", "dashed", beside && `the plan beside, peak ${mb(beside.peak)}`],
    [
      "beside",
      "dotted",
      stop && stop.plan === null && stop.us !== null && `peak under ${mb(stop.budget)}: ${mb(stop.peak)}`,
    ],
    [
      "measured",
      "dashed",
      state.axis === "time" && plan.measured_us !== null && `measured end of backward ${ms(plan.measured_us)}`,
    ],
    [
      "bound",
      "dashed",
      state.axis === "time" && plan.bound_us ? `no plan of its class takes less: ${ms(plan.bound_us)}` : null,
    ],
  ];
  byId("lines").replaceChildren(
    ...lines.filter(([, , text]) => text).map(([name, dash, text]) => el("li", null, swatch(name, dash), text)),
  );
  byId("work").replaceChildren(...workIn(state).map((kind) => el("li", null, swatch(kind), WORK[kind])));
}

/** Show what the header says of a plan, or of a budget that has no plan here. */
function figures() {
  const { plan, stop } = state,
    other = stop && stop.plan === null ? stop : null;
  const us = other ? other.us : plan.us,
    bound = other ? other.lower_bound : plan.bound_us;
  const longer = percent(us / plan.as_it_is.us - 1);
  const shown = [
    [
      "Forecast peak",
      other ? mb(other.peak) : mb(plan.peak),
      other && other.us === null ? "the smallest that a plan was found for" : "",
    ],
    ["Measured peak", other || plan.measured === null ? "not yet" : mb(plan.measured), ""],
    ["Budget", mb(other ? other.budget : plan.budget), ""],
    ["Step, forecast", us === null ? "no plan" : ms(us), us === null || !plan.as_it_is.us ? "" : `${longer} on the step as it is`],
    [
      "Step, measured",
      other || plan.measured_us === null ? "not yet" : ms(plan.measured_us),
      other || plan.measured_us === null ? "" : "to the end of backward",
    ],
    [
      "Proven bound",
      bound ? ms(bound) : "none",
      other || !bound ? "" : `this plan is ${(plan.gap * 100).toFixed(1)}% above`,
    ],
    ["As it is", ms(plan.as_it_is.us), mb(plan.as_it_is.peak)],
    [
      "Decisions",
      `${other ? other.decisions : plan.decided_count}`,
      other || plan.decided_count === plan.decisions.count ? "" : `in ${plan.decisions.count} rows of like ones`,
    ],
  ];
  byId("figures").replaceChildren(
    ...shown.map(([name, text, more]) =>
      el("div", null, el("dt", null, name), el("dd", null, text, ...(more ? [el("small", null, more)] : []))),
    ),
  );
  byId("verdict").textContent = !other
    ? plan.verdict
    : other.us === null
      ? `a budget of ${mb(other.budget)} does not fit`
      : `fits: forecast ${mb(other.peak)}, budget ${mb(other.budget)}`;
  byId("peak-is").textContent = other ? "" : `${plan.peak_is[0].toUpperCase()}${plan.peak_is.slice(1)}.`;
  byId("others").replaceChildren(...plan.others.map((line) => el("li", null, line)));
}
