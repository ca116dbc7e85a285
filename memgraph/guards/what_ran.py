"""The functions that forward and backward have entered, and the variables outside of attributes that they refer to.

    class Layer(nn.Module):
        calls = 0                                ->   Layer.calls
        def forward(self, x): COUNTS["n"] += 1   ->   model.COUNTS

These are globals, with the attributes behind them, closures, defaults, and attributes of classes and of objects that
are named.  What is entered is noted before its first line, so that what it changes has been seen before.
"""

from __future__ import annotations

import enum
import gc
import inspect
import logging
import operator
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..system.entered_code import is_watched
from ..system.frames import MEMGRAPH
from ..system.own_attributes import attributes_of
from .cleared_caches import FunctionCache
from .code_reads import UNTOLD, CodeReads, code_reads, mentions_any
from .contents import NAMESPACES, STATES, container_of, reached_from
from .found_functions import AROUND, MISSING, WRAPPERS, FoundFunctions, codes, defaults_of
from .module_attributes import CONSTANTS
from .module_proxy import ModuleProxy
from .packages import has_own_state, is_installed, is_library, is_open, module_of
from .variable_scope import WHOLE, OuterVariable, Reads, Scope, Whole, cell_contents, has_read, mentions

GETTERS = (operator.attrgetter, operator.methodcaller)
CLOSED = (type, ModuleType, nn.Module, fx.Tracer)  # the last is that of the capture
HELD = (Tensor, nn.Module, type, ModuleType, *WRAPPERS)  # what counts otherwise
FOUND_BY = dict.fromkeys(("getenv", "getenvb", "expanduser", "expandvars"), (os, "environ"))  # what these read
METHODS = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})
ENTRIES = ("forward", "backward", "setup_context")  # methods that torch calls
GROUPS = "param_groups"  # alone of an optimizer counts: its states differ in each step
DEPTH = 3  # how far objects in attributes of objects are looked into
MANY = 1_000  # entries of a container that are looked at


class Entered(NamedTuple):
    """Where code was entered: the globals of its file, and the code that was running, the innermost first."""

    content: dict[str, Any]
    around: tuple[CodeType, ...]


class WhatRan:
    """A record of the code that is entered while some submodules run.

    Attributes:
        scopes: a place that has variables may have several, each with other names.
        defaults: those of functions that can change; they belong to these.
        functions: with their closures and defaults.
        codes: where each was entered first.
        takes_any: some of it reads attributes by names that it computes.
        kinds: classes of objects in attributes, which tell what is read of them.
    """

    def __init__(self, parts: Iterable[tuple[str, nn.Module]] = (), tensors: Sequence[Tensor] = ()) -> None:
        """`tensors` are those of the call: others stand for them while it is traced."""
        self.parts, self.tensors = list(parts), tensors
        self.scopes: list[Scope] = []
        self.functions: list[FunctionType] = []
        self.defaults: list[Scope] = []
        self.codes: dict[CodeType, Entered] = {}
        self._known: dict[int, set[str]] = {}  # names, by the id of what has the variables
        self._names = {*ENTRIES, *METHODS}
        self._loads, self._told = set[str](), set[str]()
        self._attributes, self._set = set[tuple[int, str]](), set[tuple[int, str]]()
        self.kinds = set[type]()
        self.takes_any = False
        self._whole: dict[int, Whole] = {}
        self._seen, self._taken = set[int](), set[int]()  # functions, and objects all of whose attributes count
        self._held: dict[int, Any] = {}
        self._optimizers, self._found = list[torch.optim.Optimizer](), FoundFunctions()
        self._own = {id(part): part for _, part in self.parts}
        for part in list(self._own.values()):
            self._enter_part(part)

    def enter(self, frame: FrameType) -> tuple[list[Scope], list[FunctionType]]:
        """Note that a function is entered; return the variables and functions that were not known before."""
        code, known = frame.f_code, (len(self.scopes), len(self.defaults), len(self.functions))
        if is_new := code not in self.codes:
            self.codes[code] = Entered(frame.f_globals, tuple(each.f_code for each, _ in walk_stack(frame)))
            self._enter_code(code_reads(code), frame)
        if is_new or code.co_freevars:
            for function in self._found.of(frame, self.codes):
                if id(function) not in self._seen:
                    self._enter_function(function)
        return self.scopes[known[0] :] + self.defaults[known[1] :], self.functions[known[2] :]

    def read(self, thing: Any, name: str) -> list[Scope]:
        """Note that an attribute of an object is read; return the variables that were not known before."""
        scopes = len(self.scopes)
        self._enter_class(type(thing))
        self._add(f"{type(thing).__name__}.{{}}", False, vars(thing), (name,))
        return self.scopes[scopes:]

    def reads(self, written: Container[tuple[int, str]] = ()) -> Reads:
        """Return the places and functions on which the graph rests that was traced meanwhile.

        `written` are the attributes that each step writes: others that forward has set were what it sets them to.
        """
        self._held.clear()
        for whole in list(self._whole.values()):  # objects may have been made
            self._name_attributes(whole)
        for scope in list(self.scopes):
            for value in scope.content().values():
                if isinstance(value, FunctionCache):
                    self._hold(value)
        is_any = not self._told.isdisjoint(WHOLE) or not self._names.isdisjoint(UNTOLD)
        named = None if is_any else frozenset(self._told)
        kept = {attribute for attribute in self._set if attribute not in written}
        return Reads(tuple(self.scopes), tuple(self.functions), frozenset(self._attributes | kept), named)

    def has(self, variable: OuterVariable) -> bool:
        """Return True if what ran refers to a variable, which another record may have."""
        return variable.name in self._known.get(id(variable.scope.owner), ())

    def takes(self, part: nn.Module, name: str) -> bool:
        """Return True if an attribute of a module was read, or code that ran has a branch which may."""
        return has_read(self._attributes, id(part), name) or self.takes_any or name in self._loads

    def read_attribute(self, part: nn.Module, name: str) -> None:
        """Note that an attribute of a module is read."""
        self._attributes.add((id(part), name))

    def set_attribute(self, part: nn.Module, name: str) -> None:
        """Note that an attribute of a module is set."""
        self._set.add((id(part), name))

    def read_name(self, name: str) -> None:
        """Note that an attribute of this name is read of an object of one of `kinds`."""
        self._told.add(name)

    def line(self, variable: OuterVariable) -> str:
        """Return the line that assigns to a variable, or else names it, as `path:line in function`; empty without."""
        users = [code for code, entered in self.codes.items() if entered.content is variable.scope.owner] or self.codes
        places = [one for code in users for one in mentions(code, variable.name)]
        return max(places).place if places else ""

    def is_of_hooks(self, variable: OuterVariable) -> bool:
        """Return True if forward hooks alone name a variable: they run when a step is captured, and in no later run."""
        if isinstance(variable.name, int):  # what a hook holds
            return True
        hooks = {code for _, part in self.parts for hook in _hooks(part) for code in codes(hook)}
        named = [(code, *entered.around) for code, entered in self.codes.items() if mentions_any(code, variable.name)]
        return bool(hooks and named) and all(not hooks.isdisjoint(chain) for chain in named)

    def paths_of_readers(self, variable: OuterVariable) -> list[str]:
        """Return the paths of the submodules that were running when code was entered which names a variable."""
        kinds: dict[CodeType, set[type]] = {}  # of submodules, by the code of their methods
        for kind in {type(part) for _, part in self.parts}:
            for value in (value for base in kind.__mro__ for value in vars(base).values()):
                if isinstance(function := inspect.unwrap(value) if callable(value) else value, FunctionType):
                    kinds.setdefault(function.__code__, set()).add(kind)
        readers = set[type]()
        for code, entered in self.codes.items():
            if mentions_any(code, variable.name):
                readers |= next((kinds[each] for each in entered.around if each in kinds), set())
        return [path for path, part in self.parts if type(part) in readers]

    def _enter_code(self, reads: CodeReads, frame: FrameType) -> None:
        content = frame.f_globals
        title = str(content.get("__name__", ""))
        installed = is_installed(ModuleType(title))
        for path in reads.paths:
            self._follow(title, installed, content, path)
        if reads.takes_globals:
            taken: set[str] = {
                name for name, value in content.items() if not isinstance(value, type | FunctionType | ModuleType)
            }
            self._add(f"{title}.{{}}", installed, content, taken)
        if "getLogger" in reads.names:
            loggers = logging.root.manager.loggerDict
            texts = {title, *(each for each in frame.f_code.co_consts if isinstance(each, str))}
            self._add("the logger {}", True, loggers, texts & loggers.keys())
        for each in reads.imports:
            for module in each.found(str(content.get("__package__") or "")):
                names = each.taken(module) or reads.names & vars(module).keys()
                self._enter_file(module)
                self._add(f"{module.__name__}.{{}}", is_installed(module), vars(module), names)
        if frame.f_code.co_argcount and (first := frame.f_locals.get(frame.f_code.co_varnames[0])) is not None:
            self._enter_class(first if isinstance(first, type) else type(first))
            if frame.f_code.co_name == "__init__" and isinstance(first, nn.Module):
                self._own[id(first)] = first  # the call makes it
            self._enter_module(first)
        self._loads |= reads.loads
        self._mention({*reads.names, frame.f_code.co_name}, reads.takes_any)

    def _enter_part(self, part: nn.Module) -> None:
        self._enter_class(type(part))
        self._enter_layer(type(part))
        for value in vars(part).values():
            self._hold(value)
        self._enter_hooks(part)

    def _enter_module(self, thing: Any) -> None:
        """Let all attributes count of a module that is no submodule, and of those beneath it."""
        for path, part in thing.named_modules() if isinstance(thing, nn.Module) and id(thing) not in self._own else ():
            if id(part) not in self._own and not issubclass(type(part), ModuleProxy):
                self._own[id(part)] = part
                title = ".".join(filter(None, (type(thing).__qualname__, path)))
                self._add_whole(title, vars(part))
                self._enter_part(part)
                for name, value in vars(part).items():
                    self._enter_object(f"{title}.{name}", value, 0)

    def _enter_layer(self, kind: type[nn.Module]) -> None:
        """Let the methods of a torch layer count, which are not told of, and the functions that its forward names."""
        if id(kind.forward) in self._seen or is_open(kind):
            return
        self._seen.add(id(kind.forward))
        for base in kind.__mro__[:-1]:
            self._add(f"{base.__qualname__}.{{}}", True, base, METHODS)
        forward: Any = inspect.unwrap(kind.forward)
        if isinstance(forward, FunctionType):
            for path in code_reads(forward.__code__).paths:
                self._follow(forward.__module__, True, forward.__globals__, path)

    def _enter_hooks(self, part: nn.Module) -> None:
        """Let objects count that are hooks, and what partials hold."""
        by_number: Any = part._forward_pre_hooks, part._forward_hooks
        for hooks in by_number:
            self._add(f"a hook of {type(part).__name__} ({{}})", False, hooks, hooks)
            for hook in hooks.values():
                self._hold(hook)
                self._enter_object(f"a hook of {type(part).__name__}", hook, 0)

    def _mention(self, names: set[str], takes_any: bool = False) -> None:
        """Let attributes with these names count, or all."""
        new = names - self._names
        self._names |= new
        self._add("Tensor.{}", True, Tensor, {name for name in new if hasattr(Tensor, name)})
        for module, variable in (FOUND_BY[name] for name in new & FOUND_BY.keys()):
            self._add(f"{module.__name__}.{{}}", True, vars(module), (variable,))
        for optimizer in self._optimizers if GROUPS in self._names else ():
            self._add(f"{type(optimizer).__name__}.{{}}", False, vars(optimizer), (GROUPS,))
        takes_any, self.takes_any = takes_any and not self.takes_any, self.takes_any or takes_any
        if new or takes_any:
            for whole in list(self._whole.values()):
                self._name_attributes(whole)

    def _follow(self, title: str, installed: bool, content: dict[str, Any], path: Sequence[str]) -> None:
        """Add a global, and what code takes of it at once: attributes of files, classes, functions and objects."""
        owner: Any = content
        for place, name in enumerate(path):
            self._add(f"{title}.{{}}", installed, owner, {name})
            value = (owner if isinstance(owner, dict) else vars(owner)).get(name, MISSING)
            is_last, label = place == len(path) - 1, f"{title}.{name}"
            if isinstance(value, (*WRAPPERS, *GETTERS, *STATES, nn.Module)) or container_of(value) is not None:
                self._hold(value)
            if isinstance(value, type):
                self._enter_class(value)
                return
            if isinstance(value, ModuleType):
                if is_last or path[place + 1] not in vars(value):
                    self._enter_file(value)
                title, owner, installed = value.__name__, vars(value), is_installed(value)
            elif isinstance(value, FunctionType):
                title, owner = value.__qualname__, vars(value)
            elif isinstance(value, Tensor | nn.Module) or attributes_of(value) is None:
                return
            else:
                inside = vars(value)
                self._enter_class(type(value))
                if is_last or path[place + 1] not in inside:  # a method or a property reads others
                    self._enter_object(label, value, 0, installed)
                    return
                title, owner = label, inside

    def _hold(self, value: Any, depth: int = 0) -> None:
        """Note the functions that a value leads to, the classes of objects there, and the objects of bound methods."""
        if isinstance(value, type | ModuleType):
            self._enter_class(value) if isinstance(value, type) else self._enter_file(value)
        self._enter_module(value)
        if id(value) in self._held or depth > DEPTH or isinstance(value, (*CONSTANTS, *CLOSED, Tensor)):
            return
        self._held[id(value)] = value
        for name in AROUND:
            self._hold(getattr(value, name, None) if isinstance(value, WRAPPERS) else None, depth)
        if isinstance(value, FunctionType):
            self._found.note(value)
            self._add(f"{value.__qualname__}.{{}}", is_installed(value), vars(value), set(vars(value)))
            file = value.__code__.co_filename  # a decorator of torch's has given it the module of what it wraps
            is_theirs = not is_watched(file) and not file.startswith(MEMGRAPH)
            if value.__closure__ and is_theirs and id(value) not in self._seen:
                self._enter_function(value)  # nothing tells when it is entered
            inside = [content for cell in value.__closure__ or () for content in cell_contents(cell)]
            for each in (*inside, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                self._hold(each, depth if isinstance(each, WRAPPERS) else depth + 1)
            return
        if isinstance(value, GETTERS):
            self._mention({part for text in value.__reduce__()[1] for part in str(text).split(".")})
        if isinstance(value, FunctionCache):
            for kept in gc.get_referents(value):
                for result in kept.values() if type(kept) is dict else (kept,):
                    self._enter_object(f"a result of {getattr(value, '__qualname__', 'a cache')}", result, 0)
        if isinstance(value, torch.optim.Optimizer):
            self._optimizers.append(value)
            self._mention(set())
        self._enter_class(type(value))
        inside = [*reached_from(value, MANY), *(attributes_of(value) or {}).values()]
        if isinstance(value, MethodType):
            self._enter_object(type(value.__self__).__qualname__, value.__self__, 0)
        for each in list(inside):
            self._hold(each, depth + 1)

    def _enter_file(self, file: ModuleType) -> None:
        """Let the variables of a file that is used as a value count, once they are named."""
        if not is_installed(file) and id(vars(file)) not in self._whole:
            self._whole[id(vars(file))] = Whole(file.__name__, vars(file), False, 0, frozenset())
            self._name_attributes(self._whole[id(vars(file))])

    def _enter_class(self, kind: type) -> None:
        meta: Any = type(kind)
        for base in (*kind.__mro__, *meta.__mro__):
            if id(base) not in self._whole and (base in NAMESPACES or is_open(base)):
                inherited = _names_of(base.__mro__[1:])
                self._whole[id(base)] = whole = Whole(base.__qualname__, base, is_installed(base), 0, inherited)
                self._name_attributes(whole)
                for name, value in vars(base).items():
                    if isinstance(value, WRAPPERS):
                        self._hold(value)
                    elif isinstance(value, enum.Enum):  # a loop or a call finds it without its name
                        self._add(f"{base.__qualname__}.{name}.{{}}", False, vars(value), ("_value_",))
                        self._enter_object(f"{base.__qualname__}.{name}", value, 0)

    def _enter_object(self, title: str, thing: Any, depth: int, installed: bool = False) -> None:
        """Let attributes of an object count once they are named, and those of objects among them."""
        inside, kind = attributes_of(thing), type(thing)
        if inside is None or isinstance(thing, HELD) or id(inside) in self._whole or depth > DEPTH:
            return
        self._enter_class(kind)
        if kind in NAMESPACES or is_open(kind):
            self._whole[id(inside)] = whole = Whole(title, inside, installed, depth, _names_of(kind.__mro__))
            self._name_attributes(whole)
        elif has_own_state(kind) and kind not in STATES:  # nothing tells what its methods read
            self._add_whole(title, inside)

    def _name_attributes(self, whole: Whole) -> None:
        content = whole.owner if isinstance(whole.owner, dict) else vars(whole.owner)
        names = set(content) if self.takes_any else self._names & content.keys()
        if self.takes_any and not whole.is_installed:
            self._add_whole(whole.title, whole.owner)
        absent = self._names & whole.inherited if whole.is_installed else self._names
        self._add(f"{whole.title}.{{}}", whole.is_installed, whole.owner, names | absent)
        if whole.owner is content or not whole.is_installed:
            for name in names & content.keys():
                self._hold(content[name], min(whole.depth, 1))
                self._enter_object(f"{whole.title}.{name}", content[name], whole.depth + 1, whole.is_installed)

    def _add_whole(self, title: str, owner: dict[str, Any] | type) -> None:
        """Let all attributes of an object count, those that it may get included."""
        if id(owner) not in self._taken:
            self._taken.add(id(owner))
            self.scopes.append(Scope(f"{title}.{{}}", owner, None, False))

    def _enter_function(self, function: FunctionType) -> None:
        self._seen.add(id(function))
        self.functions.append(function)
        title, installed = function.__qualname__, is_installed(function) and not is_library(module_of(function))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            label = f"the variable {name} that {title} closes over"
            self._add(label, installed, cell, (name,))
            for value in cell_contents(cell):
                self._hold(value)
                self._enter_object(label, value, 0)
                if isinstance(value, ModuleType):
                    names = code_reads(function.__code__).names & vars(value).keys()
                    self._add(f"{value.__name__}.{{}}", is_installed(value), vars(value), names)
        if defaults := defaults_of(function):
            self.defaults.append(Scope(f"the default of {{}} in {title}", defaults, set(defaults)))
        if function.__dict__:
            self._add(f"{title}.{{}}", installed, vars(function), set(vars(function)))

    def _add(self, title: str, installed: bool, owner: Any, names: Iterable[str]) -> None:
        """Add the variables with these names, unless they are known."""
        known = self._known.setdefault(id(owner), set())
        if new := set(names) - known:
            known |= new
            self.scopes.append(Scope(title, owner, new, installed))


def _hooks(part: nn.Module) -> Iterator[Any]:
    yield from (*part._forward_pre_hooks.values(), *part._forward_hooks.values())


def _names_of(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in vars(kind))
