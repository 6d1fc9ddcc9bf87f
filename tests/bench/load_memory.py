"""Memory and time of quantising a bf16 file while it loads, on the CPU, against loading the same file plain.

    python tests/bench/load_memory.py [--gb 8] [--folder FOLDER]

Writes a synthetic Wan 2.1 text-to-video model of about that size, loads it in a process of its own for each way, and
prints the peak of anonymous host memory beyond what is left after the load, in units of the largest layer (bf16), and the wall time.
Needs COMFYUI_PATH, 1.5 times the size in free disk, and twice in memory: the plain way copies the file beside its map.
Set OMP_NUM_THREADS=1 on a busy machine: threads that wait for each other make times of a chance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# dim, ffn_dim of Wan 14B; another ratio for small files
WIDTHS = ((5120, 13824), (1536, 8960), (512, 2048), (256, 768))
# "cached" makes a converted copy, "again" loads it
WAYS = ("plain", "int8", "unrotated", "cached", "again")


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


def measure(way: str, path: str, user: str) -> dict[str, float]:
    """Load once in this process."""
    import comfy.sd
    import folder_paths
    from native_int8.nodes.int8.loader import LoadOptions, load_model

    folder_paths.user_directory = user
    options = LoadOptions(rotation=way != "unrotated", cache=way in ("cached", "again"), device="cpu")
    before = anonymous_bytes()
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    with torch.inference_mode():
        if way == "plain":
            # as stored: a CPU would otherwise expand it to fp32
            model = comfy.sd.load_diffusion_model(path, {"dtype": torch.bfloat16})
        else:
            model = load_model(path, options)
    seconds = time.perf_counter() - start
    top, left = peak.stop(), anonymous_bytes()
    return {"seconds": seconds, "peak": top - before, "result": left - before, "model": model.model_size()}


def run_all(path: Path, folder: Path, largest: int) -> list[dict]:
    """Every way in its own process, after the file was read once."""
    rows = []
    for way in WAYS:
        with open(path, "rb") as file:
            while file.read(64 << 20):
                pass
        command = [sys.executable, __file__, "--way", way, "--file", str(path), "--folder", str(folder)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        row = {"way": way, **json.loads(answer)}
        row["beyond_layers"] = (row["peak"] - row["result"]) / largest
        rows.append(row)
    return rows


def table(rows: list[dict], largest: int) -> str:
    """The rows as text."""
    plain = rows[0]["seconds"]
    lines = [
        f"largest layer {largest / 2**20:.0f} MiB in bf16, {torch.get_num_threads()} threads, torch {torch.__version__}"
    ]
    lines.append(
        f"{'way':<10} {'seconds':>8} {'x plain':>8} {'peak GB':>8} {'after GB':>8} {'model GB':>8} {'beyond, layers':>15}"
    )
    for row in rows:
        lines.append(
            f"{row['way']:<10} {row['seconds']:8.1f} {row['seconds'] / plain:8.2f} {row['peak'] / 1e9:8.2f} "
            f"{row['result'] / 1e9:8.2f} {row['model'] / 1e9:8.2f} {row['beyond_layers']:15.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=8.0, help="size of the bf16 file")
    parser.add_argument("--folder", help="where the file is written; a temporary folder by default")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    # without a GPU users have no interpreter either
    os.environ["TRITON_INTERPRET"] = "0"
    import packtest
    from packtest.host import import_comfy

    packtest.load_pack()
    import_comfy("comfy.sd", "comfy.ops", "comfy.ldm.wan.model")
    if args.way:
        print(json.dumps(measure(args.way, args.file, args.folder)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "model.safetensors"
        largest = write_model(path, int(args.gb * 1e9))
        print(table(run_all(path, Path(folder), largest), largest))


if __name__ == "__main__":
    main()
