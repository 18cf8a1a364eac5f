"""`python -m maintenance`, in the root of the repository: measurements for those who work on egg; no run needs them."""

import sys
import tempfile

from cluster.console import Printer
from egg import COUNT, Program, command, main, number, numpy_threads, option
from engine import hardware

PROGRAM = Program("-m maintenance", "Measurements for those who work on egg.", """\
examples:
  python -m maintenance shapes default gru-H64 --whole-steps
  python -m maintenance load --workers 4000 --chunk-seconds 1
  python -m maintenance backprop --preset laptop --minutes 1 --log-json backprop.jsonl
  maintenance/learning.sh .venv/bin/python            draws docs/learning.svg
  maintenance/pictures.sh .venv/bin/python            draws the other pictures of the documents""", {})


@command("--threads", "--gpu", option("shapes SHAPE", "only these shapes (default: all)", nargs="*"),
         option("--whole-steps", "also whole steps, and what they cost beyond evaluation and update"), program=PROGRAM)
def shapes(cfg, args):
    """measure models of many shapes: evaluation with each kind of int8 product, update

    examples:
      python -m maintenance shapes
      python -m maintenance shapes default gru-H64 --whole-steps"""
    numpy_threads(args.threads)
    from maintenance import shapes
    shapes.print_table(cfg, args.shapes, hardware.one_device(cfg, args.gpu), args.threads, args.whole_steps)


@command("--minutes", "--threads", "--log-json",
         option("--batch N", "windows of SEQ_LEN tokens in a step (default: 32, good for small models on a CPU)", COUNT,
                default=32),
         option("--rate X", "the highest learning rate (default: 0.006)", number(float, 1e-9, 10), default=0.006),
         "--objective",
         option("--objective-minutes N", "then trains with rewards (default: 3)", number(float, 1e-9, 1e6),
                default=3.0),
         option("--objective-rate X", "the highest learning rate with rewards (default: 0.002)",
                number(float, 1e-9, 10), default=0.002), program=PROGRAM)
def backprop(cfg, args):
    """train the same shape by back-propagation on the same text (needs PyTorch; default: one minute), and then, with an
    objective, by REINFORCE with the mean of a group as baseline, the core of GRPO

    examples:
      python -m maintenance backprop --preset laptop --minutes 1 --log-json backprop.jsonl
      python egg.py plot ckpt backprop.jsonl --x time
      python -m maintenance backprop --preset laptop --objective examples/words.py"""
    from maintenance import backprop
    backprop.train(cfg, args.minutes or 1.0, args.batch, args.rate, args.threads, Printer(), args.log_json,
                   args.objective and (args.objective, args.objective_minutes, args.objective_rate))


@command(option("--workers N", "workers that are simulated (default: 1000)", COUNT, default=1000),
         option("--seconds N", "duration (default: 20)", number(float, 1, 3600), default=20.0),
         option("--chunk-seconds N", "time that a worker takes for a chunk (default: 0.2)", number(float, 0, 3600),
                default=0.2), program=PROGRAM)
def load(cfg, args):
    """measure a coordinator under simulated workers on this machine, with a small model

    example: python -m maintenance load --workers 4000 --chunk-seconds 1"""
    from maintenance import load
    with tempfile.TemporaryDirectory() as place:
        print(load.measure(place, args.workers, args.seconds, args.chunk_seconds))


if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
