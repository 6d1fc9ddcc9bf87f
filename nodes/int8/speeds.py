"""How much of an INT8 MODEL runs on this pack's kernels: the values of the input `int8_speed`, most first."""

GRAPHED, FUSED, LINEAR_ONLY, OFF = "fused + CUDA graph", "fused", "linear only", "off"
SPEEDS = (GRAPHED, FUSED, LINEAR_ONLY, OFF)
# those with the passes around the Linears in single kernels
FUSING = (GRAPHED, FUSED)
