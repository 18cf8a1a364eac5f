"""The CPU engine: evaluation, update, validation and generation in numba, bit for bit as in the SPEC.

Work is parallel over antithetic pairs; a pair's activations stay in the caches of a core. The kernels are compiled
once on a machine and serve every configuration.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time

from llvmlite import binding
import numpy as np

import egg_config
from model import parameters, rewards, rules, soft_targets, steps
from engine import cpu_gru, cpu_transformer, cpu_votes, hardware, kernel_cache, simd
from engine.cpu_kernels import (NO_LOSSES, NO_NATS, ROW, TOGETHER, Draws, Model, Writing, constants,
                                nothing_kept, tables)
from engine.simd import PANEL, ROWS

AT_ONCE = 8                  # tokens that `generate` writes before it yields them
WORTH_A_THREAD = 100_000    # elementary operations, roughly 100 us: handing less to a thread costs more than it saves


def cut(n, size):
    """Parts (first, end) of 0..n - 1 with `size` numbers each; the last may have fewer."""
    return [(first, min(n, first + size)) for first in range(0, n, size)]


class ParallelJob:
    """The calls work(*part) for all parts. Other threads (a pool) begin with them at once, and the caller of `finish`
    takes part; the kernels leave the interpreter lock."""

    def __init__(self, pool, threads, parts, work):
        self._parts, self._work = enumerate(parts), work
        self._results = [None] * len(parts)
        self._helpers = [pool.submit(self._take) for _ in range(min(threads, len(parts)) - 1)]

    def _take(self):
        for number, part in self._parts:
            self._results[number] = self._work(*part)

    def finish(self):
        """The results of all calls."""
        try:
            self._take()
        finally:
            self.stop()
        return self._results

    def stop(self):
        """Waits for the calls that have begun and omits the others."""
        for _ in self._parts:
            pass
        for helper in self._helpers:
            if not helper.cancel():
                helper.result()


class CpuEngine:
    """The verbs of an engine on a State in this process's memory.

    tokens: the training data, uint8 or uint32 [n] (may be memory-mapped), or None where nothing is evaluated. threads:
    cores to use, default all. Raises ValueError (one line) for a product kind this process cannot use."""

    TEXTS_AT_ONCE = 256          # best number of texts per `write` while earlier texts are judged

    def __init__(self, cfg, tokens=None, threads=None):
        simd.use(cfg.SIMD)
        if threads is not None and not 1 <= threads <= hardware.cores():
            raise ValueError(f"{threads} threads: this machine allows 1 to {hardware.cores()}")
        self.cfg, self.tokens = cfg, tokens
        self.threads = threads or hardware.cores()
        self._pool = concurrent.futures.ThreadPoolExecutor(max(1, self.threads - 1))
        self.name = f"cpu {simd.KIND} x{self.threads}"
        self._begun = {}                                     # {(first, count): (pool, ParallelJob)}: evaluations
        self._draws = Draws(*(getattr(cfg, name) for name in Draws._fields))
        self._forward = cpu_gru if cfg.MODEL == "gru" else cpu_transformer
        self._units = self._unit_votes(cfg) if cfg.PERTURB == "units" else None
        # that of the updates that a chunk makes for itself, or None
        self.local = CpuEngine(cfg.changed(LOCAL_STEPS=1), tokens, threads) if cfg.LOCAL_STEPS > 1 else None
        self._tensors = parameters.tensors(cfg)
        self._followers = soft_targets.Tables(cfg, None if self.local else tokens)
        count = len(parameters.table(cfg))
        self._table = np.zeros((2 * count, cfg.N_LAYERS), ROW)
        packed = corrections = columns = 0
        for t in self._tensors:
            row = (t.seed_a, t.seed_b, t.overlay_a, t.overlay_b)
            for param, rows, cols in ((t.param, t.rows, t.cols), (count + t.param, t.cols, t.rows)):
                self._table[param, t.layer] = (t.weights, packed, corrections, columns, *row, rows, cols)
                if t.product if param < count else self._is_transposed(t):
                    padded = -(-cols // PANEL) * PANEL
                    packed, corrections = packed + rows * padded, corrections + padded
            columns += t.cols if self._is_by_token(t) else 0
        self._sizes = packed, corrections, columns
        self.load(parameters.initial_state(cfg))

    def load(self, state):
        """Takes over a State (copied)."""
        self._stop()
        packed, corrections, columns = self._sizes
        self._model = Model(
            **constants(self.cfg), weights=state.weights.copy(),
            columns=np.empty((columns, self.cfg.HIDDEN_DIM), np.int8), packed=np.zeros(packed, np.int8),
            correction=np.zeros(corrections, np.int32), overlay=state.overlay.copy(), table=self._table)
        self._moments = state.moments.copy()
        self.step, self.seed = state.step, state.seed
        for t in self._tensors:
            self._pack(t)

    def _spread(self, n, cost, kernel, *arguments):
        """The results of kernel(*arguments, first, end) on a part of 0..n - 1 for each thread, in parallel unless the
        whole costs less than handing a part over. cost: elementary operations of the whole."""
        work = functools.partial(kernel, *arguments)
        if cost < WORTH_A_THREAD:
            return [work(0, n)]
        return self._job(cut(n, -(-n // self.threads)), work).finish()

    def _job(self, parts, work):
        return ParallelJob(self._pool, self.threads, parts, work)

    def _at_once(self, count):
        """How many of `count` sequences a thread takes at once, an even number: members of whole pairs."""
        return 2 * min(TOGETHER, -(-count // (2 * self.threads)))

    def _unit_votes(self, cfg):
        return cpu_votes.UnitVotes(cfg, self.threads, self._job, self._spread)

    def _is_by_token(self, t):
        """Whether the Model has the columns of an array: credits of the head go through few of them."""
        return t.looked_up or self._units and t.name == "head"

    def _is_transposed(self, t):
        """Whether credits are multiplied by an array."""
        return self._units and t.hidden

    def _pack(self, t):
        """Derives the panels and columns of the Model from one array."""
        weights, row = self._model.weights[t.span], self._table[t.param, t.layer]
        if self._is_by_token(t):
            columns = self._model.columns[row["columns"]:][:t.cols]
            columns.view(np.int32)[:] = weights.view(np.int32).reshape(-1, t.cols).T
        if t.product:
            fill_panels(self._model, row, weights)
        if self._is_transposed(t):
            transposed = parameters.to_canonical(parameters.from_canonical(weights, t.cols).T)
            fill_panels(self._model, self._table[len(self._table) // 2 + t.param, t.layer], transposed)

    def state(self):
        """A copy of the State."""
        arrays = self._model.weights, self._moments, self._model.overlay
        return parameters.State(*(array.copy() for array in arrays), self.step, self.seed)

    def digest(self):
        """bytes [16]: model.parameters.Digest of the State."""
        digest = parameters.Digest(self.step, self.seed)
        for part in (self._model.weights, self._moments):
            words = part.ravel().view(np.uint64)
            for sums in self._spread(words.size, words.size, cpu_votes.word_sums, words, digest.number):
                digest.add(*map(int, sums))
            digest.number += words.size
        digest.update(self._model.overlay.data)
        return digest.digest()

    begin_update = None        # it begins nothing that needs the state after `update`: there is too little to gain

    def begin(self, first, count):
        """Begins with an evaluation of this step on the other threads. Two may be begun."""
        if (first, count) in self._begun or self.local:
            return
        if len(self._begun) > 1:
            self._stop(next(iter(self._begun)))
        cfg, step, seed = self.cfg, self.step, self.seed
        c, followers = self._model, self._followers.at_step(step)
        windows, pool = count // cfg.MEMBERS, self._units and self._units.pool()

        def read(a, b):
            number = first // cfg.MEMBERS + a
            part = soft_targets.windows(cfg, self.tokens, followers, step, seed, number, b - a)
            if pool:
                return self._units.read(c, pool, part, seed + number)
            losses = np.empty((b - a, 2 * cfg.SEQ_LEN), np.int64)
            self._forward.run_windows(c, losses, NO_NATS, part, cfg.STATE_TOKENS, cfg.SEQ_LEN,
                                      np.uint32(seed + number & 0xFFFFFFFF), 1, nothing_kept(c))
            return losses.reshape(-1, cfg.SEQ_LEN).sum(1)

        # windows for many pairs are cut in little more time than for a few
        each = self._units.together(windows) if pool else min(4 * TOGETHER, -(-count // (4 * self.threads)))
        self._begun[first, count] = pool, self._job(cut(windows, each), read)

    def _stop(self, *begun):
        """Ends evaluations that nobody will ask for, by default all; then no thread reads the weights."""
        for members in begun or list(self._begun):
            self._begun.pop(members)[1].stop()

    def evaluate(self, first, count):
        """int64 [count]: losses of members first.. (both even) of this step. With unit trials these are the windows of
        a chunk, and it is (bytes, int): the chunk's packed digits and its loss (SPEC 21)."""
        if self.local:
            return short_run(self, self.local, first, count)
        self.begin(first, count)
        pool, job = self._begun.pop((first, count))
        results = job.finish()
        return self._units.chunk(results, pool) if pool else np.concatenate(results)

    def rate(self, cooling=0):
        """float: the rate of this step; cooling: that of its bytes, or with LOCAL_STEPS that of those before."""
        if self.local:
            cooling = steps.known_cooling(self.cfg, self._model.overlay)
        return steps.learning_rate(self.cfg, self.step * self.cfg.LOCAL_STEPS, cooling)

    def vote(self, first, windows, advantages, counted, temperature):
        """bytes: the packed digits of a chunk of windows int32 [n, T + 1], from number `first` of this step on, at a
        temperature (SPEC 22): advantages int8 [n], counted bool [n, T], see rewards.text_windows."""
        cfg = rewards.text_reading(self.cfg, counted.shape[1], temperature)
        votes, c = self._unit_votes(cfg), self._model._replace(**constants(cfg))
        pool = votes.pool()

        def read(a, b):
            return votes.read(c, pool, windows[a:b], self.seed + first + a, advantages[a:b], counted[a:b])

        return votes.chunk(self._job(cut(len(windows), votes.together(len(windows))), read).finish(), pool)[0]

    def update(self, fitness):
        """Applies the update of this step and goes on to the next; number of weights changed. fitness: the bytes of
        the step (steps.join_digits)."""
        cfg, cooling = self.cfg, steps.cooling_of(self.cfg, fitness)
        changed = self.advance(self.rate(cooling), rules.step_votes(cfg, fitness) if self._units else
                               rules.unpacked_digits(fitness, cfg.N_PAIRS))
        if self.local:
            self._model.overlay[0] = cooling
        return changed

    def advance(self, rate, votes):
        """Moves the weights by their votes, int32 [CHUNK_DIGITS], or by the digits of pairs, int8, and goes on to the
        next step; number of weights changed."""
        self._stop()
        if not self._units:
            voting = np.flatnonzero(votes)
            seeds = (np.uint64(self.seed) + voting.astype(np.uint64)).astype(np.uint32)
            signs = votes[voting].astype(np.int32)
        changed = sum(self._move(t, rules.update_constants(self.cfg, rate, t),
                                 votes[t.span] if self._units else self._votes(t, seeds, signs))
                      for t in self._tensors)
        self.seed = steps.next_seed(self.seed, self.step, self.cfg.NOISE_REUSE)
        self.step += 1
        return changed

    def _votes(self, t, seeds, signs):
        """int32 [size], in canonical order: the votes of pairs on one array: uint32 seeds, int32 signs."""
        row = self._table[t.param, t.layer]
        if t.matrix:
            return parameters.to_canonical(self._matrix_votes(t, row, seeds, signs)[:t.rows, :t.cols])
        votes = np.empty(t.cols, np.int32)
        self._spread(t.cols, t.cols * seeds.size, cpu_votes.vector_votes, self._draws, row, seeds, signs, votes)
        return votes

    def _move(self, t, o, votes):
        """Moves one array by its votes int32 [size], in canonical order; number of weights changed. o: Optimizer."""
        cfg, weights, moments = self.cfg, self._model.weights[t.span], self._moments[t.span]
        directions = self._muon_directions(t, o, votes) if o.rule == rules.MUON else np.empty(0, np.float32)
        before = weights.copy()
        self._spread(t.size, 4 * t.size, cpu_votes.apply_votes, o, votes, directions, weights, moments)
        moved = weights != before
        if cfg.ADAPTIVE_NOISE_MODE:                          # the overlay rule of SPEC 9
            words = moved.view(np.uint32 if t.matrix else np.uint8).reshape(-1, t.cols)       # four rows in each
            of_rows = np.bitwise_or.reduce(words, 1).view(np.bool_)
            for at, its in [(t.overlay_a, words.any(0))] + [(t.overlay_b, of_rows)] * t.matrix:
                part = self._model.overlay[at:at + its.size]
                part[:] = np.clip(part + np.where(its, cfg.ADAPTIVE_NOISE_INC, -cfg.ADAPTIVE_NOISE_DEC), -127, 127)
        self._pack(t)
        return np.count_nonzero(moved)

    def _matrix_votes(self, t, row, seeds, signs):
        """int32 [rows padded, cols padded]: sum over pairs of sign * noise(A, col) * noise(B, row), as products over
        blocks of pairs."""
        votes = np.zeros((-(-t.rows // ROWS) * ROWS, -(-t.cols // PANEL) * PANEL), np.int32)
        for first in range(0, seeds.size, cpu_votes.BLOCK):
            block = seeds[first:first + cpu_votes.BLOCK]
            x = np.empty((votes.shape[0], 4 * -(-block.size // 4)), np.uint8)
            self._spread(votes.shape[0], x.size, cpu_votes.input_block, self._draws, row, block,
                         signs[first:first + cpu_votes.BLOCK], x)
            self._spread(votes.shape[1] // PANEL, x.size + votes.shape[1] * block.size + votes.size * block.size // 64,
                         cpu_votes.panel_votes, self._draws, row, block, x, votes)
        return votes

    def _muon_directions(self, t, o, votes):
        """float32 [size], in canonical order: the momentum after these votes, orthogonalised (see model.rules)."""
        a, b, c = rules.muon_coefficients(self.cfg)
        x = np.empty(t.size, np.float32)
        cpu_votes.muon_momenta(o, votes, self._moments[t.span], x)
        x = parameters.from_canonical(x, t.cols)
        x = np.ascontiguousarray(x.T) if t.rows > t.cols else x
        x /= cpu_votes.muon_norm(x.ravel())

        def product(left, right, gram, alpha, beta):
            out = np.empty((len(left), len(left) if gram else right.shape[1]), np.float32)
            self._spread(out.shape[1] // PANEL, left.shape[1] * out.size // 16, cpu_votes.muon_panels, left, right,
                         gram, alpha, beta, out)
            return out

        for _ in range(rules.MUON_ROUNDS):
            squares = product(x, x, True, a, a)
            x = product(product(squares, squares, False, b, c), x, False, a, np.float32(1))
        return parameters.to_canonical(x.T if t.rows > t.cols else x)

    def validate(self, windows):
        """(nats, tokens): summed cross-entropy of softmax(logits / SOFTMAX_EXP_SCALE), without noise, over int windows
        [n, SEQ_LEN + 1] (gru: of any length)."""
        windows = np.ascontiguousarray(windows, np.int32)
        nats = np.zeros(len(windows))

        def work(a, b):
            self._forward.run_windows(self._model, NO_LOSSES, nats[a:b], windows[a:b], 0, windows.shape[1] - 1,
                                      np.uint32(0), 0, nothing_kept(self._model))

        self._job(cut(len(windows), self._at_once(len(windows))), work).finish()
        return float(nats.sum()), windows.shape[0] * (windows.shape[1] - 1)

    def write(self, texts, lengths, seeds, s):
        """Fills texts int32 [sequences, room] behind their prompts, whose lengths (int64 [sequences]) are at least 1
        and below room. seeds uint32 [sequences]: of the draws (SPEC 10); s: rules.Sampling."""
        room = texts.shape[1]
        c = self._model._replace(**tables(self.cfg, room, True))

        def work(a, b):
            writing = self._writing(texts[a:b], lengths[a:b], seeds[a:b], s)
            self._forward.write_texts(c, writing, texts[a:b], 0, room, self._forward.memory(self.cfg, b - a, room),
                                      nothing_kept(c))

        self._job(cut(len(texts), self._at_once(len(texts))), work).finish()

    def _writing(self, texts, lengths, seeds, s):
        present = np.zeros((lengths.size, self.cfg.VOCAB_SIZE), np.uint8)
        for tokens, text, length in zip(present, texts, lengths):
            tokens[text[:length]] = 1
        return Writing(lengths, seeds, present, s.penalty, s.temp, np.int64(s.floor))

    def generate(self, prompt, count, seed, **settings):
        """Yields `count` int tokens that continue prompt (int [n >= 1]); settings: of rules.sampling_settings."""
        prompt, s = rules.checked_prompt(self.cfg, prompt), rules.sampling_settings(self.cfg, **settings)
        text, memory, total = prompt[None], np.zeros(0, np.int8), prompt.size + count
        writing = self._writing(text, np.array([prompt.size]), np.array([seed & 0xFFFFFFFF], np.uint32), s)
        for known in range(prompt.size, total, AT_ONCE):
            end = min(total, known + AT_ONCE)
            if end > text.size or not memory.size:           # room for twice as much
                shorter, text = text, np.zeros((1, min(total, 2 * end + 64)), np.int32)
                text[:, :shorter.size] = shorter
                smaller, memory = memory, self._forward.memory(self.cfg, 1, text.size)
                c = self._model._replace(**tables(self.cfg, text.size, True))
                if smaller.size:
                    memory[tuple(map(slice, smaller.shape))] = smaller
            start = known - 1 if known > prompt.size else 0
            self._forward.write_texts(c, writing, text, start, end, memory, nothing_kept(c))
            yield from text[0, known:end].tolist()


def fill_panels(c, row, weights):
    """Copies a matrix, int8 in canonical order, to its panels in the Model c, with each column's correction. row: of
    c.table."""
    rows, cols = row["rows"] // 4, row["cols"]
    words = np.zeros((rows, -(-cols // PANEL) * PANEL), np.int32)
    words[:, :cols] = weights.view(np.int32).reshape(rows, cols)
    panels = c.packed[row["packed"]:][:words.nbytes].view(np.int32).reshape(-1, rows, PANEL)
    panels[:] = words.reshape(rows, -1, PANEL).swapaxes(0, 1)
    sums = words.view(np.int8).sum(0, dtype=np.int32).reshape(-1, 4).sum(1, dtype=np.int32)
    c.correction[row["correction"]:][:sums.size] = -128 * sums


def short_run(engine, local, first, count):
    """(bytes, int): the packed digits and the loss of a chunk that makes updates for itself, on `local` (SPEC 23)."""
    cfg, before, loss = engine.cfg, engine.state(), 0
    local.load(dataclasses.replace(before, step=before.step * cfg.LOCAL_STEPS))
    for _ in range(cfg.LOCAL_STEPS):
        packed, its = local.evaluate(first, count)
        votes = rules.unpacked_digits(packed, cfg.CHUNK_DIGITS, cfg.DIGIT_VALUES).astype(np.int32)
        local.advance(steps.learning_rate(cfg, local.step, steps.known_cooling(cfg, before.overlay)), votes)
        loss += its
    after, digits, rate = local.state(), np.zeros(cfg.CHUNK_DIGITS, np.int8), engine.rate()
    for t in parameters.tensors(cfg):
        cpu_votes.moves(rules.update_constants(cfg, rate, t), before.weights[t.span], before.moments[t.span],
                        after.weights[t.span], after.moments[t.span], digits[t.span], 0, t.size)
    return steps.pack_digits(digits, cfg.DIGIT_VALUES), loss


STEP = ("evaluate", "update")                      # the verbs of a training step
VERBS = *STEP, "validate", "digest", "write"
APART = "update", "digest"                         # which a fork compiles meanwhile, with the votes of units


def warm_up(cfg, say=print, verbs=STEP):
    """Compiles the kernels of some verbs on a tiny model, or loads them from the cache. Returns the seconds that took.
    `say` takes a line if anything is compiled. If there is another core, a fork of this process compiles what has
    nothing in common with `evaluate`."""
    started, fork = time.monotonic(), None
    small = egg_config.make(HIDDEN_DIM=64, N_LAYERS=1, SEQ_LEN=8, VOCAB_SIZE=256, CHUNK_SIZE=2, POPULATION_SIZE=2,
                            SIMD=simd.use(cfg.SIMD), MODEL=cfg.MODEL, USE_MUON=cfg.USE_MUON, VOTE_LEVELS=7,
                            LOCAL_STEPS=min(2, cfg.LOCAL_STEPS),
                            PERTURB=cfg.PERTURB, ADAPTIVE_NOISE_MODE=0, STATE_TOKENS=min(1, cfg.STATE_TOKENS))
    step = b"\1".ljust(small.STEP_BYTES, b"\0")
    arguments = dict(evaluate=(0, 2), update=(step,), validate=(np.zeros((1, 9), np.int32),), digest=(),
                     write=(np.ones((2, 4), np.int32), np.ones(2, np.int64), np.zeros(2, np.uint32),
                            rules.sampling_settings(small)))
    verbs = [verb for verb in VERBS if verb in verbs]
    apart = [verb for verb in verbs if verb in APART]
    ready = kernel_cache.directory() / f"ready-{kernel_cache.key(vars(small), verbs, binding.get_host_cpu_name())}"

    def use(some):
        # Ctrl-C ends what this thread compiles; it would wait for others
        engine = CpuEngine(small, np.arange(64, dtype=np.uint8) % 7, threads=1)
        for verb in some:
            getattr(engine, verb)(*arguments[verb])
        return engine

    def work_apart():
        engine = use(apart)
        if engine._units:
            engine._units.vote_on_nothing(engine._model)

    with contextlib.nullcontext() if ready.exists() else kernel_cache.alone(f"cpu-{cfg.MODEL}-{cfg.PERTURB}"):
        if not ready.exists():                               # who waited finds it
            say(f"compiling the CPU engine ({simd.KIND}) ...")
            if hardware.cores() > 1 and apart != verbs:
                fork = kernel_cache.forked(work_apart)
        use([verb for verb in verbs if verb not in apart])
        if fork:
            os.waitpid(fork, 0)
        use(apart)
        ready.touch()
    return time.monotonic() - started
