"""torch.compile on the full-size Ideogram 4 class (34 layers, random weights): eager and compiled steps of bf16, host and ours.

    COMFYUI_PATH=... python tests/bench/compiled.py [--json FILE] [--limit SECONDS] [--rounds N] [--tiny] [--only NAME ...]

"bf16" is the float MODEL, "host" its INT8 twin on comfy_kitchen's kernels, "linear" the twin with our Linears only, "fused"
with our blocks, each as it is ("eager"), with every block compiled as KJNodes does it ("blocks", dynamic shapes), and with
the whole diffusion model compiled as ComfyUI's TorchCompileModel does it ("whole"). "visible" and "opaque" are what
NATIVE_INT8_COMPILED_QUANTISE says; with NATIVE_INT8_COMPILED_FUSION the graph holds our fused blocks ("traced", or
"traced visible" when what is left of quantising is visible), else the host's. 1024 px, 256 text tokens, batch 1, a mask
that hides nothing given (none to whole models). Everything compiled is compared with the eager step before its time
counts. A sample is four steps in a row, as a sampler queues them; contestants are interleaved in one process, in turns
forwards and backwards; medians. "fused again" is "fused" once more: what the two differ by is noise.

Then one compiled MODEL runs three sizes with two lengths of prompt each: how many graphs that takes. Compile times are of
the first step; inductor's graph caches are off, but kernels that an earlier contestant compiled are there. Blocks come
first and whole models last, which take minutes. What the time limit cuts off is named. All that was compiled of one class
is looked through at each call of a block, the latest first; --only leaves out the others. --tiny: a small model, on a CPU
if there is no GPU, to see that the program runs.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from typing import NamedTuple

import torch
from block_fusion import profiled
from block_fusion_models import DEVICE, Case, at_time, normal, random_state
from ideogram4_forward import event_ms, forward
from lora import Results, median
from machine import load_comfy, load_kernels

SWITCHES = "NATIVE_INT8_COMPILED_QUANTISE", "NATIVE_INT8_COMPILED_FUSION"
# what they are: how a graph quantises, and whether it holds our fused blocks
OPAQUE, VISIBLE, TRACED, TRACED_VISIBLE = ("opaque", "0"), ("visible", "0"), ("opaque", "1"), ("visible", "1")
MIN_COSINE = 0.99
STEPS, AGAIN = 4, "fused again"
SIDES = {False: (64, 48, 80), True: (4, 6, 8)}
WORDS = {False: (256, 77), True: (11, 21)}
TINY = {
    "num_attention_heads": 4, "attention_head_dim": 64, "intermediate_size": 512, "adaln_dim": 32, "llm_features_dim": 48,
    "mrope_section": [6, 5, 5],
}  # fmt: skip


class Contestant(NamedTuple):
    """A MODEL, what SWITCHES are while it runs, and the name of the eager contestant whose output it must give."""

    model: object
    settings: tuple[str, str] = OPAQUE
    eager: str = ""

    def set(self) -> None:
        os.environ.update(zip(SWITCHES, self.settings, strict=True))

    def run(self, comfy, inputs: dict) -> torch.Tensor:
        self.set()
        return forward(comfy, self.model, inputs)


class OutOfTime(Exception):
    """The alarm of the time limit."""


def ring(*_) -> None:
    raise OutOfTime("the time limit")


def inputs_for(tiny: bool, side: int, words: int) -> dict:
    channels, width = (16, 48) if tiny else (128, 53248)
    text = normal(1, words, width, seed=2, dtype=torch.bfloat16)
    mask = torch.ones((1, words), device=DEVICE, dtype=torch.long)
    return at_time(normal(1, channels, side, side, seed=1), text, attention_mask=mask)


def step_ms(call) -> float:
    """Milliseconds of one of STEPS steps that are queued one after the other."""

    def steps():
        for _ in range(STEPS):
            call()

    if DEVICE == "cuda":
        return event_ms(steps) / STEPS
    begin = time.perf_counter()
    steps()
    return (time.perf_counter() - begin) * 1e3 / STEPS


def graphs() -> tuple[int, int]:
    """(graphs, graph breaks) of the process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def compiled(model, whole: bool):
    """A clone of a MODEL as KJNodes compiles its blocks, or as the stock node compiles all of it."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    twin = model.clone()
    if whole:
        set_torch_compile_wrapper(twin, backend="inductor", options={"guard_filter_fn": skip_torch_compile_dict})
        return twin
    blocks = [f"diffusion_model.layers.{i}" for i in range(len(twin.model.diffusion_model.layers))]
    set_torch_compile_wrapper(twin, backend="inductor", dynamic=True, keys=blocks)
    return twin


def build(comfy, tiny: bool):
    """The eager contestants, loaded, and a line about the INT8 one."""
    from native_int8.nodes.int8 import host_backend, patcher, speeds

    settings, layers = {}, (34, 34)
    if tiny:
        import comfy.ldm.ideogram4.model as module
        import comfy.supported_models as supported
        from comfy.ldm.modules.attention import attention_pytorch

        supported.Ideogram4.unet_extra_config.update(TINY)
        settings, layers = {**TINY, "in_channels": 16}, (2, 2)
        # the host's attention for a CPU asks for free memory, which no graph can hold
        module.optimized_attention_masked = attention_pytorch
    case = Case("", "comfy.ldm.ideogram4.model", "Ideogram4Transformer2DModel", settings, {"num_layers": layers}, dict)
    options = {"dtype": torch.bfloat16}
    base = comfy.sd.load_diffusion_model_state_dict(random_state(case), model_options=options, disable_dynamic=True)
    fused, report = patcher.patch_model(base)
    linear, host = fused.clone(), fused.clone()
    host_backend.set_speed(linear, speeds.LINEAR_ONLY)
    host_backend.set_speed(host, speeds.OFF)
    comfy.model_management.load_models_gpu([base, fused], force_full_load=True)
    models = {"bf16": base, "host": host, "linear": linear, "fused": fused}
    return {name: Contestant(model) for name, model in models.items()}, report.summary()


def first_step(comfy, results: Results, name: str, contestant: Contestant, inputs: dict, expected: dict) -> bool:
    """Compile; note how long it took, how many graphs, and how far the output is from the eager one. False: cut off."""
    before = graphs()
    signal.setitimer(signal.ITIMER_REAL, max(results.left() - 3, 1))
    try:
        begin = time.perf_counter()
        out = contestant.run(comfy, inputs).float().flatten()
        seconds = time.perf_counter() - begin
    except Exception as error:
        # the alarm may reach us inside an error of the compiler
        reason = "out of time" if results.left() < 4 else f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        results.data["cut_off"].append(f"{name} ({reason})")
        results.note(f"{name}: {reason}")
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    made = [now - then for now, then in zip(graphs(), before, strict=True)]
    reference = expected[contestant.eager]
    cosine = float(torch.nn.functional.cosine_similarity(out, reference, dim=0))
    error = float((out - reference).norm() / reference.norm())
    results.data.setdefault("compile", {})[name] = {
        "first_step_s": seconds, "graphs": made[0], "breaks": made[1], "cosine": cosine, "relative_error": error
    }  # fmt: skip
    results.note(
        f"{name}: first step {seconds:.1f} s, {made[0]} graphs, {made[1]} breaks, cosine {cosine:.6f} and relative error "
        f"{error:.4f} against {contestant.eager} eager; {results.left():.0f} s left"
    )
    if not cosine > MIN_COSINE:
        raise SystemExit(f"wrong result, no times are given: {name} has the cosine {cosine}")
    return True


def interleaved(comfy, results: Results, key: str, contestants: dict, inputs: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, which are noted under `key`."""
    times = {name: [] for name in contestants}
    for done in range(rounds + 1):
        if done > 3 and results.left() < 5:
            results.data["cut_off"].append(f"{key} after {done} rounds")
            break
        for name, contestant in list(contestants.items())[:: -1 if done % 2 else 1]:
            times[name].append(step_ms(lambda c=contestant: c.run(comfy, inputs)))
    ms = {name: median(values[1:]) for name, values in times.items()}
    results.data.setdefault("step_ms", {})[key] = ms
    results.note(f"{key}, ms: " + ", ".join(f"{name} {value:.1f}" for name, value in ms.items()))
    return ms


def judge(results: Results, ms: dict[str, float], pairs) -> None:
    """The bars: the first of each pair is not slower than the second."""
    for name, other in pairs:
        if name in ms and other in ms:
            ratio = ms[name] / ms[other]
            results.data.setdefault("ratios", {})[f"{name} / {other}"] = ratio
            results.note(f"  {name} / {other}: {ratio:.3f} {'pass' if ratio <= 1.01 else 'FAIL'}")


def shapes(comfy, results: Results, name: str, contestant: Contestant, tiny: bool) -> None:
    """Graphs that a compiled MODEL needs for other sizes and prompts, after its first step."""
    first, found = graphs(), {}
    for side in SIDES[tiny]:
        for words in WORDS[tiny]:
            if results.left() < 10:
                results.data["cut_off"].append(f"{name} at {side} x {side}, {words} words")
                continue
            before = graphs()
            begin = time.perf_counter()
            contestant.run(comfy, inputs_for(tiny, side, words))
            seconds = time.perf_counter() - begin
            now = graphs()
            found[f"{side}x{side}, {words} words"] = [now[0] - before[0], now[1] - before[1], round(seconds, 2)]
    now = graphs()
    results.data.setdefault("shapes", {})[name] = found
    results.note(
        f"{name}: {now[0] - first[0]} more graphs and {now[1] - first[1]} more breaks over {len(found)} sizes and prompts "
        f"(each: graphs, breaks, seconds): {found}"
    )


def by_blocks(comfy, results: Results, eager: dict, inputs: dict, expected: dict, rounds: int, only) -> dict:
    """Every MODEL with its blocks compiled: times beside the eager ones. Returns the contestants that compiled."""
    twins = {name: compiled(contestant.model, False) for name, contestant in eager.items()}
    wanted = {
        "fused blocks traced": Contestant(twins["fused"], TRACED, "fused"),
        "fused blocks visible": Contestant(twins["fused"], VISIBLE, "fused"),
        "linear blocks visible": Contestant(twins["linear"], VISIBLE, "linear"),
        "host blocks": Contestant(twins["host"], OPAQUE, "host"),
        "fused blocks opaque": Contestant(twins["fused"], OPAQUE, "fused"),
        "linear blocks opaque": Contestant(twins["linear"], OPAQUE, "linear"),
        "fused blocks traced visible": Contestant(twins["fused"], TRACED_VISIBLE, "fused"),
        "bf16 blocks": Contestant(twins["bf16"], OPAQUE, "bf16"),
    }
    ready = {}
    for name, contestant in wanted.items():
        if only and name not in only:
            continue
        if results.left() < 45:
            results.data["cut_off"].append(name)
        elif first_step(comfy, results, name, contestant, inputs, expected):
            ready[name] = contestant
    needed = {contestant.eager for contestant in ready.values()} | {"fused"} if only else eager.keys()
    plain = {name: contestant for name, contestant in eager.items() if name in needed} | {AGAIN: eager["fused"]}
    ms = interleaved(comfy, results, "blocks", {**plain, **ready}, inputs, rounds)
    pairs = [(name, contestant.eager) for name, contestant in ready.items()]
    pairs += [(AGAIN, "fused"), ("fused", "host blocks"), ("fused blocks visible", "fused blocks opaque")]
    judge(results, ms, pairs)
    return ready


def as_a_whole(comfy, results: Results, eager: dict, inputs: dict, rounds: int, only) -> None:
    """Every MODEL compiled as a whole, one after the other, each timed beside its eager twin and ours; without a mask.

    ComfyUI itself passes on no mask that hides nothing; what drops one in "fused" is not part of a graph.
    """
    inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    expected = {name: contestant.run(comfy, inputs).float().flatten() for name, contestant in eager.items()}
    wanted = {
        "host whole": ("host", OPAQUE),
        "fused whole traced": ("fused", TRACED),
        "linear whole visible": ("linear", VISIBLE),
        "bf16 whole": ("bf16", OPAQUE),
        "fused whole visible": ("fused", VISIBLE),
    }
    for name, (of, settings) in wanted.items():
        if only and name not in only:
            continue
        if results.left() < 40:
            results.data["cut_off"].append(name)
            continue
        contestant = Contestant(compiled(eager[of].model, True), settings, of)
        if first_step(comfy, results, name, contestant, inputs, expected):
            beside = {of: eager[of], "fused": eager["fused"], name: contestant}
            ms = interleaved(comfy, results, name, beside, inputs, rounds)
            judge(results, ms, [("fused", name)] if of == "host" else [(name, of)])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=280)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="compile these alone, as in 'fused blocks traced'")
    arguments = parser.parse_args()
    # before anything reads it: no kernel of an earlier run
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    results = Results(arguments.json, arguments.limit)
    signal.signal(signal.SIGALRM, ring)
    comfy = load_comfy()
    load_kernels()
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # all contestants run the same functions of the host
    torch._dynamo.config.recompile_limit = 64
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    eager, line = build(comfy, arguments.tiny)
    results.note(f"{line}; {results.left():.0f} s left")
    inputs = inputs_for(arguments.tiny, SIDES[arguments.tiny][0], WORDS[arguments.tiny][0])
    # the first attention of a process may differ in its last bits
    eager["bf16"].run(comfy, inputs)
    expected = {name: contestant.run(comfy, inputs).float().flatten() for name, contestant in eager.items()}
    ready = by_blocks(comfy, results, eager, inputs, expected, arguments.rounds, arguments.only)
    for name in ("fused blocks traced", "fused blocks visible", "fused blocks opaque"):
        if name in ready:
            shapes(comfy, results, name, ready[name], arguments.tiny)
    for name in ("fused blocks traced", "fused blocks visible", "host blocks") if DEVICE == "cuda" else ():
        if name in ready and results.left() > 20:
            ready[name].set()
            found = profiled(comfy, ready[name].model, inputs)
            results.data.setdefault("profile", {})[name] = found
            results.note(f"{name}: {found['launches']} launches, ms {found['ms']}")
    as_a_whole(comfy, results, eager, inputs, arguments.rounds, arguments.only)
    results.note(f"cut off: {results.data['cut_off'] or 'nothing'}; {results.left():.0f} s left")
    # compiler processes would hold the program up
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
