"""Networks of timm, which classify images."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..training import Maker, Training, classifier

VIT = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}


def net(name: str, size: int = 64, **sizes: Any) -> Training:
    """Return the training of a network by its name in timm."""
    import timm

    return classifier(timm.create_model(name, num_classes=10, **sizes).train(), size)


def mixer() -> Training:
    from timm.models import MlpMixer

    return classifier(MlpMixer(10, 64, 3, 8, num_blocks=2, embed_dim=64).train())


TIMM: dict[str, Maker] = {
    "timm_resnet18": partial(net, "resnet18", channels=(16, 32, 48, 64)),
    "timm_resnet50": partial(net, "resnet50", channels=(8, 16, 24, 32), layers=(1, 1, 1, 1)),
    "timm_efficientnet_b0": partial(net, "efficientnet_b0", size=96),
    "timm_mobilenetv3": partial(net, "mobilenetv3_small_050", size=96),
    "timm_convnext": partial(net, "convnext_atto", dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), drop_path_rate=0.1),
    "timm_vit": partial(net, "vit_tiny_patch16_224", **VIT),
    "timm_deit": partial(net, "deit_tiny_distilled_patch16_224", **VIT),
    "timm_swin": partial(
        net, "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm_mixer": mixer,
    "timm_regnet": partial(net, "regnety_002", size=128),
    "timm_densenet": partial(net, "densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "timm_xcit": partial(net, "xcit_nano_12_p8_224", img_size=64, embed_dim=64, depth=2, num_heads=4),
}
