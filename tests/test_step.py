"""The chunks of a step: leases, copies, audits, votes, errors, bans."""

import os
import random
import re
from contextlib import closing, suppress
from time import monotonic

import numpy as np
from hypothesis import given, settings
from hypothesis.strategies import integers
from pytest import mark, raises

import egg_net
from cluster import admission, auth, dispatch, status, wire
from cluster.admission import BANNED_FILE, Bans
from cluster.dispatch import PROBATION
from cluster.step import Author, Step
from cluster.wire import JOB_RESPONSE, REBUILD
from coordinators import Peer, Peer2, Server, cluster, filled, kept, named, refused, run_worker, turned_away, until
from fakes import (BAD, CFG, Drifting, FakeEngine, GOOD, GOOD_STEP, Liar, SECRET, UNITS, changed,
                   expected)
from model import integer_tables, steps
from pages import EVERYBODY, state_of
from run_logs import events, of_kind


class Worker:
    """One that can be in sets."""

    def __init__(self, name):
        self.author = Author(name, name)


A, B, C, D = map(Worker, "abcd")


def gives(step, worker, chunk, packed=GOOD):
    """The names of those who have erred, by this result of a chunk."""
    return "".join(sorted(author.name for author in step.result(worker, chunk, packed, 5)))


def with_audits(chunks, cfg=CFG):
    """A Step of which these chunks are audited."""
    step = Step(cfg)
    assert all(map(step.audit, chunks))
    return step


def disputed(times=1):
    """A Step of which A and B have given different results for chunk 0, so many times."""
    step = with_audits([0])
    step.authors = {A.author, B.author}
    for _ in range(times):
        assert gives(step, A, 0) == gives(step, B, 0, BAD) == ""
    return step


# --- one step ---------------------------------------------------------------------------------------------------------

def test_an_audited_chunk_needs_two_authors_and_a_third_decides():
    step = with_audits([1])
    step.authors = {A.author, B.author, C.author}
    assert [step.take(A, 0) for _ in range(5)] == [0, 1, 2, 3, None] and step.take(B, 0) == 1
    assert not any(gives(step, A, chunk) for chunk in range(4)) and {*step.done} == {0, 2, 3}
    assert gives(step, B, 1, BAD) == "" and 1 not in step.done
    assert step.dispute(1) == [A.author, B.author] and step.dispute(1) is None
    assert [step.take(worker, 1) for worker in (A, B, C)] == [None, None, 1]
    assert gives(step, C, 1) == "b" and step.complete and step.fitness() == GOOD_STEP
    step.withdraw(B.author)
    assert gives(step, D, 1, BAD) == "d" and step.complete


def test_a_tie_is_evaluated_again_by_the_same_two_and_who_contradicts_itself_has_erred():
    step = disputed()
    assert step.take(A, 0) == 0
    step.give_back(A, 0)
    assert 0 in [step.take(B, 0) for _ in range(4)]
    assert gives(step, A, 0) == ""
    assert gives(step, B, 0) == "b" and step.done[0].packed == GOOD


def test_who_repeat_their_results_wait_for_a_third_and_who_is_left_alone_is_believed():
    alone = disputed(2)
    alone.authors, alone.alone = {A.author}, True
    alone.settle()
    assert alone.done[0].packed == GOOD
    step = disputed(2)
    assert step.take(A, 0) == step.take(B, 0) - 1 == 1              # the others go on meanwhile
    assert step.take(C, 0) == 0 and gives(step, C, 0) == "b"


def test_a_worker_is_handed_first_what_it_delivered_in_the_step_before():
    step = Step(CFG)
    assert [step.take(A, 0, {2}) for _ in range(2)] == [2, 0]
    assert [step.take(B, 0, {2}) for _ in range(3)] == [1, 3, None]


def test_a_late_result_that_differs_opens_the_chunk_again():
    step = Step(CFG)
    step.authors = {A.author, B.author, C.author}
    assert gives(step, A, 0, BAD) == "" and 0 in step.done
    assert gives(step, B, 0) == "" and 0 not in step.done and step.take(C, 0) == 0
    assert gives(step, C, 0) == "a" and step.done[0] == (GOOD, 5)


def test_an_audit_waits_for_nobody_and_a_withdrawn_result_is_done_again():
    step = with_audits([0])
    assert gives(step, A, 0) == "" and not step.done
    step.alone = True
    step.settle()
    assert {*step.done} == {0}
    step.alone = False
    for worker, chunk in (B, 1), (A, 2), (B, 2):
        gives(step, worker, chunk)
    step.withdraw(A.author)
    assert {*step.done} == {1, 2}
    assert sorted(iter(lambda: step.take(C, 0), None)) == [0, 3]


def test_copies_go_to_idle_workers_and_the_first_result_counts():
    step = Step(CFG)
    assert [step.take(A, t) for t in range(4)] == [0, 1, 2, 3]
    gives(step, A, 2)
    late = step.late(3.0, 1.0)
    assert late == [0, 1] and step.late(1.2, 1.0) == []
    assert step.copy(A, 3.0, late) is None and step.copy(B, 3.0, late) == 0 and late == [1]
    gives(step, B, 0)
    step.give_back(A, 0)
    assert step.take(C, 9) is None


@settings(max_examples=300)
@given(integers(0, 1 << 64))
def test_one_broken_worker_has_no_result_kept_and_no_other_accused(seed):
    """Two or three good workers and a broken one, on one step of which every chunk is audited, in any order."""
    dice, step = random.Random(seed), with_audits(range(CFG.N_CHUNKS))
    broken, *good = workers = [Worker(f"w{k}") for k in range(dice.randint(3, 4))]
    step.authors = {worker.author for worker in workers}
    erred, leases = set(), []
    for turn in range(60):
        who, act = dice.choice(workers), dice.choice(["take", "copy", "result", "result", "back", "withdraw"])
        if act in ("take", "copy"):
            chunk = step.take(who, turn) if act == "take" else step.copy(who, turn, step.late(turn, 0.1))
            leases += [(who, chunk)] * (chunk is not None)
        elif act == "withdraw" and erred:
            step.withdraw(dice.choice(sorted(erred)))
        elif leases:
            who, chunk = leases.pop(dice.randrange(len(leases)))
            if act == "back":
                step.give_back(who, chunk)
            else:
                erred |= step.result(who, chunk, BAD if who is broken and dice.random() < 0.5 else GOOD, 5)
    for who, chunk in leases:                                    # every lease ends
        step.give_back(who, chunk)
    for who in 100 * good:                                       # and the good ones can end it, whatever happened
        if not step.complete and (chunk := step.take(who, 0)) is not None:
            erred |= step.result(who, chunk, GOOD, 5)
    assert step.complete and all(packed == GOOD for packed, _ in step.done.values())
    assert erred <= {broken.author}


# --- leases -----------------------------------------------------------------------------------------------------------

def test_leases_follow_the_time_that_chunks_take(monkeypatch, server):
    monkeypatch.setattr(dispatch, "LEAST_LEASE", 1.0)
    quick, stuck = Peer2(server), Peer2(server)
    quick.works(0, 2)
    assert stuck.chunk(0) == 64 and quick.chunk(0) == 96
    quick.result(0, 96)
    # a copy, well before the lease is over
    assert quick.chunk(0) == 64 and "handed out again" not in server.said
    until(lambda: re.search(r"has not delivered for 1(\.0\d*)? s, its chunk 2 is handed out again", server.said))
    quick.result(0, 64)
    server.reaches(1)
    stuck.result(0, 64, BAD)                                     # too late: ignored
    stuck.ask(0)
    assert stuck.answer().step == 1 and server.run.fitness(0) == GOOD_STEP


def test_only_chunks_that_were_handed_out_are_taken(server):
    peer, done = Peer2(server), server.dispatcher.work.done
    assert peer.chunk(0) == 0
    peer.result(0, 64)
    with refused("RESULT for chunk 2, which it does not owe"):
        peer.answer()
    old = Peer(server)
    for position in range(0, 128, 32):                       # of protocol 1, before it has asked for anything
        old.result(0, position)
    first = old.chunk(0)                                     # it stays
    worker, = server.dispatcher.workers
    assert not done and worker.results == 0
    old.result(0, first)
    until(lambda: [*done] == [first // 32] and worker.results == 1)


@mark.parametrize("audited", [0.0, 1.0])
def test_six_holders_that_only_beat_do_not_stop_eight_chunks(tmp_path, monkeypatch, audited):
    """Audited chunks wait for the holders until their leases end."""
    cfg = changed(POPULATION_SIZE=32 * 8, STRAGGLER_TIMEOUT=0.8, VALIDATE_EVERY=0, AUDIT_RATE=audited)
    monkeypatch.setattr(dispatch, "LEAST_LEASE", 0.2)
    monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", 0.5)
    with Server(tmp_path, cfg) as server:
        *holders, honest = named(server, *"abcdef", "honest")
        for worker in *holders, honest:
            worker.ask(0)

        def three_steps_done():
            """Holders deliver nothing, and ask for a chunk of every step and for a second one."""
            for worker in *holders, *[honest] * 12:
                worker.send(wire.HEARTBEAT)
                with suppress(TimeoutError):
                    answer = worker.answer(0.002)
                    if worker is honest and not answer.packed:
                        honest.result(answer.step, answer.first)
                    worker.ask(answer.step)
            return server.run.step >= 3

        until(three_steps_done, 12)


def test_who_is_inside_a_long_chunk_is_at_work(tmp_path, monkeypatch):
    """Whoever is quick is not alone meanwhile, so that its audits wait."""
    monkeypatch.setattr(dispatch, "ACTIVE_SECONDS", 0.1)
    monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", 0.1)
    with Server(tmp_path, changed(AUDIT_RATE=1.0)) as server:
        thinks, quick = named(server, "thinks", "quick")
        assert thinks.chunk(0) == 0                              # and says nothing
        quick.works(0, 3, packed=BAD)
        until(lambda began=monotonic(): quick.send(wire.HEARTBEAT) or monotonic() > began + 0.5)
        assert server.worker("quick").results == 3 and not server.dispatcher.work.done
        thinks.result(0, 0)
        thinks.works(0, 2)
        server.says("disagree about chunk")


@mark.parametrize("beats", [False, True])
def test_while_no_time_is_known_a_chunk_takes_as_long_as_its_worker_gives_signs_of_life(tmp_path, beats):
    with Server(tmp_path, changed(STRAGGLER_TIMEOUT=0.4)) as server:
        slow, other = named(server, "slow", "other")         # one that is alone may take its time
        slow.chunk(0)
        other.chunk(0)
        until(lambda began=monotonic(): beats and slow.send(wire.HEARTBEAT) or monotonic() > began + 1)
        assert ("worker slow (127.0.0.1" in "".join(re.findall(".* has not delivered .*", server.said))) != beats


@mark.parametrize("local", [1, 2])
def test_rates_fall_before_a_planned_end(tmp_path, monkeypatch, local):
    """As a byte of every step says, with LOCAL_STEPS for the next one; those of a run that goes on fall from where it
    does so."""
    monkeypatch.undo()
    cfg = UNITS.changed(LR_SCHEDULE=((0, 1.0),), LOCAL_STEPS=local, VOTE_LEVELS=7)
    for begun, last in (0, 40), (40, 60):
        cluster(tmp_path, [FakeEngine(cfg)], last, cfg, save=True)
        done = [(step + (local > 1) - begun) / (last - begun) for step in range(begun, last)]
        levels = [max(0, min(19, int((share - 0.3) / 0.7 * 20))) for share in done]
        rates = [event["learning_rate"] for event in of_kind("step", events(tmp_path))][begun:]
        assert rates == [1 - level / 20 for level in levels]
        assert kept(tmp_path, cfg)[-1][-1] == levels[-1] > 17
    assert [steps.cooling_at(share) for share in (0, 0.3, 0.65, 1.0, 2.0)] == [0, 0, 10, 19, 19]
    assert steps.cooling_of(CFG, b"\5") == 0                # with noise on weights it is a digit


# --- errors and bans --------------------------------------------------------------------------------------------------

class ErrsOnce(Liar):
    """Its chunks of step 20 are wrong, once each."""

    def evaluate(self, first, count):
        self.start = 20 if self.step == 20 and (20, first, count) not in self.evaluated else 99
        return super().evaluate(first, count)


def test_two_workers_survive_a_wrong_digit_once(tmp_path):
    cfg = UNITS.changed(AUDIT_RATE=1.0)
    server = cluster(tmp_path, [FakeEngine(cfg, 0.001), ErrsOnce(cfg, pause=0.001)], 24, cfg, save=True)
    assert "they evaluate it again" in server.said and "worker w1 has erred, 1 of 3 times" in server.said
    assert "w0 has erred" not in server.said and kept(tmp_path, cfg) == expected(24, cfg)[0]


def test_who_computes_wrongly_is_found_named_and_out_at_its_third_error(tmp_path):
    cfg = UNITS.changed(AUDIT_RATE=1.0)
    honest, *others = [FakeEngine(cfg, 0.002) for _ in range(3)]
    server = cluster(tmp_path, [honest, Liar(cfg, 2, pause=0.001), *others], 20, cfg, save=True)
    for count in 1, 2:
        assert f"worker w1 has erred, {count} of 3 times: its result for chunk" in server.said
    assert re.search(r"^banned w1: its result for chunk \d of step \d+ is not that of others", server.said, re.M)
    assert server.said.count("banned w") == 1 and "w0 has erred" not in server.said
    assert kept(tmp_path, cfg) == expected(20, cfg)[0]
    assert (tmp_path / BANNED_FILE).read_text().startswith("w1\tits result")


def test_the_first_chunks_of_a_newcomer_are_evaluated_by_another_too(tmp_path):
    """Without audits: who is wrong from its first chunk on changes no step, and comes back under no new name."""
    engines = [FakeEngine(UNITS, 0.002), Liar(UNITS, pause=0.001), FakeEngine(UNITS, 0.002)]
    server = cluster(tmp_path, engines, PROBATION, UNITS, save=True, probation=PROBATION)
    assert "w1 has erred" in server.said and kept(tmp_path, UNITS) == expected(PROBATION, UNITS)[0]


def test_a_withdrawn_result_is_not_in_the_sums():
    """Results come, differ, count no more and are withdrawn, in any order."""
    rng, step, workers = random.Random(5), with_audits((0, 1), UNITS), (A, B, C, D)
    answers = [[steps.pack_digits(bytes(rng.choices((0, 1, 255), k=UNITS.CHUNK_DIGITS))) for _ in range(2)]
               for _ in range(UNITS.N_CHUNKS)]
    step.authors, seen = frozenset(worker.author for worker in workers), set()
    for turn in range(300):
        worker, chunk = rng.choice(workers), rng.randrange(UNITS.N_CHUNKS)
        if turn % 3:
            step.result(worker, chunk, answers[chunk][rng.random() < 0.4], 0)
        else:
            step.withdraw(worker.author)
        if step.complete:
            done = [step.done[chunk].packed for chunk in range(UNITS.N_CHUNKS)]
            seen.add(step.fitness(3))
            assert step.fitness(3) == steps.join_digits(UNITS, done, 3)
    assert len(seen) > 2


def test_a_ban_outlasts_the_coordinator_until_its_line_is_removed(tmp_path):
    reason = "it said that 2 + 2 = 5"
    for turn in range(3):
        with Server(tmp_path, save=True) as server:
            if turn == 0:
                peer = Peer2(server, name="w1")
                peer.chunk(0)
                server.calls.put(lambda: [server._blame(server.author(), reason, again=True) for _ in range(3)])
                with refused("banned: it said that 2 [+] 2 = 5"):
                    peer.answer()
            if turn < 2:
                turned_away("banned: it said that .*; to let w1 in again, remove its line", server, name="w1")
                Peer2(server, name="w2")
                assert (f"banned: w1: {reason}\nto lift a ban remove its line from {tmp_path}"
                        in status.describe_status(server.fetched()))
            if turn == 1:
                (tmp_path / BANNED_FILE).write_text("")          # no restart is needed
            if turn:
                Peer2(server, name="w1")


def test_bans_hold_also_where_the_file_cannot_be_written_and_nobody_comes_in_where_it_cannot_be_read(tmp_path):
    bans = Bans(tmp_path / "gone")
    bans.add("w1", "it lied")
    assert bans.all() == {"w1": "it lied"}
    file = tmp_path / BANNED_FILE
    file.write_bytes(b"gpu9\n\n\xff w\twhy\twith a tab\nw2\ttorn")
    bans = Bans(tmp_path)
    assert bans.all() == {"gpu9": "by hand", "\ufffd w": "why\twith a tab", "w2": "torn"} and bans.message("w3") is None
    os.truncate(file, admission.MOST_BANNED + 1)
    with raises(admission.Refused, match="nobody is let in while .* cannot be read: File too large") as told:
        bans.message("w3")
    assert told.value.code == wire.FULL                          # it may come again


def test_a_list_of_bans_that_cannot_be_read_is_a_warning_and_ends_no_run(tmp_path):
    """Neither the page nor who asks for the status: a directory, a link, too large a file."""
    file = tmp_path / BANNED_FILE
    for make in file.mkdir, lambda: file.symlink_to("elsewhere"), lambda: file.write_bytes(b"x" * (1 << 20) + b"y"):
        with Server(tmp_path, save=True, http=EVERYBODY) as server:
            peer = Peer2(server, name="early")
            make()
            server.says("banned.txt: File too large" if file.is_file() else "banned.txt: not a regular file")
            with raises(TimeoutError, match="nobody is let in while"):
                Peer2(server, name="late")
            assert server.fetched()["banned"] == {} and peer.chunk(0) == 0
            until(lambda: state_of(server)["workers"])
            assert server.said.count(": nobody is let in until it can be read") == 1
        file.rmdir() if file.is_dir() else file.unlink()


def test_of_the_errors_of_a_name_in_a_step_one_counts(tmp_path):
    """Whichever process makes them, unless it repeats one after it has rebuilt."""
    with Server(tmp_path, save=True) as server:
        one, other = (Author("w1", voter) for voter in "ab")

        def erred(author, **how):
            server.calls.put(lambda: server._blame(author, "it lied", **how))
            server.status()
            return server.said.count("worker w1 has erred")

        assert (erred(one), erred(other), erred(one, again=True, counts=False)) == (1, 1, 1)
        assert erred(other, again=True) == 2
        assert "worker w1 has erred, 2 of 3 times: it lied" in server.said


def test_a_wrong_peer_of_version_1_does_not_ban_all_of_them(tmp_path):
    with Server(tmp_path, save=True) as server:
        wrong = Peer(server)
        wrong.chunk(0)
        server.calls.put(lambda: [server._blame(server.author(), "it lied", again=True) for _ in range(3)])
        assert wrong.closed()
        assert Peer(server).chunk(0) == 0
    assert not os.path.exists(tmp_path / BANNED_FILE)


def test_audits_do_not_hold_up_a_lonely_worker_for_long(tmp_path, monkeypatch):
    for steps, patience in (4, 3600.0), (8, 0.5):                # when the run goes on, another might come back
        monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", patience)
        began = monotonic()
        cluster(tmp_path, [FakeEngine()], steps, changed(AUDIT_RATE=1.0), save=True)
    assert monotonic() - began > 0.5


# --- states -----------------------------------------------------------------------------------------------------------

def test_a_replica_that_drifted_rebuilds_and_its_results_are_refused(tmp_path):
    """It delivers nothing of its wrong state before the others have stated theirs: a worker that is alone in a step is
    believed."""
    (packed, digest), others = expected(9), [FakeEngine(pause=0.002) for _ in range(2)]

    class Late(Drifting):
        def evaluate(self, *members):
            if self.step >= self.after:
                until(lambda: all(other.loads or other.evaluated[-1][0] >= self.after
                                  for other in others))
            return super().evaluate(*members)

    late = Late(pause=0.001)
    server = cluster(tmp_path, [others[0], late, others[1]], 9, save=True)
    assert "its state at step 3 is not that of others" in server.said
    # one of two that differ cannot know that it is right
    assert late.loads >= 1 and sum(other.loads for other in others) <= 1
    assert {engine.digest() for engine in (late, *others)} == {digest} and kept(tmp_path) == packed
    assert "w1 has erred, 1 of 3" in server.said and "2 of 3" not in server.said


def test_a_step_does_not_end_while_states_differ_and_nobody_has_decided(tmp_path):
    server = Server(tmp_path)                                    # nobody drives it
    coordinator = server.coordinator
    with closing(server.run), closing(coordinator):
        coordinator.progress.chunk_handed_out()                  # as the first result does
        votes = coordinator.states.votes[0] = {b"right": {A.author}, b"wrong": {B.author}}
        for chunk in range(CFG.N_CHUNKS):
            gives(coordinator.dispatcher.work, A, chunk)
        for step in 0, 1:
            coordinator._complete_step()
            assert coordinator.run.step == step
            votes[b"right"].add(C.author)


def test_when_two_hold_different_states_both_rebuild_and_a_third_decides(server):
    a, b = named(server, *"ab")
    a.ask(0, b"a" * 16)
    a.delivers(0)
    until(lambda: server.dispatcher.work.done)
    states = (b, b"b" * 16), (a, b"a" * 16)
    for peer, digest in states:
        peer.ask(0, digest)
        assert peer.next(REBUILD, JOB_RESPONSE) == (REBUILD, bytes(8))
    # what was computed in doubt is done again
    assert not server.dispatcher.work.done
    for peer, digest in states:
        peer.ask(0, digest)
        assert peer.silent()
    assert "start another worker, which decides" in server.said
    c = Peer2(server, name="c")
    c.ask(0, b"b" * 16)                                                     # b is waiting for just this
    assert c.answer() and b.answer()
    with suppress(egg_net.NetError):
        for _ in range(3):
            a.next(REBUILD)
            a.ask(0, b"a" * 16)
    server.says("banned a: its state at step 0 is not that of others")


def test_two_processes_with_one_key_are_compared_and_a_flipped_bit_is_one_error(tmp_path):
    """The key has one vote for each state, so that both rebuild; one then has what the other has."""
    cfg, (packed, digest) = changed(AUDIT_RATE=1.0), expected(9)
    access = auth.Access(auth.key_of(SECRET, "gpu7"), name="gpu7")
    engines = [FakeEngine(cfg, 0.002), Drifting(cfg, pause=0.002)]
    server = cluster(tmp_path, engines, 9, cfg, save=True, access=auth.Access(SECRET), caller=access)
    assert "banned" not in server.said and server.said.count("has erred") == 1
    assert {engine.digest() for engine in engines} == {digest} and kept(tmp_path) == packed


def test_who_repeats_a_wrong_state_after_rebuilding_is_banned_by_its_key(tmp_path):
    access = auth.Access(auth.key_of(SECRET, "gpu7"), name="gpu7")
    with Server(tmp_path, access=auth.Access(SECRET)) as server:
        wrong, twin = (Peer2(server, access=access) for _ in range(2))
        others = [Peer2(server, secret=SECRET, name=name) for name in "ab"]
        for peer in *others, twin:
            peer.ask(0, b"right")
            assert peer.answer()
        with suppress(egg_net.NetError):
            for count in range(3):
                wrong.ask(0, b"wrong")
                wrong.next(REBUILD)
        server.says("banned gpu7: its state at step 0 is not that of others")
        assert server.said.count("gpu7 has erred") == 2


# --- data -------------------------------------------------------------------------------------------------------------

ONE, OTHER = "ab" * 32, "cd" * 32


def test_what_the_first_worker_had_all_others_must_have(server, monkeypatch):
    """The files of an objective, and the tables that its mathematics makes: a difference is named, nobody banned."""
    Peer2(server, same={"helper.py": ONE})
    turned_away("other helper.py than the first worker had: give every worker the same", server,
                same={"words.txt": ONE, "helper.py": OTHER})
    Peer2(server, same={"words.txt": OTHER})
    Peer2(server)
    for wrong in 5, [ONE]:
        turned_away("JOIN cannot be read", server, same=wrong)
    server.work(FakeEngine()), server.work(FakeEngine())
    server.reaches(1)
    monkeypatch.setattr(integer_tables, "gelu_table", lambda: np.zeros(256, np.int8))
    with refused("other tables of exponentials, cosines and powers, .* than the first worker had"):
        run_worker(server, FakeEngine())


def test_the_first_worker_says_which_data_a_run_has(tmp_path):
    filled(tmp_path, 1)
    with Server(tmp_path, save=True) as server:
        first = Peer2(server, data=ONE, validation=ONE)
        turned_away("other training data than this run has", server, data=OTHER)
        turned_away("other held-out data than the first worker had", server, data=ONE, validation=OTHER)
        first.chunk(1)
    with Server(tmp_path, save=True) as server:                  # training data are kept
        turned_away("other training data", server, data=OTHER)
        Peer2(server, data=ONE, validation=OTHER)
