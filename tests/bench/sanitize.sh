#!/usr/bin/env bash
# compute-sanitizer over the edge-shape suite: bad memory accesses (memcheck), then races in shared memory (racecheck).
#
#   tests/bench/sanitize.sh [FOLDER]      logs and sanitize.json go to FOLDER (default .)
#
# TOOLS="memcheck" runs one of them, ONLY="low_rank split_k" parts of the suite (edge_shapes.py --help names them); LIMIT is
# the seconds that each tool may take. TRITON_OVERRIDE_ARCH=sm80 checks the Ampere path. Status 0: both clean. 1: errors found, or the suite failed. 2: compute-sanitizer cannot run here.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-.}
limit=${LIMIT:-240}
python=${PYTHON:-python3}
mkdir -p "$out"
parts=()
# shellcheck disable=SC2206
[ -n "${ONLY:-}" ] && parts=(--only $ONLY)

sanitizer=$(command -v compute-sanitizer || true)
for folder in /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer; do
    [ -n "$sanitizer" ] || { [ -x "$folder/compute-sanitizer" ] && sanitizer=$folder/compute-sanitizer; }
done
if [ -z "$sanitizer" ]; then
    echo "sanitize: compute-sanitizer is not installed. Needed: the CUDA toolkit."
    echo '{"state": "compute-sanitizer is not installed"}' >"$out/sanitize.json"
    exit 2
fi

# the compiled kernels come from Triton's cache, so that the time goes into the checks
"$python" "$here/edge_shapes.py" ${parts[@]+"${parts[@]}"} || { echo '{"state": "the suite fails without the sanitizer"}' >"$out/sanitize.json"; exit 1; }

status=0
lines=()
for tool in ${TOOLS:-memcheck racecheck}; do
    options=(--tool "$tool" --error-exitcode 86 --print-limit 20)
    suite=(${parts[@]+"${parts[@]}"})
    [ "$tool" = racecheck ] && suite+=(--quick) && options+=(--racecheck-report analysis)
    log=$out/sanitize_$tool.txt
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" "$sanitizer" "${options[@]}" \
        "$python" "$here/edge_shapes.py" ${suite[@]+"${suite[@]}"} >"$log" 2>&1
    code=$?
    summary=$(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1 | sed 's/=* *//')
    suite_line=$(grep -a '^edge shapes on' "$log" | tail -1)
    if grep -aqE 'Device not supported|Unable to|not supported on this' "$log" && [ -z "$suite_line" ]; then
        text="cannot run here: $(grep -aE 'Device not supported|Unable to|not supported on this' "$log" | head -1 | sed 's/=* *//')"
        [ "$status" = 1 ] || status=2
    elif [ "$code" = 124 ]; then
        text="not finished after $limit s"
        status=1
    elif [ "$code" = 0 ] && [ -n "$suite_line" ] && grep -aqE 'SUMMARY: 0 (errors|hazards)' "$log"; then
        text="clean: $summary; $suite_line"
    else
        text="status $code: ${summary:-no summary}; ${suite_line:-the suite did not finish}"
        status=1
    fi
    echo "$tool: $text"
    lines+=("\"$tool\": \"${text//\"/\'}\"")
    # after each tool, so that a run that is cut short has the first
    (IFS=,; echo "{\"path\": \"${TRITON_OVERRIDE_ARCH:-native}\", ${lines[*]}}") >"$out/sanitize.json"
done
exit "$status"
