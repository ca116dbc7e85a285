"""Update each parameter inside backward.

dx = mm(dy, w)                          dx = mm(dy, w)
dw = mm(x_t, dy)              ->        dw = mm(x_t, dy)
...                                     ...
return dw                               w_update = update(w, dw)    # in place

`passes/order/early_updates.py` decides where the update is.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from torch import Tensor, fx, nn, optim

from ..errors import FusedError
from ..tensors.aliasing import describe_shared_memory
from ..tensors.parameter_groups import parameter_groups
from .captured import Captured
from .nodes import returned_values
from .ops import update


def add_updates(
    captured: Captured, module: nn.Module, optimizer: optim.Optimizer
) -> tuple[Captured, dict[str, Tensor]]:
    """Insert the updates of this optimizer, and return the updated parameters by the names of the ops.

    Raises:
        FusedError: a parameter shares memory, so backward would read what is updated; or as in `fuse_updates`.
    """
    named = dict(module.named_parameters())
    owned = parameter_groups(optimizer)
    captured = fuse_updates(captured, {name for name, parameter in named.items() if parameter in owned})
    updated = updated_parameters(captured.graph.graph)
    if shared := describe_shared_memory(module, optimizer, updated.values()):
        raise FusedError(f"{shared}, or compile without fuse_update")
    return captured, {op: named[name] for op, name in updated.items()}


def fuse_updates(captured: Captured, names: Container[str]) -> Captured:
    """Insert updates of these parameters in place of their gradients among the results. Changes the graph.

    Raises:
        FusedError: backward starts from a non-scalar, whose gradient may be scaled.
    """
    graph = captured.graph.graph
    output, handed = graph.output_node(), returned_values(graph)
    if not captured.tangents or any(handed[i].meta["val"].numel() != 1 for i in captured.tangents):
        raise FusedError(
            "fuse_update=True wants the loss in the step, and the model returns no scalar that can be "
            "differentiated: give loss=, or a module that returns its loss"
        )
    inputs = zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    parameters = {role.name: node for node, role in inputs if role.kind == "parameter"}
    roles = {i: role for i, role in enumerate(captured.outputs) if role.kind == "gradient" and role.name in names}
    with graph.inserting_before(output):
        for i, role in roles.items():
            _insert(graph, parameters[role.name], handed[i], role.name)
    rest = [i for i in range(len(handed)) if i not in roles]
    output.args = (tuple(handed[i] for i in rest),)
    output.meta["kinds"] = tuple(output.meta["kinds"][i] for i in rest)
    updates = tuple(role.name for role in roles.values())
    return replace(captured, outputs=tuple(captured.outputs[i] for i in rest), updates=updates)


def updated_parameters(graph: fx.Graph) -> dict[str, str]:
    """Map the name of each update node to its parameter's name, in the graph's order."""
    return {str(node.name): str(node.args[2]) for node in graph.nodes if node.target is update}


def _insert(graph: fx.Graph, parameter: fx.Node, gradient: fx.Node, name: str) -> None:
    node = graph.create_node("call_function", update, (parameter, gradient, name), name=f"{parameter.name}_update")
    node.meta = {"phase": "update", "val": None, "where": parameter.meta.get("where", "")}
