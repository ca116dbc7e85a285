// Columns of integers back into arrays, and a plan into what the charts read.

/** Return the integers of a packed column: as they are, as runs ("r") or as places in a table ("t"), summed if "s". */
function ints([mark, first, second]) {
  let found;
  if (mark.endsWith("t")) {
    found = new Float64Array(second.length);
    for (let i = 0; i < second.length; i++) found[i] = first[second[i]];
  } else if (mark.endsWith("r")) {
    let count = 0;
    for (let i = 1; i < first.length; i += 2) count += first[i];
    found = new Float64Array(count);
    for (let i = 0, at = 0; i < first.length; at += first[i + 1], i += 2) found.fill(first[i], at, at + first[i + 1]);
  } else found = new Float64Array(first);
  if (mark.startsWith("s")) for (let i = 1; i < found.length; i++) found[i] += found[i - 1];
  return found;
}

/** Return the columns of a part of a plan, each as an array that is made when it is first read. */
function unpacked(part) {
  const found = {};
  for (const [name, column] of Object.entries(part)) {
    const make = () => {
      const value = Array.isArray(column) ? ints(column) : column;
      Object.defineProperty(found, name, { value });
      return value;
    };
    Object.defineProperty(found, name, { get: make, configurable: true });
  }
  return found;
}

/** Return the begin of each op and the end of the last one in microseconds, from durations in tenths of them. */
function beginsOf(tenths) {
  const begins = new Float64Array(tenths.length + 1);
  let sum = 0;
  for (let i = 0; i < tenths.length; i++) begins[i + 1] = (sum += tenths[i]) / 10;
  return begins;
}

/** Return the bytes of each kind at each op, summed from lifetimes, and which kinds there are. */
function bytesByKind(kinds, { count, kind, first, length, nbytes }, workspace, staging) {
  const ops = workspace.length,
    byKind = kinds.map(() => new Float64Array(ops + 1)),
    has = kinds.map(() => false);
  for (let i = 0; i < count; i++) {
    const bytes = byKind[kind[i]];
    bytes[first[i]] += nbytes[i];
    bytes[first[i] + length[i] + 1] -= nbytes[i];
    if (nbytes[i] > 0) has[kind[i]] = true;
  }
  byKind.forEach((bytes, k) => has[k] && addUp(bytes));
  const [work, copies] = ["workspace", "staging"].map((name) => kinds.indexOf(name));
  byKind[work].set(workspace);
  has[work] = workspace.some((each) => each > 0);
  byKind[copies].fill(staging);
  has[copies] = staging > 0 && ops > 0;
  return { byKind: byKind.map((bytes) => bytes.subarray(0, ops)), has };
}

function addUp(values) {
  for (let i = 1; i < values.length; i++) values[i] += values[i - 1];
}

/** Return the bytes of all kinds at each op. */
function totalOf({ byKind, has, count }) {
  const total = new Float64Array(count);
  byKind.forEach((bytes, k) => {
    if (has[k]) for (let i = 0; i < count; i++) total[i] += bytes[i];
  });
  return total;
}

/** Return a plan as the page shows it; `data.plans[number]` with its columns as arrays. */
function planOf(data, number) {
  const plan = { ...data.plans[number], strings: data.strings },
    { strings } = plan;
  for (const part of ["ops", "lives", "copies", "captured", "decisions"]) plan[part] = unpacked(plan[part]);
  const { ops, lives, captured } = plan,
    { stem, number: numbers, of } = ops;
  plan.count = ops.count;
  const last = new Float64Array(strings.length).fill(-1);
  for (let i = 0; i < numbers.length; i++) {
    numbers[i] += last[stem[i]];
    last[stem[i]] = numbers[i];
    of[i] = i - of[i];
  }
  const own = (i) => strings[stem[i]] + (numbers[i] < 0 ? "" : numbers[i]);
  plan.name = (i) => (of[i] === i ? own(i) : own(of[i]) + own(i));
  for (const name of ["fn", "type", "where"]) plan[name] = (i) => strings[ops[name][i]];
  plan.begins = beginsOf(ops.tenths);
  captured.begins = beginsOf(captured.tenths);
  Object.assign(plan, bytesByKind(data.kinds, lives, ops.workspace, plan.staging));
  plan.total = totalOf(plan);
  plan.peakIndex = plan.total.indexOf(most(plan.total));
  plan.decision = (i) => rowOf(plan, i, strings);
  return plan;
}

/** Return the largest of values that are not negative; 0 if there are none. */
function most(values) {
  let found = 0;
  for (let i = 0; i < values.length; i++) if (values[i] > found) found = values[i];
  return found;
}

/** Map the op of each decided value to its rows. */
function decisionsByOp(plan) {
  if (plan.decided) return plan.decided;
  const rows = (plan.decided = new Map()),
    { op } = plan.decisions;
  for (let i = 0; i < op.length; i++) {
    if (!rows.has(op[i])) rows.set(op[i], []);
    rows.get(op[i]).push(i);
  }
  return rows;
}

function rowOf({ decisions }, i, strings) {
  const text = (name) => strings[decisions[name][i]];
  return {
    value: text("value"),
    verb: text("verb"),
    fn: text("fn"),
    where: text("where"),
    why: text("why"),
    op: decisions.op[i],
    nbytes: decisions.nbytes[i],
    us: decisions.tenths[i] / 10,
    again: decisions.again[i] < 0 ? null : decisions.again[i] / 10,
  };
}
