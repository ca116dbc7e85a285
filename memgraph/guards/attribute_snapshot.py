"""What forward may read of a module in Python, attribute by attribute, so that two moments can be compared.

before = Contents(module);  ...;  before.changed(Contents(module))   ->   "layers.0.count"
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .module_attributes import HOOKS, STATE, UNREAD, AttributeWalk, IdentityKey
from .module_proxy import all_submodules

NOTED = {"_flat_weights", "_flat_weight_refs"}  # by a recurrent layer, of its weights, for itself


class AttributeSnapshot:
    """All of it as it is now.  `containers` are the lists, dicts and sets that lie there, however deep.

    Tensors among `given`, the inputs of a call or of its trace, count by their place: every trace has others.
    """

    def __init__(self, module: nn.Module, given: Sequence[Tensor] = ()) -> None:
        self._walk = AttributeWalk({id(tensor): place for place, tensor in enumerate(given)})
        parts = all_submodules(module)
        # Each is opened below, and nowhere else.
        self._walk.numbers |= {id(part): place for place, (_, part) in enumerate(parts)}
        self.named = {f"{path}.{name}".lstrip("."): what for path, part in parts for name, what in self._of(part)}

    @property
    def containers(self) -> list[Any]:
        walk = self._walk
        return [held for notes in (walk.listed, walk.mapped, walk.sets) for held, *_ in notes]

    def changed(self, later: AttributeSnapshot) -> str | None:
        """The first attribute that is new, gone or another."""
        for name in (*later.named, *self.named):
            if self.named.get(name) != later.named.get(name):
                return name
        return None

    def has_fakes(self, name: str) -> bool:
        """Whether a tensor of a trace lies there."""
        tokens: Any = self.named.get(name)
        tokens = tokens if isinstance(tokens, tuple) else ()
        return any(isinstance(token, IdentityKey) and isinstance(token.held(), FakeTensor) for token in tokens)

    def _of(self, part: nn.Module) -> Iterator[tuple[str, Hashable]]:
        walk, unread = self._walk, weights_set_by_hooks(part) | (UNREAD - {*STATE, *HOOKS})
        if isinstance(part, nn.RNNBase):
            unread |= NOTED
        for name, held in vars(part).items():
            begin = len(walk.tokens)
            if name == "_modules":
                yield from ((key, IdentityKey(child)) for key, child in held.items())
            elif name in STATE:
                yield from ((key, True) for key in held)
            elif name not in unread:
                walk.open_state(held, hooks=True) if name in HOOKS else walk.describe(held, 1)
                yield name, tuple(walk.tokens[begin:])


def weights_set_by_hooks(part: nn.Module) -> set[str]:
    """The weights that a hook of torch.nn.utils (spectral_norm, prune) makes anew each time: they are nobody's news."""
    hooks = part._forward_pre_hooks.values()
    names = {getattr(hook, where, None) for hook in hooks for where in ("name", "_tensor_name")}
    return {name for name in names if isinstance(name, str)}
