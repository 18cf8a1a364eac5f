#!/bin/bash
# Draws pictures of the documents anew, from runs of the preset laptop-bytes on the CPU: live-page.png, plot.png,
# islands-worth.png, rewards.svg and rewards-examples.svg, in a quarter of an hour on two quiet cores. Needs a Python
# with matplotlib, and for the live page curl and Chromium:
# lab/pictures.sh PYTHON [page] [plot] [worth] [rewards] [examples]
# With SCREENS=DIR, an absolute path, `page` also shows the page on a desktop and on a phone, light and dark.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
egg=("$(realpath -s "${1:?which Python?}")" "$root/egg.py")
shift
[ $# -gt 0 ] || set -- page plot worth rewards examples
export EGG_PRESET=laptop-bytes EGG_DEVICE=cpu EGG_INPUT_FILE="$root/input.bin" EGG_VAL_FILE="$root/val.bin" \
    EGG_DECODING_FILE="$root/decoding.bin"
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$work"' EXIT
cd "$work"

# archipelago NAMES OPTION...: islands that know each other, each with a worker on one core and a directory of its name
archipelago() {
    local names=$1 name port=5300 peers=() coordinators=() workers=()
    shift
    for name in $names; do
        port=$((port + 1))
        peers+=(--peer "127.0.0.1:$port")
    done
    port=5300
    for name in $names; do
        port=$((port + 1))
        "${egg[@]}" coordinator --island "$name" "${peers[@]}" --port $port --save-dir "$name" --steps 601 \
            -D ISLAND_SEED=$port "$@" >"$name.log" 2>&1 &
        coordinators+=($!)
        "${egg[@]}" worker 127.0.0.1 --port $port --threads 1 -D ISLAND_SEED=$port "$@" >"$name-worker.log" 2>&1 &
        workers+=($!)
    done
    wait "${coordinators[@]}"
    kill "${workers[@]}" 2>/dev/null || true
    wait "${workers[@]}" || true
}

# shot WIDTH,HEIGHT LIGHT FILE
shot() {
    nice chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
        --user-data-dir="$work/browser" --window-size=$1 --blink-settings=preferredColorScheme=$2 \
        --virtual-time-budget=4000 --screenshot="$3" http://localhost:8765/ 2>browser.log
}

page() {
    "${egg[@]}" train --save-dir ckpt-laptop --http 8765 >page.log 2>&1 &
    local run=$!
    until curl -s localhost:8765/metrics | grep -q '^egg_steps_total 1[0-9][0-9][0-9]'; do
        kill -0 $run
        sleep 1
    done
    shot 1185,1604 1 "$root/docs/live-page.png"
    for width in ${SCREENS+1280 390}; do
        shot $width,2400 1 "$SCREENS/$width-light.png"
        shot $width,2400 0 "$SCREENS/$width-dark.png"
    done
    kill $run
    wait $run || true
}

plot() {
    "${egg[@]}" train --steps 300 -D VALIDATE_EVERY=20 -D SOFT_TARGETS=0:3 --save-dir soft-targets >plot.log 2>&1
    "${egg[@]}" train --steps 300 -D VALIDATE_EVERY=20 --save-dir one-target >plot.log 2>&1
    "${egg[@]}" plot soft-targets one-target --log --out "$root/docs/plot.png"
}

# validations RUN NAME: the validations of a run as a curve of this name, beside the references of their common text
validations() {
    grep -h '"event": "references"' one-population/events.jsonl >"$2.jsonl"
    grep -h '"event": "validation"' "$1/events.jsonl" >>"$2.jsonl"
}

# equal work: 601 steps of 64 windows in all
worth() {
    local setup options="-D CHUNK_SIZE=8 -D POPULATION_SIZE=8 -D VALIDATE_EVERY=50 -D SNAPSHOT_EVERY=50"
    "${egg[@]}" train --steps 601 -D VALIDATE_EVERY=50 --save-dir one-population >worth.log 2>&1
    for setup in no-gossip clone recombine; do
        mkdir "$setup"
        cd "$setup"
        case $setup in
            no-gossip) archipelago "1 2 3 4 5 6 7 8" $options -D GOSSIP_RATE=0 ;;
            *) archipelago "1 2 3 4 5 6 7 8" $options -D GOSSIP_RATE=0.01 -D MERGE=$setup ;;
        esac
        cd ..
        validations "$setup/1" "1 of 8 islands, $setup"
    done
    validations one-population "one population"
    for setup in one-population */[1-8]; do
        echo "$setup: $(grep '"event": "validation"' "$setup/events.jsonl" | grep '"step": 600,')"
    done
    "${egg[@]}" plot "one population.jsonl" "1 of 8 islands, "*.jsonl --x steps --log \
        --out "$root/docs/islands-worth.png"
}

# by steps, which no other work on the machine changes; prints the means before and after, each with the same prompt
rewards() (
    words=(--objective "$root/examples/words.py")
    "${egg[@]}" train --preset laptop --minutes 1 --save-dir text >rewards.log 2>&1
    unset EGG_PRESET                                 # the others take what text and the file set
    "${egg[@]}" train "${words[@]}" --load-dir text --save-dir words --steps 140 >rewards.log 2>&1
    grep -hE '"event": "(reward|validation)"' words/events.jsonl >words.jsonl
    "${egg[@]}" plot words.jsonl --x steps --out "$root/docs/rewards.svg"
    for run in text words; do
        "${egg[@]}" eval "${words[@]}" --load-dir $run
    done
)

# the commands of OBJECTIVES
examples() (
    unset EGG_PRESET EGG_INPUT_FILE EGG_VAL_FILE
    export EGG_DETOKENIZE=0
    # example STEPS TEXT NAME FILE REWARD_STEPS EVERY OPTION...: the options are of the text
    example() {
        local steps=$1 text=$2 name=$3 file=$4 rewards=$5 every=$6
        shift 6
        "${egg[@]}" train --preset laptop-bytes --steps $steps -D INPUT_FILE=$text.txt -D VAL_FILE=$text-val.txt "$@" \
            --save-dir $text >examples.log 2>&1
        "${egg[@]}" train --objective "$file" --load-dir $text --save-dir "$name" --steps $rewards \
            -D VALIDATE_EVERY=$every >examples.log 2>&1
        grep -hE '"event": "(reward|validation)"' "$name/events.jsonl" >"$name.jsonl"
        grep '"reward"' "$name.jsonl" | tail -n 1
    }
    for file in sort json_array guess; do
        "${egg[0]}" "$root/examples/$file.py"
    done
    example 700 sort "sorted digits" "$root/examples/sort.py" 200 20 -D SOFT_TARGETS=0:7 -D SEQ_LEN=16
    example 1000 arrays "arrays of three" "$root/examples/json_array.py" 200 20 -D SOFT_TARGETS=
    example 800 games "guesses" "$root/examples/guess.py" 200 20 -D SOFT_TARGETS=0:7
    "${egg[@]}" plot "sorted digits.jsonl" "arrays of three.jsonl" guesses.jsonl --x steps --log \
        --out "$root/docs/rewards-examples.svg"
)

for part in "$@"; do
    "$part"
done
