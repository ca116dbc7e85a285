// Tables with the same data as the charts. A table has `count` rows; `row(i)` returns its cells.

const PAGE = 100; // rows that are shown at once

const NUMBERS = new Set([
  "bytes",
  "time",
  "begins",
  "takes",
  "ends",
  "on the device",
  "from",
  "to",
  "op number",
  "workspace",
  "budget",
  "peak",
  "step",
  "bound",
  "kept",
  "recomputed",
  "offloaded",
  "decisions",
]);

/** Return the tables of the page by name; each is made when it is asked for. */
function tablesOf(state) {
  const { plan, data } = state,
    places = (where) => Object.values(placeOf(where));
  const lifeRow = (life) => {
    const maker = plan.lives.maker[life],
      first = plan.lives.first[life];
    return [
      data.kinds[plan.lives.kind[life]],
      mb(plan.lives.nbytes[life]),
      { text: plan.name(maker), go: () => state.tell(life) },
      plan.fn(maker),
      plan.type(maker),
      ...places(plan.where(maker)),
      reasonOf(plan, life, data.kinds).verb,
      `${first + 1}`,
      `${first + plan.lives.length[life] + 1}`,
    ];
  };
  const lives = (op) => {
    const found = liveAt(plan, op);
    return {
      columns: ["kind", "bytes", "buffer", "op", "type", "module", "line", "decided", "from", "to"],
      count: found.length,
      row: (i) => lifeRow(found[i]),
    };
  };
  const goto = (op, text) => ({ text, go: () => state.hold(op) });
  const tables = {
    Decisions: () => decisionTable(state, places, goto),
    "Buffers at the peak": () => lives(plan.peakIndex),
    "Buffers at this op": () => lives(state.op),
    "Modules at this op": () => moduleTable(state),
    Ops: () => ({
      columns: ["op number", "name", "op", "module", "line", "phase", "begins", "takes", "on the device"],
      count: plan.count,
      row: (i) => [
        `${i + 1}`,
        goto(i, plan.name(i)),
        plan.fn(i),
        ...places(plan.where(i)),
        ["forward", "backward", "update"][plan.ops.phase[i]],
        ms(plan.begins[i]),
        ms(plan.ops.tenths[i] / 10),
        mb(plan.total[i]),
      ],
    }),
    "Memory by kind": () => ({
      columns: ["op number", "name", ...state.kinds.map(({ kind }) => kind), "on the device"],
      count: plan.count,
      numbers: new Set(state.kinds.map(({ kind }) => kind)),
      row: (i) => [
        `${i + 1}`,
        goto(i, plan.name(i)),
        ...state.kinds.map(({ k }) => mb(plan.byKind[k][i])),
        mb(plan.total[i]),
      ],
    }),
  };
  if (plan.copies.count)
    tables.Copies = () => ({
      columns: ["queue", "value", "module", "line", "begins", "ends", "takes"],
      count: plan.copies.count,
      row: (i) => {
        const { op, queue, begin, tenths } = plan.copies;
        return [
          data.queues[queue[i]],
          goto(op[i], plan.name(op[i])),
          ...places(plan.where(op[i])),
          ms(begin[i] / 10),
          ms((begin[i] + tenths[i]) / 10),
          ms(tenths[i] / 10),
        ];
      },
    });
  if (state.beside) tables.Differences = () => differences(state, places);
  if (data.stops.length)
    tables.Budgets = () => ({
      columns: ["budget", "peak", "step", "bound", "kept", "recomputed", "offloaded", "decisions"],
      count: data.stops.length,
      row: (i) => {
        const stop = data.stops[i],
          share = (each) => `${(each * 100).toFixed(0)}%`;
        if (stop.us === null) return [mb(stop.budget), "does not fit", "", "", "", "", "", ""];
        return [
          mb(stop.budget),
          mb(stop.peak),
          ms(stop.us),
          ms(stop.lower_bound),
          share(stop.kept),
          share(stop.recomputed),
          share(stop.offloaded),
          `${stop.decisions}`,
        ];
      },
    });
  return tables;
}

function moduleTable({ plan, op, kinds, showAll }) {
  const rows = modulesAt(plan, op);
  return {
    columns: ["module", "on the device", "buffers", ...kinds.map(({ kind }) => kind)],
    count: rows.length,
    numbers: new Set(["buffers", ...kinds.map(({ kind }) => kind)]),
    row: (i) => {
      const { name, nbytes, count, byKind } = rows[i];
      return [
        { text: name, go: () => showAll(name) },
        mb(nbytes),
        `${count}`,
        ...kinds.map(({ k }) => (byKind.has(k) ? mb(byKind.get(k)) : "")),
      ];
    },
  };
}

function decisionTable({ plan }, places, goto) {
  const order = Array.from({ length: plan.decisions.count }, (_, i) => i).sort(
    (a, b) => plan.decisions.nbytes[b] - plan.decisions.nbytes[a],
  );
  return {
    columns: ["decided", "value", "op", "module", "line", "bytes", "time", "why"],
    count: order.length,
    row: (i) => {
      const row = plan.decision(order[i]);
      return [
        row.verb,
        row.op < 0 ? row.value : goto(row.op, row.value),
        row.fn,
        ...places(row.where),
        mb(row.nbytes),
        ms(row.us),
        row.why,
      ];
    },
  };
}

/** Return the values that two plans decide otherwise, the largest first. */
function differences({ plan, beside }, places) {
  const verbs = (of) => {
    const found = new Map();
    for (let i = 0; i < of.decisions.count; i++) {
      const row = of.decision(i);
      found.set(row.value, { ...row, count: (found.get(row.value)?.count ?? 0) + 1 });
    }
    return found;
  };
  const said = (row) => (row ? row.verb + (row.count > 1 ? ` ${row.count} x` : "") : "keep");
  const here = verbs(plan),
    there = verbs(beside);
  const values = [...new Set([...here.keys(), ...there.keys()])].filter(
    (value) => said(here.get(value)) !== said(there.get(value)),
  );
  const rows = values
    .map((value) => [value, here.get(value), there.get(value)])
    .sort((a, b) => (b[1] ?? b[2]).nbytes - (a[1] ?? a[2]).nbytes);
  return {
    columns: ["value", "here", "beside", "op", "module", "line", "bytes"],
    count: rows.length,
    row: (i) => {
      const [value, mine, other] = rows[i],
        either = mine ?? other;
      return [value, said(mine), said(other), either.fn, ...places(either.where), mb(either.nbytes)];
    },
  };
}

/** Show tables in the page; return a function that shows the chosen one again. */
function showTables(state) {
  const which = byId("which"),
    filter = byId("filter"),
    table = byId("table");
  let names = "",
    page = 0,
    shown = null,
    matching = [];
  const text = (cell) => (typeof cell === "string" ? cell : cell.text);
  const cellOf = (cell, name) =>
    el(
      "td",
      NUMBERS.has(name) || shown.numbers?.has(name) ? { class: "number" } : null,
      typeof cell === "string" ? cell : el("button", { type: "button", onclick: cell.go }, cell.text),
    );
  function draw() {
    const rows = matching.slice(page * PAGE, (page + 1) * PAGE).map((i) => shown.row(i));
    table.caption.textContent = which.value;
    table.tHead.replaceChildren(
      el(
        "tr",
        null,
        ...shown.columns.map((name) =>
          el(
            "th",
            { scope: "col", ...(NUMBERS.has(name) || shown.numbers?.has(name) ? { class: "number" } : {}) },
            name,
          ),
        ),
      ),
    );
    table.tBodies[0].replaceChildren(
      ...rows.map((row) => el("tr", null, ...row.map((cell, i) => cellOf(cell, shown.columns[i])))),
    );
    const from = Math.min(page * PAGE + 1, matching.length),
      to = page * PAGE + rows.length;
    byId("found").textContent =
      (matching.length ? `${from} to ${to} of ${matching.length} rows` : "no rows") +
      `${matching.length < shown.count ? `, ${shown.count} without the filter` : ""}`;
    byId("before").disabled = page === 0;
    byId("after").disabled = to >= matching.length;
  }
  function choose() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const every = Array.from({ length: shown.count }, (_, i) => i);
    matching =
      words.length === 0
        ? every
        : every.filter((i) => {
            const all = shown.row(i).map(text).join(" ").toLowerCase();
            return words.every((word) => all.includes(word));
          });
    page = 0;
    draw();
  }
  function show() {
    const tables = tablesOf(state),
      found = Object.keys(tables);
    if (names !== found.join()) {
      const chosen = which.value;
      which.replaceChildren(...found.map((name) => el("option", null, name)));
      which.value = found.includes(chosen) ? chosen : state.plan.decisions.count ? "Decisions" : "Buffers at the peak";
      names = found.join();
    }
    shown = tables[which.value]();
    choose();
  }
  which.addEventListener("change", show);
  filter.addEventListener("input", choose);
  byId("before").addEventListener("click", () => (page--, draw()));
  byId("after").addEventListener("click", () => (page++, draw()));
  return { show, showIf: (name) => which.value === name && show() };
}
