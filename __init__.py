"""Native INT8 DiT: ComfyUI nodes that run diffusion transformers in true INT8.

Importing this module is cheap; ComfyUI calls `comfy_entrypoint` when it wants the nodes.
"""

import logging

WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint():
    """Return the pack's extension for ComfyUI's V3 loader."""
    try:
        from .nodes.extension import NativeInt8Extension
    except Exception:
        # ComfyUI logs only the message of an exception raised here, never its traceback
        logging.getLogger("native_int8.extension").exception("The Native INT8 DiT nodes could not be imported.")
        raise
    return NativeInt8Extension()
