"""LoRAs on INT8 MODELs through ComfyUI's own loader: beside the product, exact, without cost to the INT8 path."""

import pytest
import torch
from native_int8.kernels import add_low_rank
from native_int8.nodes.int8 import host_backend, lora_branch, patcher, short_way
from packtest.loras import add_lora, delta, int8_linears, lora_file

pytestmark = pytest.mark.comfy

# of the delta's norm, on the output of one layer
CLOSE = 0.02
# in float32, as on a CPU; on a GPU the stacks are bfloat16, which rounds by up to 2^-8, and so are the steps of a picture
EXACT, SAME_PICTURE = (2.0**-8, 0.998) if torch.cuda.is_available() else (1e-4, 0.999)


@pytest.fixture
def layer_delta(inside):
    """A function (MODEL, LoRA MODEL, layer name, x) -> difference of the layer's outputs, in float64."""

    def measure(plain, with_lora, name, x):
        module = int8_linears(plain)[name]
        before, after = inside(plain, lambda: module(x)), inside(with_lora, lambda: module(x))
        assert before.dtype == after.dtype == x.dtype and before.shape == after.shape
        return after.double() - before.double()

    return measure


def inputs(module, *rows, dtype=torch.float32):
    return torch.randn((*rows, module.in_features), generator=torch.Generator().manual_seed(5)).to(dtype)


def error(got, expected):
    return float((got - expected).norm() / expected.norm())


def counts(model):
    record = host_backend.record_of(model)
    return record.snapshot() | record.ways_taken()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strengths", [(1.0,), (-0.7,), (0.2, 1.0), (0.5, 0.25, 1.0, -0.3, 0.6, 0.8)], ids=str)
def test_adds_the_sum_of_all_loras(model, layer_delta, strengths, dtype):
    files = [lora_file(model, seed=i, dtype=dtype) for i in range(len(strengths))]
    patched = model
    for file, strength in zip(files, strengths, strict=True):
        patched = add_lora(patched, file, strength)
    for name, module in list(int8_linears(model).items())[:6]:
        x = inputs(module, 2, 9)
        expected = x.double() @ sum(s * delta(f, name) for f, s in zip(files, strengths, strict=True)).T
        assert error(layer_delta(model, patched, name, x), expected) < EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_delta_error_in_half_precision(model, dtype):
    file = lora_file(model, size=1e-3)
    name, module = next(iter(int8_linears(model).items()))
    terms = lora_branch.terms_of(add_lora(model, file).patches[f"{name}.weight"], module)
    low_rank = lora_branch.stack(terms, module.out_features, module.in_features, torch.device("cpu"), dtype)
    x = inputs(module, 64, dtype=dtype)
    expected = x.double() @ delta(file, name).T
    got = add_low_rank(torch.zeros((64, module.out_features), dtype=dtype), x, low_rank)
    assert error(got.double(), expected) < CLOSE


@pytest.mark.parametrize("order", ["lora first", "lora last"])
def test_b10_order_of_nodes_does_not_matter(order, stock_int8_model, model, sample):
    file = lora_file(model)
    expected = sample(add_lora(model, file))
    assert not torch.equal(expected, sample(model))
    if order == "lora first":
        assert torch.equal(sample(patcher.patch_model(add_lora(stock_int8_model, file))[0]), expected)
    assert torch.equal(sample(add_lora(patcher.patch_model(stock_int8_model)[0], file)), expected)


def test_b10_lora_on_the_float_model_comes_along(float_model, sample, cosine):
    file = lora_file(patcher.patch_model(float_model)[0], size=0.5)
    in_float = add_lora(float_model, file)
    before = patcher.patch_model(in_float)[0]
    after = add_lora(patcher.patch_model(float_model)[0], file)
    assert torch.equal(sample(before), sample(after))
    assert cosine(sample(after), sample(in_float)) > 0.99


def test_b11_deltas_below_half_a_step_are_kept(model, layer_delta):
    file = lora_file(model, size=0.0005)
    patched = add_lora(model, file)
    for name, module in list(int8_linears(model).items())[:4]:
        x = inputs(module, 33)
        assert delta(file, name).abs().max() < 0.5 * module.weight._params.scale.min()
        assert error(layer_delta(model, patched, name, x), x.double() @ delta(file, name).T) < CLOSE


def test_b19_every_layer_stays_on_the_int8_path(model, sample):
    sample(model)
    plain = counts(model)
    host_backend.record_of(model).reset()
    patched = model
    for seed in range(6):
        patched = add_lora(patched, lora_file(model, seed=seed))
        sample(patched)
        assert counts(patched) == plain
        host_backend.record_of(model).reset()


def test_b09_patches_on_other_modules_are_passed_over(model, sample):
    shape = model.model.state_dict()["diffusion_model.single_blocks.0.norm.query_norm.weight"].shape
    patched = add_lora(model, lora_file(model))
    patched.add_patches({"diffusion_model.single_blocks.0.norm.query_norm.weight": (torch.ones(shape),)})
    patched.patches["diffusion_model.no_longer_there.weight"] = [(1.0, (torch.ones(3),), 1.0, None, None)]
    plan = patched.native_int8_plan()
    assert len(plan.beside) == len(int8_linears(model)) and not plan.baked


@pytest.mark.parametrize("switch", ["0", "1"])
def test_without_the_short_way_or_the_backend(switch, model, sample, monkeypatch, cosine):
    from comfy_kitchen.registry import registry

    plain, patched = sample(model), add_lora(model, lora_file(model, size=0.5))
    expected = sample(patched)
    monkeypatch.setenv(short_way.SWITCH, switch)
    if switch == "1" or not torch.cuda.is_available():
        assert torch.equal(sample(patched), expected)
    else:
        # the product is then added to the rounded output
        assert cosine(sample(patched), expected) > SAME_PICTURE
    registry.disable("native_int8")
    try:
        own = sample(patched)
    finally:
        registry.enable("native_int8")
    assert cosine(own, expected) > SAME_PICTURE > cosine(expected, plain)


def test_sliced_loras_change_their_slice_only(model, layer_delta):
    name, module = next((n, m) for n, m in int8_linears(model).items() if n.endswith("qkv"))
    n, k = module.out_features, module.in_features
    generator = torch.Generator().manual_seed(2)
    from comfy.weight_adapter import LoRAAdapter

    patched, expected = model.clone(), torch.zeros((n, k), dtype=torch.float64)
    for axis, start, length in ((0, n // 3, n // 3), (0, 0, n // 3), (1, k // 2, k // 4)):
        shape = [n, k]
        shape[axis] = length
        up, down = torch.randn((shape[0], 3), generator=generator), torch.randn((3, shape[1]), generator=generator)
        adapter = LoRAAdapter(set(), (up, down, 1.5, None, None, None))
        assert patched.add_patches({(f"{name}.weight", (axis, start, length)): adapter}, 0.8)
        expected.narrow(axis, start, length).add_(0.8 * 0.5 * (up.double() @ down.double()))
    x = inputs(module, 11)
    assert error(layer_delta(model, patched, name, x), x.double() @ expected.T) < EXACT


def test_middle_parts_mean_what_they_mean_to_the_host(comfy, model):
    from comfy.weight_adapter import LoRAAdapter

    name, module = next(iter(int8_linears(model).items()))
    n, k = module.out_features, module.in_features
    up, down, mid = torch.randn(n, 4, 1, 1), torch.randn(4, k, 1, 1), torch.randn(4, 4, 1, 1)
    patches = [(0.7, LoRAAdapter(set(), (up, down, 2.0, mid, None, None)), 1.0, None, None)]
    expected = comfy.lora.calculate_weight(patches, torch.zeros(n, k), name)
    low_rank = lora_branch.stack(lora_branch.terms_of(patches, module), n, k, torch.device("cpu"), torch.float32)
    assert torch.allclose(low_rank.up @ low_rank.down, expected, rtol=1e-4, atol=1e-4)


def test_compiled_layers_add_the_lora_without_a_new_graph(model, inside):
    module = next(iter(int8_linears(model).values()))
    x = inputs(module, 2, 9)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    file = lora_file(model)
    weak, strong = (add_lora(model, file, strength) for strength in (0.2, 1.2))
    for patched in (weak, strong, add_lora(strong, lora_file(model, seed=1))):
        eager = inside(patched, lambda: module(x))
        got = inside(patched, lambda: compiled(x))
        assert torch.allclose(got, eager, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


def test_a_compiled_model_has_the_lora(model, sample, cosine):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    plain, patched = sample(model, steps=1), add_lora(model, lora_file(model))
    expected = sample(patched, steps=1)
    compiled = patched.clone()
    set_torch_compile_wrapper(compiled, backend="eager")
    got = sample(compiled, steps=1)
    assert (
        cosine(got, expected) > SAME_PICTURE if torch.cuda.is_available() else torch.allclose(got, expected, atol=1e-4)
    )
    assert not torch.allclose(plain, expected, atol=1e-2)


def odd_patches(comfy, n, k):
    """Patches that are no low-rank product of the whole weight, by what is said about them."""
    from comfy.weight_adapter import LoRAAdapter

    def lora(up=(n, 4), down=(4, k), alpha=None, mid=None, dora=None, reshape=None):
        tensors = [None if shape is None else torch.ones(shape) for shape in (up, down, mid, dora)]
        return LoRAAdapter(set(), (tensors[0], tensors[1], alpha, tensors[2], tensors[3], reshape))

    return {
        "kind diff": (1.0, (torch.ones(n, k),), 1.0, None, None),
        "kind set": (1.0, ("set", (torch.ones(n, k),)), 1.0, None, None),
        "scales the weight": (1.0, lora(), 0.5, None, None),
        "through a function": (1.0, lora(), 1.0, None, lambda weight: weight * 2),
        "DoRA": (1.0, lora(dora=(n, 1)), 1.0, None, None),
        "changes the shape": (1.0, lora(reshape=[n + 8, k]), 1.0, None, None),
        "for axis 2": (1.0, lora(), 1.0, (2, 0, 4), None),
        "middle part": (1.0, lora(mid=(4, 4, 3, 3)), 1.0, None, None),
        "different rank": (1.0, lora(down=(5, k)), 1.0, None, None),
        "another shape": (1.0, lora(up=(n + 1, 4)), 1.0, None, None),
        "has another shape": (1.0, lora(), 1.0, (0, 0, n // 2), None),
    }


def test_anything_else_is_left_to_the_weight(comfy, model):
    module = next(iter(int8_linears(model).values()))
    for sentence, patch in odd_patches(comfy, module.out_features, module.in_features).items():
        found = lora_branch.terms_of([patch], module)
        assert isinstance(found, str) and sentence in found, sentence


def test_layers_whose_weight_the_host_takes_itself_are_baked(comfy, model, sample, cosine):
    """Such as an MLP that calls the host's linear_input_act with the Linear instead of calling the Linear."""
    parent = type(
        "TakesWeights", (torch.nn.Module,), {"forward": lambda self, x: comfy.ops.linear_input_act(self.a, x, "")}
    )
    assert lora_branch._takes_weights(parent)
    block = model.model.diffusion_model.single_blocks[0]
    block.__class__ = type("Block", (type(block),), {"more": parent.forward})
    file = lora_file(model, size=0.5)
    expected = sample(add_lora(model, file))
    plan = add_lora(model, file).native_int8_plan()
    assert {key.split(".")[1:3] == ["single_blocks", "0"] for key in plan.baked} == {True}
    assert plan.reasons == {"Block hands weights to the kernel without calling the Linear": len(plan.baked)}
    block.__class__ = type(block).__mro__[1]
    assert cosine(sample(add_lora(model, file)), expected) > 0.999


def test_a_lora_is_never_lost_without_a_word(model, sample, caplog, cosine):
    file = lora_file(model, size=0.5)
    patched = add_lora(model, file)
    expected = sample(patched)
    module = next(iter(int8_linears(model).values()))
    of_class = getattr(type(module), short_way.LOWER)
    module.__dict__[short_way.LOWER] = lambda *arguments: of_class(module, *arguments)
    sample(patched)
    assert caplog.text.count("1 Linears run without their LoRA") == 1
    # known at load, it is baked in
    before_load = add_lora(model, file)
    assert cosine(sample(before_load), expected) > 0.999
    assert before_load.native_int8_plan().reasons == {"another pack replaced the Linear's methods": 1}
    del module.__dict__[short_way.LOWER]
    assert torch.equal(sample(add_lora(model, file)), expected)
