#!/usr/bin/env python3
"""The command line of egg: one subcommand, one short function. What takes long to load is loaded by the command that needs it."""

import argparse
import os
import shlex
import sys

import egg_config
from egg_engine import cores

EXAMPLES = """\
examples:
  python egg.py train --preset laptop --minutes 1     learn from the shipped text on this machine, no GPU needed
  python egg.py train --save-dir ckpt                 train until Ctrl-C, and go on from there the next time
  python egg.py prepare my.txt                        your own text in place of the shipped one
  openssl rand -hex 32 > secret                       a cluster: a file for all its machines, this on one of them, which
  python egg.py coordinator --save-dir ckpt --secret-file secret       needs no GPU and no data,
  python egg.py worker 10.0.0.1 --secret-file secret  and this on the others (./run-workers.sh 10.0.0.1 uses every GPU)
  python egg.py status 10.0.0.1 --secret-file secret  ... and how they are doing
  python egg.py train --preset nano-egg               the recurrent model of nano-egg
  python egg.py arch -D N_LAYERS=8 -D HIDDEN_DIM=512  what a configuration costs

Every constant of egg_config.py can be set for one run, by -D NAME=VALUE or by an environment variable EGG_NAME=VALUE;
coordinator and workers must be given the same. `python egg.py COMMAND --help` explains a command."""


def coordinator(cfg, args):
    import egg_auth
    import egg_net
    access = egg_auth.Access(egg_auth.read_secret(args.secret_file), egg_auth.server_tls(args.tls_cert, args.tls_key, args.tls_ca),
                             args.insecure)
    egg_net.run_coordinator(cfg, args.host, port(cfg, args), args.save_dir, args.load_dir, args.steps, args.minutes, access=access)


def worker(cfg, args):
    import egg_engine
    if args.list_devices:
        print("\n".join(egg_engine.devices(cfg)))
        return
    access, device = access_to(args), egg_engine.one_device(cfg, args.gpu)
    import egg_train
    egg_train.work(cfg, args.host, port(cfg, args), device, args.threads, access=access, protocol=args.protocol, name=args.name)


def status(cfg, args):
    import json
    import egg_worker
    told = egg_worker.fetch_status(cfg, args.host, port(cfg, args), access_to(args))
    print(json.dumps(told, indent=1) if args.json else egg_worker.describe_status(told))


def access_to(args):
    """How to meet the coordinator, from the arguments."""
    import egg_auth
    return egg_auth.Access(egg_auth.read_secret(args.secret_file), egg_auth.client_tls(args.tls_ca, args.tls_cert, args.tls_key))


def train(cfg, args):
    import egg_train
    egg_train.train(cfg, args.steps, args.minutes, args.save_dir, args.load_dir, args.threads)


def arch(cfg, args):
    import egg_model
    print(egg_model.describe(cfg))


def prepare(cfg, args):
    import egg_data
    # a preset that reads the tokens as bytes still wants tokens in the file
    wanted = args.vocab_size or (egg_config.VOCAB_SIZE if cfg.DETOKENIZE else cfg.VOCAB_SIZE)
    got = egg_data.prepare(args.texts, wanted, args.val, args.out)
    vocab = "" if got == egg_config.VOCAB_SIZE else f" -D VOCAB_SIZE={max(got, 257) if wanted > 256 else 256} -D DETOKENIZE=0"
    where = "" if os.path.samefile(args.out, ".") else f"cd {shlex.quote(args.out)} && "
    print(f"next: {where}python {shlex.quote(os.path.relpath(__file__, args.out))} train{vocab}")


def bench(cfg, args):
    if args.threads:
        os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)      # NumPy, the yardstick, gets as many; read when it is loaded
    import egg_bench
    egg_bench.main(cfg, args)


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


def parser():
    """The whole command line."""
    main = Parser(prog="egg.py", description="Trains int8 language models, a transformer or a recurrent one, by evolution strategies, on any number of machines.",
                  epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = main.add_subparsers(metavar="COMMAND", required=True)

    def command(function, text, epilog=None):
        sub = commands.add_parser(function.__name__, help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(function=function)
        sub.add_argument("-D", action="append", default=[], dest="defines", metavar="NAME=VALUE",
                         help="set a constant of egg_config.py; can be given many times")
        sub.add_argument("--preset", choices=sorted(egg_config.PRESETS), help="start from a ready-made set of constants")
        return sub

    def options(sub, *names):
        for name in names:
            sub.add_argument("--" + name, **OPTIONS[name])

    sub = command(train, "train on this machine: coordinator and workers in one command, until Ctrl-C",
                  "example: python egg.py train --preset laptop --minutes 1 --save-dir ckpt")
    options(sub, "steps", "minutes", "save-dir", "load-dir", "threads")

    sub = command(coordinator, "hand out the work of a cluster and keep its history; needs no GPU, no data, little memory",
                  "examples:\n  python egg.py coordinator --save-dir ckpt                         for workers on this machine\n"
                  "  python egg.py coordinator --save-dir ckpt --secret-file secret    for others too: "
                  "python egg.py worker THIS_HOST --secret-file secret")
    sub.add_argument("--host", help="address to listen on (default: all of this machine with a secret, else 127.0.0.1)")
    options(sub, "port", "steps", "minutes", "save-dir", "load-dir", "secret-file", "tls-cert", "tls-key", "tls-ca")
    sub.add_argument("--insecure", action="store_true", help="let anybody in who can reach the port, C++ peers of protocol 1 too")

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
    "threads": dict(type=number(int, 1, cores(), f"a number of cores of this machine, 1 to {cores()}"), metavar="N",
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
        args.function(egg_config.load(args.preset, args.defines), args)
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
        if not type(error).__module__.startswith("egg_"):
            raise
        return fail(error, 1)


def fail(message, status):
    print("egg: " + " ".join(str(message).split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
