// Numbers and places as text, and elements that hold text. No text is ever read as HTML.

/** Bytes as in the report's text: kB, MB and GB are powers of 1000. */
function mb(nbytes) {
  if (nbytes < 1e3) return `${nbytes} B`;
  if (nbytes < 1e5) return `${(nbytes / 1e3).toFixed(1)} kB`;
  return nbytes < 1e10 ? `${(nbytes / 1e6).toFixed(1)} MB` : `${(nbytes / 1e9).toFixed(1)} GB`;
}
const ms = (us) => `${(us / 1e3).toFixed(us < 10 && us > 0 ? 4 : us < 1000 && us > 0 ? 2 : 1)} ms`;
const percent = (share) => `${share < 0 ? "" : "+"}${(share * 100).toFixed(1)}%`;

/** Split "blocks.0.mlp gpt.py:71" into the path of a module and a source line. */
function placeOf(where) {
  const match = /^(?:(.*) )?([^\s]+:\d+)$/s.exec(where);
  return match ? { module: match[1] ?? "", line: match[2] } : { module: where, line: "" };
}

const byId = (id) => document.getElementById(id);

/** Return an element; children are elements or text. */
function el(tag, facts, ...children) {
  const made = document.createElement(tag);
  for (const [name, fact] of Object.entries(facts ?? {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), fact);
    else if (name === "class") made.className = fact;
    else made.setAttribute(name, fact);
  }
  made.append(...children);
  return made;
}

/** Return rows of a description list; rows without text are left out. */
const facts = (rows) =>
  rows
    .filter(([, text]) => text !== "" && text != null)
    .flatMap(([name, text]) => [el("dt", null, name), el("dd", null, text)]);

const colours = new Map(); // of the scheme that is on; read once, as each reading makes the browser lay the page out

const colour = (name) => {
  if (!colours.has(name))
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
};

function swatch(name, dash) {
  const made = el("span", { class: dash ? "swatch line" : "swatch", "aria-hidden": "true" });
  made.style[dash ? "borderTopColor" : "backgroundColor"] = `var(--${name})`;
  if (dash) made.style.borderTopStyle = dash;
  return made;
}
