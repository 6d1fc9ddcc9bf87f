"""Whole diffusion models of the host at small size, with INT8 Linears in their blocks, and what they are called with."""

import torch
from native_int8.nodes.int8 import host_backend

from .host_parts import fill

IDEOGRAM_4 = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64, "intermediate_size": 256, "adaln_dim": 32,
    "llm_features_dim": 48, "in_channels": 16, "mrope_section": (6, 5, 5),
}  # fmt: skip
Z_IMAGE = {
    "dim": 256, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "ffn_dim_multiplier": 2.0,
    "multiple_of": 64, "axes_dims": (16, 24, 24), "axes_lens": (128, 64, 64), "cap_feat_dim": 48, "in_channels": 16,
    "qk_norm": True, "z_image_modulation": True, "pad_tokens_multiple": 8, "time_scale": 1000.0,
}  # fmt: skip
TEXT_TOKENS = 5


def ideogram4(comfy, group: int = 0) -> torch.nn.Module:
    """Ideogram4Transformer2DModel as on a card that computes in bfloat16; `group` is the rotation of its INT8 Linears."""
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    made = _random(comfy, Ideogram4Transformer2DModel, IDEOGRAM_4)
    for layer in made.layers:
        for part in (layer.attention, layer.feed_forward):
            fill(part, group, {})
    return made


def z_image(comfy, group: int = 0) -> torch.nn.Module:
    """The same for NextDiT with the modulation of Z-Image."""
    from comfy.ldm.lumina.model import NextDiT

    made = _random(comfy, NextDiT, Z_IMAGE)
    for block in (*made.layers, *made.noise_refiner, *made.context_refiner):
        for part in (block.attention, block.feed_forward):
            fill(part, group, {})
    return made


def ideogram4_call(batch=1, side=4, mask=None, context=True, seed=1, time=0.7) -> tuple[tuple, dict]:
    """Arguments of a call as the host's BaseModel makes it."""
    x, text = _inputs(batch, side, IDEOGRAM_4["in_channels"], IDEOGRAM_4["llm_features_dim"], seed)
    named = {"context": text if context else None, "attention_mask": mask, "control": None, "transformer_options": {}}
    return (x, torch.full((batch,), time)), named


def z_image_call(batch=1, side=4, seed=1, time=0.7) -> tuple[tuple, dict]:
    """The same for `z_image`."""
    x, text = _inputs(batch, side, Z_IMAGE["in_channels"], Z_IMAGE["cap_feat_dim"], seed)
    named = {"context": text, "num_tokens": TEXT_TOKENS, "control": None, "transformer_options": {}}
    return (x, torch.full((batch,), time)), named


def _inputs(batch, side, channels, features, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((batch, channels, side, side), generator=g).bfloat16()
    return x, torch.randn((batch, TEXT_TOKENS, features), generator=g).bfloat16()


def _random(comfy, kind, sizes) -> torch.nn.Module:
    host_backend.register()
    made = kind(dtype=torch.bfloat16, operations=comfy.ops.mixed_precision_ops({}, torch.bfloat16), **sizes)
    floats = kind(dtype=torch.bfloat16, operations=comfy.ops.manual_cast, **sizes).state_dict()
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in floats.items():
        random = torch.randn(value.shape, generator=generator)
        state[name] = (random * value.shape[-1] ** -0.5 if value.dim() > 1 else 1 + random * 0.1).bfloat16()
    made.load_state_dict(state)
    return made.requires_grad_(False)
