#!/bin/bash
# Checks and measures the CUDA engine on a machine with a GPU, after a change of kernels, engine or model. Each part
# prints what it finds and ends with the seconds it took:
# lab/gpu.sh PYTHON [check] [sanitize] [speed] [learn]
#   check      the tests that need a GPU, in PARTS processes (4) with a cache of kernels each
#   sanitize   memcheck and racecheck of the CUDA toolkit
#   speed      egg.py bench of every preset
#   learn      the preset best for SECONDS_EACH ("10 30 100"), with every ISLAND_SEED of SEEDS ("0 1 2"). TEXT: a
#              directory that egg.py prepare has filled, default the shipped text; DEFINES: more of -D NAME=VALUE
set -u
cd "$(dirname "$0")/.."
python=${1:?which Python?}
shift
[ $# -gt 0 ] || set -- check speed
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT

check() {
    "$python" -m pytest -m gpu --collect-only -q 2>/dev/null | grep :: >"$work/tests"
    for part in $(seq "${PARTS:=4}"); do
        awk "NR % $PARTS == $part - 1" "$work/tests" >"$work/part$part"
        XDG_CACHE_HOME=$work/cache$part xargs -d '\n' -a "$work/part$part" \
            "$python" -m pytest -m gpu -q --durations=5 >"$work/log$part" 2>&1 &
    done
    wait
    tail -n 15 "$work"/log*
}

sanitize() {
    "$python" -m tests.sanitize
}

speed() {
    for preset in deggs nano-egg best best-bytes; do
        "$python" egg.py bench --preset $preset
    done
}

learn() {
    place=${TEXT:-.}
    for seed in ${SEEDS:-0 1 2}; do
        for seconds in ${SECONDS_EACH:-10 30 100}; do
            # shellcheck disable=SC2086
            "$python" egg.py train --preset best --minutes "$(awk "BEGIN {print $seconds / 60}")" \
                -D INPUT_FILE="$place/input.bin" -D VAL_FILE="$place/val.bin" -D DECODING_FILE="$place/decoding.bin" \
                -D ISLAND_SEED="$seed" -D SAMPLE_EVERY=0 ${DEFINES:-} >"$work/learn" 2>&1
            echo "seed $seed, $seconds s: $(grep -E "^validation: |tokens/s|stopped after" "$work/learn" | tr '\n' ' ')"
        done
    done
}

for part; do
    began=$SECONDS
    echo "== $part"
    "$part"
    echo "== $part took $((SECONDS - began)) s"
done
