"""Files of LoRA makers for tests, as state dicts, and what they mean."""

import torch

RANK = 4


def int8_linears(model) -> dict:
    """INT8 Linears of a MODEL by the name that LoRA files give them."""
    return {
        f"diffusion_model.{name}": module
        for name, module in model.model.diffusion_model.named_modules()
        if getattr(module, "layout_type", None) == "TensorWiseINT8Layout"
    }


def low_rank(layer, seed: int = 3, size: float = 0.02, rank: int = 32):
    """What LoRAs add to a Linear, as kernels.LowRank in bf16; both factors are normal with `size` as standard deviation."""
    from native_int8.kernels import LowRank

    g = torch.Generator().manual_seed(seed)
    down, up = _randn(rank, layer.in_features, generator=g), _randn(layer.out_features, rank, generator=g)
    return LowRank((down * size).bfloat16(), (up * size).bfloat16())


# what the host does to INT8 weights, or has done to them beside the product
WEIGHT_CHANGES = ("LoRA", "weight function", "weight held elsewhere")


def change_weights(model: torch.nn.Module, how: str) -> None:
    """Do one of WEIGHT_CHANGES to every INT8 Linear inside a diffusion model."""
    from native_int8.nodes.int8 import short_way

    for layer in filter(short_way.is_known, model.modules()):
        if how == "LoRA":
            setattr(layer, short_way.BRANCH, low_rank(layer))
        elif how == "weight function":
            layer.weight_function = [lambda weight: weight * 1.25]
        else:
            layer._v = object()


def _randn(*shape, generator, scale=1.0):
    return torch.randn(shape, generator=generator) * scale


def _lora(name, n, k, size, generator, rank=RANK):
    return {
        f"{name}.lora_up.weight": _randn(n, rank, generator=generator, scale=size * k**-0.5 * rank**-0.5),
        f"{name}.lora_down.weight": _randn(rank, k, generator=generator),
        # alpha equal to the rank means a factor of 1
        f"{name}.alpha": torch.tensor(float(rank)),
    }


def _dora(name, n, k, size, generator):
    return _lora(name, n, k, size, generator) | {
        f"{name}.dora_scale": 1 + 0.1 * torch.rand((n, 1), generator=generator)
    }


def _lokr(name, n, k, size, generator):
    return {
        f"{name}.lokr_w1": _randn(4, 4, generator=generator, scale=size * k**-0.5),
        f"{name}.lokr_w2": _randn(n // 4, k // 4, generator=generator),
    }


def _loha(name, n, k, size, generator):
    return {
        f"{name}.hada_w1_a": _randn(n, RANK, generator=generator, scale=size * k**-0.5 / RANK),
        f"{name}.hada_w1_b": _randn(RANK, k, generator=generator),
        f"{name}.hada_w2_a": _randn(n, RANK, generator=generator),
        f"{name}.hada_w2_b": _randn(RANK, k, generator=generator),
    }


def _diff(name, n, k, size, generator):
    return {f"{name}.diff": _randn(n, k, generator=generator, scale=size * k**-0.5)}


KINDS = {"lora": _lora, "dora": _dora, "lokr": _lokr, "loha": _loha, "diff": _diff}


def lora_file(model, kind="lora", seed=0, size=0.1, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A file of `kind` on all INT8 Linears; deltas have about `size` / sqrt(K) as standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, module in int8_linears(model).items():
        state |= KINDS[kind](name, module.out_features, module.in_features, size, generator)
    return {name: value.to(dtype) for name, value in state.items()}


def delta(state: dict, name: str) -> torch.Tensor:
    """The matrix [N, K] that a plain LoRA file adds to the layer `name`, in float64."""
    up, down = state[f"{name}.lora_up.weight"].double(), state[f"{name}.lora_down.weight"].double()
    return up @ down * (float(state[f"{name}.alpha"]) / down.shape[0])


def add_lora(model, state: dict, strength: float = 1.0):
    """What the stock nodes Load LoRA and Load LoRA (Model Only) return for a MODEL."""
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, dict(state), strength, 0)[0]
