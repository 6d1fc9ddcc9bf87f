"""The ComfyUI side of the pack: one file per node, the work in `int8/`, the list in `extension.py`."""
