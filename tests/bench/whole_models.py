"""Tables of what was measured on whole models: fused blocks, LoRAs, text encoders, loading. Reads what their programs wrote.

    python tests/bench/whole_models.py results/h200_lora.json results/h200_text_encoder.json [...] [--write]

--write puts them into README.md beside this file, between the lines of its section "models".
"""

import argparse
import json
from pathlib import Path

from load_memory import COLUMNS
from pages import replace_section, table


def machine(content: dict) -> str:
    """One line that says where a file was measured."""
    m = content.get("machine") or {"gpu": content.get("device"), "torch": content.get("torch")}
    parts = [m.get("gpu") or "CPU", f"torch {m['torch']}"]
    parts += [
        f"{name} {m[key]}" for key, name in (("triton", "Triton"), ("comfy_kitchen", "comfy_kitchen")) if key in m
    ]
    return ", ".join(parts + ([f"commit {content['commit']}"] if "commit" in content else []))


def lora(content: dict) -> str:
    """Steps of Ideogram 4 at 1024 px with LoRAs of rank 32 on all INT8 Linears."""
    rows, base = content["table"], content["table"]["ours none"]["ms"]
    body = [
        [name, f"{row['ms']:.1f}", f"{row['ms'] / base:.3f}", f"{row['load_s']:.2f}", row["times"]]
        for name, row in rows.items()
    ]
    missing = f" Cut off by the time limit: {', '.join(content['cut_off'])}." if content["cut_off"] else ""
    title = (
        f"LoRAs of rank {content['rank']} on all INT8 Linears, one forward of Ideogram 4 at 1024 px. Error of one layer's "
        f"delta: {content['delta_error']:.1%} of its norm.{missing}"
    )
    return f"{title}\n\n" + table(["whose, LoRAs", "ms", "of ours without", "seconds to load", "samples"], body)


def text_encoder(content: dict) -> str:
    """Text encoders on one prompt."""
    body = [
        [
            f"{row['encoder']}, {row['prompt']}", row["way"], f"{row['ms']:.1f}", f"{row['weights_gib']:.2f}",
            row["expanded"], row["our_int8_calls"], f"{row['cosine_to_bf16']:.5f}", f"{row['worst_token']:.5f}",
        ]
        for row in content["rows"]
    ]  # fmt: skip
    columns = ["encoder", "way", "ms", "weights GiB", "weights expanded", "our INT8 calls", "cosine", "worst token"]
    return "Text encoders of full size with random weights, cosine against bf16.\n\n" + table(columns, body, left=2)


def load(content: dict) -> str:
    """Loading a bf16 file plain and as INT8."""
    ways = content["ways"]
    columns = [(title, key, unit) for title, key, unit in COLUMNS if key in ways[0]]
    body = [
        [f"{row['way']}, {len(row['runs'])}", *(f"{row[key] / unit:.2f}" for _, key, unit in columns)] for row in ways
    ]
    title = (
        f"Loading a bf16 file of {content['file_bytes'] / 1e9:.2f} GB whose largest layer has "
        f"{content['largest_layer_bytes'] / 2**20:.0f} MiB, from the page cache. "
        "The first load of a process compiles kernels and is left out where there are more."
    )
    return f"{title}\n\n" + table(["way, loads", *(title for title, _, _ in columns)], body)


def block_fusion(content: dict) -> str:
    """Steps of Ideogram 4 with fused blocks, and where their time goes."""
    sizes = content["forward_ms"]
    names = list(next(iter(sizes.values())))
    body = [[name, *(f"{ms[name]:.1f} ({ms['bf16'] / ms[name]:.2f}x)" for ms in sizes.values())] for name in names]
    cosines = "; ".join(
        f"{pixels} px: " + ", ".join(f"{pair} {value:.5f}" for pair, value in found.items())
        for pixels, found in content["cosine"].items()
    )
    profile = content["profile"]
    kinds = sorted({kind for found in profile.values() for kind in found["ms"]})
    where = [
        [name, found["launches"], *(f"{found['ms'].get(k, 0):.1f}" for k in kinds)] for name, found in profile.items()
    ]
    parts = [
        "One forward of Ideogram 4, 256 text tokens, a mask given that hides nothing; ms and times the speed of bf16. "
        "linear: our Linears alone; no mask: the same without the mask; host rope: fused blocks with comfy_kitchen's rope.",
        table(["what runs", *(f"{pixels} px" for pixels in sizes)], body),
        f"Cosines: {cosines}. Leaving the mask away chooses another attention kernel, which alone moves the output as far as "
        "everything else does.",
        "Where the time goes, in ms of GPU time by one profiled forward:",
        table(["px, what runs", "launches", *kinds], where),
    ]
    return "\n\n".join([*parts, content["note"]] if "note" in content else parts)


def fused_models(content: dict) -> str:
    """Steps of several models with fused blocks, and where their time goes."""
    models = content["models"]
    names = list(next(iter(models.values()))["ms"])
    body = [
        [model, *(f"{found['ms'][n]:.1f} ({found['ms']['bf16'] / found['ms'][n]:.2f}x)" for n in names),
         f"{found['cosine']['fused / linear']:.6f}", f"{found['cosine']['fused / bf16']:.4f}"]
        for model, found in models.items()
    ]  # fmt: skip
    profiles = [(model, key, part) for model, found in models.items() for key, part in found.get("profile", {}).items()]
    kinds = sorted({kind for _, _, part in profiles for kind in part["ms"]})
    where = [
        [f"{model}, {key}", part["launches"], *(f"{part['ms'].get(kind, 0):.1f}" for kind in kinds)]
        for model, key, part in profiles
    ]
    whats = " ".join(f"{model}: {found['what']}; blocks: {found['layers']}." for model, found in models.items())
    parts = [
        f"One step with random weights, ms and times the speed of bf16. {whats}",
        table(["model", *names, "cosine fused / linear", "fused / bf16"], body),
        "Where the time goes, in ms of GPU time by one profiled forward:",
        table(["model, what runs", "launches", *kinds], where),
    ]
    return "\n\n".join(parts)


def compiled(content: dict) -> str:
    """Steps of Ideogram 4 compiled by torch.compile, and how often it compiled."""
    body = []
    for group, ms in content["step_ms"].items():
        for name, value in ms.items():
            found = content["compile"].get(name, {})
            of = name.split()[0]
            body.append(
                [
                    "blocks" if group == "blocks" else "whole model", name, f"{value:.1f}", f"{value / ms[of]:.3f}",
                    f"{found['first_step_s']:.0f}" if found else "", found.get("graphs", ""), found.get("breaks", ""),
                ]
            )  # fmt: skip
    shapes = "; ".join(
        f"{name}: {sum(graphs for graphs, _, _ in found.values())} more graphs and "
        f"{sum(breaks for _, breaks, _ in found.values())} breaks"
        for name, found in content["shapes"].items()
    )
    missing = f" Cut off by the time limit: {', '.join(content['cut_off'])}." if content["cut_off"] else ""
    title = (
        "torch.compile on one forward of Ideogram 4 at 1024 px, dynamic shapes; each group is interleaved with its own eager "
        "steps. visible: unrotated rows are quantised in operations that inductor sees, opaque: each Linear is one op, traced: "
        f"fused blocks, as one op for each pass; traced visible is the default. Over three sizes and two lengths of prompt: {shapes}.{missing}"
    )
    columns = ["compiled", "what runs", "ms", "of its eager step", "first step s", "graphs", "breaks"]
    return f"{title}\n\n" + table(columns, body, left=2)


def cuda_graphs(content: dict) -> str:
    """Steps of Ideogram 4 with fused blocks, started one by one and as one CUDA graph."""
    body = [
        [name, *(f"{found['ms'][way]:.1f}" for way in ("fused", "graph")),
         f"{found['ms']['fused'] / found['ms']['graph']:.2f}", f"{found['cost_mib']:.0f}"]
        for name, found in content["steps"].items()
    ]  # fmt: skip
    title = (
        "One step of Ideogram 4 with fused blocks and the same as a CUDA graph, bits equal. image: the branch without text. "
        "Memory is what each further graph adds to those before it."
    )
    return f"{title}\n\n" + table(["step", "fused ms", "graph ms", "times as fast", "MiB more"], body)


def dynamic_vram(content: dict) -> str:
    """Steps of Ideogram 4 without and with ComfyUI's dynamic VRAM."""
    found = content["dynamic_vram"]
    body = [
        [
            f"{pixels} px, {name}",
            f"{off[0]:.1f}",
            f"{on[0]:.1f}",
            f"{on[0] / off[0]:.3f}",
            f"{off[1]:.0f}",
            f"{on[1]:.0f}",
        ]
        for pixels, ways in found["off"].items()
        if pixels.isdigit()
        for name, off in ways.items()
        for on in [found["on"][pixels][name]]
    ]
    title = (
        "One step of Ideogram 4 without ComfyUI's dynamic VRAM, as in the other tables, and with it, which is what ComfyUI "
        "starts with on NVIDIA; all weights on the GPU. CPU: how long the CPU is busy with a step."
    )
    return f"{title}\n\n" + table(
        ["step", "ms without", "ms with", "with / without", "CPU ms without", "CPU ms with"], body
    )


KINDS = {
    "dynamic_vram": dynamic_vram,
    "models": fused_models,
    "compile": compiled,
    "steps": cuda_graphs,
    "forward_ms": block_fusion,
    "rank": lora,
    "rows": text_encoder,
    "largest_layer_bytes": load,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    parts = []
    for path in arguments.files:
        content = json.loads(Path(path).read_text())
        kind = next((make for key, make in KINDS.items() if key in content), None)
        if kind is None:
            raise SystemExit(
                f"whole_models.py: {path} is no result of block_fusion.py, block_fusion_models.py, compiled.py, cuda_graphs.py, "
                "lora.py, text_encoder.py, load_memory.py or dynamic_vram.py."
            )
        parts.append(f"{kind(content)}\n\n({machine(content)})")
    text = "\n\n".join(parts)
    if arguments.write:
        replace_section(Path(__file__).with_name("README.md"), "models", text)
    else:
        print(text)


if __name__ == "__main__":
    main()
