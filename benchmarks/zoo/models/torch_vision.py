"""Networks of torchvision; a detector finds its own targets in forward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..training import Maker, Training, classifier, with_criterion


def net(name: str, size: int = 64, rows: int = 8, **sizes: Any) -> Training:
    """Return the training of a network by its name in torchvision."""
    from torchvision import models

    return classifier(getattr(models, name)(weights=None, num_classes=10, **sizes).train(), size, rows)


def googlenet() -> Training:
    from torchvision import models

    model = models.googlenet(weights=None, num_classes=10, init_weights=False).train()
    return with_criterion(model, _with_auxiliary, torch.randn(16, 3, 96, 96), target=torch.randint(10, (16,)))


def swin() -> Training:
    from torchvision.models import SwinTransformer

    model = SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.2, num_classes=10)
    return classifier(model.train())


def convnext() -> Training:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 1)]
    return classifier(ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=10).train())


def vit() -> Training:
    from torchvision.models import VisionTransformer

    return classifier(VisionTransformer(64, 8, 2, 4, 64, 128, num_classes=10).train())


def lraspp() -> Training:
    from torchvision.models import segmentation

    model = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5).train()
    return with_criterion(model, _segmented, torch.randn(4, 3, 96, 96), target=torch.randint(5, (4, 96, 96)))


def video_resnet() -> Training:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    model = VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=10).train()
    return with_criterion(
        model, nn.functional.cross_entropy, torch.randn(4, 3, 4, 32, 32), target=torch.randint(10, (4,))
    )


def ssd() -> Training:
    from torchvision.models import detection

    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=10).train()
    corners = [torch.rand(count, 2) * 100 for count in (3, 1, 2, 4)]
    labels = [
        {"boxes": torch.cat((corner, corner + 80), -1), "labels": torch.randint(1, 10, (len(corner),))}
        for corner in corners
    ]
    return Training(model, (list(torch.rand(4, 3, 240, 320)), labels), loss=_sum)


def _with_auxiliary(outputs: Any, target: Tensor) -> Tensor:
    cross_entropy = nn.functional.cross_entropy
    auxiliary = cross_entropy(outputs.aux_logits1, target) + cross_entropy(outputs.aux_logits2, target)
    return cross_entropy(outputs.logits, target) + 0.3 * auxiliary


def _segmented(outputs: Mapping[str, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs["out"], target)


def _sum(losses: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


TORCHVISION: dict[str, Maker] = {
    "tv_resnet18": partial(net, "resnet18", size=128, rows=16),
    "tv_efficientnet_b0": partial(net, "efficientnet_b0"),
    "tv_mobilenet_v2": partial(net, "mobilenet_v2", width_mult=0.35),
    "tv_shufflenet": partial(net, "shufflenet_v2_x0_5"),
    "tv_squeezenet": partial(net, "squeezenet1_1"),
    "tv_googlenet": googlenet,
    "tv_swin": swin,
    "tv_convnext": convnext,
    "tv_vit": vit,
    "tv_lraspp": lraspp,
    "tv_video_resnet": video_resnet,
    "tv_ssd": ssd,
}
