"""Images, and images with text, of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..training import Maker, Training, with_criterion
from .huggingface import SMALL, made, tokens

ROWS = 4
IMAGE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 64, "patch_size": 8,
}  # fmt: skip
DETR = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_queries": 20, "num_labels": 10,
}  # fmt: skip


def images(size: int = 64, rows: int = ROWS) -> Tensor:
    """Return a batch of images."""
    return torch.randn(rows, 3, size, size)


def classified(model: str, size: int = 64, **config: Any) -> Training:
    """Return the training of a model that classifies images."""
    return made(model, config, {"pixel_values": images(size), "labels": torch.randint(2, (ROWS,))})


def boxes() -> list[dict[str, Tensor]]:
    """Return labels of a detector: some boxes for each image."""
    return [
        {"class_labels": torch.randint(10, (count,)), "boxes": torch.rand(count, 4) * 0.4 + 0.1}
        for count in (3, 1, 2, 4)
    ]


def detr() -> Training:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = {**DETR, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    mask = torch.ones(ROWS, 128, 128, dtype=torch.long)
    mask[1:, :, 96:] = 0
    inputs = {"pixel_values": images(128), "pixel_mask": mask, "labels": boxes()}
    return made("DetrForObjectDetection", {**config, "backbone_config": backbone}, inputs)


def yolos() -> Training:
    sizes = {**IMAGE, "image_size": [64, 64], "num_detection_tokens": 20, "num_labels": 10}
    return made("YolosForObjectDetection", sizes, {"pixel_values": images(), "labels": boxes()})


def segformer() -> Training:
    sizes = {
        "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 64], "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 64,
    }  # fmt: skip
    inputs = {"pixel_values": images(), "labels": torch.randint(2, (ROWS, 64, 64))}
    return made("SegformerForSemanticSegmentation", sizes, inputs)


def swin() -> Training:
    return classified(
        "SwinForImageClassification", image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4],
        window_size=4,
    )  # fmt: skip


def convnext_v2() -> Training:
    return classified("ConvNextV2ForImageClassification", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1])


def vit_mae() -> Training:
    decoding = {"decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 128}
    return made(
        "ViTMAEForPreTraining", {**IMAGE, **decoding, "decoder_num_attention_heads": 4}, {"pixel_values": images()}
    )


def video_mae() -> Training:
    sizes = {**IMAGE, "num_frames": 4, "tubelet_size": 2, "decoder_hidden_size": 64, "decoder_num_hidden_layers": 2}
    masked = torch.zeros(2, 128, dtype=torch.bool)
    masked[:, ::4] = True
    decoding = {"decoder_intermediate_size": 128, "decoder_num_attention_heads": 4}
    inputs = {"pixel_values": torch.randn(2, 4, 3, 64, 64), "bool_masked_pos": ~masked}
    return made("VideoMAEForPreTraining", {**sizes, **decoding}, inputs)


def clip() -> Training:
    config = {"text_config": {**SMALL, "eos_token_id": 2}, "vision_config": IMAGE, "projection_dim": 32}
    return made("CLIPModel", config, {**tokens(labels=""), "pixel_values": images(), "return_loss": True})


def llava() -> Training:
    import transformers

    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**IMAGE),
        text_config=transformers.LlamaConfig(**SMALL, num_key_value_heads=2), image_token_index=4,
    )  # fmt: skip
    batch = tokens(length=112)
    batch["input_ids"][:, 1:65] = 4
    model = transformers.LlavaForConditionalGeneration(config).train()
    return Training(model, kwargs={**batch, "pixel_values": images()})


def blip() -> Training:
    special = {"bos_token_id": 2, "sep_token_id": 3, "pad_token_id": 0}
    config = {"text_config": {**SMALL, "encoder_hidden_size": 64, **special}, "vision_config": IMAGE}
    return made("BlipForConditionalGeneration", config, {**tokens(), "pixel_values": images()})


def sam() -> Training:
    import transformers

    vision = {
        "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 128, "patch_size": 16, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 128,
        "num_pos_feats": 16,
    }  # fmt: skip
    prompts = {"hidden_size": 32, "image_size": 128, "patch_size": 16, "image_embedding_size": 8}
    masks = {"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32, "num_attention_heads": 4}
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    model = transformers.SamModel(config).train()
    corners = torch.rand(ROWS, 1, 2) * 50
    input_boxes = torch.cat((corners, corners + 60), -1)
    target = (torch.rand(ROWS, 1, 32, 32) < 0.3).float()
    inputs = {"pixel_values": images(128), "input_boxes": input_boxes, "multimask_output": False}
    return with_criterion(model, _mask_loss, target=target, **inputs)


def _mask_loss(outputs: Any, target: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.pred_masks.squeeze(1), target)


VISION: dict[str, Maker] = {
    "vit": lambda: classified("ViTForImageClassification", **IMAGE),
    "beit": lambda: classified("BeitForImageClassification", **IMAGE),
    "dinov2": lambda: classified(
        "Dinov2ForImageClassification", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=64,
        patch_size=8,
    ),
    "swin": swin,
    "convnext_v2": convnext_v2,
    "segformer": segformer,
    "vit_mae": vit_mae,
    "video_mae": video_mae,
    "detr": detr,
    "yolos": yolos,
    "sam": sam,
    "clip": clip,
    "llava": llava,
    "blip": blip,
}  # fmt: skip
