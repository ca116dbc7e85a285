"""Networks of diffusers, which predict noise or code images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..training import Maker, Training, with_criterion

ROWS = 4


def unet() -> Training:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return denoiser(model.train(), torch.randn(ROWS, 3, 32, 32), torch.randint(1000, (ROWS,)))


def unet_condition() -> Training:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    text = torch.randn(ROWS, 12, 32)
    return denoiser(model.train(), torch.randn(ROWS, 4, 16, 16), torch.randint(1000, (ROWS,)), text)


def autoencoder_kl() -> Training:
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(block_out_channels=(32, 64), layers_per_block=1, **kinds).train()
    images = torch.randn(ROWS, 3, 32, 32)
    return with_criterion(model, _sample_loss, images, sample_posterior=True, target=images.clone())


def vq_model() -> Training:
    from diffusers import VQModel

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = VQModel(block_out_channels=(32, 64), num_vq_embeddings=64, **kinds).train()
    images = torch.randn(ROWS, 3, 32, 32)
    return with_criterion(model, _vq_loss, images, target=images.clone())


def dit() -> Training:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=16
    ).train()
    classes = torch.randint(1000, (ROWS,))
    noisy, times = torch.randn(ROWS, 4, 16, 16), torch.randint(1000, (ROWS,))
    return with_criterion(
        model, _sample_loss, noisy, timestep=times, class_labels=classes, target=torch.randn(ROWS, 4, 16, 16)
    )


def sd3() -> Training:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=16, num_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
        caption_projection_dim=64, pooled_projection_dim=32, in_channels=4, out_channels=4, pos_embed_max_size=16,
    ).train()  # fmt: skip
    text = {"encoder_hidden_states": torch.randn(ROWS, 12, 32), "pooled_projections": torch.randn(ROWS, 32)}
    noisy, times = torch.randn(ROWS, 4, 16, 16), torch.rand(ROWS)
    return with_criterion(model, _sample_loss, noisy, timestep=times, **text, target=torch.randn_like(noisy))


def flux() -> Training:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    ).train()  # fmt: skip
    where = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
    noisy, times = torch.randn(ROWS, 64, 16), torch.rand(ROWS)
    text = {"encoder_hidden_states": torch.randn(ROWS, 12, 32), "pooled_projections": torch.randn(ROWS, 32)}
    return with_criterion(
        model, _sample_loss, noisy, timestep=times, img_ids=where, txt_ids=torch.zeros(12, 3), **text,
        target=torch.randn_like(noisy),
    )  # fmt: skip


def denoiser(model: nn.Module, noisy: Tensor, *conditions: Tensor) -> Training:
    """Return the training of a network that predicts the noise in `noisy`."""
    return with_criterion(model, _sample_loss, noisy, *conditions, target=torch.randn_like(noisy))


def _sample_loss(outputs: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.sample, target)


def _vq_loss(outputs: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.sample, target) + outputs.commit_loss.mean()


DIFFUSION: dict[str, Maker] = {
    "unet2d": unet,
    "unet2d_condition": unet_condition,
    "autoencoder_kl": autoencoder_kl,
    "vq_model": vq_model,
    "dit": dit,
    "sd3": sd3,
    "flux": flux,
}
