"""Memory and time of quantising a bf16 file while it loads, against loading the same file plain.

    python tests/bench/load_memory.py [--gb 8] [--folder FOLDER] [--ways plain,int8] [--repeat 3] [--json FILE]
    python tests/bench/load_memory.py --gpu

Writes a synthetic Wan 2.1 text-to-video model of about that size, loads it in a process of its own for each way, and
prints medians of the wall time and the largest peaks: of anonymous host memory beyond what is left after the load, and
with --gpu of GPU memory beyond the model, both in units of the largest layer (bf16). With --gpu weights are quantised on the GPU, the
time ends when the model is there, the file lies in /dev/shm if it fits, and all is done in --budget seconds. The file is
read once before each way, so it comes from the page cache. The host runs without dynamic VRAM.
Needs COMFYUI_PATH, 1.5 times the size in free disk, and twice in memory: the plain way copies the file beside its map.
Set OMP_NUM_THREADS=1 on a busy machine: threads that wait for each other make times of a chance.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# of a process until its first load
STARTUP_SECONDS = 8
# dim, ffn_dim of Wan 14B; another ratio for small files
WIDTHS = ((5120, 13824), (1536, 8960), (512, 2048), (256, 768))
# "cached" makes a converted copy, "again" loads it
WAYS = ("plain", "int8", "unrotated", "cached", "again")
GPU_WAYS = ("plain", "int8", "unrotated")


def write_model(path: Path, size_bytes: int) -> int:
    """A Wan 2.1 model in bf16 of about `size_bytes`, layer by layer; the bytes of the largest Linear that is quantised."""
    import comfy.ldm.wan.model
    import comfy.ops
    from native_int8.nodes.int8.native_file import NativeFile

    dim, ffn = next(w for w in WIDTHS if 4 * (8 * w[0] ** 2 + 2 * w[0] * w[1]) <= size_bytes or w == WIDTHS[-1])
    block_bytes = 2 * (8 * dim**2 + 2 * dim * ffn)
    layers = max(2, round(size_bytes / block_bytes))
    with torch.device("meta"):
        model = comfy.ldm.wan.model.WanModel(
            dim=dim, ffn_dim=ffn, num_heads=dim // 128, num_layers=layers, operations=comfy.ops.disable_weight_init
        )
    state = model.state_dict()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(max(v.numel() for v in state.values()), generator=generator).mul_(0.02).to(torch.bfloat16)
    with NativeFile(path, state) as file:
        for name, value in state.items():
            tensor = noise[: value.numel()].reshape(value.shape)
            file[name] = tensor + 1 if "norm" in name else tensor
    return 2 * dim * ffn


def anonymous_bytes() -> int:
    """Anonymous memory of this process: what a memory map of a file does not count towards."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; Linux is needed.")


class Peak(threading.Thread):
    """Samples anonymous memory every 2 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self._stop_now = 0, threading.Event()

    def run(self) -> None:
        while not self._stop_now.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes())

    def stop(self) -> int:
        self._stop_now.set()
        self.join()
        return max(self.bytes, anonymous_bytes())


def load_once(way: str, path: str, device: str) -> tuple[object, dict[str, float]]:
    """Load, and with device "cuda" move the model there: the MODEL and what it took."""
    import comfy.model_management
    import comfy.sd
    from native_int8.nodes.int8.loader import LoadOptions, load_model

    gpu = device == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated() if gpu else 0
    before = anonymous_bytes()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    if way == "plain":
        # as stored: a CPU would otherwise expand it to fp32
        model = comfy.sd.load_diffusion_model(path, {"dtype": torch.bfloat16})
    else:
        cached = way in ("cached", "again")
        model = load_model(path, LoadOptions(rotation=way != "unrotated", cache=cached, device=device))
    if gpu:
        torch.cuda.synchronize()
    row = {"load_seconds": time.perf_counter() - start}
    top, left = peak.stop(), anonymous_bytes()
    if gpu:
        row["gpu_while_loading"] = torch.cuda.max_memory_allocated() - allocated
        comfy.model_management.load_models_gpu([model], force_full_load=True)
        torch.cuda.synchronize()
        row["gpu"] = torch.cuda.memory_allocated() - allocated
        row["gpu_peak"] = torch.cuda.max_memory_allocated() - allocated
    row["seconds"] = time.perf_counter() - start
    return model, {**row, "peak": top - before, "result": left - before, "model": model.model_size()}


def measure(way: str, path: str, user: str, device: str, repeat: int, seconds: float) -> list[dict[str, float]]:
    """Load `repeat` times in this process, or fewer where more would take over `seconds`."""
    import comfy.model_management
    import folder_paths

    folder_paths.user_directory = user
    rows, start = [], time.perf_counter()
    for _ in range(repeat):
        if rows and time.perf_counter() - start + 1.3 * rows[-1]["seconds"] > seconds:
            break
        with torch.inference_mode():
            model, row = load_once(way, path, device)
        rows.append(row)
        del model
        comfy.model_management.unload_all_models()
        gc.collect()
        comfy.model_management.soft_empty_cache()
    return rows


def run_all(path: Path, folder: Path, args, deadline: float) -> list[dict]:
    """Every way in its own process, after the file was read once."""
    rows = []
    for done, way in enumerate(args.ways):
        with open(path, "rb") as file:
            while file.read(64 << 20):
                pass
        share = (deadline - time.monotonic()) / (len(args.ways) - done)
        command = [sys.executable, __file__, "--way", way, "--file", str(path), "--folder", str(folder)]
        command += ["--repeat", str(1 if way == "cached" else args.repeat), "--budget", str(share - STARTUP_SECONDS)]
        command += ["--gpu"] if args.gpu else []
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        runs = json.loads(answer)
        rows.append({"way": way, "runs": runs})
        print(way, *(f"{run['seconds']:.2f}" for run in runs), "s", flush=True)
    return rows


def summarise(rows: list[dict], largest: int) -> None:
    """Add to each way the medians of times and the largest of the rest, also in layers."""
    for row in rows:
        for key in row["runs"][0]:
            # the first load of a process compiles kernels and starts CUDA
            warm = row["runs"][1:] or row["runs"]
            values = [run[key] for run in (warm if "seconds" in key else row["runs"])]
            row[key] = statistics.median(values) if "seconds" in key else max(values)
        row["beyond_layers"] = max(run["peak"] - run["result"] for run in row["runs"]) / largest
        if "gpu" in row:
            row["gpu_beyond_layers"] = max(run["gpu_peak"] - run["gpu"] for run in row["runs"]) / largest
            row["gpu_while_loading_layers"] = row["gpu_while_loading"] / largest
        row["times_plain"] = row["seconds"] / rows[0]["seconds"]


COLUMNS = (
    ("seconds", "seconds", 1), ("x plain", "times_plain", 1), ("load s", "load_seconds", 1), ("peak GB", "peak", 1e9),
    ("after GB", "result", 1e9), ("model GB", "model", 1e9), ("beyond, layers", "beyond_layers", 1),
    ("GPU GB", "gpu", 1e9), ("GPU beyond, layers", "gpu_beyond_layers", 1), ("while loading", "gpu_while_loading_layers", 1),
)  # fmt: skip


def table(rows: list[dict], largest: int) -> str:
    """The rows as text, and for the INT8 ways whether the bars hold."""
    columns = [(title, key, unit) for title, key, unit in COLUMNS if key in rows[0]]
    lines = [
        f"largest layer {largest / 2**20:.0f} MiB in bf16, {torch.get_num_threads()} threads, torch {torch.__version__}"
    ]
    lines.append(f"{'way':<10}" + "".join(f" {title:>{max(len(title), 8)}}" for title, _, _ in columns))
    for row in rows:
        numbers = (f" {row[key] / unit:{max(len(title), 8)}.2f}" for title, key, unit in columns)
        lines.append(f"{row['way']:<10}" + "".join(numbers))
    bars = (
        ("wall time <= 1.3 x plain", "times_plain", 1.3),
        ("host memory beyond the result <= 2 layers", "beyond_layers", 2),
    )
    bars += (("GPU memory beyond the model <= 2 layers", "gpu_beyond_layers", 2),)
    for row in rows:
        for name, key, limit in bars if row["way"] in ("int8", "unrotated") else ():
            if key in row and not (key == "times_plain" and rows[0]["way"] != "plain"):
                lines.append(f"{'pass' if row[key] <= limit else 'FAIL'} {row['way']}: {name}: {row[key]:.2f}")
    return "\n".join(lines)


def roomy_folder(size: int) -> str | None:
    """/dev/shm where it takes the file and leaves memory for two copies; None for the usual place."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).free < 1.1 * size:
        return None
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return str(shm) if int(fields["MemAvailable"].split()[0]) * 1024 > 3.5 * size else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=8.0, help="size of the bf16 file")
    parser.add_argument("--folder", help="where the file is written; a temporary folder by default")
    parser.add_argument("--gpu", action="store_true", help="quantise on the GPU and load to it")
    parser.add_argument("--ways", type=lambda text: text.split(","), help=f"of {', '.join(WAYS)}; plain first")
    parser.add_argument("--repeat", type=int, help="loads of each way; the first is not counted; 1, with --gpu 3")
    parser.add_argument("--budget", type=float, help="seconds for everything; with --gpu 110")
    parser.add_argument("--json", help="where the numbers are written")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    start = time.monotonic()
    args.ways = args.ways or (GPU_WAYS if args.gpu else WAYS)
    args.repeat = args.repeat or (3 if args.gpu else 1)
    args.budget = args.budget or (110 if args.gpu else 24 * 3600)
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA device; leave it out to measure on the CPU")
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    if not args.gpu:
        # without a GPU users have no interpreter either
        os.environ["TRITON_INTERPRET"] = "0"
    import packtest
    from machine import load_comfy

    packtest.load_pack()
    load_comfy()
    importlib.import_module("comfy.ldm.wan.model")
    device = "cuda" if args.gpu else "cpu"
    if args.way:
        print(json.dumps(measure(args.way, args.file, args.folder, device, args.repeat, args.budget)))
        return
    size = int(args.gb * 1e9)
    folder = args.folder or (roomy_folder(size) if args.gpu else None)
    with tempfile.TemporaryDirectory(dir=folder) as folder:
        path = Path(folder) / "model.safetensors"
        largest = write_model(path, size)
        print(f"wrote {path.stat().st_size / 1e9:.2f} GB in {time.monotonic() - start:.0f} s", flush=True)
        rows = run_all(path, Path(folder), args, start + args.budget)
        summarise(rows, largest)
        if args.json:
            from machine import describe

            machine = describe() if args.gpu else {"torch": torch.__version__, "threads": torch.get_num_threads()}
            content = {
                "machine": machine,
                "file_bytes": path.stat().st_size,
                "largest_layer_bytes": largest,
                "ways": rows,
            }
            Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(rows, largest), flush=True)


if __name__ == "__main__":
    main()
