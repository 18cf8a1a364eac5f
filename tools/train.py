"""Training on this machine: the coordinator in this process, a worker process for every device. Also the start of every
worker: it opens the data, makes the engine, prints the references."""

import contextlib
import os
import signal
import socket
import time
from collections import namedtuple

import numpy as np

import egg_net
from cluster import auth
from cluster.console import STOPPING, Console, stop_signals
from cluster.link import check_address
from egg_config import EggError, UsageError, explained, loss_unit, sha256_of
from engine import hardware
from model import data_files, parameters

RESTARTS = 3               # of a worker process, before training gives up
FINAL_SECONDS = 30.0       # limit for the workers to apply the last update, and for one to measure and send its state
LEAVE_SECONDS = 5.0        # limit for each of them to end
SLOW_STEP = 60.0           # seconds; a longer step gets advice
SLICE_SECONDS = 0.3        # least time of an evaluation that is measured
FEW_STEPS = 50             # after fewer nobody can judge
COMPILING = "(once; about 15 s)"


class TrainError(EggError):
    """About the worker processes of a training."""


# tokens: training data; validation: a data_files.Validation or None; decoding: a data_files.Decoding or None
Data = namedtuple("Data", "tokens validation decoding")


def open_data(cfg, console=None):
    """The Data of cfg; the console gets warnings. Raises DataError."""
    console = console or Console(quiet=True)

    def warn(line):
        console.line("warning: " + line)

    if cfg.NTT_MODE and not cfg.NTT_CAUSAL:
        warn("NTT_CAUSAL = 0: the coefficients see the tokens that are to be predicted, so losses and validation are "
             "too low, and generation, which cannot see these tokens, is worse than the figures suggest")
    try:
        decoding, tokens = data_files.load_decoding(cfg, warn), data_files.open_tokens(cfg, cfg.INPUT_FILE)
        if decoding:
            data_files.need_decodable(tokens, cfg.INPUT_FILE, decoding, cfg.DECODING_FILE)
        return Data(tokens, data_files.open_validation(cfg, decoding, warn), decoding)
    except data_files.DataError as error:
        raise data_files.UnusableData(str(error)) from None


def print_references(cfg, data, console, emit=None):
    """Prints a line about the data and one about simple models, which are also an event for `emit`. Returns {model:
    figure}, {} without validation."""
    units, kinds = ("bytes", "") if cfg.VOCAB_SIZE == 256 else ("tokens", f" of {cfg.VOCAB_SIZE:,} kinds")
    console.line(f"{cfg.INPUT_FILE}: {data.tokens.size:,} {units}{kinds}")
    if data.validation is None:
        return {}
    references = data_files.references(cfg, data.tokens, data.validation)
    count, known = data.validation.windows[:, 1:].size, data.validation
    console.line(f"{cfg.VAL_FILE}: validation on {count:,} {units}\n"
                 f"for comparison, in {known.unit}: {_listed(references)}: a table of pairs, the mark to beat")
    if known.unit not in (unit := loss_unit(cfg.constants())[1]):
        console.line(f"loss is in {unit}, as windows are cut in tokens; val in {known.unit}: a token has "
                     f"{known.n_bytes / count:.2f} bytes")
    if emit:
        emit("references", unit=data.validation.unit, values={name: round(x, 4) for name, x in references.items()})
    return references


def make_engine(cfg, tokens, device="cpu", threads=None, verbs=()):
    """The engine for `device`: a CpuEngine or CudaEngine, which have the same verbs and are loaded only then. tokens:
    1-D array, or None if nothing is evaluated. threads: CPU cores, default all. verbs: "digest", "validate" or "write",
    if a GPU shall compile them now, together with those of a step. Raises EngineError."""
    try:
        if device == "cpu":
            from engine import cpu_engine
            return cpu_engine.CpuEngine(cfg, tokens, threads)
        from engine import cuda_engine
        return cuda_engine.CudaEngine(cfg, tokens, int(device.partition(":")[2]), verbs=verbs)
    except ValueError as error:
        raise hardware.EngineError(str(error)) from None


def measure(cfg, log):
    """Tells the pace of the CPU, without data."""
    start_engine(cfg, Data(np.arange(1 << 16, dtype=np.uint32) % cfg.VOCAB_SIZE, None, None), "cpu", None, log)


def start_engine(cfg, data, device, threads, log):
    """An engine, with all kernels compiled that a worker with these data will use, and no others. log: takes lines.
    Raises EngineError."""
    verbs = ["digest"] + ["validate"] * (data.validation is not None) \
        + ["write"] * bool(cfg.OBJECTIVE or cfg.SAMPLE_EVERY)
    engine = make_engine(cfg, data.tokens, device, threads, verbs)
    if device == "cpu":
        from engine import cpu_engine
        cpu_engine.warm_up(cfg, log, ["evaluate", "update", *verbs])
        if not cfg.OBJECTIVE:                        # whose texts take their own time
            tell_pace(cfg, engine, log)
    return engine


def few(cfg, engine):
    """(members or windows, seconds that their evaluation takes): SLICE_SECONDS long, or a chunk."""
    count, seconds = 1, 0.0
    while seconds < SLICE_SECONDS and count < cfg.CHUNK_SIZE:
        count = min(2 * count, cfg.CHUNK_SIZE)       # the first evaluation also makes the table of soft targets
        seconds = min(seconds_of(lambda: engine.evaluate(0, count)) for _ in range(2))
    return count, seconds


def seconds_of(run):
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def read_a_step(cfg):
    """What a step evaluates."""
    return f"{cfg.POPULATION_SIZE * cfg.LOCAL_STEPS:,} " + ("members" if cfg.PERTURB == "weights" else "windows")


def tell_pace(cfg, engine, log):
    """Tells how long a step takes on a CPU, as measured, and what to choose where that is long."""
    count, seconds = few(cfg, engine.local or engine)
    seconds *= cfg.POPULATION_SIZE * cfg.LOCAL_STEPS / count
    log(f"a step of {read_a_step(cfg)} takes about " + (
        f"{seconds:.2g} s here" if seconds < SLOW_STEP else
        f"{seconds / 60:,.0f} min here: --preset laptop, a GPU or a smaller "
        f"{'LOCAL_STEPS' if cfg.LOCAL_STEPS > 1 else 'POPULATION_SIZE'} is faster"))
    if "vnni" not in engine.name and cfg.SIMD == "auto":
        log("this processor has no VNNI instructions: int8 products take two to three times as long")


@contextlib.contextmanager
def opened_objective(cfg, path, data, processes=None, steps=None):
    """The Objective of the file `path`, None without one. processes: that judge; steps: of the run, if known. Raises
    ObjectiveError, also where the file is not that of OBJECTIVE: of another node, or changed since the run began."""
    if not path:
        yield None
        return
    from tools import objective
    advice = "the file of --objective must be on the disk of this machine"
    with explained(objective.WrongFile, path, advice):
        if cfg.OBJECTIVE not in ("", sha256_of(path)):
            raise objective.WrongFile(f"{path} is not the file with which this run began: copy that one here, or "
                                           "undo what has changed")
    held_out = data_files.open_tokens(cfg, cfg.VAL_FILE) if os.path.exists(cfg.VAL_FILE) else None
    with contextlib.closing(objective.Objective(cfg, path, data.decoding, data.tokens, held_out, processes,
                                                steps)) as opened:
        yield opened


def try_objective(cfg, path):
    """Raises an EggError for a file of --objective with which no run can begin, before anything is made."""
    with opened_objective(cfg, path, open_data(cfg), 1) as judge:
        judge.try_out()


def work(cfg, host, port, device, threads=None, console=None, access=auth.Access(), name=None,
         objective=None):
    """The command `egg.py worker`: opens the data, makes the engine, serves the coordinator at host:port to the end
    of its run. access, name: see egg_net.run_worker. objective: the file of --objective."""
    console = console or Console()
    check_address(host, port)
    data = open_data(cfg, console)
    print_references(cfg, data, console)
    engine = start_engine(cfg, data, device, threads, console.line)
    # a ban shall not hit the other workers of this host
    name = name or f"{socket.gethostname()}/{device}" + f"-{os.getpid()}" * (device == "cpu")
    try:
        with opened_objective(cfg, objective, data) as judge:
            egg_net.run_worker(cfg, host, port, engine, *data, console=console, access=access, name=name,
                               objective=judge)
    finally:
        console.clear()                              # a prompt, or an error, begins a line


# --- the worker processes ---------------------------------------------------------------------------------------------

def _worker_process(device, cfg, port, threads, first, access, steps, objective, pipe):
    """The main function of a worker process. Reports (kind, value) go through `pipe`: ("log", line), ("ready", name of
    the engine), ("error", line). When the coordinator has closed, it ends."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)       # the parent gets these too, and ends this process
    ready = False
    try:
        data = open_data(cfg)
        engine = start_engine(cfg, data, device, threads, lambda line: pipe.send(("log", line)))
        with opened_objective(cfg, objective, data, steps=steps) as judge:
            pipe.send(("ready", engine.name))
            ready = True
            console = Console(quiet=True)
            egg_net.run_worker(cfg, "127.0.0.1", port, engine, *data, retry=False, validate_first=first, access=access,
                               name=device, console=console, objective=judge)
    except BrokenPipeError:
        pass                                        # the parent has ended
    except Exception as error:
        if ready and not isinstance(error, EggError):
            raise                                   # it may be chance: the parent starts another one
        kind = "" if isinstance(error, EggError) else f"the worker on {device}: {type(error).__name__}: "
        with contextlib.suppress(BrokenPipeError):
            pipe.send(("error", kind + " ".join(str(error).split())))


class Child:
    """A worker process, seen from the parent. ready: the name of its engine, None before it serves."""

    def __init__(self, device, *arguments):
        self.device, self._arguments = device, arguments
        self.deaths = 0
        self.start()

    def start(self):
        self.ready = None
        self.started = time.monotonic()
        self.process, self.pipe = hardware.start_process(_worker_process, self.device, *self._arguments)

    def reports(self):
        """Yields the (kind, value) that arrived since the last call."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                yield self.pipe.recv()


class Training:
    """The worker processes of one `train`."""

    def __init__(self, coordinator, devices, threads, objective):
        self.coordinator = coordinator
        self.console = console = coordinator.console
        self.started = time.monotonic()
        self.status = "the workers ..."
        console.line(f"starting: {len(devices)} worker{'s' * (len(devices) > 1)} on {', '.join(devices)} ...")
        self.children = [Child(device, coordinator.cfg, coordinator.address[1], threads, i == 0, coordinator.access,
                               coordinator.steps, objective)
                         for i, device in enumerate(devices)]

    def watch(self):
        """Handles the reports of the workers and restarts dead workers. Raises TrainError if that does not help."""
        for child in self.children:
            for kind, value in child.reports():
                self._handle(child, kind, value)
            if child.process.exitcode is not None:
                self._restart(child)
        seconds = time.monotonic() - self.started
        waited = f"{seconds:.0f} s"
        if not any(child.ready for child in self.children):
            self.console.progress(f"starting: {self.status} {waited}")
        elif not self.coordinator.progress.seconds:
            done = len(self.coordinator.dispatcher.work.done)
            self.console.progress(f"the first step: {done} of {self.coordinator.cfg.N_CHUNKS} chunks, {waited} since "
                                  "the start")

    def _handle(self, child, kind, value):
        match kind:
            case "error":
                raise TrainError(value)
            case "log":
                self.status = value
                self.console.line(f"starting: {value} {COMPILING}" if value.endswith("...") else value)
            case "ready":
                child.ready = value
                self.console.line(f"worker: {value}, ready after {time.monotonic() - child.started:.1f} s")

    def _restart(self, child):
        code = child.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        child.deaths += 1
        if child.deaths > RESTARTS or code > 0 and not child.ready:      # what fails at the start would do so again
            raise TrainError(f"the worker on {child.device} {how}{f', {child.deaths} times' * (child.deaths > 1)}; "
                             f"the {self.coordinator.run.step} completed steps are kept")
        self.console.line(f"the worker on {child.device} {how}: starting it again")
        child.pipe.close()
        child.start()

    def close(self):
        self.coordinator.dismiss()
        for child in self.children:                  # all at once, before waiting for each
            child.pipe.close()
        for child in self.children:
            child.process.join(LEAVE_SECONDS if child.ready else 0)      # one that compiles would not notice
            if child.process.is_alive():
                child.process.kill()
                child.process.join()


def train(cfg, threads, console, objective=None, steps=None, minutes=None, **options):
    """Trains on this machine until the run has `steps` completed steps, `minutes` have passed since the first chunk, or
    Ctrl-C; prints a summary and returns its Progress. threads: cores of a CPU worker, None for all; objective: the file
    of --objective; options: see egg_net.opened_coordinator. Raises DataError, EngineError, HistoryError, NetError,
    ObjectiveError, TrainError; the completed steps are kept in every case."""
    devices = hardware.devices(cfg)
    data = open_data(cfg, console)
    if data.validation is None and (options.get("target") or options.get("patience")):
        raise UsageError("--target and --patience need validations: name a VAL_FILE, with VALIDATE_EVERY above 0")
    access = auth.Access(os.urandom(32))             # a random secret keeps other processes of this machine out
    with (stop_signals() as stopped,
          egg_net.opened_coordinator(cfg, "127.0.0.1", 0, console, steps=steps, minutes=minutes, peers=False,
                                     access=access, **options) as coordinator):
        run, events = coordinator.run, coordinator.events
        references = print_references(cfg, data, console, events.emit)
        coordinator.progress.unigram = references.get("unigram", 0.0)
        if coordinator.finished:
            console.line(f"the run has its {run.step} steps already: raise --steps to continue")
            return coordinator.progress
        ends = ([f"until step {steps:,}"] if steps else []) + ([f"for {minutes:g} min"] if minutes else [])
        console.line(f"training {parameters.n_weights(cfg):,} weights, {read_a_step(cfg)} a step, "
                     f"from step {run.step:,} {' or '.join(ends) or 'until Ctrl-C'}")
        console.line(f"kept in {run.directory}{run.beside}" if run.directory else
                     "nothing of this run is kept: --save-dir DIR keeps it")
        if coordinator.page:
            console.line(coordinator.page.invitation())
        with contextlib.closing(Training(coordinator, devices, threads, objective)) as training:
            while not coordinator.finished and not stopped:
                coordinator.poll()
                training.watch()
            if stopped:
                console.line("stopping (once more to stop at once) ...")
            coordinator.drain(FINAL_SECONDS)
            coordinator.dismiss()
            _sum_up(coordinator, references)
            coordinator.finish(0)
            return coordinator.progress


def _sum_up(coordinator, references):
    """Prints a summary."""
    console, done = coordinator.console, coordinator.progress
    console.line(done.summary())
    if coordinator.run.step == done.first_step and coordinator.minutes and coordinator.finished:
        console.line(f"no step was done in {coordinator.minutes:g} min: give more time, or see above what a step takes")
    if len(done.validations) > 1:                    # [(step, figure, unit)]
        models, (_, after, unit) = {k: x for k, x in references.items() if k != "uniform"}, done.validations[-1]
        console.line(f"validation: {done.validations[0][1]:.3f} before, {after:.3f} {unit} after ({_listed(models)})")
        if coordinator.run.step * coordinator.cfg.LOCAL_STEPS < FEW_STEPS:
            console.line(f"{coordinator.run.step} steps are too few to judge")
    if done.rewards:
        console.line(f"reward: {done.rewards[0][1]:.4f} before, {done.rewards[-1][1]:.4f} after, on held-out prompts")


def _listed(references):
    return ", ".join(f"{name} {figure:.2f}" for name, figure in references.items())
