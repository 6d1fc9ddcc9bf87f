#!/usr/bin/env bash
# Linears, their checks and a forward without fused blocks in one go, the most important first; meant for one Hopper GPU, in under 9 minutes.
#
#   OUT=folder tests/bench/h200.sh
#
# ComfyUI (COMFYUI_PATH) and comfy_kitchen (on PYTHONPATH) are compared when they are there. SECONDS_IN_ALL (530) limits
# the whole, STEPS picks some of: linear_native linear_sm80 forward checks kitchen_triton random_sm80. Results are
# OUT/*.json, what the programs printed is OUT/logs.tgz, and the summary comes last. A step that fails or runs out of
# time is named there, and the others run on.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:?set OUT to a folder for the results}
python=${PYTHON:-python3}
in_all=${SECONDS_IN_ALL:-530}
steps=" ${STEPS:-linear_native linear_sm80 forward checks kitchen_triton random_sm80} "
logs=$(mktemp -d)
export PYTHONUNBUFFERED=1
# the paths must not share compiled kernels
cache=${TRITON_CACHE_DIR:-$logs/triton}
native=(env -u TRITON_OVERRIDE_ARCH "TRITON_CACHE_DIR=$cache/native")
sm80=(env TRITON_OVERRIDE_ARCH=sm80 "TRITON_CACHE_DIR=$cache/sm80")
ampere_contestants=bf16,kitchen_cuda,kitchen_cuda_rot,ours,ours_rot,ours_matmul,ours_quantise,ours_quantise_rot,copy
mkdir -p "$out"

wanted() { [[ $steps == *" $1 "* ]]; }
left() { echo $((in_all - SECONDS)); }

# step NAME LIMIT COMMAND...: run it with its own limit, cut to the time that is left
step() {
    local name=$1 limit=$2 begin=$SECONDS code
    shift 2
    ((limit > $(left) - 5)) && limit=$(($(left) - 5))
    if ((limit < 10)); then
        echo "$name: not run, no time left"
        return
    fi
    timeout "$limit" "$@" >"$logs/$name.txt" 2>&1
    code=$?
    echo "$name: status $code after $((SECONDS - begin)) s: $(tail -1 "$logs/$name.txt" | cut -c1-220)"
    ((code == 0)) || grep -aE 'WRONG|Error' "$logs/$name.txt" | head -5 | cut -c1-300
}

# compile ahead in many processes: alone, compiling would take longer than measuring
compile() {
    local part pids=()
    if wanted linear_native; then
        for part in 0 1 2 3 4 5 6 7; do
            timeout 100 "${native[@]}" "$python" "$here/run.py" --min-m 256 --compile-only $part/8 >>"$logs/compile.txt" 2>&1 &
            pids+=($!)
        done
    fi
    if wanted linear_sm80; then
        for part in 0 1 2 3 4 5; do
            timeout 100 "${sm80[@]}" "$python" "$here/run.py" --min-m 2048 --compile-only $part/6 >>"$logs/compile.txt" 2>&1 &
            pids+=($!)
        done
    fi
    for part in ${pids[@]+"${pids[@]}"}; do wait "$part"; done
    echo "compiled ahead after $SECONDS s"
}

compile
wanted linear_native && step linear_native 170 "${native[@]}" "$python" "$here/run.py" \
    --path native --min-m 256 --budget-seconds "${NATIVE_SECONDS:-130}" --kitchen-triton "" --json "$out/linear_native.json"
wanted linear_sm80 && step linear_sm80 70 "${sm80[@]}" "$python" "$here/run.py" \
    --path sm80 --min-m 2048 --budget-seconds 45 --kitchen-triton "" --contestants "$ampere_contestants" \
    --json "$out/linear_sm80.json"
wanted forward && step forward 110 "${native[@]}" "$python" "$here/ideogram4_forward.py" --json "$out/forward.json"
if wanted checks; then
    # neither measures time, so they share the GPU
    budget=$(($(left) - 60))
    ((budget > 150)) && budget=150
    step random_native $((budget + 20)) "${native[@]}" "$python" "$here/random_shapes.py" \
        --workers 12 --seconds "$budget" --json "$out/random_native.json" &
    step sanitize_native $((budget + 20)) "${native[@]}" LIMIT=$((budget / 2 - 10)) "$here/sanitize.sh" "$logs"
    wait
    [ -f "$logs/sanitize.json" ] && cp "$logs/sanitize.json" "$out/sanitize_native.json"
fi
wanted kitchen_triton && step kitchen_triton 60 "${native[@]}" "$python" "$here/run.py" \
    --path native --models ideogram4 --min-m 2048 --budget-seconds 25 --json "$out/kitchen_triton_native.json" \
    --contestants bf16,kitchen_cuda,kitchen_triton,kitchen_triton_rot,ours,ours_rot
wanted random_sm80 && step random_sm80 90 "${sm80[@]}" "$python" "$here/random_shapes.py" \
    --workers 14 --seconds "$(($(left) - 40))" --seed 1 --json "$out/random_sm80.json"

tar czf "$out/logs.tgz" -C "$logs" --exclude=triton .
echo
"$python" "$here/summary.py" "$out"/*.json
echo "whole run: $SECONDS s"
