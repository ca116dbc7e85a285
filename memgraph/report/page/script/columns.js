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

/** Return the columns of a part of a plan, each as an array. */
const unpacked = (part) =>
  Object.fromEntries(
    Object.entries(part).map(([name, column]) => [name, Array.isArray(column) ? ints(column) : column]),
  );

/** Return the begin of each op and the end of the last one in microseconds, from durations in tenths of them. */
function beginsOf(tenths) {
  const begins = new Float64Array(tenths.length + 1);
  let sum = 0;
  for (let i = 0; i < tenths.length; i++) begins[i + 1] = (sum += tenths[i]) / 10;
  return begins;
}

/** Return the bytes of each kind at each op, summed from lifetimes. */
function bytesByKind(kinds, lives, workspace, staging) {
  const count = workspace.length;
  const byKind = kinds.map(() => new Float64Array(count + 1));
  for (let i = 0; i < lives.count; i++) {
    const bytes = byKind[lives.kind[i]];
    bytes[lives.first[i]] += lives.nbytes[i];
    bytes[lives.first[i] + lives.length[i] + 1] -= lives.nbytes[i];
  }
  for (const bytes of byKind) for (let i = 1; i < count; i++) bytes[i] += bytes[i - 1];
  byKind[kinds.indexOf("workspace")].set(workspace);
  byKind[kinds.indexOf("staging")].fill(staging);
  return byKind.map((bytes) => bytes.subarray(0, count));
}

/** Return a plan as the page shows it; `data.plans[number]` with its columns as arrays. */
function planOf(data, number) {
  const plan = { ...data.plans[number] },
    strings = data.strings;
  const ops = (plan.ops = unpacked(plan.ops)),
    count = (plan.count = ops.count);
  for (const part of ["lives", "copies", "captured", "decisions"]) plan[part] = unpacked(plan[part]);
  const last = new Float64Array(strings.length).fill(-1),
    numbers = ops.number;
  for (let i = 0; i < count; i++) {
    last[ops.stem[i]] = numbers[i] += last[ops.stem[i]];
    ops.of[i] = i - ops.of[i];
  }
  const own = (i) => strings[ops.stem[i]] + (numbers[i] < 0 ? "" : numbers[i]);
  plan.name = (i) => (ops.of[i] === i ? own(i) : own(ops.of[i]) + own(i));
  for (const name of ["fn", "type", "where"]) plan[name] = (i) => strings[ops[name][i]];
  plan.begins = beginsOf(ops.tenths);
  plan.captured.begins = beginsOf(plan.captured.tenths);
  plan.byKind = bytesByKind(data.kinds, plan.lives, ops.workspace, plan.staging);
  plan.has = plan.byKind.map((bytes) => bytes.some((each) => each > 0));
  plan.total = new Float64Array(count);
  for (const bytes of plan.byKind) for (let i = 0; i < count; i++) plan.total[i] += bytes[i];
  plan.peakIndex = 0;
  for (let i = 1; i < count; i++) if (plan.total[i] > plan.total[plan.peakIndex]) plan.peakIndex = i;
  plan.strings = strings;
  plan.decided = decisionsByOp(plan);
  plan.decision = (i) => rowOf(plan, i, strings);
  return plan;
}

/** Map the op of each decided value to its rows. */
function decisionsByOp({ decisions }) {
  const rows = new Map();
  for (let i = 0; i < decisions.count; i++) {
    if (!rows.has(decisions.op[i])) rows.set(decisions.op[i], []);
    rows.get(decisions.op[i]).push(i);
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
