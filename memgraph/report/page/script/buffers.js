// What is on the device at an op, and the story of one buffer: its life, its decision, and the price of the others.

/** Return the lifetimes that are on the device while an op runs, the largest first. */
function liveAt({ lives }, op) {
  const found = [];
  for (let i = 0; i < lives.count; i++)
    if (lives.first[i] <= op && op <= lives.first[i] + lives.length[i] && lives.nbytes[i] > 0) found.push(i);
  return found.sort((a, b) => lives.nbytes[b] - lives.nbytes[a]);
}

/** Return how many are on the device while an op runs, and the `most` largest of them; without a sort of all. */
function largestAt({ lives }, op, most) {
  const { first, length, nbytes } = lives,
    found = [];
  let count = 0;
  for (let i = 0; i < lives.count; i++) {
    if (first[i] > op || op > first[i] + length[i] || nbytes[i] === 0) continue;
    count++;
    if (found.length === most && nbytes[i] <= nbytes[found[most - 1]]) continue;
    let at = found.length < most ? found.length : most - 1;
    while (at > 0 && nbytes[found[at - 1]] < nbytes[i]) found[at] = found[--at];
    found[at] = i;
  }
  return { count, found };
}

/** Return the groups of lifetimes that are alike but for numbers in their names, as layers are. */
function groupsOf(plan) {
  if (plan.groups) return plan.groups;
  const { kind, maker, count } = plan.lives,
    known = new Map(),
    of = new Int32Array(count),
    titles = [];
  for (let i = 0; i < count; i++) {
    const title = titleOf(plan, maker[i]).replace(/(?<=\.|^)\d+(?=\.|$| )|(?<=_)\d+\b/g, "*"),
      key = `${kind[i]} ${title}`;
    if (!known.has(key)) {
      known.set(key, titles.length);
      titles.push(title);
    }
    of[i] = known.get(key);
  }
  return (plan.groups = { of, titles });
}

/** Return how many are on the device while an op runs, and the largest groups of them as {title, nbytes, members}. */
function largestGroups(plan, op, most) {
  const { first, length, nbytes, count } = plan.lives,
    { of, titles } = groupsOf(plan),
    sums = new Float64Array(titles.length),
    members = new Map();
  let all = 0;
  for (let i = 0; i < count; i++) {
    if (first[i] > op || op > first[i] + length[i] || nbytes[i] === 0) continue;
    all++;
    sums[of[i]] += nbytes[i];
    if (!members.has(of[i])) members.set(of[i], []);
    members.get(of[i]).push(i);
  }
  const found = [...members].sort(([a], [b]) => sums[b] - sums[a]).slice(0, most);
  return {
    count: all,
    found: found.map(([group, lives]) => ({
      title: lives.length === 1 ? titleOf(plan, plan.lives.maker[lives[0]]) : titles[group],
      nbytes: sums[group],
      members: lives,
    })),
  };
}

/** Return the rows of a roll-up: bytes and buffers on the device while an op runs, of each module with all in it. */
function modulesAt(plan, op) {
  const rows = new Map();
  for (const life of liveAt(plan, op)) {
    const { module } = placeOf(plan.where(plan.lives.maker[life])),
      path = module ? module.split(".") : ["(none)"];
    for (let depth = 1; depth <= path.length; depth++) {
      const name = path.slice(0, depth).join("."),
        row = rows.get(name) ?? { name, nbytes: 0, count: 0, byKind: new Map() },
        kind = plan.lives.kind[life];
      row.nbytes += plan.lives.nbytes[life];
      row.count++;
      row.byKind.set(kind, (row.byKind.get(kind) ?? 0) + plan.lives.nbytes[life]);
      rows.set(name, row);
    }
  }
  return [...rows.values()].sort((a, b) => b.nbytes - a.nbytes || a.name.localeCompare(b.name));
}

/** Return the value that a lifetime is of: the op that made it first. */
const valueOf = (plan, life) => plan.ops.of[plan.lives.maker[life]];

/** Return a name for people: the module, or the function where there is none. */
function titleOf(plan, op) {
  const { module } = placeOf(plan.where(op)),
    fn = plan
      .fn(op)
      .replace(/^(aten|memgraph)\./, "")
      .replace(/\.default$/, "");
  return module ? `${module} · ${fn}` : `${plan.name(op)} · ${fn}`;
}

/** Return why a buffer is where it is, as {verb, why}. */
function reasonOf(plan, life, kinds) {
  const value = valueOf(plan, life),
    rows = decisionsByOp(plan).get(value),
    kind = kinds[plan.lives.kind[life]];
  if (rows) {
    const first = plan.decision(rows[0]),
      us = rows.reduce((sum, row) => sum + plan.decision(row).us, 0);
    const costs = first.verb === "recompute" ? `running it again takes ${ms(us)}` : `compute loses ${ms(us)} to it`;
    return { verb: first.verb, why: `${costs}; ${first.why}`, decision: first };
  }
  if (kind === "gradient") return { verb: "keep", why: "a gradient, which the step hands to the optimizer" };
  if (plan.ops.phase[value] === 0 && ["parameter", "buffer", "input", "state", "tangent"].includes(plan.fn(value)))
    return { verb: "keep", why: `an input of the step, which no decision streams` };
  if (kind === "output") return { verb: "keep", why: "an output of the step, which the caller has" };
  if (kind === "activation")
    return {
      verb: "keep",
      why: "made in forward and read in backward; the plan fits the budget with it on the device",
    };
  return { verb: "keep", why: "made and read close together; it is freed after its last read" };
}

/** Return what the choices that were not taken would cost, as {verb, us, text}, the cheapest first. */
function othersOf(plan, life, kinds, reason) {
  const { lives, ops } = plan,
    value = valueOf(plan, life),
    nbytes = reason.decision?.nbytes ?? lives.nbytes[life],
    { link } = plan;
  const kind = kinds[lives.kind[life]],
    fn = plan.fn(value),
    others = [];
  const isInput = ["parameter", "buffer", "input", "state", "tangent", "gradient"].includes(fn),
    streams = plan.streams[fn];
  if (reason.verb === "keep" && kind !== "activation" && !streams) return [];
  if (reason.verb !== "keep")
    others.push({ verb: "keep", us: 0, text: `no time, but ${mb(nbytes)} more on the device until it is read` });
  const again = reason.decision ? reason.decision.again : ops.once[value] ? null : ops.tenths[value] / 10;
  if (!isInput && again !== null && reason.verb !== "recompute")
    others.push({
      verb: "recompute",
      us: again,
      text: `${ms(again)} to run ${plan.fn(value)} again, and what it reads has to be there`,
    });
  if (link && (!isInput || streams) && !/^(offload|stream|update)/.test(reason.verb)) {
    const us = nbytes / link.out + nbytes / link.back,
      lost = 2 * link.call_us + 2 * nbytes * link.us_per_byte,
      costs = lost ? `; ${ms(lost)} of compute are lost to them` : "";
    const verb = isInput ? "stream" : "offload";
    others.push({
      verb,
      us,
      text: `${ms(us)} for the copies out and back, which may hide behind compute` + costs,
    });
  }
  return others.sort((a, b) => (a.verb === "keep") - (b.verb === "keep") || a.us - b.us);
}

/** Return the other lifetimes of the same value: before it was dropped, or after it was restored. */
function sameValue(plan, life) {
  const value = valueOf(plan, life),
    found = [];
  for (let i = 0; i < plan.lives.count; i++) if (valueOf(plan, i) === value && plan.lives.nbytes[i] > 0) found.push(i);
  return found;
}

/** Return the elements that tell the story of a buffer. */
function storyOf(plan, life, kinds) {
  const { lives } = plan,
    maker = lives.maker[life],
    value = valueOf(plan, life),
    first = lives.first[life],
    last = first + lives.length[life];
  const reason = reasonOf(plan, life, kinds),
    others = othersOf(plan, life, kinds, reason),
    { module, line } = placeOf(plan.where(value));
  const span = (i) => `op ${lives.first[i] + 1} to ${lives.first[i] + lives.length[i] + 1}`;
  const parts = sameValue(plan, life);
  const list = (rows) =>
    el(
      "ul",
      null,
      ...rows.map(({ verb, text }, i) =>
        el("li", null, el("strong", null, verb), `${i === 0 && verb !== "keep" ? " (next best)" : ""}: ${text}`),
      ),
    );
  return [
    el("h3", null, `Buffer ${plan.name(maker)}`),
    el(
      "dl",
      { class: "facts" },
      ...facts([
        ["bytes", `${mb(lives.nbytes[life])} of ${kinds[lives.kind[life]]}`],
        ["type", plan.type(maker)],
        ["made by", plan.fn(maker)],
        ["module", module],
        ["line", line],
        ["life", `${span(life)} of ${plan.count}, from ${ms(plan.begins[first])} to ${ms(plan.begins[last + 1])}`],
        ["freed after", last + 1 < plan.count ? `${plan.name(last)} · ${plan.fn(last)}` : "the step"],
        [
          "also",
          parts
            .filter((i) => i !== life)
            .map(span)
            .slice(0, 4)
            .join(", "),
        ],
      ]),
    ),
    el("p", null, el("strong", null, `${reason.verb}: `), reason.why, "."),
    ...(others.length
      ? [el("p", null, "Instead:"), list(others)]
      : [el("p", { class: "quiet" }, "There is no other choice for it.")]),
  ];
}

/** Return the elements that list the buffers of a group, each of which has a story. */
function groupStory(plan, { title, nbytes, members }, tell) {
  const { lives } = plan;
  return [
    el("h3", null, `${members.length} buffers: ${title}`),
    el("p", null, `${mb(nbytes)} in all.`),
    el(
      "ul",
      { class: "rows" },
      ...members.map((life) =>
        el(
          "li",
          null,
          el(
            "button",
            { type: "button", onclick: () => tell(life) },
            `${titleOf(plan, lives.maker[life])}, ${mb(lives.nbytes[life])}`,
          ),
        ),
      ),
    ),
  ];
}
