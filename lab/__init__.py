"""Measurements for those who work on egg, in the root of the repository: `python -m lab.shapes`, `python -m lab.load`,
`python -m lab.backprop`, each with --help. RECORDS.md and TRIED.md have what was measured."""

import argparse

import egg_config


def parser(description):
    """A parser of a measurement's options; `configuration` takes what it has parsed."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--preset", help="as of egg.py")
    options.add_argument("-D", action="append", default=[], dest="defines", metavar="NAME=VALUE", help="as of egg.py")
    return options


def configuration(args):
    return egg_config.load(args.preset, args.defines)
