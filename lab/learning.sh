#!/bin/sh -e
# Draws docs/learning.svg: bits per byte of held-out text against time. The preset laptop-bytes and back-propagation on
# its shape are trained here, on the CPU, one after the other, and their validations go to docs/learning/*-cpu.jsonl.
# docs/learning/*-h?00.jsonl are the figures of lab/MEASUREMENTS.md. Held out are the last 460,000 bytes.
# On a machine without other work, with a Python that has matplotlib and PyTorch:
# lab/learning.sh [PYTHON [MINUTES]]
cd "$(dirname "$0")/.."
root=$PWD
python=$(realpath -s "${1:-.venv/bin/python}")
minutes=${2:-5}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" - "$work" <<'END'
import sys
import numpy as np
from model.data_files import Decoding
text = Decoding.read("decoding.bin").expand(np.fromfile("input.bin", "<u4"))
text[:-460000].tofile(sys.argv[1] + "/input.bin")
text[-460000:].tofile(sys.argv[1] + "/val.bin")
END
set -- -D DEVICE=cpu -D DETOKENIZE=0 -D INPUT_FILE="$work/input.bin" -D VAL_FILE="$work/val.bin"
"$python" egg.py train --preset laptop-bytes --minutes "$minutes" -D VALIDATE_EVERY=100 -D SAMPLE_EVERY=0 "$@" \
  --log-json "$work/laptop-bytes-cpu.jsonl"
"$python" -m lab.backprop gru --width 64 --layers 1 --batch 32 --rates 0.006 --device cpu --decoding '' \
  --input "$work/input.bin" --val "$work/val.bin" --seconds "$(awk "BEGIN {print 60 * $minutes}")" >"$work/backprop"
awk '!/#/ {printf "{\"event\": \"validation\", \"step\": %d, \"tokens\": %d, \"seconds\": %s, \"value\": %s, " \
                  "\"unit\": \"bits/byte\"}\n", $2 / (32 * 64), $2, $1, $3}' \
  "$work/backprop" >docs/learning/backprop-laptop-bytes-cpu.jsonl

"$python" - "$work/laptop-bytes-cpu.jsonl" >docs/learning/laptop-bytes-cpu.jsonl <<'END'
import json
import os
import sys
from tools.curves import read_curve
curve = read_curve(sys.argv[1])
for step, tokens, seconds, value in curve.validation:
    print(json.dumps(dict(event="validation", step=step, tokens=int(tokens), seconds=round(seconds, 2), value=value,
                          unit=curve.units["validation"])))
END

# a curve has the name of its file
while read -r file name; do
  ln -s "$PWD/docs/learning/$file.jsonl" "$work/$name.jsonl"
done <<'END'
laptop-bytes-cpu egg: laptop-bytes, 2 threads
best-h200 egg: best, H200
nano-egg-h200 egg: nano-egg, H200
nano-egg-jax-h200 nano-egg itself, H200
backprop-laptop-bytes-cpu back-propagation: 64 units, 2 threads
backprop-gru-64-h200 back-propagation: 64 units, H200
backprop-gru-256-h200 back-propagation: 256 units, H200
END
cd "$work"
"$python" "$root/egg.py" plot egg:* "nano-egg itself"* back-propagation:* --x time --log --out "$root/docs/learning.svg"
