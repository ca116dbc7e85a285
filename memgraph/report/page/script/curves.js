// Curves over the step, with one entry a pixel: the op with the most bytes in it, so that no peak is lost.

/** Return the edges of ops along the axis: op i lies between edges[i] and edges[i + 1]. */
function edgesOf(plan, axis) {
  if (axis === "time") return plan.begins;
  if (!plan.places) {
    plan.places = new Float64Array(plan.count + 1);
    for (let i = 0; i <= plan.count; i++) plan.places[i] = i;
  }
  return plan.places;
}

/** Return the edges of the captured step's ops: its own times, or the places of its ops in the plan. */
function capturedEdges(plan, axis) {
  if (axis === "time") return plan.captured.begins;
  return withEnd(plan.captured.place, plan.count);
}

/** Return the edges of another plan's ops: its own times, or the places of ops with the same names. */
function besideEdges(plan, other, axis) {
  if (axis === "time") return other.begins;
  const place = new Map();
  for (let i = 0; i < plan.count; i++) if (plan.ops.of[i] === i) place.set(plan.name(i), i);
  let last = 0;
  const places = Float64Array.from(
    { length: other.count },
    (_, i) => (last = Math.max(last, place.get(other.name(i)) ?? last)),
  );
  return withEnd(places, plan.count);
}

function withEnd(places, end) {
  const edges = new Float64Array(places.length + 1);
  edges.set(places);
  edges[places.length] = end;
  return edges;
}

/** Return the index of the op at a place of the axis. */
function opAt(edges, x) {
  let low = 0,
    high = edges.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (edges[middle] <= x) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Return for each of `count` pixels between `low` and `high` the index of the largest value in it; -1 for none. */
function largest(edges, values, low, high, count) {
  const found = new Int32Array(count).fill(-1),
    width = (high - low) / count,
    end = edges.length - 1;
  let begin = opAt(edges, low);
  while (begin > 0 && edges[begin - 1] >= low) begin--; // ops that take no time
  for (let i = begin; i < end && edges[i] <= high; i++) {
    const first = Math.min(count - 1, Math.max(0, Math.floor((edges[i] - low) / width + 1e-9)));
    const last = Math.min(count - 1, Math.max(first, Math.ceil((edges[i + 1] - low) / width - 1e-9) - 1));
    for (let at = first; at <= last; at++) if (found[at] < 0 || values[i] > values[found[at]]) found[at] = i;
  }
  return found;
}

/** Return values at indices, for as many pixels. */
const curveOf = (found, values) => toTheEdge(Array.from(found, (i) => (i < 0 ? null : values[i])));

/** Return a curve with its last value twice, so that a step reaches the edge. */
function toTheEdge(curve) {
  curve.push(curve.at(-1));
  return curve;
}
