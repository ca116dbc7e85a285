"""Let ops and libraries do in a trace what they do in eager.

random.random(), torch.prod(x), checkpoint(f, x), ...   ->   what they do on real tensors

Each has its own file; here they are entered together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...guards.attribute_snapshot import AttributeSnapshot
from ...guards.module_proxy import all_submodules
from ...guards.what_ran import WhatRan
from ...system.entered_code import unwatched_ops
from ..call.call import Call
from ..constant_fake_mode import ConstantFakeMode, constant_transformers_checks
from ..python_state.draw_in_graph import drawing_in_trace
from ..python_state.function_caches import empty_function_caches
from ..user_checkpoint import eager_casts, eager_fast_paths, eager_value_decompositions, without_checkpoint
from ..values.host_lengths import readable_lengths
from .prod_gradient import eager_prod_gradient


@contextmanager
def eager_behavior(call: Call, mode: ConstantFakeMode) -> Iterator[AttributeSnapshot]:
    """Let ops and libraries do what they do in eager, and restore the module afterwards.

    What forward writes outside of it stays, but for what symbols and stand-ins for floats may be in.
    """
    parts = all_submodules(call.module)
    snapshot = AttributeSnapshot(call.module, call.tensors, WhatRan(parts, call.tensors))
    with (
        snapshot.restored() if mode.sizes is not None or mode.has_floats else snapshot.restored_attributes() as before,
        unwatched_ops(),
        drawing_in_trace(),
        without_checkpoint(),
        eager_fast_paths(),
        eager_prod_gradient(),
        eager_value_decompositions(),
        eager_casts([part for _, part in parts]),
        readable_lengths(),
        constant_transformers_checks(mode, call.tensors),
    ):
        try:
            yield before
        finally:
            empty_function_caches(before)
