"""Attentions and feed-forwards of the host at small size, with random INT8 weights."""

import importlib
from types import SimpleNamespace

import torch
from native_int8.kernels import quantize_rows

DIM, HEADS, HIDDEN, ROWS, TEXT_ROWS = 64, 2, 128, 12, 6
HEAD_DIM = DIM // HEADS


def host_class(name: str) -> type:
    """A class of comfy by the name that shared_rows.TABLE gives it."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"comfy.{module}"), attribute)


def rows(count: int = ROWS, seed: int = 0) -> torch.Tensor:
    """[2, count, DIM] bfloat16."""
    return torch.randn((2, count, DIM), generator=torch.Generator().manual_seed(seed)).bfloat16()


def turns(count: int) -> torch.Tensor:
    """Rotary frequencies [1, 1, count, HEAD_DIM / 2, 2, 2] float32."""
    angle = torch.randn((count, HEAD_DIM // 2), generator=torch.Generator().manual_seed(7))
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(1, 1, count, HEAD_DIM // 2, 2, 2)


def _joint():
    nothing = torch.nn.Identity()
    return SimpleNamespace(
        heads=HEADS, kv_heads=HEADS, dim_head=HEAD_DIM, norm_q=nothing, norm_k=nothing, to_out=[nothing]
    )


def _llama():
    return SimpleNamespace(
        num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=DIM, head_dim=HEAD_DIM, intermediate_size=HIDDEN,
        qkv_bias=True, q_norm=None, k_norm=None, mlp_activation="silu",
    )  # fmt: skip


def _attend(*arguments, **keywords):
    from comfy.ldm.modules.attention import optimized_attention

    return optimized_attention(*arguments, **keywords)


# name -> arguments of the class beside the operations, and what its forward is called with
_GATED, _ATTENTION = (DIM, HIDDEN), (DIM, HEADS, HEAD_DIM)
ARGUMENTS = {
    "ldm.aura.mmdit.DoubleAttention": ((DIM, HEADS), lambda: (rows(TEXT_ROWS, 1), rows())),
    "ldm.aura.mmdit.SingleAttention": ((DIM, HEADS), lambda: (rows(),)),
    "ldm.boogu.model.BooguDoubleStreamProcessor": (
        (DIM, HEAD_DIM, HEADS, HEADS), lambda: (_joint(), rows(), rows(TEXT_ROWS, 1), None)),
    "ldm.cosmos.predict2.Attention": ((DIM, None, HEADS, HEAD_DIM), lambda: (rows(),)),
    "ldm.ernie.model.ErnieImageAttention": (_ATTENTION, lambda: (rows(),)),
    "ldm.ernie.model.ErnieImageFeedForward": (_GATED, lambda: (rows(),)),
    "ldm.flux.layers.YakMLP": (_GATED, lambda: (rows(),)),
    "ldm.hidream.model.FeedForwardSwiGLU": ((DIM, HIDDEN, 64), lambda: (rows(),)),
    "ldm.krea2.model.Attention": ((DIM, HEADS), lambda: (rows(),)),
    "ldm.krea2.model.SwiGLU": ((DIM, 2, False, 64), lambda: (rows(),)),
    "ldm.lens.model.GateMLP": (_GATED, lambda: (rows(),)),
    "ldm.lightricks.model.CrossAttention": ((DIM, None, HEADS, HEAD_DIM), lambda: (rows(),)),
    "ldm.lumina.model.FeedForward": ((DIM, HIDDEN, 64, None), lambda: (rows(),)),
    "ldm.omnigen.omnigen2.Attention": ((DIM, HEAD_DIM, HEADS, HEADS), lambda: (rows(),) * 2),
    "ldm.omnigen.omnigen2.LuminaFeedForward": ((DIM, HIDDEN, 64), lambda: (rows(),)),
    "ldm.qwen_image.model.Attention": (
        (DIM, HEAD_DIM, HEADS), lambda: (rows(), rows(TEXT_ROWS, 1), None, None, turns(TEXT_ROWS + ROWS))),
    "ldm.wan.ar_model.CausalWanSelfAttention": ((DIM, HEADS), lambda: (rows(), turns(ROWS).transpose(1, 2))),
    "ldm.wan.model.WanI2VCrossAttention": ((DIM, HEADS), lambda: (rows(), rows(TEXT_ROWS, 1), 2)),
    "ldm.wan.model.WanSelfAttention": ((DIM, HEADS), lambda: (rows(), turns(ROWS).transpose(1, 2))),
    "ldm.wan.model.WanT2VCrossAttention": ((DIM, HEADS), lambda: (rows(), rows(TEXT_ROWS, 1))),
    "ldm.wan.model.WanT2VCrossAttentionGather": ((DIM, HEADS), lambda: (rows(), rows(32, 1))),
    "text_encoders.llama.Attention": (
        (_llama(),), lambda: (rows(), None, (torch.rand((ROWS, HEAD_DIM)), *torch.rand((2, ROWS, HEAD_DIM // 2))), _attend)),
    "text_encoders.llama.MLP": ((_llama(),), lambda: (rows(),)),
    "text_encoders.t5.T5Attention": ((DIM, DIM, HEADS, False), lambda: (rows(), None, None, _attend)),
    "text_encoders.t5.T5DenseGatedActDense": ((DIM, HIDDEN, "gelu_pytorch_tanh"), lambda: (rows(),)),
}  # fmt: skip


def build(comfy, name: str, group: int = 0, groups: dict[str, int] | None = None) -> torch.nn.Module:
    """A module of the host with random INT8 Linears, rotated by `group`, or by another group where `groups` names one."""
    ops = comfy.ops.mixed_precision_ops({}, torch.bfloat16)
    positional, _ = ARGUMENTS[name]
    static = {"device": None, "dtype": torch.bfloat16}
    if name.startswith(("ldm.wan.", "ldm.lumina.")):
        keywords = {"operation_settings": static | {"operations": ops}}
    else:
        keywords = static | {"ops" if name.startswith("text_encoders.llama.") else "operations": ops}
    module = host_class(name)(*positional, **keywords)
    fill(module, group, groups or {})
    return module


def fill(module: torch.nn.Module, group: int, groups: dict[str, int]) -> None:
    """Give every Linear of the host in `module` an INT8 weight and every other one with parameters random values."""
    generator = torch.Generator().manual_seed(11)
    state = {}
    for name, part in module.named_modules():
        if hasattr(part, "in_features"):
            own = groups.get(name, group)
            weight = torch.randn((part.out_features, part.in_features), generator=generator) / part.in_features**0.5
            codes, scale = quantize_rows(weight, rotation_group=own, implementation="torch")
            convrot = f', "convrot": true, "convrot_groupsize": {own}' if own else ""
            marker = f'{{"format": "int8_tensorwise"{convrot}}}'
            state[f"{name}.weight"], state[f"{name}.weight_scale"] = codes, scale
            state[f"{name}.comfy_quant"] = torch.tensor(list(marker.encode()), dtype=torch.uint8)
            if part.bias is not None:
                state[f"{name}.bias"] = torch.randn(part.out_features, generator=generator).bfloat16()
        else:
            for parameter, value in part.named_parameters(recurse=False):
                state[f"{name}.{parameter}"] = torch.rand(value.shape, generator=generator).to(value.dtype) + 0.5
    module.load_state_dict(state)


def arguments(name: str) -> tuple:
    """What `name`'s forward is called with."""
    return ARGUMENTS[name][1]()
