"""One INT8 run in a process of its own: python flag_run.py FILE [start options of ComfyUI]; writes latents to FILE.

The latents are those of the tiny model without a LoRA, with a low-rank one, with one that is baked in, and without again.
"""

import os
import sys
from pathlib import Path


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
    import comfy.lora
    import comfy.sample
    import comfy.sd
    import comfy.utils
    import torch

    from packtest import tiny
    from packtest.loras import add_lora, lora_file

    with torch.inference_mode():
        model = tiny.int8_model(comfy)
        models = [model, add_lora(model, lora_file(model)), add_lora(model, lora_file(model, "lokr")), model]
        torch.save([tiny.sample(comfy, one, size=(6, 6), steps=2, cfg=3.0).cpu() for one in models], file)


if __name__ == "__main__":
    main()
