"""Import torchvision where its C extension can't be loaded, as beside a torch without CUDA.

    import_torchvision()   ->   models work; boxes of a detector can't be suppressed, which training does not do

There is no build of torchvision for the CPU on the package index: the extension looks for CUDA's libraries and fails,
and then the import fails where Python describes `nms` to torch.  With schemas declared, there is something to describe.
transformers, timm and diffusers import torchvision where it is installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
declared: list[Any] = []  # a library's schemas go with it


def import_torchvision() -> None:
    """Import torchvision if it is there, with schemas of the ops that its extension would declare."""
    found = find_spec("torchvision")
    if found is None or found.origin is None or declared:
        return
    try:
        for extension in Path(found.origin).parent.glob("_C*.so"):  # torchvision 0.29 calls it _C_stable
            torch.ops.load_library(str(extension))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        declared.append(library)
    import torchvision  # noqa: F401
