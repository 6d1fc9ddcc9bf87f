"""How much of an INT8 MODEL runs on this pack's kernels: the values of the input `int8_speed`, most first."""

FUSED, LINEAR_ONLY, OFF = "fused", "linear only", "off"
SPEEDS = (FUSED, LINEAR_ONLY, OFF)
