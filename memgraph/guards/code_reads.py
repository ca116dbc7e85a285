"""The variables that one code object refers to, by name.

    def forward(self, x): return x * args.scale + getattr(self, "bias")
    ->   globals: ("args", "scale");  names: scale, bias

Names are those of attributes, and texts that may be one.  Code of inner functions counts when that runs.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
ATTRIBUTE_OPS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"})
STORES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
BY_NAME = frozenset({"getattr", "hasattr"})  # functions whose second argument is a name
BY_TEXT = frozenset({"import_module", "modules", "__import__"})  # what finds a module by its name
BY_FORMAT = frozenset({"format", "format_map", "vformat"})  # methods of texts
FIELD = re.compile(r"[.\[]([^\W\d]\w*)")
UNTOLD = frozenset({"__getattribute__", "getattr_static"})  # read attributes past what tells of it
# These read attributes of any name.
ANY_NAME = UNTOLD | {"vars", "dir", "attrgetter", "asdict", "astuple", "__dict__"}


@dataclass(frozen=True)
class Import:
    """`from module import names`, or without names `import module`; `level` is the number of dots before it."""

    module: str
    level: int
    names: tuple[str, ...]

    def found(self, package: str) -> Iterator[ModuleType]:
        """Yield the modules that it names and that are loaded; code in `package` imports."""
        try:
            name = importlib.util.resolve_name("." * self.level + self.module, package or None)
        except (ImportError, ValueError):
            return
        paths = [name] if self.names else [name, name.partition(".")[0]]
        yield from (sys.modules[path] for path in dict.fromkeys(paths) if path in sys.modules)

    def taken(self, module: ModuleType) -> set[str]:
        """Return the names that it takes from a module, for a star all that may be values; none without `from`."""
        if self.names != ("*",):
            return set(self.names)
        public = getattr(module, "__all__", None) or (name for name in vars(module) if not name.startswith("_"))
        return {name for name in public if not isinstance(vars(module).get(name), type | ModuleType)}


@dataclass(frozen=True)
class CodeReads:
    """The names to which a code object refers.

    Attributes:
        paths: globals, with the attributes that it takes of each at once.
        names: of attributes.
        loads: of these, without those to which it assigns only.
        imports: inside of the function.
        takes_any: it reads attributes by names that it computes.
        takes_globals: it calls `globals()`.
    """

    paths: tuple[tuple[str, ...], ...]
    names: frozenset[str]
    loads: frozenset[str]
    imports: tuple[Import, ...]
    takes_any: bool
    takes_globals: bool


@functools.lru_cache(20_000)
def code_reads(code: CodeType) -> CodeReads:
    """Return what a code object refers to."""
    steps = list(dis.get_instructions(code))
    patterns = (each for constant in code.co_consts if isinstance(constant, tuple) for each in constant)
    texts = [each for each in (*code.co_consts, *patterns) if isinstance(each, str) and each.isidentifier()]
    if not BY_FORMAT.isdisjoint(code.co_names):  # "{0.scale}"
        texts += [name for each in code.co_consts if isinstance(each, str) for name in FIELD.findall(each)]
    names = frozenset((*code.co_names, *texts))
    loads = frozenset((*texts, *(str(step.argval) for step in steps if _names(step) and step.opname not in STORES)))
    imports = [*_imports(steps)]
    if names & BY_TEXT:
        imports += [Import(text, 0, ()) for text in code.co_consts if isinstance(text, str)]
    computes = any(step.argval in BY_NAME and _computes_name(steps[i + 1 :]) for i, step in enumerate(steps))
    computes |= any(step.argval in BY_FORMAT and not _is_text(steps[i - 1]) for i, step in enumerate(steps) if i)
    computes |= any(step.opname == "MATCH_CLASS" and step.arg for step in steps)  # by `__match_args__`
    return CodeReads(
        tuple(dict.fromkeys(_paths(steps))), names, loads, tuple(imports),
        computes or bool(names & ANY_NAME), "globals" in code.co_names,
    )  # fmt: skip


def _is_text(step: dis.Instruction) -> bool:
    """Return True if an instruction takes a text of the code, whose fields are known."""
    return step.opname.startswith("LOAD_CONST") and isinstance(step.argval, str)


def _names(step: dis.Instruction) -> bool:
    """Return True if an instruction takes a name of the code."""
    return step.opcode in dis.hasname


def _paths(steps: Sequence[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    path = tuple[str, ...]()
    for step in steps:
        if step.opname in ATTRIBUTE_OPS and path:
            path = (*path, step.argval)
            continue
        if path:
            yield path
        path = (step.argval,) if step.opname in GLOBAL_OPS else ()


def _imports(steps: Sequence[dis.Instruction]) -> Iterator[Import]:
    for i, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[i - 2].argval if i > 1 and isinstance(steps[i - 2].argval, int) else 0
            given = steps[i - 1].argval
            yield Import(step.argval, level, tuple(given) if isinstance(given, tuple) else ())


def _computes_name(steps: Sequence[dis.Instruction]) -> bool:
    """Return True unless the second argument of the call that begins here is a text in the code."""
    depth, name = 0, False  # of what is above the function on the stack
    for step in steps:
        if step.opname.startswith(("CALL", "PRECALL")) and depth == step.arg:
            return not name
        before = depth
        depth += dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)
        if depth == 2:
            name = before == 1 and step.opname.startswith("LOAD_CONST") and isinstance(step.argval, str)
        if depth < 0:
            return True
    return True


def mentions_any(code: CodeType, name: str) -> bool:
    """Return True if a function, or one inside of it, has this name in its code."""
    if name in (*code.co_names, *code.co_freevars, *code.co_varnames, *code.co_cellvars):
        return True
    inner: list[Any] = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(mentions_any(each, name) for each in inner)
