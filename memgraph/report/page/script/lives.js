// The lives of the largest buffers at an op, on the axis of the charts: a bar while one is on the device.

const BARS = 12; // values that have a row
const LEGIBLE = 60; // pixels of a bar from which on it says what it is; its title and its story always do

/** Return a row for each of the largest values that are on the device while the op runs. */
function barsOf(state) {
  const { plan, op, low, high, axis, width, data } = state,
    edges = edgesOf(plan, axis);
  const x = (place) => ((Math.max(low, Math.min(high, place)) - low) / (high - low)) * width;
  return largestAt(plan, op, BARS).found.map((life) => {
    const { first, length, kind, maker, nbytes } = plan.lives,
      parts = sameValue(plan, life).sort((a, b) => first[a] - first[b]),
      spans = parts.map((part) => [edges[first[part]], edges[first[part] + length[part] + 1]]),
      { verb } = reasonOf(plan, life, data.kinds),
      says = `${titleOf(plan, maker[life])} · ${mb(nbytes[life])}${verb === "keep" ? "" : ` · ${verb}`}`;
    const row = el("li", null, ...away(spans, x));
    row.style.setProperty("--bar", `var(--${data.kinds[kind[life]]})`);
    for (const [i, [begin, end]] of spans.entries()) {
      if (end < low || begin > high) continue;
      const part = parts[i],
        span = `op ${first[part] + 1} to ${first[part] + length[part] + 1}`,
        bar = el("button", { type: "button", title: `${says}, ${span}`, onclick: () => state.tell(part) });
      bar.setAttribute("aria-label", `${says}, ${span}`);
      bar.style.left = `${x(begin)}px`;
      bar.style.width = `${x(end) - x(begin)}px`;
      if (part === life && x(end) - x(begin) > LEGIBLE) bar.textContent = says;
      row.append(bar);
    }
    return row;
  });
}

/** Return a dotted line from the first to the last time that a value is on the device; none if it is there throughout. */
function away(spans, x) {
  if (spans.length === 1) return [];
  const line = el("hr", { "aria-hidden": "true" });
  line.style.left = `${x(spans[0][0])}px`;
  line.style.width = `${x(spans.at(-1)[1]) - x(spans[0][0])}px`;
  return [line];
}
