"""INT8 MODELs that are run again and again, cloned, interrupted and thrown away: same bits, no memory, nothing left behind."""

import gc
import sys
import threading
import types
import weakref

import pytest
import torch
from native_int8.nodes.int8 import host_backend, loader, lora_branch, patcher, quantize, short_way
from packtest import tiny
from packtest.loras import add_lora, int8_linears, lora_file

pytestmark = pytest.mark.comfy


@pytest.fixture
def run(comfy):
    """A function (MODEL, seed=0, **more) -> latent after one step."""
    return lambda model, seed=0, **more: tiny.sample(comfy, model, seed=seed, **more)


@pytest.fixture
def model(comfy):
    return tiny.int8_model(comfy)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def tensors():
    # by type: isinstance would wake up lazy modules of torch
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def quantisations(comfy, monkeypatch):
    """A list that grows with each weight that is made INT8, here or by the host."""
    from comfy.quant_ops import QuantizedTensor

    seen = []
    for owner, name in ((quantize, "native_layer"), (QuantizedTensor, "requantize_from_float")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _f=original, _n=name, **k: (seen.append(_n), _f(*a, **k))[1])
    return seen


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_b32_b39_fifty_runs_change_no_bit_and_take_no_memory(comfy, model, run, monkeypatch):
    patched, other = add_lora(model, lora_file(model)), tiny.float_model(comfy)
    baked = add_lora(model, lora_file(model, "lokr"))
    expected = {one: run(one) for one in (patched, baked, other, model)}
    # further sizes, so that what is kept for one shape would grow
    sizes = [(h, w) for h in (4, 6, 8) for w in (5, 7, 9)]
    for size in sizes:
        run(patched, size=size)
    seen = quantisations(comfy, monkeypatch)
    counts, memory = [], []
    for i in range(50):
        one = (patched, model, patched, other, patched)[i % 5]
        assert torch.equal(run(one), expected[one])
        if i % 5 == 0:
            run(patched, size=sizes[i // 5 % len(sizes)])
        gc.collect()
        counts.append((len(tensors()), len(gc.get_objects())))
        memory.append(resident_bytes())
    assert seen == []
    first, last = counts[4], counts[-1]
    assert last[0] <= first[0]
    assert last[1] <= 1.02 * first[1]
    assert memory[-1] <= 1.02 * max(memory[:10])
    # the patch that lies in the weights is made anew with other weights, and is the same again
    assert torch.equal(run(baked), expected[baked])


def test_b31_other_models_in_between_are_gone_afterwards(comfy, model, run):
    patched = add_lora(model, lora_file(model))
    expected = run(patched)
    for _ in range(3):
        between = add_lora(tiny.int8_model(comfy), lora_file(model, "loha", seed=3))
        run(between)
        alive = [weakref.ref(thing) for thing in (between, between.model, host_backend.record_of(between))]
        del between
        assert torch.equal(run(patched), expected)
        comfy.model_management.free_memory(1e30, torch.device("cpu"), keep_loaded=[])
        comfy.model_management.cleanup_models()
        gc.collect()
        assert [one() for one in alive] == [None] * len(alive)
    assert torch.equal(run(patched), expected)


def test_clones_of_clones_and_two_samplers_on_one_model(model, run):
    twice = model.clone().clone()
    first, second = run(model), run(model, seed=1, steps=2, cfg=3.0)
    for one in (twice, model, twice):
        assert torch.equal(run(one, seed=1, steps=2, cfg=3.0), second)
        assert torch.equal(run(one), first)


def test_b30_a_clone_has_all_that_the_pack_put_on_the_model(model):
    patched = add_lora(model, lora_file(model))
    own = {name for name in vars(patched) if "native_int8" in name or name.startswith("_hook")}
    for one in (patched.clone(), patched.clone().clone()):
        assert type(one) is type(patched)
        assert one.attachments == patched.attachments
        assert one.cached_patcher_init == patched.cached_patcher_init
        assert host_backend.record_of(one) is host_backend.record_of(patched)
        # what else is there is made again from the patches
        assert vars(one).keys() - own <= vars(patched).keys() | own
        assert one.native_int8_plan().beside.keys() == patched.native_int8_plan().beside.keys()


def global_things():
    """(module, name) -> function or class of ComfyUI, comfy_kitchen and torch; and what is on those classes."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if (
            not module_name.startswith(("comfy", "torch.nn", "nodes", "execution", "folder_paths"))
            and module_name != "torch"
        ):
            continue
        for name, thing in list(vars(module).items() if module is not None else ()):
            if isinstance(thing, types.FunctionType | types.BuiltinFunctionType | type):
                found[module_name, name] = thing
            if isinstance(thing, type) and thing.__module__.startswith("comfy"):
                found |= {(module_name, name, own): value for own, value in vars(thing).items() if callable(value)}
    return found


def test_b37_nothing_of_the_host_or_torch_is_replaced(comfy, run):
    from comfy_kitchen.registry import registry

    host_backend.register()
    run(tiny.float_model(comfy))
    before, order = global_things(), list(registry._priority)
    model = patcher.patch_model(tiny.float_model(comfy))[0]
    run(add_lora(model, lora_file(model)))
    run(add_lora(model, lora_file(model, "dora")))
    after = global_things()
    assert [key for key, thing in before.items() if after.get(key) is not thing] == []
    assert list(registry._priority) == order
    assert getattr(registry._thread_local, "backend_override", None) is None


class Stop:
    """Does something before the n-th INT8 Linear runs."""

    def __init__(self, model, n, action):
        linears = list(int8_linears(model).values())
        self.handle = linears[n].register_forward_pre_hook(lambda *_: action())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


def nothing_is_left(model):
    assert getattr(short_way._thread, "run", None) is None
    assert getattr(host_backend._running, "record", None) is None
    for module in int8_linears(model).values():
        assert not {short_way.UPPER, short_way.LOWER, short_way.BRANCH} & vars(module).keys()


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("n", [0, 5, -1])
@pytest.mark.parametrize("kind", ["interrupt", "memory"])
def test_a_run_that_ends_in_the_middle_leaves_everything_usable(comfy, model, run, kind, n):
    patched = add_lora(model, lora_file(model))
    plain, expected = run(model), run(patched)
    management = comfy.model_management
    action, error = {
        "interrupt": (lambda: management.interrupt_current_processing(True), management.InterruptProcessingException),
        "memory": (out_of_memory, torch.OutOfMemoryError),
    }[kind]
    # the request to stop is seen by the next Linear of the host
    with Stop(model, n, action), pytest.raises(error):
        run(patched)
        management.throw_exception_if_processing_interrupted()
    nothing_is_left(model)
    for one, wanted in ((patched, expected), (model, plain), (patched, expected)):
        assert torch.equal(run(one), wanted)


@pytest.mark.parametrize("n", [1, 4])
def test_no_memory_for_a_stack_leaves_everything_usable(model, run, monkeypatch, n):
    patched = add_lora(model, lora_file(model))
    plain = run(model)
    original, left = lora_branch.stack, [n]

    def stack(*args):
        left[0] -= 1
        return original(*args) if left[0] else out_of_memory()

    monkeypatch.setattr(lora_branch, "stack", stack)
    with pytest.raises(torch.OutOfMemoryError):
        run(patched)
    monkeypatch.undo()
    nothing_is_left(model)
    with_lora = run(patched)
    assert not torch.equal(with_lora, plain)
    assert torch.equal(run(model), plain)
    assert torch.equal(run(patched), with_lora)


@pytest.mark.parametrize("n", [0, 7])
@pytest.mark.parametrize("error", ["interrupt", "memory"])
def test_b26_patching_that_ends_in_the_middle_leaves_the_incoming_model_as_it_was(comfy, run, monkeypatch, error, n):
    float_model = tiny.float_model(comfy)
    expected, as_int8 = run(float_model), run(patcher.patch_model(float_model)[0])
    weights = {key: (value, value.clone()) for key, value in float_model.model.state_dict().items()}
    original, done = quantize.native_layer, []

    def native_layer(*args):
        done.append(args)
        if len(done) > n:
            out_of_memory() if error == "memory" else comfy.model_management.interrupt_current_processing(True)
        return original(*args)

    monkeypatch.setattr(quantize, "native_layer", native_layer)
    with pytest.raises(BaseException) as caught:
        patcher.patch_model(float_model)
    monkeypatch.undo()
    comfy.model_management.interrupt_current_processing(False)
    assert caught.type.__name__ in ("InterruptProcessingException", "OutOfMemoryError")
    assert not host_backend.is_attached(float_model)
    for key, (value, copy) in weights.items():
        assert float_model.model.state_dict()[key].data_ptr() == value.data_ptr() and torch.equal(value, copy)
    assert torch.equal(run(float_model), expected)
    assert torch.equal(run(patcher.patch_model(float_model)[0]), as_int8)


@pytest.mark.parametrize("n", [1, 6, 15])
def test_no_memory_while_the_host_loads(comfy, model, run, monkeypatch, n):
    plain, patched = run(model), add_lora(model, lora_file(model))
    expected = run(patched)
    comfy.model_management.unload_all_models()
    original, left = torch.nn.Module.to, [n]

    def to(self, *args, **kwargs):
        left[0] -= 1
        return original(self, *args, **kwargs) if left[0] else out_of_memory()

    monkeypatch.setattr(torch.nn.Module, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        run(patched)
    monkeypatch.undo()
    nothing_is_left(model)
    assert torch.equal(run(patched), expected)
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("how", ["deep", "without dynamic VRAM", "other GPU"])
def test_the_host_builds_the_model_again(comfy, model, run, how):
    patched = add_lora(model, lora_file(model))
    expected = run(patched)
    if how == "deep":
        again = patched.clone(force_deepcopy=True)
    elif how == "without dynamic VRAM":
        again = patched.cached_patcher_init[0](*patched.cached_patcher_init[1], disable_dynamic=True)
        assert not again.is_dynamic()
        again = add_lora(again, lora_file(model))
    else:
        if torch.cuda.device_count() == 1:
            pytest.skip("needs a second GPU, or none")
        other = torch.device("cuda", 1) if torch.cuda.is_available() else torch.device("cpu")
        again = patched.deepclone_multigpu(new_load_device=other)
    assert again.model is not patched.model
    assert again.cached_patcher_init == patched.cached_patcher_init
    assert type(again) is type(patched) and host_backend.is_attached(again)
    assert torch.equal(run(again), expected)
    assert torch.equal(run(patched), expected)


def test_multi_gpu_copies_run_in_threads_of_their_own(comfy, model, run):
    patched = add_lora(model, lora_file(model))
    expected, copy = run(patched), patched.deepclone_multigpu(new_load_device=torch.device("cpu"))
    comfy.model_management.load_models_gpu([patched, copy])
    text, image = tiny.conditioning(512), torch.randn((1, tiny.CHANNELS, 6, 6))
    results = {}

    def work(one):
        options = {"wrappers": comfy.patcher_extension.copy_nested_dicts(one.wrappers)}
        with torch.inference_mode():
            for _ in range(5):
                y = one.model.apply_model(image, torch.tensor([0.7]), c_crossattn=text, transformer_options=options)
                results.setdefault(id(one), []).append(y)

    threads = [threading.Thread(target=work, args=(one,)) for one in (patched, copy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = results[id(patched)][0]
    assert all(torch.equal(y, first) for one in (patched, copy) for y in results[id(one)])
    assert torch.equal(run(patched), expected)


def test_b40_sizes_are_the_bytes_that_are_there(model):
    state = model.model.state_dict()
    held = sum(value.numel() * value.element_size() for value in state.values())
    assert abs(model.model_size() - held) <= 0.02 * held
    for share in (1.0, 0.5, 0.0):
        model.detach()
        model.partially_load(model.load_device, 1e32 if share == 1.0 else max(share * held, 1))
        assert model.current_loaded_device() == model.load_device
        if share == 1.0:
            assert model.loaded_size() == pytest.approx(model.model_size(), rel=0.02)
        else:
            # what the host keeps free for a float weight beside the INT8 one counts as not loaded
            assert model.loaded_size() <= share * held + 1
    assert loader.describe(model).int8_layers == len(int8_linears(model))
