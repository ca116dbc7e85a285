"""All architectures by name, with the library that each is of.

ARCHITECTURES["mixtral"].make()   ->   Training: a model, its batch and its loss, drawn from the global generator
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .models.audio import AUDIO
from .models.diffusion import DIFFUSION
from .models.experts import EXPERTS
from .models.graph_nets import GRAPHS
from .models.plain import PLAIN
from .models.sequences import SEQUENCES
from .models.text import TEXT
from .models.timm_nets import TIMM
from .models.torch_vision import TORCHVISION
from .models.vision import VISION
from .training import Maker

QUICK = ("gpt2", "mixtral", "bart", "vit", "gcn", "lstm", "timm_resnet18", "vae")


@dataclass(frozen=True)
class Architecture:
    """A model of a library, in its stock configuration made small."""

    name: str
    library: str
    make: Maker


def _of(library: str, *families: Mapping[str, Maker]) -> dict[str, Architecture]:
    return {name: Architecture(name, library, make) for family in families for name, make in family.items()}


ARCHITECTURES = {
    **_of("transformers", TEXT, EXPERTS, SEQUENCES, VISION, AUDIO),
    **_of("diffusers", DIFFUSION),
    **_of("timm", TIMM),
    **_of("torchvision", TORCHVISION),
    **_of("torch_geometric", GRAPHS),
    **_of("torch", PLAIN),
}
