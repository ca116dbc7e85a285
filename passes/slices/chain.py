"""Find the ops around a large value that can run on the same rows together.

    h = norm(x)                     f32[64, 8]
    a = mm(h, w)                    f32[64, 100]    <- the seed
    b = log_softmax(a)              f32[64, 100]    a chain of a, b, d and e: h and g have few bytes,
    g = gather(b, labels)           f32[64, 1]      so they are whole, while a, b and d never are
    ...
    d = log_softmax_backward(g_1, b)
    e = mm(d, w)                    f32[64, 8]

The chain is every op that reads or makes rows of a large value, from the seed on, and ops between two of these. There
may be one for each way to divide the seed: with tokens as rows, with columns, or with the samples of the batch where
tokens are not alike, as in a loss that leaves out the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..ir.trace import Op, Trace
from .hoist import can_hoist
from .row_rule import Dims, RowFacts, RowRule, rows_of, type_shape
from .slice import Slice

Facts = Callable[[str], RowFacts]  # of an op, by name
# A value with at least this part of the seed's bytes is large: a mask, or rows in half precision. If such values lead
# from a layer to the next, as the input of an MLP does, only larger ones count.
LARGE = (4, 2, 1)
ABSORBED = 32  # ops between those of a chain that may become part of it


def find_chains(trace: Trace, facts: Facts, seed: str, parts: int) -> Iterator[Slice]:
    """Yield the chains around what the op `seed` makes, to run in so many parts; those of the most rows first.

    A chain of forward and backward runs in forward if it may; otherwise backward runs forward ops of it again.
    """
    rules = facts(seed).rules
    if not rules:
        return  # among others an op of several results
    shape = type_shape(trace.op[seed].type)
    users, made = _users(trace), frozenset(made.name for op in trace.ops if not op.is_input for made in op.makes)
    ways = [(rows_of(shape, rule.makes), rule) for rule in rules if rule.makes is not None]
    batches = {type_shape(op.type)[0] for op in trace.ops if op.fn == "input" and type_shape(op.type)}
    ways += [(batch, rule) for count, rule in ways for batch in batches if batch < count and count % batch == 0]
    for rows, rule in sorted(ways, key=lambda way: -way[0]):
        for reruns, large in itertools.product((False, True), LARGE) if rows > 1 else ():
            growth = _Growth(trace, facts, users, rows, trace.op[seed].nbytes // large, reruns, made)
            found = growth.slice(parts) if growth.grows_from(seed, rule) else None
            if found is not None and (reruns or can_hoist(trace, found.rule, facts)):
                yield found
                break


def _users(trace: Trace) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for op in trace.ops:
        for read in op.reads:
            users.setdefault(read, []).append(op.name)
    return users


@dataclass
class _Growth:
    """A chain while it grows."""

    trace: Trace
    facts: Facts
    users: dict[str, list[str]]
    rows: int
    large: int  # bytes
    reruns: bool
    made: frozenset[str]  # storages that ops make, and not the caller
    rules: dict[str, RowRule] = field(default_factory=dict)

    def grows_from(self, seed: str, rule: RowRule) -> bool:
        """Grow; return False if there is no chain with this rule."""
        if not self._has_rows(self.trace.op[seed], rule):
            return False
        self._add(seed, rule)
        return self._close()

    def _add(self, name: str, rule: RowRule) -> None:
        """Add an op, and those that read or make large values beside it."""
        waiting = [(name, rule)]
        while waiting:
            name, rule = waiting.pop()
            if name in self.rules:
                continue
            self.rules[name] = rule
            for other in self._neighbours(self.trace.op[name], rule):
                if other not in self.rules and (found := self._consistent(other)) is not None:
                    waiting.append((other, found))

    def _close(self) -> bool:
        """Add the ops between those of the chain; False if one of them can't run on rows."""
        for _ in range(ABSORBED):
            outside = self._between()
            if outside is None:
                break
            found = self._consistent(outside)
            if found is None:
                return False
            self._add(outside, found)
        if self._between() is not None or self.reruns != self._is_apart():
            return False
        return all(self._reads_rows(name) for name in self.rules)

    def slice(self, parts: int) -> Slice | None:
        """Return the chain; None if sequences are not of one length."""
        tokens = {shape[dims[1] - 1] for shape, dims in self._divided() if dims[1] - dims[0] > 1}
        if len(tokens) > 1:
            return None
        rules = tuple((op.name, self.rules[op.name]) for op in self.trace.ops if op.name in self.rules)
        return Slice(self.rows, max(tokens, default=0), min(parts, self.rows), rules, self.large if self.reruns else 0)

    def _neighbours(self, op: Op, rule: RowRule) -> Iterable[str]:
        """Yield the ops that make or read the same large values."""
        if rule.makes is not None and self._is_large(op.name):
            yield from self.users.get(op.name, ())
        for read, dims in zip(op.reads, rule.reads, strict=True):
            if dims is not None and self._is_large(read):
                yield read
                yield from self.users.get(read, ())

    def _is_large(self, value: str) -> bool:
        """Return True if an op of the step made the bytes of a value, and they are many."""
        held = [storage for storage in self.trace.op[value].holds if storage in self.made]
        return self.large <= max((self.trace.nbytes[storage] for storage in held), default=0)

    def _consistent(self, name: str) -> RowRule | None:
        """Return the way in which an op runs on the rows that ops of the chain make or read; None if there is none."""
        op = self.trace.op[name]
        if op.once or op.draws:
            return None
        wanted = self._dims_by_users(name)
        for rule in self.facts(name).rules:
            reads = zip(op.reads, rule.reads, strict=True)
            known = [dims is not None and dims == self.rules[read].makes for read, dims in reads if read in self.rules]
            is_beside = bool(known) or wanted is not None
            if is_beside and all(known) and wanted in (None, rule.makes) and self._has_rows(op, rule):
                return rule
        return None

    def _dims_by_users(self, name: str) -> Dims | None:
        """Return the dimensions of a value that ops of the chain take as rows."""
        for user in self.users.get(name, ()):
            if user in self.rules:
                dims = self.rules[user].reads[self.trace.op[user].reads.index(name)]
                if dims is not None:
                    return dims
        return None

    def _has_rows(self, op: Op, rule: RowRule) -> bool:
        """Return True if all that is divided has these rows, or a dimension of several elements in each."""
        for name, dims in [(op.name, rule.makes), *zip(op.reads, rule.reads, strict=True)]:
            if dims is not None:
                count = rows_of(self._shape(name), dims)
                if count != self.rows and (dims[1] - dims[0] > 1 or count % self.rows):
                    return False
        return True

    def _reads_rows(self, name: str) -> bool:
        """Return True if an op reads of the values of the chain what their ops make: rows."""
        reads = zip(self.trace.op[name].reads, self.rules[name].reads, strict=True)
        return all(dims is not None and dims == self.rules[read].makes for read, dims in reads if read in self.rules)

    def _between(self) -> str | None:
        """Return an op outside of the chain that one of the chain depends on, and that depends on one.

        If forward ops run again in backward, ops of the same phase count.
        """
        behind = set[str]()
        for op in self.trace.ops:
            late = [read for read in op.reads if read in behind and self._counts(read, op)]
            if op.name in self.rules:
                if late:
                    return late[0]
            elif late or any(read in self.rules and self._counts(read, op) for read in op.reads):
                behind.add(op.name)
        return None

    def _counts(self, read: str, op: Op) -> bool:
        return not self.reruns or self.trace.op[read].phase == op.phase

    def _is_apart(self) -> bool:
        """Return True if the chain has ops of both phases, and can't run in one."""
        return self.reruns and len({self.trace.op[name].phase for name in self.rules}) > 1

    def _divided(self) -> Iterable[tuple[tuple[int, ...], Dims]]:
        """Yield shape and dimensions of all that is divided."""
        for name, rule in self.rules.items():
            for value, dims in [(name, rule.makes), *zip(self.trace.op[name].reads, rule.reads, strict=True)]:
                if dims is not None:
                    yield self._shape(value), dims

    def _shape(self, value: str) -> tuple[int, ...]:
        return type_shape(self.trace.op[value].type)
