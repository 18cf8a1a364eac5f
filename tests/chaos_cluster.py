"""A cluster in which everything goes wrong."""

import os
import random
import subprocess
import sys
from contextlib import closing, suppress
from threading import Thread
from time import monotonic, sleep

import egg_config
import egg_net
from cluster import history, snapshots
from coordinators import HERE, Peer2, coordinator_process, free_port, result_frame, run_worker, whole
from fakes import Drifting, FakeEngine, Liar, changed, expected


class Chaos:
    """A cluster in which everything goes wrong that a seed decides: liars, drifting replicas, workers that leave in
    mid-frame, stop or say everything twice, and a coordinator that is killed."""

    def __init__(self, directory, seed, cfg, kills):
        self.directory = directory
        self.random = random.Random(seed)
        self.cfg = cfg
        self.kills = kills
        self.stop = False
        self.process, self.port = coordinator_process(directory, free_port(), cfg)
        self.collect()
        self.workers = [self.worker_process(i) for i in range(2)]
        self.start(FakeEngine(cfg, 0.007), "honest2")
        self.start(Drifting(cfg, after=self.random.randrange(5, 30), pause=0.002), "drifting")
        self.start(Liar(cfg, start=self.random.randrange(3, 20), pause=0.002), "liar")
        for i in range(3):
            dice = random.Random(seed * 10 + i)
            Thread(target=self.misbehave, args=(dice, f"rogue{i}"), daemon=True).start()

    def collect(self):
        """Reads what the coordinator prints, so that it never waits for us."""
        Thread(target=self.process.stdout.read, daemon=True).start()

    def worker_process(self, i):
        """An honest worker that can be killed."""
        program = (f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
                   f"import egg_config, coordinators, fakes\ncfg = egg_config.make(**{self.cfg.constants()!r})\n"
                   f"coordinators.run_worker({self.port}, fakes.FakeEngine(cfg, {0.001 * (1 + 3 * i)}), cfg, "
                   f"name='honest{i}', retry=True)")
        return subprocess.Popen([sys.executable, "-c", program], cwd=HERE, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    def start(self, engine, name):
        def serve():
            lives = 0
            while not self.stop:
                with suppress(egg_config.EggError):      # a banned one comes back, under another name
                    run_worker(self.port, engine, self.cfg, name=f"{name}.{lives}")
                lives += 1
                sleep(0.05)

        Thread(target=serve, daemon=True).start()

    def misbehave(self, dice, name):
        while not self.stop:
            with suppress(OSError, egg_config.EggError, egg_net.OldCoordinator):
                peer = Peer2(self.port, self.cfg, name=f"{name}.{dice.random()}")
                peer.ask(0, FakeEngine(self.cfg).digest())
                what, step = dice.randrange(4), peer.answer(1).step
                if what == 0:
                    peer.link.send(result_frame()[:dice.randrange(1, 40)])              # leaves in mid-frame
                elif what == 1:
                    peer.ask(200, os.urandom(32))                                       # wrong digest
                elif what == 2:
                    sleep(dice.random())                                           # paused
                else:
                    # not asked for, and thrice; of rogues that agree two would be believed
                    [peer.result(step, 32, loss=int(name[-1])) for _ in range(3)]
                peer.close()
            sleep(dice.random() * 0.1)

    def run(self, steps):
        """Until the run has `steps` steps: kills the coordinator and a worker now and then; returns how often."""
        started, kills, seen = monotonic(), 0, 0
        while True:
            sleep(self.random.uniform(0.05, 0.6) if kills < self.kills else 2)           # the last ones get somewhere
            self.process.kill()
            self.process.wait()
            kills += 1
            killed = self.random.randrange(len(self.workers))
            self.workers[killed].kill()
            self.workers[killed].wait()
            self.workers[killed] = self.worker_process(killed)
            with closing(history.open_run(self.cfg, self.directory)) as run:
                assert run.step >= seen, f"{seen} steps were there, {run.step} are left; {run.notices}"
                seen = run.step
            if seen >= steps and kills >= self.kills:
                break
            assert monotonic() - started < 60 + 5 * self.kills, f"{seen} steps after {kills} kills"
            self.process, _ = coordinator_process(self.directory, self.port, self.cfg)
            self.collect()
        self.stop = True
        return kills


OFTEN = dict(AUDIT_RATE=1.0, SNAPSHOT_EVERY=10)
CHAOS = changed(**OFTEN)


def chaos(directory, seed, steps, kills, cfg=CHAOS):
    """Runs Chaos until it has so many steps and kills, and compares every step with an undisturbed run: (steps, kills)
    done."""
    trouble = Chaos(directory, seed, cfg, kills)
    try:
        done = trouble.run(steps)
    finally:
        trouble.stop = True
        for process in trouble.process, *trouble.workers:
            process.kill()
            process.wait()
    with closing(history.open_run(cfg, directory)) as run:
        packed, digest = expected(run.step, cfg)
        assert whole(run) == packed[run.start.step:] and (not run.start.step or cfg.PERTURB == "units")
        engine = FakeEngine(cfg)
        if run.start.step:                       # with unit trials the history begins with a snapshot
            engine.load(snapshots.Shelf(cfg, run).state(run.start.step))
        history.replay(run, engine)
        assert engine.digest() == digest
        return run.step, done
