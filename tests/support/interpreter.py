"""Interpret a step op by op, on symbols instead of numbers.

    run(trace) -> Run(computed={"mm": "3f0c...", ...}, handed=(...), generator="81b2...", nbytes=[...])

A storage is an object that Python frees after its last reference. Its content is a digest of its inputs, random numbers
included. Reading a value that is offloaded, or whose reload has not ended, fails. This shares no code with `passes`: it
does what `memgraph` does with a rewritten graph, so a plan is right if a trace computes the same with it and without.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field

from passes import INPUTS, Op, Trace


@dataclass(eq=False)
class Block:
    """The bytes of a storage; `content` is empty while they are not valid."""

    name: str
    nbytes: int
    content: str


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the trace: a view of some blocks."""

    how: str
    blocks: tuple[Block, ...]

    @property
    def content(self) -> str:
        assert all(block.content for block in self.blocks), f"{self.how}: read while its bytes are elsewhere"
        return digest(self.how, *(block.content for block in self.blocks))


@dataclass
class Run:
    """The result of each op, the outputs of the step, the generator's state after it, and the bytes at every op."""

    computed: dict[str, str] = field(default_factory=dict)
    handed: tuple[str, ...] = ()
    generator: str = "seed"
    nbytes: list[int] = field(default_factory=list)


def run(trace: Trace, window: int | None = None, ahead: int = 0) -> Run:
    """Interpret a trace.

    Args:
        window: bytes that an update with offloaded operands holds; None for its own workspace.
        ahead: bytes that it leaves to the updates after it.
    """
    return _Interpreter(trace, window, ahead).run()


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class _Interpreter:
    """`env` has the values that will be read, `alive` the blocks with references, and `far` what is offloaded."""

    def __init__(self, trace: Trace, window: int | None, ahead: int) -> None:
        self.trace, self.window, self.ahead = trace, window, ahead
        self.left = 0
        self.done = Run()
        self.env: dict[str, Value] = {}
        self.far: dict[str, tuple[str, str]] = {}
        self.landed: set[str] = set()
        self.alive: weakref.WeakSet[Block] = weakref.WeakSet()
        # The caller holds all inputs from the start; tangents are allocated when backward begins.
        self.inputs = {
            s.name: self._new(s.name, s.nbytes, s.name) for op in trace.ops if op.fn in INPUTS for s in op.makes
        }
        self.tangents = sum(op.nbytes for op in trace.ops if op.fn == "tangent")

    def run(self) -> Run:
        last = {name: i for i, op in enumerate(self.trace.ops) for name in (op.name, *op.reads)}
        handed = {value for _, value in self.trace.outputs}
        for i, op in enumerate(self.trace.ops):
            self._step(op)
            for name in {op.name, *op.reads} - handed:
                if last[name] == i:
                    del self.env[name]
        self.done.handed = tuple(self.env[value].content for _, value in self.trace.outputs)
        return self.done

    def _step(self, op: Op) -> None:
        reads = [self.env[name] for name in op.reads]
        own = [self.inputs.get(made.name) or self._new(made.name, made.nbytes) for made in op.makes]
        there = {block.name: block for block in (*own, *(block for read in reads for block in read.blocks))}
        blocks = tuple(there[held] for held in op.holds)
        verb = op.fn.removeprefix("memgraph.").removesuffix(".default") if op.fn.startswith("memgraph.") else "compute"
        self.env[op.name] = getattr(self, f"_{verb}")(op, reads, blocks)
        begun = self.tangents * any(known.phase == "backward" for known in self.trace.ops[: len(self.done.nbytes) + 1])
        in_windows = op.phase == "update" and any(name in self.far for name in op.reads)
        taken = self.window if in_windows and self.window is not None else op.workspace + self.left
        self.left = self.ahead if in_windows else self.left
        self.done.nbytes.append(sum(block.nbytes for block in self.alive) - self.tangents + begun + taken)

    def _new(self, name: str, nbytes: int, content: str = "") -> Block:
        block = Block(name, nbytes, content)
        self.alive.add(block)
        return block

    def _compute(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        """Compute an op of the captured step, or recompute it."""
        name = op.recomputes or op.name
        facts = [op.fn, op.type, name, *(read.content for read in reads)]
        if op.draws:
            facts.append(self.done.generator)
            self.done.generator = digest(self.done.generator, name)
        for place, made in enumerate(op.makes):
            block = next(block for block in blocks if block.name == made.name)
            block.content = block.content or digest(place, *facts)
        value = Value(digest(*facts), blocks)
        if op.recomputes:
            assert value.content == self.done.computed[name], f"{op.name} is not what {name} was"
        self.done.computed.setdefault(name, value.content)
        if op.offloaded:
            self.far[op.name] = value.how, blocks[0].content
            self.landed.add(op.name)
        return value

    def _rng_state(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        blocks[0].content = self.done.generator
        return Value("state", blocks)

    def _swap_rng(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        blocks[0].content, self.done.generator = self.done.generator, reads[0].blocks[0].content
        return Value("state", blocks)

    def _offload(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        assert len(reads[0].blocks) == 1, f"{op.name} offloads more than one storage"
        assert reads[0].content
        how, content = self.far[op.name] = reads[0].how, reads[0].blocks[0].content
        return Value(how, (Block("", 0, content),))  # the ticket refers to the bytes in the tier

    def _narrow(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        """Cast a value; the result is not equal to the value until it is cast back."""
        assert len(reads[0].blocks) == 1, f"{op.name} casts more than one storage"
        blocks[0].content = f"narrow {reads[0].content} {reads[0].blocks[0].content}"
        return Value(f"narrow {reads[0].how}", blocks)

    def _widen(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        how = reads[0].how.removeprefix("narrow ")
        word, content, blocks[0].content = reads[0].blocks[0].content.split(" ")
        value = Value(how, blocks)
        assert reads[0].content and word == "narrow" and reads[0].how != how and value.content == content
        return value

    def _free(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        assert reads[1].blocks[0].content == self.far[op.reads[0]][1], f"{op.name} frees a value that was not offloaded"
        reads[1].blocks[0].content = ""
        sent = self.trace.op[op.reads[1]]
        if sent.fn == "memgraph.narrow.default" and sent.reads[0] in self.env:  # a view may still hold it
            self.env[sent.reads[0]].blocks[0].content = ""
        self.landed.add(op.reads[0])
        return Value("nothing", ())

    def _reload(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        assert op.reads[0] in self.landed, f"{op.name} fetches what has not arrived there yet"
        self.far[op.name] = self.far[op.reads[0]]
        return Value("on its way", blocks)

    def _wait(self, op: Op, reads: list[Value], blocks: tuple[Block, ...]) -> Value:
        how, blocks[0].content = self.far[op.reads[0]]
        return Value(how, blocks)
