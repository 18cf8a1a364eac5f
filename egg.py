#!/usr/bin/env python3
"""The command line of egg: one subcommand, one short function. What takes long to load is loaded by the command that needs it."""

import argparse
import os
import shlex
import shutil
import sys

import egg_config
from egg_config import EggError
from engine import hardware

EXAMPLES = """\
examples:
  python egg.py train --preset laptop --minutes 1     learn from the shipped text on this machine, no GPU needed
  python egg.py train --save-dir ckpt                 train until Ctrl-C, and go on from there the next time
  python egg.py generate --prompt 'The king said'     ... and let it write
  python egg.py prepare my.txt                        your own text in place of the shipped one
  openssl rand -hex 32 > secret                       a cluster: a file for all its machines, this on one of them, which
  python egg.py coordinator --save-dir ckpt --secret-file secret       needs no GPU and no data,
  python egg.py worker 10.0.0.1 --secret-file secret  and this on the others (./run-workers.sh 10.0.0.1 uses every GPU)
  python egg.py status 10.0.0.1 --secret-file secret  ... and how they are doing
  python egg.py train --save-dir ckpt --http 8080     with a page to watch it on, http://localhost:8080/
  python egg.py plot ckpt                             the curves of a run
  python egg.py train --preset nano-egg               the recurrent model of nano-egg
  python egg.py arch -D N_LAYERS=8 -D HIDDEN_DIM=512  what a configuration costs

Every constant of egg_config.py can be set for one run, by -D NAME=VALUE or by an environment variable EGG_NAME=VALUE;
coordinator and workers must be given the same. `python egg.py COMMAND --help` explains a command."""


def coordinator(cfg, args):
    from cluster import auth
    import egg_net
    access = auth.Access(auth.read_secret(args.secret_file), auth.server_tls(args.tls_cert, args.tls_key, args.tls_ca),
                             args.insecure)
    egg_net.run_coordinator(cfg, args.host, port(cfg, args), args.save_dir, args.load_dir, args.steps, args.minutes, access=access,
                            http=page(args, access), log_json=args.log_json, tensorboard=args.tensorboard, island=island(cfg, args))


def island(cfg, args):
    """The islands.gossip.Terms of the arguments, None without --island. Peers are called with the certificate that is shown to workers, and
    must show one that --tls-ca signed, or the same one."""
    from cluster import auth
    from islands import gossip
    tls = auth.client_tls(args.tls_ca or args.tls_cert, args.tls_cert, args.tls_key) if args.island else None
    return gossip.terms(args.island, args.peer, args.peers_from_slurm, port(cfg, args), args.gossip_bandwidth, not args.no_accept, tls)


def worker(cfg, args):
    if args.list_devices:
        print("\n".join(hardware.devices(cfg)))
        return
    access, device = access_to(args), hardware.one_device(cfg, args.gpu)
    from tools import train
    train.work(cfg, args.host, port(cfg, args), device, args.threads, access=access, protocol=args.protocol, name=args.name)


def status(cfg, args):
    import json
    import egg_net
    told = egg_net.fetch_status(cfg, args.host, port(cfg, args), access_to(args))
    print(json.dumps(told, indent=1) if args.json else egg_net.describe_status(told))


def access_to(args):
    """How to meet the coordinator, from the arguments."""
    from cluster import auth
    return auth.Access(auth.read_secret(args.secret_file), auth.client_tls(args.tls_ca, args.tls_cert, args.tls_key))


def train(cfg, args):
    from tools import train
    http = None
    if args.http:
        from cluster import auth
        http = page(args, auth.Access(auth.read_secret(args.secret_file), None, args.insecure))
    done = train.train(cfg, args.steps, args.minutes, args.save_dir, args.load_dir, args.threads, http=http, log_json=args.log_json,
                           tensorboard=args.tensorboard)
    if done.final is not None and done.coordinator.directory:
        print(f"try it: {command_line()} generate --load-dir {shlex.quote(done.coordinator.directory)} --prompt 'The king said'")


def generate(cfg, args):
    from tools import use
    text = sys.stdin.buffer.read() if args.prompt == "-" else os.fsencode(args.prompt)
    settings = dict(temp=args.temp, min_p=args.min_p, penalty=args.penalty)
    use.generate(cfg, load(cfg, args), text, args.tokens, args.seed, console(sys.stdout), **settings)


def eval_(cfg, args):
    from tools import use
    use.evaluate(cfg, load(cfg, args), args.file, args.tokens, console(sys.stdout))


def export(cfg, args):
    from tools import use
    print(use.export(cfg, load(cfg, args), args.file, args.full))


def import_(cfg, args):
    from tools import use
    print(use.import_(cfg, args.file, args.save_dir))
    constants = " ".join(shlex.quote(f"-D{name}={egg_config.text(value)}") for name, value in egg_config.changed(cfg).items())
    print(f"next: {command_line()} train --save-dir {shlex.quote(args.save_dir)} {constants}".rstrip())


def debug(cfg, args):
    from tools import debug
    from model import data_files
    tokens, saved = data_files.open_tokens(cfg, cfg.INPUT_FILE), load(cfg, args)
    debug.report(cfg, saved.engine, tokens, console(sys.stdout), args.json)


def load(cfg, args):
    """The saved run that the arguments name, ready for use."""
    from tools import use
    return use.load(cfg, args.load_dir, args.best, hardware.one_device(cfg, args.gpu), args.threads, console(sys.stderr))


def console(stream):
    import egg_net
    return egg_net.Console(stream)


def of_run(args):
    """The constants of the saved run that a command is about; it need not be told them."""
    from cluster import history
    args.load_dir = args.load_dir or history.newest()
    return history.configuration(args.load_dir)


def of_file(args):
    from tools import use
    return use.read_config(args.file)


def command_line():
    """How this program is called here, by the Python that runs it."""
    python = os.path.relpath(sys.executable)
    python = "python" if sys.executable == shutil.which("python") else sys.executable if python.startswith("..") else python
    return f"{shlex.quote(python)} {shlex.quote(os.path.relpath(__file__))}"


def page(args, access):
    """Where the live page is served, None without --http."""
    from tools import live_page
    return live_page.where(args.http, access) if args.http else None


def plot(cfg, args):
    from tools import plot
    plot.plot(args.runs, args.x, args.out)


def arch(cfg, args):
    from model import parameters
    print(parameters.describe(cfg))


def prepare(cfg, args):
    from tools import prepare
    # a preset that reads the tokens as bytes still wants tokens in the file
    wanted = args.vocab_size or (egg_config.VOCAB_SIZE if cfg.DETOKENIZE else cfg.VOCAB_SIZE)
    got = prepare.prepare(args.texts, wanted, args.val, args.out)
    vocab = "" if got == egg_config.VOCAB_SIZE else f" -D VOCAB_SIZE={max(got, 257) if wanted > 256 else 256} -D DETOKENIZE=0"
    where = "" if os.path.samefile(args.out, ".") else f"cd {shlex.quote(args.out)} && "
    print(f"next: {where}python {shlex.quote(os.path.relpath(__file__, args.out))} train{vocab}")


def bench(cfg, args):
    if args.threads:
        os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)      # NumPy, the yardstick, gets as many; read when it is loaded
    from tools import bench
    bench.main(cfg, args)


def port(cfg, args):
    return cfg.PORT if args.port is None else args.port


# --- arguments -----------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message):
        """A wrong use is one line, not the whole usage."""
        self.exit(2, f"egg: {message} (see python {self.prog} --help)\n")


def number(kind, low, high, what):
    """A checked argument type for argparse: `kind` from low to high."""
    def parse(text):
        try:
            value = kind(text)
            if low <= value <= high:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return parse


def http_address(text):
    """An argument type for argparse: (host, port)."""
    from tools import live_page
    try:
        return live_page.parse_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not PORT or HOST:PORT") from None


def read_by(name, what):
    """An argument type for argparse: what islands.gossip.`name` makes of the text."""
    def parse(text):
        from islands import gossip
        try:
            return getattr(gossip, name)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
    return parse


def parser():
    """The whole command line."""
    main = Parser(prog="egg.py", description="Trains int8 language models, a transformer or a recurrent one, by evolution strategies, on any number of machines.",
                  epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(metavar="COMMAND", required=True)

    def command(function, text, epilog=None, saved=lambda args: {}):
        sub = commands.add_parser(function.__name__.rstrip("_"), help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(function=function, saved=saved)
        sub.add_argument("-D", action="append", default=[], dest="defines", metavar="NAME=VALUE",
                         help="set a constant of egg_config.py; can be given many times")
        sub.add_argument("--preset", choices=sorted(egg_config.PRESETS), help="start from a ready-made set of constants")
        return sub

    def options(sub, *names):
        for name in names:
            sub.add_argument("--" + name, **OPTIONS[name])

    sub = command(train, "train on this machine: coordinator and workers in one command, until Ctrl-C",
                  "example: python egg.py train --preset laptop --minutes 1 --save-dir ckpt")
    options(sub, "steps", "minutes", "save-dir", "load-dir", "threads", "http", "log-json", "tensorboard", "secret-file")
    sub.add_argument("--insecure", action="store_true", help="show the page of --http to anybody who can reach it")

    sub = command(coordinator, "hand out the work of a cluster and keep its history; needs no GPU, no data, little memory",
                  "examples:\n  python egg.py coordinator --save-dir ckpt                         for workers on this machine\n"
                  "  python egg.py coordinator --save-dir ckpt --secret-file secret    for others too: "
                  "python egg.py worker THIS_HOST --secret-file secret\n"
                  "  python egg.py coordinator --save-dir a --port 5001 --island a --peer 127.0.0.1:5002 -D ISLAND_SEED=1     an island: "
                  "python egg.py worker 127.0.0.1 --port 5001 -D ISLAND_SEED=1")
    sub.add_argument("--host", help="address to listen on (default: all of this machine with a secret, else 127.0.0.1)")
    options(sub, "port", "steps", "minutes", "save-dir", "load-dir", "http", "log-json", "tensorboard", "secret-file", "tls-cert", "tls-key",
            "tls-ca")
    sub.add_argument("--insecure", action="store_true", help="let anybody in who can reach the port, C++ peers of protocol 1 too")
    islands = sub.add_argument_group("islands", "a coordinator that meets others like it: who is worse takes the other's state (README, Islands)")
    islands.add_argument("--island", metavar="NAME", type=read_by("parse_name", "a name: letters, digits and _ . : / -, 64 at most"),
                         help="be an island of this name; every island needs -D ISLAND_SEED=N of its own, here and at its workers")
    islands.add_argument("--peer", metavar="HOST:PORT", action="append", default=[], type=read_by("parse_peer", "HOST:PORT"),
                         help="the coordinator of another island; can be given many times, and all islands may be given the same list")
    islands.add_argument("--peers-from-slurm", action="store_true", help="the other nodes of this Slurm job are peers, on the same port")
    islands.add_argument("--gossip-bandwidth", metavar="BYTES", type=read_by("parse_bandwidth", "bytes a second, 1k or more, like 500k or 2.5M; 0: no bound"),
                         help="bytes of states a second, sent and taken in, k and M understood, 0: no bound (default: 16M)")
    islands.add_argument("--no-accept", action="store_true", help="give states, but keep the own one")

    sub = command(worker, "evaluate for a coordinator, on a GPU where there is one",
                  "examples:\n  python egg.py worker 10.0.0.1\n  python egg.py worker 10.0.0.1 --gpu 1\n  python egg.py worker 10.0.0.1 -D DEVICE=cpu --threads 8")
    sub.add_argument("host", metavar="HOST", help="the coordinator's name or address")
    options(sub, "port", "threads", "gpu", "secret-file", "tls-cert", "tls-key", "tls-ca")
    sub.add_argument("--name", help="what the coordinator calls this worker (default: its host and device)")
    sub.add_argument("--protocol", type=int, choices=(1, 2), default=0,
                     help="1: that of C++ coordinators (default: 2, then 1 where it is not understood)")
    sub.add_argument("--list-devices", action="store_true", help="name the devices that a worker can use here, one a line, and stop")

    sub = command(status, "what a coordinator is doing, and with which workers", "example: python egg.py status 10.0.0.1 --secret-file secret")
    sub.add_argument("host", nargs="?", default="localhost", metavar="HOST", help="the coordinator's name or address (default: localhost)")
    options(sub, "port", "secret-file", "tls-cert", "tls-key", "tls-ca")
    sub.add_argument("--json", action="store_true", help="all of it, for programs")

    def command_of_run(function, text, epilog):
        sub = command(function, text, epilog, of_run)
        sub.add_argument("--load-dir", metavar="DIR", help="directory of the saved run (default: of ckpt* here the one written last); its "
                         "configuration is taken from there")
        sub.add_argument("--best", action="store_true", help="the snapshot that was best in validation, not the newest state")
        options(sub, "threads", "gpu")
        return sub

    sub = command_of_run(generate, "let a saved run write: text that goes on from a prompt",
                         "examples:\n  python egg.py generate --prompt 'The king said' --tokens 100\n"
                         "  echo 'To be, or' | python egg.py generate --load-dir ckpt --prompt - --temp 0")
    sub.add_argument("--prompt", default="\n", metavar="TEXT", help="text to go on from; -: all of standard input (default: a new line)")
    sub.add_argument("--tokens", type=number(int, 1, 1 << 40, "a number of tokens, 1 or more"), default=200, metavar="N",
                     help="tokens to add (default: 200); memory is the only limit")
    sub.add_argument("--temp", type=number(float, *egg_config.bounds("SAMPLING_TEMP"), "a temperature from 0 to 100"), metavar="T",
                     help="temperature, 0 takes the likeliest token always (default: SAMPLING_TEMP)")
    sub.add_argument("--min-p", type=number(float, *egg_config.bounds("SAMPLING_MIN_P"), "a share from 0 to 1"), metavar="P",
                     help="tokens less likely than this share of the likeliest are cut (default: SAMPLING_MIN_P)")
    sub.add_argument("--penalty", type=number(float, *egg_config.bounds("SAMPLING_PRESENCE_PENALTY"), "a penalty from 0 to 100"), metavar="X",
                     help="nats taken once from every token seen (default: SAMPLING_PRESENCE_PENALTY)")
    sub.add_argument("--seed", type=number(int, 0, (1 << 32) - 1, "a seed from 0 to 4294967295"), default=1, metavar="N",
                     help="another seed, another text (default: 1); both engines write the same one")

    sub = command_of_run(eval_, "measure a saved run on held-out text: bits per byte, beside simple models",
                         "examples:\n  python egg.py eval --load-dir ckpt\n  python egg.py eval --load-dir ckpt --best other.txt")
    sub.add_argument("file", nargs="?", metavar="FILE", help="a text, .zst unpacked, or tokens in a .bin (default: VAL_FILE)")
    sub.add_argument("--tokens", type=number(int, 1, 1 << 40, "a number of tokens, 1 or more"), default=0, metavar="N",
                     help="read at most N tokens of it, in windows spread evenly (default: all)")

    sub = command_of_run(export, "write the weights of a saved run as a safetensors file",
                         "example: python egg.py export weights.safetensors --load-dir ckpt")
    sub.add_argument("file", metavar="FILE", help="the file to write")
    sub.add_argument("--full", action="store_true", help="with the optimizer's moments and the noise scales, so that training can go on bit for bit")

    sub = command(import_, "begin a run with the weights of a safetensors file", "example: python egg.py import weights.safetensors --save-dir ckpt-new",
                  of_file)
    sub.add_argument("file", metavar="FILE", help="a file written by `egg.py export`; its configuration is taken from there, -D changes it")
    sub.add_argument("--save-dir", required=True, metavar="DIR", help="the directory to make; train, coordinator and generate go on from there")

    sub = command_of_run(debug, "statistics of a saved run: activations of member 0, attention, weights",
                         "examples:\n  python egg.py debug --load-dir ckpt --json trace.jsonl\n"
                         "  EGG_DEBUG=1 python egg.py train      the same at every tenth step; EGG_DEBUG_FILE=trace.jsonl for the lines")
    sub.add_argument("--json", metavar="FILE", help="append them to a file, as a line of JSON")

    sub = command(plot, "draw loss and validation of runs, and who took whose state where they are islands, in the terminal or as a picture",
                  "examples:\n  python egg.py plot ckpt\n  python egg.py plot ckpt-1 ckpt-2 --x time --out runs.png")
    sub.add_argument("runs", nargs="+", metavar="RUN", help="a save directory, or a file of --log-json")
    sub.add_argument("--out", metavar="FILE.png", help="a picture instead (needs matplotlib; .svg and .pdf as well)")
    sub.add_argument("--x", choices=("tokens", "time", "steps"), default="tokens", help="what the curves are drawn against (default: tokens)")

    command(arch, "print the architecture: parameters, sizes, what a step costs", "example: python egg.py arch -D HIDDEN_DIM=512 -D N_LAYERS=8")

    sub = command(prepare, "turn texts into input.bin, val.bin and decoding.bin",
                  "examples:\n  python egg.py prepare book1.txt book2.txt.zst\n  python egg.py prepare corpus.txt --vocab-size 256 --out bytes\n"
                  "  python egg.py prepare train.txt --val held-out.txt --vocab-size 4096")
    sub.add_argument("texts", nargs="+", metavar="TEXT", help="files of text (or any bytes), read one after the other; .zst is unpacked")
    sub.add_argument("--vocab-size", type=number(int, 256, 262144, "a vocabulary size from 256 to 262144"), metavar="N",
                     help=f"tokens of the byte-level BPE (default: VOCAB_SIZE, {egg_config.VOCAB_SIZE}); 256: plain bytes")
    sub.add_argument("--val", metavar="FILE", help="text to hold out (default: 5 %% of TEXT, in evenly spaced blocks)")
    sub.add_argument("--out", default=".", metavar="DIR", help="directory for the three files (default: this one)")

    sub = command(bench, "measure this machine: evaluation, update, a whole step, generation")
    options(sub, "threads", "gpu")
    return main


OPTIONS = {
    "port": dict(type=number(int, 0, 65535, "a port from 0 to 65535"), metavar="N", help=f"TCP port (default: PORT, {egg_config.PORT})"),
    "steps": dict(type=number(int, 1, 1 << 40, "a number of steps, 1 or more"), metavar="N", help="stop when the run has N steps"),
    "minutes": dict(type=number(float, 1e-3, 1e7, "a number of minutes"), metavar="N", help="stop after so many minutes"),
    "save-dir": dict(metavar="DIR", help="keep the run's history here, and go on with the run that is here already"),
    "load-dir": dict(metavar="DIR", help="start from the run in this directory"),
    "http": dict(type=http_address, metavar="[HOST:]PORT", help="serve a live page here, and /metrics for Prometheus (default host: this "
                                                               "machine alone); it asks for the secret where there is one"),
    "log-json": dict(metavar="FILE", help="append every event to FILE, a JSON object a line (EVENTS.md)"),
    "tensorboard": dict(metavar="DIR", help="write figures and samples for TensorBoard (needs tensorboardX)"),
    "threads": dict(type=number(int, 1, hardware.cores(), f"a number of cores of this machine, 1 to {hardware.cores()}"), metavar="N",
                    help="cores that the CPU engine uses (default: all)"),
    "secret-file": dict(metavar="FILE", help="what coordinator and workers know and strangers do not (default: variable EGG_SECRET)"),
    "tls-cert": dict(metavar="FILE", help="own certificate, PEM"),
    "tls-key": dict(metavar="FILE", help="... and its key"),
    "tls-ca": dict(metavar="FILE", help="the other side's certificate, or that of who signed it; a coordinator with it lets in no worker "
                                        "without a certificate"),
    "gpu": dict(type=number(int, 0, 1023, "the number of a GPU, 0 or more"), metavar="N", help="the GPU to use (default: the first)"),
}


def main(argv=None):
    """Runs a command; the exit status: 0, 1 for a failure, 2 for a wrong use, 130 for Ctrl-C."""
    try:
        args = parser().parse_args(argv)
        args.function(egg_config.load(args.preset, args.defines, saved=args.saved(args)), args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output is gone; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except egg_config.ConfigError as error:
        return fail(error, 2)
    except MemoryError:
        return fail("not enough memory: take a smaller configuration, or a shorter text", 1)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else error, 1)
    except Exception as error:
        # exceptions that our own modules define are messages to the user; any other one is a fault of the program
        if not isinstance(error, EggError):
            raise
        return fail(error, 1)


def fail(message, status):
    print("egg: " + " ".join(str(message).split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
