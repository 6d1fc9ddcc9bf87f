"""One INT8 run in a process of its own: python flag_run.py FILE [start options of ComfyUI]; writes what it saw to FILE.

That is a dictionary. latents: those of the tiny model without a LoRA, with a low-rank one, with one that is baked in, and
without again. record: what the INT8 Linears did. dynamic: whether dynamic VRAM held weights; it is switched on as
ComfyUI's main.py does it, unless an option forbids it.
"""

import os
import sys
from pathlib import Path


def begin_dynamic_vram() -> None:
    """What ComfyUI's main.py does before and after it imports torch, on a GPU and unless an option forbids it."""
    from comfy.cli_args import args, enables_dynamic_vram

    if args.cpu or not enables_dynamic_vram():
        return
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = [(d.index, int(args.vram_headroom * 1024**3)) for d in comfy.model_management.get_all_torch_devices()]
    if comfy_aimdo.control.init_devices(devices):
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def main() -> None:
    """Run as a node would, on the device that the options choose."""
    file, *options = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import packtest

    packtest.load_pack()
    sys.argv = ["main.py", *options]
    sys.path.insert(0, str(Path(os.environ["COMFYUI_PATH"]).resolve()))
    import comfy.options

    comfy.options.enable_args_parsing()
    begin_dynamic_vram()
    import comfy.lora
    import comfy.sample
    import comfy.sd
    import comfy.utils
    import torch
    from native_int8.nodes.int8 import host_backend

    from packtest import tiny
    from packtest.loras import add_lora, lora_file

    with torch.inference_mode():
        model = tiny.int8_model(comfy)
        models = [model, add_lora(model, lora_file(model)), add_lora(model, lora_file(model, "lokr")), model]
        # torch's attention gives other bits at the first call of a process, to a float model as well
        tiny.sample(comfy, model, size=(6, 6), steps=1, cfg=3.0)
        latents = [tiny.sample(comfy, one, size=(6, 6), steps=2, cfg=3.0).cpu() for one in models]
    held = [module for module in model.model.modules() if hasattr(module, "_v")]
    record = host_backend.record_of(model)
    seen = {"latents": latents, "dynamic": bool(held), "record": {**record.snapshot(), **record.ways_taken()}}
    torch.save(seen, file)


if __name__ == "__main__":
    main()
