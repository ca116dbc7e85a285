"""Whatever breaks, the error says what and where, nothing leaks, and the next step is as if nothing had been."""

from __future__ import annotations

import errno
import gc
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import memgraph
from memgraph import planner
from memgraph.disk import STAGING
from memgraph.flight import Flight
from passes import Choice, Machine, Trace, apply, predict
from passes.gaps import Gaps
from passes.schedule import Fate, schedule

ROOM = "1GB"
SHM = Path("/dev/shm")


class Net(nn.Module):
    norm: Any = nn.LayerNorm

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        block = (nn.Sequential(nn.Linear(width, width), self.norm(width), nn.GELU(), nn.Dropout(0.2)) for _ in range(1))
        self.blocks, self.last = nn.Sequential(*block), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


class Running(Net):
    """With buffers that forward changes."""

    norm = nn.BatchNorm1d


def given_up(fate: Fate) -> Callable[[Trace, Machine], Choice]:
    """In the place of `make_plan`: one fate for all."""

    def make_plan(trace: Trace, machine: Machine, seconds: float = 0.0) -> Choice:
        machine = replace(machine, out=100.0, back=100.0, staging=STAGING)
        gaps = Gaps(trace)
        if fate is Fate.STALL:
            chosen = [storage for storage in gaps.root if storage in gaps.uses]
        else:
            chosen = [storage for storage in gaps.maker if not trace.op[gaps.maker[storage]].once]
        plan = schedule(gaps, dict.fromkeys(chosen, fate), machine)
        return Choice(plan, predict(trace, machine), predict(apply(trace, plan), machine))

    return make_plan


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be sent to disk is sent there."""
    monkeypatch.setattr(planner, "make_plan", given_up(Fate.STALL))


@pytest.fixture(params=[Fate.KEEP, Fate.STALL, Fate.BRIEF])
def fate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fate:
    monkeypatch.setattr(planner, "make_plan", given_up(request.param))
    chosen: Fate = request.param
    return chosen


def fresh(make: type[Net] = Net, **wishes: Any) -> tuple[Net, memgraph.CompiledModule]:
    torch.manual_seed(0)
    module = make()
    return module, memgraph.compile(module, ROOM, **wishes)


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(5))


def step(model: nn.Module) -> list[Tensor]:
    """A step from one seed, and all that it leaves behind."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(batch()).square().mean()
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def assert_next_step_right(module: nn.Module, compiled: nn.Module) -> None:
    """From the state in which the module is now, the compiled and the plain one take the same step."""
    state = {key: value.clone() for key, value in module.state_dict().items()}
    ours = step(compiled)
    module.load_state_dict(state)
    theirs = step(module)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


def living() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]  # others are of other tests
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def here() -> int:
    """The line after that of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + 1


# --- the folder


def refused(folder: Path, text: str) -> None:
    _, compiled = fresh(spill_dir=folder)
    before = open_files()
    with pytest.raises(memgraph.SpillError, match=text) as caught:
        compiled(batch())
    assert str(folder) in str(caught.value)
    assert "spill_dir=" in str(caught.value)
    del caught
    assert open_files() <= before


@pytest.mark.usefixtures("spilling")
def test_a_folder_that_is_gone_since_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    _, compiled = fresh(spill_dir=tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(memgraph.SpillError, match=r"gone: it is not a folder.*spill_dir="):
        compiled(batch())


@pytest.mark.usefixtures("spilling")
def test_a_folder_that_can_not_be_written_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def denied(path: Any, *args: Any, **kwargs: Any) -> int:  # root may write anywhere
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    refused(tmp_path, "Permission denied")


@pytest.mark.usefixtures("spilling")
def test_a_full_disk_is_an_error_of_the_first_call_and_the_call_after_it_is_emptied_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, compiled = fresh()
    before = open_files()
    with monkeypatch.context() as patch, pytest.raises(memgraph.SpillError, match="No space left") as caught:
        patch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        compiled(batch())
    assert "spill_dir=" in str(caught.value)
    del caught
    assert open_files() <= before
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_after_a_bad_folder_a_good_one_works(tmp_path: Path) -> None:
    (tmp_path / "missing").mkdir()
    module, compiled = fresh(spill_dir=tmp_path / "missing")
    (tmp_path / "missing").rmdir()
    with pytest.raises(memgraph.SpillError):
        compiled(batch())
    assert_next_step_right(module, memgraph.compile(module, ROOM, spill_dir=tmp_path))
    (tmp_path / "missing").mkdir()
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    module, compiled = fresh(spill_dir=tmp_path)
    assert_next_step_right(module, compiled)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("spilling")
@pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
def test_a_folder_in_ram_is_warned_of() -> None:
    _, compiled = fresh(spill_dir=SHM)
    with pytest.warns(RuntimeWarning, match="/dev/shm is in RAM"):
        compiled(batch())


# --- in mid step


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.usefixtures("spilling")
@pytest.mark.parametrize(("call", "verb"), [("pwritev", "write"), ("preadv", "read")])
def test_a_disk_that_fails_in_mid_step_is_an_error_and_not_a_leak(
    call: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, compiled = fresh()
    step(compiled)
    files, before = open_files(), living()
    with (
        monkeypatch.context() as patch,
        pytest.raises(memgraph.SpillError, match=f"failed to {verb} .*Input/output error") as caught,
    ):
        patch.setattr(os, call, failing(errno.EIO))
        step(compiled)
    assert "spill_dir=" in str(caught.value)
    del caught
    compiled.zero_grad()
    gradients = sum(p.nbytes for p in module.parameters())
    assert living() <= before - gradients
    assert open_files() <= files + 1
    assert_next_step_right(module, compiled)


@pytest.mark.usefixtures("spilling")
def test_a_disk_that_fails_again_and_again_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    module, compiled = fresh()
    step(compiled)
    files = open_files()
    for call in ("pwritev", "preadv") * 3:
        with monkeypatch.context() as patch, pytest.raises(memgraph.SpillError):
            patch.setattr(os, call, failing(errno.EIO))
            step(compiled)
    assert open_files() <= files
    assert_next_step_right(module, compiled)


class Injected(BaseException):
    """Caught by nobody."""


def nodes_of(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


@contextmanager
def broken(compiled: memgraph.CompiledModule, half: str, place: float, error: type[BaseException]) -> Iterator[None]:
    """One op of a half of the latest step raises; `place` is where in the half it stands."""
    graph: fx.GraphModule = getattr(compiled._latest.halves, half)
    nodes = nodes_of(graph)
    node = nodes[int(place * (len(nodes) - 1))]
    with poisoned(graph, node, error):
        yield


@contextmanager
def poisoned(graph: fx.GraphModule, node: fx.Node, error: type[BaseException]) -> Iterator[None]:
    target = node.target

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("injected")

    node.target = fail
    graph.recompile()
    try:
        yield
    finally:
        node.target = target
        graph.recompile()


PLACES = [(0.0, RuntimeError), (0.3, KeyboardInterrupt), (0.6, RuntimeError), (1.0, KeyboardInterrupt)]


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_what_is_raised_in_mid_step_comes_out_and_the_next_step_is_right(fate: Fate, half: str) -> None:
    module, compiled = fresh(Running)
    step(compiled)
    compiled.zero_grad()
    before, files = living(), open_files()
    for place, error in PLACES:
        with broken(compiled, half, place, error), pytest.raises(error, match="injected"):
            step(compiled)
        compiled.zero_grad()
        assert_next_step_right(module, compiled)
    compiled.zero_grad()
    assert living() <= before
    assert open_files() <= files + 1


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_what_is_raised_while_the_first_step_is_measured_leaves_no_profiler_behind(fate: Fate, half: str) -> None:
    module, compiled = fresh()
    loss = compiled(batch()).square().mean()
    if half == "backward":
        with broken(compiled, half, 0.5, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            loss.backward()
    else:
        del loss
        with broken(compiled, half, 0.5, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            compiled(batch())
    assert compiled.plan.measured is None
    assert not torch._C._autograd._profiler_enabled()
    assert_next_step_right(module, compiled)
    assert compiled.plan.measured is not None
    assert compiled.plan.measured <= compiled.plan.peak


def test_backward_may_be_tried_again_after_an_error_if_the_graph_is_retained(fate: Fate) -> None:
    module, compiled = fresh()
    expected = step(module)
    module.zero_grad()
    torch.manual_seed(7)
    loss = compiled(batch()).square().mean()
    with broken(compiled, "backward", 0.0, RuntimeError), pytest.raises(RuntimeError, match="injected"):
        loss.backward(retain_graph=True)
    loss.backward()
    assert all(map(torch.equal, expected[1:-1], [p.grad for p in module.parameters() if p.grad is not None]))


def test_the_generator_is_not_left_in_an_earlier_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "make_plan", given_up(Fate.BRIEF))
    _, compiled = fresh()
    step(compiled)
    compiled.zero_grad()
    graph: fx.GraphModule = compiled._latest.halves.backward
    swapped = next(i for i, node in enumerate(nodes_of(graph)) if node.target is torch.ops.memgraph.swap_rng.default)
    loss = compiled(batch()).square().mean()
    state = torch.get_rng_state()
    with poisoned(graph, nodes_of(graph)[swapped + 1], KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_of_the_users_own_forward_stays_what_it_is_and_the_next_call_works() -> None:
    class Moody(Net):
        bad = True

        def forward(self, x: Tensor) -> Tensor:
            if self.bad:
                raise KeyError("mine")
            return super().forward(x)

    module = Moody()
    compiled = memgraph.compile(module, ROOM)
    with pytest.raises(KeyError, match="mine"):
        compiled(batch())
    module.bad = False
    assert_next_step_right(module, compiled)


def test_a_capture_that_is_interrupted_leaves_the_module_as_it_was() -> None:
    module, compiled = fresh()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    kept = dict(vars(module))
    handle = module.last.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        compiled(batch())
    handle.remove()
    assert vars(module) == kept
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())
    assert_next_step_right(module, compiled)


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("gone_wrong", ["rewrite", "split", "far_tier"])
def test_a_plan_that_is_interrupted_is_made_again_at_the_next_call(gone_wrong: str) -> None:
    module, compiled = fresh()
    with mock.patch.object(planner, gone_wrong, interrupt), pytest.raises(KeyboardInterrupt):
        compiled(batch())
    assert_next_step_right(module, compiled)


# --- what autograd refuses, refused likewise


def test_backward_twice_is_refused_as_in_eager(fate: Fate) -> None:
    module, compiled = fresh()
    loss = compiled(batch()).sum()
    loss.backward()
    with pytest.raises(memgraph.MemgraphError, match=r"retain_graph=True"):
        loss.backward()
    with pytest.raises(memgraph.MemgraphError, match=r"retain_graph=True"):
        torch.autograd.grad(loss, [module.last.weight])
    assert_next_step_right(module, compiled)


def test_double_backward_is_refused_with_the_reason(fate: Fate) -> None:
    module, compiled = fresh()
    x = batch().requires_grad_()
    with pytest.raises(
        memgraph.MemgraphError, match=r"memgraph module can't be differentiated again \(create_graph=True\)"
    ):
        torch.autograd.grad(compiled(x).sum(), [x], create_graph=True)
    with pytest.raises(memgraph.MemgraphError, match=r"use the plain module"):
        compiled(x).sum().backward(create_graph=True)
    assert_next_step_right(module, compiled)


@pytest.mark.parametrize("what", ["input", "weight", "bias of a norm"])
def test_what_backward_needs_may_not_be_changed_before_it(fate: Fate, what: str) -> None:
    module, compiled = fresh()
    for model in (module, compiled):
        x = batch()
        loss = model(x).square().mean()
        changed = {"input": x, "weight": module.last.weight, "bias of a norm": module.blocks[0][1].weight}[what]  # type: ignore[index]
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
    assert_next_step_right(module, compiled)


def test_an_optimizer_may_not_step_between_forward_and_backward(fate: Fate) -> None:
    module, compiled = fresh()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(compiled)
    loss = compiled(batch()).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified in ?place"):
        loss.backward()
    assert_next_step_right(module, compiled)


def test_what_backward_does_not_need_may_be_changed_before_it() -> None:
    module, compiled = fresh()
    found = []
    for model in (module, compiled):
        module.load_state_dict(fresh()[0].state_dict())
        model.zero_grad()
        torch.manual_seed(7)
        loss = model(batch()).square().mean()
        with torch.no_grad():
            module.last.bias.zero_()
        loss.backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("make", [lambda h: h.sigmoid(), lambda h: h.sigmoid().view(-1), lambda h: h.sigmoid()[:, :4]])
def test_an_output_that_backward_needs_may_not_be_changed_before_it(make: Callable[[Tensor], Tensor]) -> None:
    class Out(Net):
        def forward(self, x: Tensor) -> Tensor:
            return make(super().forward(x))

    module = Out()
    for model in (module, memgraph.compile(module, ROOM)):
        out = model(batch())
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            out.sum().backward()


def test_what_backward_needs_may_not_be_changed_before_it_if_the_loss_is_of_other_outputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.net(x).sin()
            return h.sum(), h

    module = Both()
    result = memgraph.compile(module, ROOM)(batch())
    with torch.no_grad():
        module.net.last.weight.mul_(2)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="modified"):
        result[1].sum().backward()


@pytest.mark.xfail(
    strict=True,
    reason="a leaf that requires no gradient but for the call is taken for a leaf: only in eager is it the result of an op",
)
def test_forward_may_change_an_input_in_place_that_is_the_result_of_an_op() -> None:
    found = []
    module = nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True))
    module[0] = nn.Identity()
    for model in (module, memgraph.compile(module, ROOM)):
        x = batch().requires_grad_()
        out = model(x * 2)
        out.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]


def test_a_leaf_that_requires_a_gradient_may_not_be_changed_by_forward() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True))
    for model in (module, memgraph.compile(module, ROOM)):
        with pytest.raises(RuntimeError, match=r"in.place"):
            model(batch().requires_grad_())


# --- what can't be captured


def test_a_branch_on_a_value_is_refused_with_the_line() -> None:
    line = here() + 3

    class Branch(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return super().forward(x)
            return x

    with pytest.raises(memgraph.CaptureError, match=rf"test_faults\.py:{line} in forward") as caught:
        memgraph.compile(Branch(), ROOM)(batch())
    assert "`if`" in str(caught.value)
    assert "torch.where" in str(caught.value)


@pytest.mark.parametrize(
    "ask", [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x * int(x.sum()), lambda x: x * x.max().item()]
)
def test_what_depends_on_values_is_refused_with_the_line(ask: Callable[[Tensor], Tensor]) -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            return ask(super().forward(x))

    with pytest.raises(memgraph.CaptureError, match=r"test_faults\.py:\d+ in <lambda>"):
        memgraph.compile(Asking(), ROOM)(batch())


def test_sparse_gradients_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(
        memgraph.CaptureError, match=r"gradient of parameter 0\.weight is torch\.sparse_coo: use sparse=False"
    ):
        memgraph.compile(module, ROOM)(torch.tensor([1, 2]))


def test_a_model_on_several_devices_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"\['cpu', 'meta'\]; move it to one"):
        memgraph.compile(module, ROOM)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        memgraph.compile(nn.Linear(2, 2, device="meta"), ROOM)(torch.randn(1, 2, device="meta"))


def test_an_input_on_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="device"):
        fresh()[1](torch.randn(8, 16, device="meta"))


def test_a_lazy_module_that_never_ran_is_refused() -> None:
    with pytest.raises(memgraph.CaptureError, match="run the lazy module once"):
        memgraph.compile(nn.Sequential(nn.LazyLinear(4)), ROOM)(batch())


def test_a_lazy_module_that_ran_once_trains() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    module(batch())
    assert_next_step_right(module, memgraph.compile(module, ROOM))


def test_an_argument_that_hides_tensors_is_refused_by_its_type() -> None:
    class Locked:
        def __reduce__(self) -> str:
            raise TypeError("no")

    class Taking(Net):
        def forward(self, x: Tensor, other: object = None) -> Tensor:
            return super().forward(x)

    with pytest.raises(memgraph.CaptureError, match=r"Locked, which can't be taken apart"):
        memgraph.compile(Taking(), ROOM)(batch(), Locked())


def test_a_tensor_that_forward_leaves_on_the_module_is_refused_by_its_name() -> None:
    class Leaving(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x)
            return self.seen

    with pytest.raises(memgraph.CaptureError, match=r"forward stores a tensor in seen"):
        memgraph.compile(Leaving(), ROOM)(batch())


# --- other processes


@pytest.mark.usefixtures("spilling")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_steps_too_or_says_why_it_can_not() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of OpenMP's threads the child has none either, and torch itself waits for them
    module, compiled = fresh()
    step(compiled)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3)
        step(module)
        os.write(write, b"e")
        with suppress(memgraph.MemgraphError):
            step(compiled)
        os.write(write, b"c")
        os._exit(0)
    os.waitpid(child, 0)
    torch.set_num_threads(threads)
    os.close(write)
    said = os.read(read, 2)
    os.close(read)
    assert said == b"ec"


# --- nothing stays


def test_what_is_saved_for_backward_dies_with_backward(fate: Fate, monkeypatch: pytest.MonkeyPatch) -> None:
    flights: list[Flight] = []
    real = Flight.forward

    def watched(self: Flight, *args: Any) -> Any:
        flights.append(self)
        return real(self, *args)

    monkeypatch.setattr(Flight, "forward", watched)
    _, compiled = fresh()
    step(compiled)
    assert [flight.saved for flight in flights] == [None]
    assert flights[0].lease is None
    compiled.zero_grad()
    before = living()
    for _ in range(3):
        F.mse_loss(compiled(batch()), batch()).backward()
        compiled.zero_grad()
    flights.clear()
    assert living() <= before


def test_a_compiled_module_that_is_dropped_gives_back_its_files(fate: Fate) -> None:
    before = open_files()
    for _ in range(2):
        _, compiled = fresh()
        compiled(batch()).sum().backward()
        compiled(batch())
        del compiled
    assert open_files() <= before


def test_a_flight_that_gets_no_room_goes_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        staging = 0

        def bind(self, homes: object) -> None: ...

        def lease(self) -> Any:
            raise memgraph.SpillError("no room")

        def close(self) -> None: ...

    lost: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lost.append)
    with pytest.raises(memgraph.SpillError):
        Flight(mock.Mock(), Full())
    Flight.__new__(Flight)
    gc.collect()
    assert not lost
