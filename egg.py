#!/usr/bin/env python3
"""The command line of egg: one subcommand, one short function, with its help and its options above and inside it.

Modules that take long to load are imported by the commands that need them.
"""

import os
import signal

if __name__ == "__main__":
    if os.getpid() == 1:                                 # for which Linux has no default
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)     # Ctrl-C ends a command at once; a run catches it, to be kept

import argparse
import contextlib
import functools
import importlib
import shlex
import shutil
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))       # with PYTHONSAFEPATH it is not there
try:
    import egg_config
except Exception as error:                               # a slip in an edit of that file is one line too
    import linecache
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    number = getattr(error, "lineno", trace.tb_lineno)
    line = linecache.getline(os.path.join(os.path.dirname(__file__), "egg_config.py"), number)
    place = "" if hasattr(error, "status") else f"egg_config.py:{number}: {(line.split() or ['?'])[0]}: "
    advice = ": text needs quotes, and == sets nothing" if isinstance(error, NameError) else ""
    print(f"egg: {place}{getattr(error, 'msg', error)}{advice}", file=sys.stderr)
    sys.exit(2)
from cluster.console import Console, Printer, let_go
from egg_config import ROOT, EggError
from engine import hardware

EXAMPLES = """\
train on this machine:
  python egg.py train --minutes 1 --save-dir ckpt     learn from the shipped text; no GPU needed
  python egg.py train --save-dir ckpt                 continue until Ctrl-C, which loses nothing
  python egg.py train --save-dir ckpt --http 8080     continue, with a live page: http://localhost:8080/
  python egg.py train --preset deggs                  the settings of d-eggs: egg_config.py as it is
use a run:
  python egg.py generate --prompt 'The king said'     let the newest saved run write
  python egg.py eval --load-dir ckpt                  measure it on held-out text
  python egg.py plot ckpt                             draw its curves
  python egg.py runs                                  compare the runs here
a Python function judges what the models write (docs/OBJECTIVES.md):
  python egg.py train --objective examples/words.py --load-dir ckpt --save-dir ckpt-words
your own text, your own configuration:
  python egg.py prepare my.txt --out mine             and then the command that it prints
  python egg.py arch -D N_LAYERS=8 -D HIDDEN_DIM=512  what a configuration costs
a cluster (best suits GPUs, laptop CPUs):
  (umask 077; openssl rand -hex 32 > secret)          the secret, a file for every machine
  python egg.py coordinator --preset best --save-dir ckpt --secret-file secret    on one; needs no GPU and no data
  python egg.py worker 10.0.0.1 --preset best --secret-file secret    on the others; ./run-workers.sh uses every GPU
  python egg.py status 10.0.0.1 --secret-file secret  step, speed, every worker

Every constant of egg_config.py can be set for one run, with -D NAME=VALUE or an environment variable EGG_NAME=VALUE.
Coordinator and workers need the same ones. `python egg.py COMMAND --help` explains a command."""


# --- options ---------------------------------------------------------------------------------------------------------

def typed(parse, description):
    """A type for argparse: parse(text), which raises ValueError for a text that is not `description`."""
    def checked(text):
        try:
            return parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}") from None
    return checked


def number(kind, low, high, description=None):
    """A type for argparse: a `kind` from low to high; description: of it, if that is not enough."""
    def parse(text):
        if low <= (value := kind(text)) <= high:
            return value
        raise ValueError
    return typed(parse, description or f"{egg_config.KINDS[kind]} from {low} to {high}")


def parsed_by(module, name, description):
    """A type for argparse: module.name(text); the module is loaded on first use."""
    return typed(lambda text: getattr(importlib.import_module(module), name)(text), description)


class Once(argparse.Action):
    """An option that may not be given twice."""

    def __call__(self, parser, namespace, value, option_string=None):
        if getattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, value)


def named(text):
    """Of a file or directory: an empty one, as of a variable that is not set, would pass for none."""
    if text:
        return text
    raise ValueError


def option(usage, help, type=None, **keywords):
    """(name, arguments for argparse). usage: the name, then a placeholder for its value; a flag has none."""
    name, _, metavar = usage.partition(" ")
    if metavar.startswith(("DIR", "FILE")):
        type = typed(named, "the name of a file or directory")
    arguments = {"metavar": metavar, "type": type, **keywords} if metavar else {"action": "store_true"}
    return name, {"help": help, **arguments}


def of_constant(usage, help, name):
    """An `option` that replaces a constant of egg_config."""
    constant = egg_config.CONSTANTS[name]
    return option(usage, f"{help} (default: {name}, {constant.value})", number(constant.kind, *constant.allowed))


ALIKE = "(coordinator and workers alike)"
COUNT = number(int, 1, 1 << 40, "a whole number, 1 or more")
MINUTES = number(float, 0.001, 10 ** 7)
COMMON = dict([
    of_constant("--port N", "TCP port", "PORT"),
    option("--steps N", "stop when the run has N steps; those of --load-dir count, but for a run that begins with an "
           "objective, which counts from 1", COUNT),
    option("--minutes N", "stop N minutes after the first chunk of work was handed out", MINUTES),
    option("--target X", "stop when a validation is X or better, bits/byte", number(float, 0.001, 64)),
    option("--patience N", "stop after N validations in a row that were no better than the best", COUNT),
    option("--save-dir DIR", "keep the run in DIR; if DIR holds a run, continue it", action=Once),
    option("--load-dir DIR", "go on from the run in DIR, which stays as it is, in --save-dir (default: DIR-2, ...); "
           "DIR@STEP, or the file of a snapshot: from that step", action=Once),
    of_constant("--keep-every N", "keep every Nth snapshot for good", "KEEP_EVERY"),
    option("--http [HOST:]PORT", "serve a live page, and /metrics for Prometheus (default host: this machine only), "
           "with a password if there is a secret", parsed_by("cluster.hub", "split_address", "PORT or HOST:PORT")),
    option("--log-json FILE", "append every event to FILE, one JSON object per line (docs/EVENTS.md)"),
    option("--threads N", "cores for the CPU engine (default: all)", number(int, 1, hardware.cores())),
    option("--secret-file FILE", "file with the secret that coordinator and workers share, or for a worker with its "
           "key (default: variable EGG_SECRET)"),
    option("--tls-cert FILE", "certificate of this process, PEM"),
    option("--tls-key FILE", "key of that certificate"),
    option("--tls-ca FILE", "certificate of the other side, or of its signer; a coordinator with this option refuses "
           "workers without a certificate"),
    option("--objective FILE", "a Python file whose function reward(prompts, completions) judges what the model writes "
           "(docs/OBJECTIVES.md)"),
    option("--verbose", "print a line for every step, in the format and the unit of d-eggs"),
    option("--quiet", "print nothing but errors"),
    option("--gpu N", "the GPU to use (default: the first)", number(int, 0, 1023)),
])
UNASKED = 1 << 29          # bytes of a saved model, and of the digits of a step, that are loaded without asking
LIBRARIES = {"numpy", "numba", "llvmlite", "pyzstd"}     # of requirements/core.txt
TLS = "--tls-cert", "--tls-key", "--tls-ca"
RUN = ("--steps", "--minutes", "--target", "--patience", "--load-dir", "--keep-every", "--http", "--log-json",
       "--secret-file", "--verbose", "--quiet")
SAVED_RUN = (option("--load-dir DIR", "the saved run (default: the newest ckpt*), DIR@STEP or the file of a snapshot: "
                    "at that step; its configuration is used", action=Once),
             option("--best", "the best snapshot, by validation, with an objective by reward, not the newest state"),
             "--threads", "--gpu")
OPEN_PAGE = option("--insecure", "show the page of --http to anybody who can reach it")


DESCRIPTION = ("Trains int8 language models, a transformer or a recurrent one, by trials in place of derivatives, on "
               "any number of machines.")
COMMANDS = {}               # name: (function, options, source of saved constants)


def command(*options, saved=lambda args: ({}, None)):
    """Makes a function a subcommand. Its docstring is the help: a summary, then examples. options: names in COMMON,
    `option`s, or a title of those that follow; saved(args): the constants of the saved run that it is about, and its
    directory if they must stay as they are."""
    def register(function):
        COMMANDS[function.__name__.rstrip("_")] = function, options, saved
        return function
    return register


# --- commands --------------------------------------------------------------------------------------------------------

def of_directory(args):
    """The constants of the run that --save-dir or --load-dir continues; none if a new run begins, perhaps in place of
    one without a step."""
    from cluster import history
    says = egg_config.DETERMINING & egg_config.overrides(args.preset, args.defines).keys()
    for directory in filter(None, (args.save_dir, args.load_dir)):
        if history.holds_run(directory) and not (says and directory == args.save_dir and history.is_blank(directory)):
            args.begins = directory != args.save_dir         # where constants differ, a new run with that model
            return history.configuration(directory), None if args.begins and args.objective else directory
    return {}, None


def chosen(args, run):
    """Whether the saved `run`, a run to load or a preset chose the model."""
    return run or vars(args).get("load_dir") or args.preset or os.environ.get("EGG_PRESET")


def decides():
    """[name]: the edited constants of egg_config.py that choose a model."""
    return [name for name in egg_config.edited() if name in egg_config.DETERMINING]


def of_directory_or_machine(args):
    """The same; where nothing chose a model, also no edit of egg_config.py, args.preset becomes that for this machine.
    """
    saved, run = of_directory(args)
    args.taken = not chosen(args, run) and not decides()
    if args.taken:
        _, device = egg_config.overrides(defines=args.defines).get("DEVICE", ("", egg_config.DEVICE))
        args.preset = hardware.preset(egg_config.make(DEVICE=device))
        try:
            egg_config.load(args.preset, args.defines)
        except egg_config.ConfigError as error:
            raise egg_config.ConfigError(f"{error} (with the preset {args.preset}, which `train` takes here: --preset "
                                         "chooses another, --preset deggs egg_config.py as it is)") from None
    return saved, run


@contextlib.contextmanager
def begun(cfg, args):
    """Checks that a run with an objective has it, and tries the file before `train` begins a new run. With --load-dir
    and an objective or other constants the --save-dir, by default a new directory, begins with that model. Where the
    block fails (a used port, too little memory) before a step is done, a new directory is gone again."""
    objective = args.objective
    if cfg.OBJECTIVE and not objective:
        raise egg_config.UsageError(f"{args.run or 'OBJECTIVE'} is a run with an objective: continue it with "
                                    "--objective FILE")
    if objective and args.function is train and not args.run:       # a coordinator only needs its digest
        from tools import train as training
        training.try_objective(cfg, objective)
    from cluster import history
    source = egg_config.load(environ={}, saved=history.configuration(args.load_dir)) if args.begins else cfg
    begins = args.begins and (objective or args.step is not None or cfg.saved() != source.saved())
    new = not os.path.lexists(args.save_dir) if args.save_dir else begins
    try:
        if begins:
            args.save_dir = args.save_dir or history.beside(args.load_dir)
            from tools import use
            use.begin(cfg, source, args.load_dir, args.save_dir, vars(args).get("threads"), Printer(sys.stderr),
                      args.step)
            args.load_dir = None
        yield
    except Exception:
        if new and args.save_dir:
            history.discard(args.save_dir)
        raise


def what_suits(cfg, args, presets):
    """A line where nothing chose settings, so that they are the slow ones of d-eggs; else None."""
    if not chosen(args, args.run) and cfg.saved() == egg_config.make(**egg_config.SHIPPED).saved():
        return f"no preset: the slow settings of d-eggs; {presets}"


@command("--save-dir", *RUN, "--objective", "--threads", OPEN_PAGE, saved=of_directory_or_machine)
def train(cfg, args):
    """train on this machine: coordinator and workers in one command, until Ctrl-C

    examples:
      python egg.py train --minutes 1 --save-dir ckpt
      python egg.py train --save-dir ckpt --http 8080       continue that run, with a live page
      python egg.py train --objective examples/words.py --load-dir ckpt --save-dir ckpt-words"""
    from tools import train
    console = run_console(args)
    if args.taken:
        where = "no GPU" if args.preset == "laptop" else "a GPU"
        console.line(f"{where} here: taking the preset {args.preset} (--preset deggs: egg_config.py as it is)")
    elif not chosen(args, args.run):
        console.line(f"egg_config.py decides, as {decides()[0]} is edited there (--preset {hardware.preset(cfg)} suits "
                     "this machine)")
    if args.load_dir:
        check_size(cfg, args, args.load_dir)
    with begun(cfg, args):
        done = train.train(cfg, args.threads, console, args.objective, http=page(args, access_to_page(args)),
                           **of_the_run(args))
    directory = done.run.directory
    if directory:
        objective = ["--objective", args.objective] if args.objective else []
        console.line("continue it: " + command_line("train", "--save-dir", directory, *objective))
    if directory and done.seconds:
        console.line("plot it: " + command_line("plot", directory))
        console.line("try it: " + command_line("generate", "--load-dir", directory))
    return directory


@command(option("--host HOST", "address to listen on (default: all of this machine with a secret, else 127.0.0.1)",
                lambda text: text.strip("[]")),
         "--port", "--save-dir", *RUN, "--objective", *TLS,
         option("--insecure", "let in everybody who can reach the port, also C++ peers of protocol 1"),
         "islands: coordinators that compare their models; the worse one takes over the other's (docs/ISLANDS.md)",
         option("--island NAME", "be an island with this name; each island needs its own -D ISLAND_SEED=N, which its "
                "workers share",
                parsed_by("islands.gossip", "parse_name", "a name: letters, digits and _ . : / -, 64 at most")),
         option("--peer HOST:PORT", "coordinator of another island; can be repeated; islands may share one list",
                parsed_by("islands.gossip", "parse_peer", "HOST:PORT"), action="append", default=[]),
         option("--no-accept", "give models to peers, but never take one"), saved=of_directory)
def coordinator(cfg, args):
    """hand out the work of a cluster and keep its history; needs no GPU, no data, little memory

    for workers on this machine:
      python egg.py coordinator --preset best --save-dir ckpt
    for workers on others too, which run `python egg.py worker THIS_HOST --preset best --secret-file secret`:
      python egg.py coordinator --preset best --save-dir ckpt --secret-file secret
    an island, whose workers run `python egg.py worker 127.0.0.1 --preset best --port 5001 -D ISLAND_SEED=1`:
      python egg.py coordinator --preset best --island a --peer 127.0.0.1:5002 --port 5001 -D ISLAND_SEED=1 --save-dir a
    """
    import egg_net
    from cluster import auth
    access = auth.Access(auth.whole_secret(args.secret_file),
                         auth.server_tls(args.tls_cert, args.tls_key, args.tls_ca), args.insecure)
    # an island shows its peers the certificate that workers see, and expects one signed by --tls-ca, or the same one
    island = None
    if args.island is not None:
        from islands import gossip
        tls = auth.client_tls(args.tls_ca or args.tls_cert, args.tls_cert, args.tls_key)
        island = gossip.IslandSettings(args.island, list(dict.fromkeys(args.peer)), not args.no_accept, tls)
    elif args.peer or args.no_accept:
        raise egg_config.ConfigError("--peer and --no-accept are for islands: give --island NAME too")
    console = run_console(args)
    with begun(cfg, args):
        done = egg_net.run_coordinator(
            cfg, args.host, args.port, console=console, access=access, http=page(args, access), island=island,
            **of_the_run(args), hint=what_suits(cfg, args, f"--preset best suits GPUs, --preset laptop CPUs {ALIKE}"))
    invite_to_continue(done.run.directory, console)


@command(option("host HOST", "name or address of the coordinator", lambda text: text.strip("[]")),
         "--port", "--threads", "--gpu", "--secret-file", "--objective", *TLS,
         option("--name NAME", "name of this worker at the coordinator (default: its host and device)"),
         option("--list-devices", "list the devices that workers can use on this machine, one per line, and end"))
def worker(cfg, args):
    """evaluate for a coordinator, on a GPU if there is one

    examples, with the preset of the coordinator:
      python egg.py worker 10.0.0.1 --preset best
      python egg.py worker 10.0.0.1 --preset best --gpu 1
      python egg.py worker 10.0.0.1 --preset laptop -D DEVICE=cpu --threads 1"""
    if args.list_devices:
        print("\n".join(hardware.devices(cfg)))
        return
    access, device = access_to(args), hardware.one_device(cfg, args.gpu)
    console = Console()
    if hint := what_suits(cfg, args, f"--preset {hardware.preset(cfg)} suits this machine {ALIKE}"):
        console.line(hint)
    from tools import train
    train.work(cfg, args.host, args.port, device, args.threads, console, access, args.name, args.objective)


@command(option("--save-dir DIR", "keep the run in DIR on this node; if DIR holds a run, continue it", required=True),
         *RUN, "--objective", "--port", OPEN_PAGE,
         option("--address ADDRESS", "the Ray cluster: auto (the one of RAY_ADDRESS or of this machine), HOST:PORT, or "
                "local: a new one on this machine (default: auto)"),
         option("--workers N", "number of workers, or all: as many as the nodes have room for (default: all)",
                number(lambda text: 0 if text == "all" else int(text), 0, 1 << 20, "a number of workers, or all")),
         option("--cpus N", "cores of a worker on a node without GPUs; a cluster with GPUs uses such nodes only with "
                "this option (default: as many as the smallest node has)", number(int, 1, 1024)),
         option("--wait N", "minutes to wait until a first worker has room and begins (default: 5)", MINUTES),
         saved=of_directory)
def ray(cfg, args):
    """train on a Ray cluster: a worker on every GPU, which Ray places and restarts (docs/CLUSTERS.md)

    examples:
      python egg.py ray --save-dir ckpt --preset best
      ray job submit --working-dir . -- python egg.py ray --save-dir /data/ckpt --preset best"""
    console, access = run_console(args), access_to_page(args)
    with begun(cfg, args):
        from deploy import ray
        done = ray.train(cfg, args, access, console, http=page(args, access), **of_the_run(args))
    invite_to_continue(done.run.directory, console)


@command(option("host HOST", "the coordinator (default: localhost)", lambda text: text.strip("[]"), nargs="?",
                 default="localhost"), "--port", "--secret-file", *TLS,
          option("--json", "everything as JSON, for programs"))
def status(cfg, args):
    """show what a coordinator is doing, and its workers

    example: python egg.py status 10.0.0.1 --secret-file secret"""
    import json
    from cluster import status
    report = status.fetch_status(cfg, args.host, args.port, access_to(args))
    print(json.dumps(report, indent=1) if args.json else status.describe_status(report))


@command(option("name NAME", "name of the machine, under which it is listed, and banned"), "--secret-file")
def key(cfg, args):
    """make the key of one worker: it lets that worker in, under this name alone, and the secret stays with you

    examples:
      python egg.py key gpu7 --secret-file secret > gpu7.key
      python egg.py worker 10.0.0.1 --preset best --secret-file gpu7.key      on that machine"""
    from cluster import auth
    secret = auth.whole_secret(args.secret_file)
    if not secret:
        raise egg_config.UsageError("a key is made of the secret of the coordinator: give --secret-file FILE or "
                                    "EGG_SECRET")
    print(args.name, auth.key_of(secret, args.name).hex())


def of_run(args):
    """The constants of the saved run that a command is about."""
    from cluster import history
    file = vars(args).get("file")
    if not args.load_dir and file and history.holds_run(history.at_step(file)[0]):           # eval ckpt
        (args.load_dir, args.step), args.file = history.at_step(file), None
    args.load_dir = args.load_dir or history.newest()
    saved = history.configuration(args.load_dir)
    return saved, args.load_dir if saved else None


@command(*SAVED_RUN, option("file DIR", "the same as --load-dir", nargs="?"),
         option("--prompt TEXT", "text to continue; -: all of standard input (default: a new line)", default="\n"),
         option("--tokens N", "tokens to add (default: 200); memory is the only limit", COUNT, default=200),
         of_constant("--temp T", "temperature; 0 always takes the likeliest token", "SAMPLING_TEMP"),
         of_constant("--min-p P", "cut tokens less likely than this share of the likeliest", "SAMPLING_MIN_P"),
         of_constant("--penalty X", "nats subtracted once from every token seen", "SAMPLING_PRESENCE_PENALTY"),
         option("--seed N", "another seed gives another text (default: 1); CPU and GPU write the same one",
                number(int, 0, (1 << 32) - 1), default=1),
         option("-n N", "write N texts, with this seed and the next ones", COUNT, default=1),
         option("--stop TEXT", "end before this text; can be repeated", os.fsencode, action="append",
                default=[]),
         option("--interactive", "ask for one prompt after another, until Ctrl-D"), saved=of_run)
def generate(cfg, args):
    """let a saved run write: text that continues a prompt

    examples:
      python egg.py generate --prompt 'The king said' --tokens 100
      echo 'To be, or' | python egg.py generate --load-dir ckpt --prompt - --temp 0
      python egg.py generate -n 3 --stop . --prompt 'The king said'"""
    from tools import use
    if args.file:
        raise egg_config.UsageError(f"{args.file} holds no run: text to continue is given with --prompt")
    console = Printer()
    prompts = asked(console) if args.interactive else \
        [sys.stdin.buffer.read() if args.prompt == "-" else os.fsencode(args.prompt)]
    use.need_text(*args.stop, *[] if args.interactive else prompts)              # before a model is loaded
    settings = dict(temp=args.temp, min_p=args.min_p, penalty=args.penalty, stops=args.stop)
    use.generate(cfg, load(cfg, args), prompts, args.tokens, args.seed, console, args.n, **settings)


def asked(console):
    """Yields the lines of standard input, on a terminal after a question; an empty one is a new line."""
    sys.stdin.reconfigure(errors="surrogateescape")
    with contextlib.suppress(EOFError):
        while True:
            yield os.fsencode(input("> " * console.terminal)) or b"\n"
    console.write("\n" * console.terminal)


@command(*SAVED_RUN, option("--objective FILE", "measure instead the mean reward by this file"),
         option("file FILE", "a text, also packed, or tokens in a .bin (default: VAL_FILE); or a DIR, as --load-dir",
                nargs="?"),
         option("--tokens N", "read at most N tokens, in evenly spread windows (default: all)", COUNT, default=0),
         saved=of_run)
def eval_(cfg, args):
    """measure a saved run on held-out text: bits per byte, beside simple models

    examples:
      python egg.py eval --load-dir ckpt
      python egg.py eval --load-dir ckpt --best other.txt
      python egg.py eval --load-dir ckpt --objective examples/words.py"""
    from tools import use
    if args.objective is not None:
        if args.file or args.tokens:
            raise egg_config.UsageError("--objective brings its own prompts: leave FILE and --tokens out")
        return use.evaluate_objective(cfg, load(cfg, args), args.objective, Printer())
    use.evaluate(cfg, load(cfg, args), args.file, args.tokens, Printer())


@command(*SAVED_RUN, option("file FILE", "the file to write"),
         option("--full", "also optimizer moments and noise scales, so that training can continue bit for bit"),
         saved=of_run)
def export(cfg, args):
    """write the weights of a saved run as a safetensors file

    example: python egg.py export weights.safetensors --load-dir ckpt"""
    from tools import use
    if not args.file:
        raise egg_config.UsageError("name the file to write, then --load-dir DIR")
    Printer().line(use.export(cfg, load(cfg, args), args.file, args.full))


def of_file(args):
    """The constants in a file of `egg.py export`."""
    from tools import use
    return use.read_config(args.file), None


@command(option("file FILE", "a file of `egg.py export`; its configuration is used, -D changes it"),
         option("--save-dir DIR", "the directory to create; train, coordinator and generate continue from it",
                required=True), saved=of_file)
def import_(cfg, args):
    """begin a run from the weights in a safetensors file

    example: python egg.py import weights.safetensors --save-dir ckpt-new"""
    from tools import use
    check_size(cfg, args, args.file)
    Printer().line(use.import_(cfg, args.file, args.save_dir))
    files = [f"{name}={file}" for name in egg_config.DATA_FILES
             if (file := getattr(cfg, name)) != egg_config.CONSTANTS[name].value]
    Printer().line("next: " + command_line("train", "--save-dir", args.save_dir,
                                                   *(word for file in files for word in ("-D", file))))


@command(*SAVED_RUN, option("--json FILE", "also append them to FILE, as one line of JSON"), saved=of_run)
def debug(cfg, args):
    """print statistics of a saved run: activations, attention, weights

    example: python egg.py debug --load-dir ckpt --json trace.jsonl"""
    from tools import debug
    from model import data_files
    tokens = data_files.open_tokens(cfg, cfg.INPUT_FILE)
    debug.report(cfg, load(cfg, args), tokens, Printer(), args.json)


@command(option("runs RUN", "a save directory, or a file of --log-json (default: the newest ckpt*)", nargs="*"),
         option("--out FILE.png", "write a picture (needs matplotlib; also .svg and .pdf)"),
         option("--x {tokens,time,steps}", "the x axis (default: tokens)", choices=("tokens", "time", "steps"),
                default="tokens"),
         option("--log", "a logarithmic x axis"))
def plot(cfg, args):
    """draw loss and validation of runs, and the merges of islands, in the terminal or as a picture

    examples:
      python egg.py plot ckpt
      python egg.py plot ckpt-1 ckpt-2 --x time --out runs.png"""
    from cluster import history
    from tools import curves
    curves.plot(args.runs or [history.newest()], Printer(), args.x, args.out, args.log)


@command(option("runs DIR", "save directories (default: all in this directory)", nargs="*"))
def runs(cfg, args):
    """list runs: their steps, best figures, and the constants in which they differ

    example: python egg.py runs ckpt ckpt-2"""
    from tools import curves
    curves.runs(args.runs, Printer())


@command()
def arch(cfg, args):
    """print the architecture: parameters, sizes, what a step costs, on a CPU also how long it takes

    example: python egg.py arch -D HIDDEN_DIM=512 -D N_LAYERS=8"""
    from cluster import history
    from tools import debug, train
    say = Printer().line
    say(debug.architecture(cfg))
    if hint := what_suits(cfg, args, f"train takes --preset {hardware.preset(cfg)} here"):
        say(hint)
    if hardware.devices(cfg) == ["cpu"] and sum(history.sizes(cfg)) <= UNASKED:
        train.measure(cfg, say)


@command(option("texts TEXT", "files of text (or any bytes) and directories, read one after the other; also "
                 ".gz, .xz, .bz2, .zst, and .jsonl", nargs="+"),
         of_constant("--vocab-size N", "tokens of the byte-level BPE; 256: plain bytes, as with less than 200,000 "
                     "bytes to train on if nothing is said", "VOCAB_SIZE"),
         option("--field NAME", "field of JSON lines that holds the text (default: text)", default="text"),
         option("--val FILE", "text to hold out (default: 5 %% of TEXT, in evenly spaced blocks)"),
         option("--out DIR", "directory for the three files (default: this one)", default="."),
         option("--force", "replace existing files without asking"))
def prepare(cfg, args):
    """turn texts into input.bin, val.bin and decoding.bin

    examples:
      python egg.py prepare book1.txt book2.txt.zst --out books
      python egg.py prepare corpus.txt --vocab-size 256 --out bytes
      python egg.py prepare train.txt --val held-out.txt --vocab-size 4096 --force"""
    from tools import prepare
    prepare.need_room(args.out, args.force)
    wanted = args.vocab_size
    if not wanted and "VOCAB_SIZE" in egg_config.overrides(args.preset, args.defines):
        # a preset that reads the tokens as bytes still wants tokens in the file
        wanted = egg_config.VOCAB_SIZE if cfg.DETOKENIZE else cfg.VOCAB_SIZE
    gpu = hardware.devices(cfg) != ["cpu"]
    printer = Printer()
    advise = functools.partial(prepare.training_on, args.out, gpu)
    printer.line("next: " + command_line("train", *prepare.prepare(
        args.texts, wanted, args.val, args.out, printer.line, advise, printer.progress, args.field)))


@command("--threads", "--gpu")
def bench(cfg, args):
    """measure this machine: evaluation, update, a whole step, generation

    example: python egg.py bench --preset best"""
    numpy_threads(args.threads)
    if hint := what_suits(cfg, args, f"train takes --preset {hardware.preset(cfg)} here"):
        Printer().line(hint)
    from tools import bench
    bench.bench(cfg, hardware.one_device(cfg, args.gpu), args.threads)


# --- what commands share ---------------------------------------------------------------------------------------------

def access_to(args):
    """The auth.Access of a worker or of `status`."""
    from cluster import auth
    secret, name = auth.read_secret(args.secret_file)
    return auth.Access(secret, auth.client_tls(args.tls_ca, args.tls_cert, args.tls_key), name=name)


def of_the_run(args):
    """{name: value}: the options of a run that a coordinator and its logs take as they are."""
    names = "steps", "minutes", "target", "patience", "save_dir", "load_dir", "log_json"
    return {name: vars(args)[name] for name in names}


def access_to_page(args):
    """The auth.Access of a run whose page has no TLS."""
    from cluster import auth
    return auth.Access(auth.whole_secret(args.secret_file), None, args.insecure)


def page(args, access):
    """The live_page.Where of --http, None without it."""
    if args.http:
        from tools import live_page
        return live_page.where(args.http, access)


def load(cfg, args):
    """An engine in the state of the saved run."""
    from tools import use
    check_size(cfg, args, args.load_dir)
    console = Printer(sys.stderr)
    engine = use.load(cfg, args.load_dir, args.best, hardware.one_device(cfg, args.gpu), args.threads, console,
                      args.step)
    console.line(f"egg: {args.load_dir}, step {engine.step}")
    return engine


def check_size(cfg, args, place):
    """Raises UsageError for a saved model (`place`: where) that takes more memory than UNASKED, unless the user has
    named its width: a header of a kilobyte may claim any size."""
    from cluster import history
    weights, *rest = history.sizes(cfg)
    size = weights + sum(rest) + cfg.STEP_BYTES
    if size > UNASKED and "HIDDEN_DIM" not in egg_config.overrides(args.preset, args.defines):
        raise egg_config.UsageError(f"{place} says that it holds a model of {weights:,} weights, which takes "
                                    f"{size / 1e9:.1f} GB or more: if that is right, add "
                                    f"-D HIDDEN_DIM={cfg.HIDDEN_DIM}")


def numpy_threads(threads):
    """Before NumPy, the reference of a measurement, is loaded: its cores, None for all."""
    if threads:
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)


def run_console(args):
    """The console of a run with the limits in `args`."""
    return Console(quiet=args.quiet, verbose=args.verbose, steps=args.steps, minutes=args.minutes,
                   callback=args.callback)


def command_line(*arguments):
    """A command line that calls this program with the present Python, to be pasted in this directory."""
    def from_here(path):
        return min(os.path.relpath(path), os.path.abspath(path), key=len)

    name = os.path.basename(sys.executable)
    python = name if sys.executable == shutil.which(name) else from_here(sys.executable)
    return shlex.join([python, from_here(os.path.join(ROOT, "egg.py")), *map(str, arguments)])


def invite_to_continue(directory, console):
    """Says how the run in `directory` goes on, if it is kept."""
    if directory:
        console.line(f"continue it: the same command, with --save-dir {directory}")


# --- the program -----------------------------------------------------------------------------------------------------

class Version(argparse.Action):
    def __call__(self, parser, *_):
        import subprocess
        git = f"git -C {shlex.quote(ROOT)} describe --always --dirty --abbrev=12"
        done = subprocess.run(git, shell=True, capture_output=True, text=True)               # git may be missing
        print(f"egg, commit {done.stdout.strip() or 'unknown'}, Python {sys.version.split()[0]}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args=None, namespace=None):
        """Leaves nothing to the parser of all commands, which does not know the options of this one."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error("unrecognized arguments: " + " ".join(rest))
        return known, rest

    def error(self, message):
        """Answers wrong use with one line, not with the whole usage; in a notebook with an error to catch."""
        message += egg_config.near(message.partition("invalid choice: '")[2].partition("'")[0],
                                   [*COMMANDS, *egg_config.PRESETS])
        for name in message.partition("unrecognized arguments: ")[2].split():
            name = name.partition("=")[0]
            if here := egg_config.ELSEWHERE.get(name.strip("-").replace("-", "_").upper()):
                message += f"; {name} is here {here}"
            elif name.startswith("--"):
                message += egg_config.near(name, self._option_string_actions)
        raise egg_config.UsageError(f"{message} (see python {self.prog} --help)")


def parsed(argv):
    """The arguments of a command line argv ([word])."""
    layout = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    main = Parser(prog="egg.py", description=DESCRIPTION, epilog=EXAMPLES, **layout)
    main.add_argument("--version", action=Version, nargs=0, help="print the commit of this clone")
    commands = main.add_subparsers(metavar="COMMAND", required=True)
    for name, (function, options, saved) in COMMANDS.items():
        # without inspect.getdoc: that module takes long to load
        text = function.__doc__ or f"{name} (PYTHONOPTIMIZE=2 has removed the help)"
        summary, _, examples = text.replace("\n    ", "\n").partition("\n\n")
        sub = group = commands.add_parser(name, help=summary, epilog=examples,
                                          description=summary[0].upper() + summary[1:] + ".", **layout)
        sub.set_defaults(function=function, saved=saved, begins=False, step=None, callback=None, defines=[],
                         preset=None)
        if name not in ("plot", "runs", "key"):              # to which no constant matters
            sub.add_argument("-D", action="append", default=[], dest="defines", metavar="NAME=VALUE",
                             help="set a constant of egg_config.py; can be repeated")
            sub.add_argument("--preset", choices=sorted(egg_config.PRESETS),
                             help="start from a ready-made configuration")
        for item in options:
            if isinstance(item, str) and item not in COMMON:
                group = sub.add_argument_group(*item.split(": ", 1))
            else:
                word, values = (item, COMMON[item]) if isinstance(item, str) else item
                group.add_argument(word, **values)
    return main.parse_args(argv)


def open_streams():
    """Opens the standard streams that cron or a service has closed, before a file or socket gets their numbers."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))


def main(argv=None):
    """Runs a command; the exit status: 0, 1 for a failure, 2 for a wrong use."""
    open_streams()
    os.environ.pop("NUMBA_DISABLE_JIT", None)                # of the debugging of another program: here is no other way
    try:
        args, cfg = configured(argv)
        args.function(cfg, args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:                                # the second one, which ends a run at once
        return 130
    except Exception as error:
        return failed(error)


def configured(argv):
    """(arguments, Config) of a command line."""
    args = parsed(argv)
    if vars(args).get("load_dir"):
        from cluster import history
        args.load_dir, args.step = history.at_step(args.load_dir)
    if vars(args).get("keep_every") is not None:
        args.defines.append(f"KEEP_EVERY={args.keep_every}")         # a run keeps that
    saved, args.run = args.saved(args)
    cfg = egg_config.load(args.preset, args.defines, saved=saved, run=args.run, objective=objective_of(args),
                          begins=args.begins)
    if vars(args).get("port", 0) is None:
        args.port = cfg.PORT
    if (line := overruled(cfg, args)) and not vars(args).get("quiet"):
        Printer(sys.stderr).line("egg: " + line)
    return args, cfg


def overruled(cfg, args):
    """A line about edits of egg_config.py in place of which a preset or a saved run has its values; "" without any."""
    sources = egg_config.overrides(args.preset, args.defines)
    names = [name for name in egg_config.edited() if getattr(cfg, name) != egg_config.CONSTANTS[name].value
             and not sources.get(name, ("",))[0].endswith(name)]         # of -D and EGG_* the user knows
    source = sources[names[0]][0] if names and names[0] in sources else "the run"
    return names and f"egg_config.py sets {', '.join(names)}, but {source} has its own: give -D if you mean it"


def objective_of(args):
    """(file, its SHA-256, settings of a run that it begins) of --objective, None without."""
    if args.function is not eval_ and (path := vars(args).get("objective")) is not None:
        advice = "give --objective the path of a Python file"
        with egg_config.explained(egg_config.UsageError, path, advice), open(path, "rb") as file:
            source = file.read()
        settings = {} if args.run else egg_config.OBJECTIVE_SETTINGS
        with contextlib.suppress(SyntaxError, ValueError):           # tools.objective.read tells of them
            if settings and "DATA" in compile(source, path, "exec").co_names:
                settings = {**settings, **egg_config.DATA_SETTINGS}
        return path, egg_config.sha256_of(path), settings


def failed(error):
    """Prints a line about the error that ended a command; the exit status. Raises errors of the program itself."""
    message = error
    if isinstance(error, ModuleNotFoundError) and error.name.partition(".")[0] in LIBRARIES:
        message = (f"{sys.executable} has no {error.name}: install it with `make install` in {ROOT}, and call "
                   ".venv/bin/python there")
    elif isinstance(error, ModuleNotFoundError) and error.name in ("fcntl", "resource"):
        message = "egg needs Linux or another Unix; on Windows use WSL"
    elif isinstance(error, BrokenPipeError):
        let_go(sys.stdout)
        return 1
    elif isinstance(error, MemoryError):
        message = "not enough memory: take a smaller configuration, or a shorter text"
    elif isinstance(error, OSError):
        if not error.filename:
            let_go(sys.stdout)
        message = f"{error.filename or 'the output'}: {error.strerror}"
    elif not isinstance(error, EggError):
        raise error
    Printer(sys.stderr).line("egg: " + " ".join(str(message).split()))
    return getattr(error, "status", 1)


if __name__ == "__main__":
    sys.exit(main())
