"""A child of fork trains what its parent has compiled, at the same time, and neither finds anything of the other's."""

from __future__ import annotations

import copy
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import memgraph
from tests.support import faults
from tests.support.streamed_state import Twins, far, loss

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A child lacks OpenMP's threads, and torch would wait for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def forked(work: Callable[[], bool]) -> int:
    """A child that works, and says by its exit code whether all was right."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            code = 0 if work() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def is_right(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def made(model: nn.Module, times: float) -> Tensor:
    """The loss of a batch that is `times` the usual one, with the same random numbers."""
    torch.manual_seed(7)
    return loss(model(faults.batch() * times))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def agree(module: nn.Module, ours: Tensor, times: float) -> bool:
    """Return True if backward has the gradients of a plain copy."""
    plain = copy.deepcopy(module)
    plain.zero_grad()
    made(plain, times).backward()
    module.zero_grad()
    ours.backward()
    return bool(gradients(plain)) and all(map(torch.equal, gradients(module), gradients(plain)))


@pytest.mark.usefixtures("spilling")
def test_both_have_a_step_in_flight_at_the_same_time() -> None:
    module, compiled = faults.fresh()
    assert agree(module, made(compiled, 1), 1)
    (to_parent, childs), (to_child, parents) = os.pipe(), os.pipe()

    def work() -> bool:
        ours = made(compiled, 2)
        os.write(childs, b"x")
        os.read(to_child, 1)
        return agree(module, ours, 2)

    child = forked(work)
    os.close(childs)
    os.read(to_parent, 1)
    ours = made(compiled, 1)
    os.write(parents, b"x")
    assert is_right(child)
    assert agree(module, ours, 1)
    for end in (to_parent, to_child, parents):
        os.close(end)


@pytest.mark.usefixtures("spilling")
def test_a_child_does_not_go_on_with_what_its_parent_has_begun() -> None:
    module, compiled = faults.fresh()
    assert agree(module, made(compiled, 1), 1)
    ours = made(compiled, 1)

    def work() -> bool:
        with pytest.raises(memgraph.SpillError, match="before the process was forked"):
            ours.backward()
        return agree(module, made(compiled, 2), 2)

    assert is_right(forked(work))
    assert agree(module, ours, 1)


def test_what_lives_far_is_trained_apart() -> None:
    twins = Twins()
    twins.train(2)

    def work() -> bool:
        twins.train(1)
        with torch.no_grad():
            for parameter in twins.module.parameters():
                parameter.zero_()
        return far(twins.module, twins.ours) >= {"parameter", "state"}

    assert is_right(forked(work))
    twins.assert_same()
    twins.train(1)
