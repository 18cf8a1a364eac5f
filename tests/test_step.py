"""The chunks of a step: leases, copies, audits, votes, liars, bans."""

import hashlib
import os
import re
import ssl
import subprocess
from contextlib import suppress
from time import monotonic, sleep
from types import SimpleNamespace
from unittest import mock

from pytest import approx, mark, raises

import egg_net
from cluster import admission, auth, dispatch, event_log, fairness, history, hub, status, trust, wire
from cluster.admission import Author, BANNED_FILE, Bans
from cluster.auth import Access, client_tls, der_element, server_tls
from cluster.dispatch import CHUNKS_HELD
from cluster.fairness import Conduct, Fairness
from cluster.step import Account, Step
from cluster.trust import AGREES, Trust, WAIT, tally
from cluster.wire import JOB_RESPONSE, REBUILD
from coordinators import Holder, Peer, Peer2, Server, caller, callers, cluster, idle, kept, refused, turned_away, until
from fakes import ACTIVATIONS, BAD, CFG, Drifting, FakeEngine, GOOD, GOOD_STEP, Liar, SECRET, changed, expected
from commands import certificate


# --- chunks of a step: audits, liars, leases, copies ------------------------------------------------------------------

class Alone(Author):
    """An author that is its only worker."""
    author = property(lambda self: self)


A, B = Alone("host", "a", "a"), Alone("host", "b", "b")
C, D = Alone("host", "c", "c"), Alone("host", "d", "d")


def given(step, author, chunk, packed=GOOD):
    """Who is found to have lied by this result of a chunk."""
    return step.result(author, chunk, packed, 5)


def test_an_audited_chunk_needs_two_authors_and_a_third_decides():
    step = Step(CFG, audited=[1])
    assert [step.take(A, 0) for _ in range(5)] == [0, 1, 2, 3, None] and step.take(B, 0) == 1
    for chunk in (0, 1, 2, 3):
        assert given(step, A, chunk) == []
    assert set(step.done) == {0, 2, 3} and step.take(A, 1) is None
    assert given(step, B, 1, BAD) == [] and 1 not in step.done
    assert step.disputed() == [(1, [A, B])]
    assert step.take(A, 1) is None and step.take(B, 1) is None and step.take(C, 1) == 1
    assert given(step, C, 1) == [B] and step.complete and step.fitness() == GOOD_STEP
    step.withdraw(B)
    assert given(step, D, 1, BAD) == [D] and step.complete


def test_a_worker_is_handed_first_what_it_delivered_in_the_step_before():
    past, step = Step(CFG), Step(CFG)
    past.accounts[A] = Account({1: 5.0, 2: None}, {})        # chunk 1 was never delivered
    assert [step.take(A, 0, past.accounts[A]) for _ in range(2)] == [2, 0]
    assert [step.take(B, 0, past.accounts[B]) for _ in range(3)] == [1, 3, None]
    many = Step(CFG.changed(POPULATION_SIZE=64 * CFG.CHUNK_SIZE))
    past.accounts[A] = Account({40: None}, {})
    assert many.take(A, 0, past.accounts[A]) == 0, "only the next few are looked at"


def test_a_late_result_that_differs_opens_the_chunk_again():
    step = Step(CFG)
    assert given(step, A, 0, BAD) == [] and 0 in step.done
    assert given(step, A, 0) == [] and step.done[0] == (BAD, 5)         # its own first word counts
    assert given(step, B, 0) == [] and 0 not in step.done and step.take(C, 0) == 0
    assert given(step, C, 0) == [A] and step.done[0] == (GOOD, 5)


def test_an_audit_waits_for_nobody_and_a_withdrawn_result_is_done_again():
    step = Step(CFG, audited=[0])
    assert given(step, A, 0) == [] and not step.done
    step.alone = True
    step.settle()
    step.alone = False
    assert set(step.done) == {0}
    for author, chunk in (B, 1), (A, 2), (B, 2):
        given(step, author, chunk)
    step.withdraw(A)
    assert set(step.done) == {1, 2}
    assert sorted(iter(lambda: step.take(C, 0), None)) == [0, 3]
    step.alone = True
    assert given(step, B, 0) == [] and 0 in step.done


def test_copies_go_to_idle_workers_and_the_first_result_counts():
    step = Step(CFG)
    assert [step.take(A, t) for t in range(4)] == [0, 1, 2, 3]
    given(step, A, 2)
    assert step.late(3.0, 1.0) == [0, 1] and step.late(1.2, 1.0) == []
    late = step.late(3.0, 1.0)
    assert step.copy(A, 3.0, late) is None and step.copy(B, 3.0, late) == 0 and late == [1]
    assert step.late(5.9, 1.0) == [1, 3] and step.late(6.1, 1.0) == [0, 1, 3]   # a third one waits twice as long
    given(step, B, 0)
    step.give_back(A, 0)
    assert step.take(C, 9) is None


def test_leases_follow_the_time_that_chunks_take(monkeypatch, server):
    monkeypatch.setattr(fairness, "LEAST_LEASE", 1.0)
    quick, stuck = Peer2(server), Peer2(server)
    for position in (0, 32):
        assert quick.chunk(0) == position
        sleep(0.02)
        quick.result(0, position)
    assert stuck.chunk(0) == 64 and quick.chunk(0) == 96
    quick.result(0, 96)
    # a copy, well before the lease is over
    assert quick.chunk(0) == 64 and "handed out again" not in server.said
    until(lambda: re.search(r"silent for 1(\.0\d*)? s, its chunk 2 is handed out again", server.said))
    assert CFG.STRAGGLER_TIMEOUT == 90
    quick.result(0, 64)
    server.reaches(1)


def test_a_worker_that_asks_and_does_not_deliver_never_waits_while_there_is_work(tmp_path):
    with Server(tmp_path, changed(POPULATION_SIZE=32 * 12)) as server:
        greedy, other = Peer(server), Peer2(server)
        # without waiting, and without holding more than CHUNKS_HELD
        asked = [greedy.chunk(0) for _ in range(9)]
        known = next(worker for worker in server.dispatcher.workers if worker.version == 1)
        assert {*asked} <= {*range(0, 384, 32)}
        assert len(server.dispatcher.work.accounts[known].held) == CHUNKS_HELD
        mine = []
        for _ in range(12 - CHUNKS_HELD):
            mine.append(other.chunk(0))
            other.result(0, mine[-1])
        assert sorted(mine + asked[-CHUNKS_HELD:]) == [*range(0, 384, 32)]
        greedy.ask(0)                                            # now there is nothing left that it has not got
        assert greedy.silent()


def test_who_takes_chunks_and_leaves_waits_longer_and_longer_until_it_delivers(tmp_path, monkeypatch):
    monkeypatch.setattr(fairness, "DOUBT", (30, 60))
    with Server(tmp_path, changed(POPULATION_SIZE=32 * 64)) as server:
        honest, known = caller("127.0.0.3", server), server.dispatcher.fairness

        def newcomer():
            peer = caller("127.0.0.2", server)
            peer.ask(0)
            return peer

        honest.works(0)
        for pause in (30, 60, 60):
            holder = newcomer()
            holder.answer()                                      # the first one at once, the others after the pause
            holder.close()
            server.has_workers(1)
            until(lambda: known._doubted)
            waits, end = known._doubted["127.0.0.2"]
            assert waits == pause and 0 < end - monotonic() <= pause
            honest.works(0)
            waiting = newcomer()
            assert waiting.silent(0.1)
            waiting.close()
            known._doubted["127.0.0.2"] = pause, monotonic()
        last = newcomer()
        last.delivers(0)                                         # who delivers is like all others, and its host too
        until(lambda: not known._doubted)
        last.chunk(0), last.chunk(0)
        another = newcomer()
        another.answer()
        last.ask(0)                                              # three in a row without a result
        assert last.silent(0.1)


def test_who_delivers_after_two_steps_is_slow_and_not_in_doubt(tmp_path):
    """Its host would pause longer and longer, be no second opinion, and be told that it sends more than it may."""
    with Server(tmp_path, changed(VALIDATE_EVERY=0)) as server:
        fast, slow = callers(server, 2, 3)
        for step in range(0, 9, 3):
            chunk, numbers = slow.chunk(step), range(step, step + 3)
            for number in numbers:
                fast.works(number, 4)                            # in the first of these steps a copy of what is late
                server.reaches(number + 1)
            slow.result(step, chunk)
            for number in numbers:
                slow.ask(number)
                assert slow.answer().step == number + 1
        worker = server.worker("w3")
        assert not worker.conduct.owing and not server.dispatcher.fairness.in_doubt(worker)
        assert worker.session.useless.credit == worker.session.useless.most


def test_who_loses_its_lease_and_delivers_after_the_step_has_time_for_the_next_chunk(tmp_path, monkeypatch):
    """Else a host that is slower than the least lease would never be a second opinion beside a quick one."""
    monkeypatch.setattr(fairness, "LEAST_LEASE", 0.1)
    with Server(tmp_path, changed(VALIDATE_EVERY=0)) as server:
        fast, slow = callers(server, 2, 3)
        chunk = slow.chunk(0)
        fast.works(0, 3)
        server.says("its chunk 0 is handed out again")
        worker, rules = server.worker("w3"), server.dispatcher.fairness
        conduct = worker.conduct
        assert conduct.dropped
        for number, chunks in enumerate((1, 4, 4)):
            fast.works(number, chunks)
            server.reaches(number + 1)
        slow.result(0, chunk)
        until(lambda: conduct.pace)
        assert conduct.pace > 0.1 and conduct.results == 0 and conduct.punctual is False
        assert not rules.in_doubt(worker) and not rules._doubted


def test_only_chunks_that_were_handed_out_are_taken(server):
    """Else two liars could outvote whomever they like."""
    peer, done = Peer2(server), server.dispatcher.work.done
    assert peer.chunk(0) == 0
    peer.result(0, 64)
    with refused("RESULT for chunk 2, which it was not given"):
        peer.answer()
    old = Peer(server)
    for position in range(0, 128, 32):                       # of protocol 1, before it has asked for anything
        old.result(0, position)
    given = old.chunk(0)                                     # it stays
    worker, = server.dispatcher.workers
    assert not done and worker.conduct.punctual is False and worker.conduct.results == 0
    old.result(0, given)
    until(lambda: [*done] == [given // 32] and worker.conduct.punctual)


def test_when_a_step_ends_the_first_worker_does_not_wait_for_the_last(tmp_path):
    cfg, peers = changed(POPULATION_SIZE=32), []
    with idle(tmp_path, cfg) as coordinator:
        dispatcher = coordinator.dispatcher
        for number in range(6 * dispatch.ANSWERS_IN_A_ROW):
            peers.append(Peer(coordinator.address[1], cfg))
            peers[-1].ask(0)
            until(lambda: coordinator.poll(0.01) or len(dispatcher.waiting) == number)
        first, second, *others = peers
        assert first.answer().first == 0                            # it has the chunk, the others wait
        first.result(0, 0)
        until(lambda: coordinator.poll(0.001) or coordinator.run.step == 1)
        assert len(dispatcher.waiting) > dispatch.ANSWERS_IN_A_ROW
        assert second.answer().step == 1
        second.ask(1)
        coordinator.poll()
        # its next chunk, before the last has been told of the step
        answer = second.answer()
        assert (answer.step, answer.first) == (1, 0) and dispatcher.waiting
        until(lambda: coordinator.poll(0.001) or not dispatcher.waiting)
        assert all(peer.answer().step == 1 for peer in others)


@mark.parametrize("base", [CFG, ACTIVATIONS], ids=["weights", "activations"])
def test_a_liar_is_found_by_audits_named_and_banned(tmp_path, base):
    cfg = base.changed(AUDIT_RATE=1.0)
    honest, *others = [FakeEngine(cfg, 0.002) for _ in range(3)]
    server = cluster(tmp_path, [honest, Liar(cfg, 2, pause=0.001), *others], 20, cfg, save=True)
    assert re.search(r"^banned w1 at 127.0.0.1: its result for chunk \d of step \d+ is not that of two others$",
                     server.said, re.M)
    assert server.said.count("banned w") == 1
    assert kept(tmp_path, cfg) == expected(20, cfg)[0]


def test_a_ban_outlasts_the_coordinator_until_its_line_is_removed(tmp_path):
    reason = "it said that 2 + 2 = 5"
    for turn in range(3):
        with Server(tmp_path, save=True) as server:
            if turn == 0:
                peer = Peer2(server, name="w1")
                assert peer.chunk(0) == 0
                server.ban(server.author(), reason)
                with refused("banned: it said that 2 [+] 2 = 5; to let w1 at 127.0.0.1 in again, remove its line"):
                    peer.answer()
            if turn < 2:
                for _ in range(2):
                    turned_away("banned: it said that", server, name="w1")
                Peer2(server, name="w2")
                told = server.fetched()
                assert told["banned"] == {"w1 at 127.0.0.1": reason}
                assert (f"banned: w1 at 127.0.0.1: {reason}\nto lift a ban remove its line from {tmp_path}"
                        in status.describe_status(told))
            if turn == 1:
                (tmp_path / BANNED_FILE).write_text("")          # no restart is needed
            if turn:
                Peer2(server, name="w1")


P256 = 0xffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551     # order of the curve


def der(tag, content):
    size = len(content)
    return bytes([tag, *([size] if size < 128 else [0x82, size >> 8, size & 255])]) + content


def write_twin(path, original):
    """Writes the same certificate with the other signature, (r, n - s). Returns the DER of the original."""
    shown = ssl.PEM_cert_to_DER_cert(original.read_text())
    start, _ = der_element(shown, 0)
    _, algorithm = der_element(shown, start)
    _, at = der_element(shown, algorithm)
    pair, _ = der_element(shown, der_element(shown, at)[0] + 1)
    _, second = der_element(shown, pair)
    s = P256 - int.from_bytes(shown[slice(*der_element(shown, second))])
    pair = shown[pair:second] + der(2, s.to_bytes(s.bit_length() // 8 + 1))
    path.write_text(ssl.DER_cert_to_PEM_cert(der(0x30, shown[start:at] + der(3, b"\0" + der(0x30, pair)))))
    return shown


def authority(directory):
    """A certificate that signs others, its key, and the arguments for one that it signs and that signs none."""
    ca, key = certificate(directory, "ca", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    return ca, key, ("-CA", ca, "-CAkey", key, "-addext", "basicConstraints=critical,CA:FALSE")


def test_a_certificate_is_its_key_a_ban_holds_on_to_it_and_it_signs_no_others(tmp_path):
    ca, ca_key, signed = authority(tmp_path)
    leaf, key = certificate(tmp_path, "leaf", "-subj", "/CN=w", *signed)
    shown = write_twin(tmp_path / "twin", leaf)

    def come(*pair, name="w"):
        return Peer2(server, access=Access(SECRET, client_tls(ca, *pair)), name=name)

    with Server(tmp_path, save=True, access=Access(SECRET, server_tls(ca, ca_key, ca=ca))) as server:
        peers = come(leaf, key), come(tmp_path / "twin", key)
        server.has_workers(2)
        first, second = (worker.author for worker in server.dispatcher.workers)
        assert first.voter == second.voter and first.identity == second.identity and first.former != second.former
        with refused("its certificate may sign others"):
            come(ca, ca_key)
        both = tmp_path / "both"
        both.write_text(leaf.read_text() + ca.read_text())
        with refused("may sign others .CA:TRUE. beside some that may not", auth.AuthError):
            server_tls(ca, ca_key, ca=both)
        server.ban(first, "it lied")
        with refused("banned: it lied"):
            come(leaf, key, name="another name")
        banned = tmp_path / BANNED_FILE
        assert re.fullmatch(r"certificate [0-9a-f]{64}\tit lied\n", banned.read_text())
        banned.write_text(f"certificate {hashlib.sha256(shown).hexdigest()}\tby an older version\n")
        with refused("banned: by an older version"):
            come(leaf, key)
        [peer.close() for peer in peers]


def test_bans_that_cannot_be_written_hold_until_the_end(tmp_path):
    bans = Bans(tmp_path / "gone")
    bans.add("w1 at host", "it lied")
    assert bans.all() == {"w1 at host": "it lied"}
    (tmp_path / BANNED_FILE).write_bytes(b"no tab\n\n\xff at host\twhy\twith a tab\nw2 at host\ttorn")
    assert Bans(tmp_path).all() == {"\ufffd at host": "why\twith a tab", "w2 at host": "torn"}


def test_bans_are_read_when_they_have_changed_and_nobody_comes_in_while_they_cannot_be(tmp_path, monkeypatch):
    author, other, third = (Author(f"10.0.0.{k}", "k.1", f"w{k}") for k in (1, 2, 3))
    bans, read, file = Bans(tmp_path), mock.Mock(wraps=history.read_file), tmp_path / BANNED_FILE
    monkeypatch.setattr(history, "read_file", read)
    file.write_text(f"{author.identity}\tit lied")               # edited by hand, without an end of the line
    for _ in range(100):
        assert "it lied" in bans.message(author) and bans.message(other) is None
    assert read.call_count == 1
    bans.add(other.identity, "so")
    assert "so" in Bans(tmp_path).message(other) and "it lied" in bans.message(author)
    os.truncate(file, admission.MOST_BANNED + 1)
    for one in bans, Bans(tmp_path):
        with raises(admission.Refused, match="nobody is let in while .* cannot be read: File too large") as told:
            one.check(third)
        assert told.value.code == wire.FULL                      # it may come again
    with raises(admission.Refused, match="it lied"):
        bans.check(author)                                       # what was known still counts


def test_one_host_fills_neither_the_log_nor_the_bans(tmp_path):
    authors = [Author("10.0.0.1", f"k{k}.1", f"w{k}") for k in range(400)]
    with Server(tmp_path, save=True) as server:
        def flood():
            for author in authors:
                server.ban(author, "it lied")
                server.events.warn("its state is not that of others", "10.0.0.1")
            server.ban(Author("10.0.0.2", "k.1", "another"), "it lied too")
            server.events.warn("the disk is full")

        server.calls.put(flood)
        server.status()                                          # answered after it
        assert all(map(server.admission.bans.message, authors))
        text = (tmp_path / BANNED_FILE).read_text()
        assert text.count("\n") == admission.BANS_OF_HOST + 1 and "another at 10.0.0.2" in text
        told = (tmp_path / history.EVENTS).read_text()
        assert told.count('"banned"') + told.count('not that of others"') < 2 * event_log.OF_HOST[1]
        assert "another" in told and "the disk is full" in told


def test_audits_do_not_hold_up_a_lonely_worker_for_long(tmp_path, monkeypatch):
    for steps, patience in (4, 3600.0), (8, 0.5):                # when the run goes on, another might come back
        monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", patience)
        began = monotonic()
        cluster(tmp_path, [FakeEngine()], steps, changed(AUDIT_RATE=1.0), save=True)
    assert monotonic() - began > 0.5


def one_of_three_drifts(**options):
    """Three engines, the second of which drifts. It delivers nothing of its wrong state before the others have stated
    theirs: a worker that is alone in a step is believed."""
    others = FakeEngine(pause=0.002), FakeEngine(pause=0.002)

    class Late(Drifting):
        def evaluate(self, *members):
            if self.step >= self.after:
                until(lambda: all(other.loads or any(step >= self.after for step, *_ in other.evaluated)
                                  for other in others))
            return super().evaluate(*members)

    return others[0], Late(pause=0.001, **options), others[1]


def test_a_replica_that_drifted_rebuilds_and_its_results_are_refused(tmp_path):
    (packed, digest), engines = expected(9), one_of_three_drifts()
    server = cluster(tmp_path, engines, 9, save=True)
    assert "worker w1" in server.said and "its state at step 3 is not that of others" in server.said
    # one of two that differ cannot know that it is right
    assert engines[1].loads >= 1 and engines[0].loads + engines[2].loads <= 1
    assert {engine.digest() for engine in engines} == {digest} and kept(tmp_path) == packed


def test_the_majority_of_authors_decides_which_state_is_right():
    votes = Trust()

    def judged(author, state, rebuilt=False):
        return votes.judge(5, author, state, rebuilt)

    assert judged(A, b"x") == (AGREES, set(), False) and votes.decided(5) and votes.decided(6)
    assert judged(A, b"x")[0] == AGREES                          # its own vote counts once
    assert judged(B, b"y")[0] == trust.REBUILD and not votes.decided(5)
    assert judged(B, b"y", True) == (WAIT, set(), True)
    assert judged(A, b"x", True) == (WAIT, set(), False)
    assert votes.contradicts(5, b"x") and not votes.contradicts(6, b"x") and votes.leading(6) == b""
    assert judged(C, b"y") == (AGREES, {A}, True) and votes.leading(5) == b"y"
    assert judged(A, b"x", True)[0] == trust.BAN and not votes.contradicts(5, b"y")
    assert judged(A, b"y", True) == (AGREES, set(), False)       # it has rebuilt
    votes.forget(A), votes.forget(B), votes.forget(C)
    assert votes.decided(5) and votes.leading(5) == b""
    for step in range(5, 30):
        votes.judge(step, A, b"x", False)
    assert min(votes.votes) == 30 - trust.STEPS_KEPT


def test_nobody_makes_others_rebuild_who_are_about_to_outvote_it(server):
    liar, one, other = authors = [Holder(f"10.0.0.{k}", "w").author for k in range(3)]
    votes, voters = Trust(), {author.voter for author in authors}
    assert votes.judge(5, liar, b"lie", False, voters)[0] == AGREES                   # the first is believed
    assert votes.judge(5, one, b"x", False, voters) == (WAIT, set(), False) and not votes.decided(5)
    assert votes.judge(5, other, b"x", False, voters) == (AGREES, {liar}, True)
    assert votes.judge(6, liar, b"lie", False, voters)[0] == AGREES
    voters.discard(other.voter)                                  # nobody else will vote
    assert votes.judge(6, one, b"x", False, voters)[0] == trust.REBUILD
    assert votes.judge(6, one, b"x", True, voters) == (WAIT, set(), True)

    peers = callers(server, 2, 3, 4)
    for peer in *peers, peers[0]:
        peer.works(0)
    server.reaches(1)
    for peer, digest in zip(peers, (b"lie", b"x", b"x")):
        peer.ask(1, digest)
        sleep(0.1)
    assert [peer.next(REBUILD, JOB_RESPONSE)[0] for peer in peers] == [JOB_RESPONSE] * 3
    assert "no majority" not in server.said


def test_short_chunks_that_are_late_are_found_soon(tmp_path):
    """Between two checks of the coordinator many steps could have been made."""
    with idle(tmp_path) as coordinator:
        dispatcher, found = coordinator.dispatcher, mock.Mock(conduct=Conduct())
        rules = dispatcher.fairness
        rules.usual = 0.002
        assert dispatcher.pause > egg_net.TICK                   # nobody waits: it sleeps as long as it may
        dispatcher.work.queue.clear()
        dispatcher.work.late = lambda now, usual: [0]
        dispatcher.waiting.append(found)
        assert dispatcher.pause == dispatch.LEAST_PAUSE
        rules.usual = None
        assert dispatcher.pause == dispatch.MOST_PAUSE
        rules.usual = 0.002
        dispatcher.changed = False
        dispatcher.answer_waiting()                              # without a check
        assert not found.waiting and dispatcher._late == [0]


def test_who_is_in_doubt_is_no_second_opinion(monkeypatch, server):
    monkeypatch.setattr(fairness, "DOUBT", (0.3, 64.0))
    (honest, holder), dispatcher = callers(server, 2, 3), server.dispatcher
    honest.works(0)
    holder.chunk(0)
    until(lambda: dispatcher.voters == {"127.0.0.2", "127.0.0.3"})
    holder.close()
    server.has_workers(1)
    again = caller("127.0.0.3", server, name="another name")
    position = again.chunk(0)                                    # after a pause
    assert dispatcher.voters == {"127.0.0.2"}
    again.result(0, position)
    until(lambda: dispatcher.voters == {"127.0.0.2", "127.0.0.3"})


def test_a_step_does_not_end_while_states_differ_and_nobody_has_decided(tmp_path):
    with idle(tmp_path) as coordinator:
        coordinator.progress.chunk_handed_out()                  # as the first result does
        work, votes = coordinator.dispatcher.work, {b"right": {A}, b"wrong": {B}}
        coordinator.trust.votes[0] = votes
        for chunk in range(CFG.N_CHUNKS):
            given(work, A, chunk)
        coordinator._complete_step()
        assert work.complete and coordinator.run.step == 0
        votes[b"right"].add(C)
        coordinator._complete_step()
        assert coordinator.run.step == 1


def test_a_replica_that_drifts_again_after_rebuilding_is_banned(tmp_path):
    server = cluster(tmp_path, one_of_three_drifts(times=99), 9, save=True)
    assert ("banned w1 at 127.0.0.1: its state at step 3 is not that of others, and was not after it was rebuilt"
            in server.said)
    assert kept(tmp_path) == expected(9)[0]


def test_when_two_hold_different_states_both_rebuild_and_a_third_decides(server):
    a, b = (Peer2(server, name=name) for name in "ab")
    a.ask(0, b"a" * 16)
    assert a.next(JOB_RESPONSE)[0] == JOB_RESPONSE
    a.result(0, 0)
    until(lambda: server.dispatcher.work.done)
    for peer, digest in (b, b"b"), (a, b"a"):
        peer.ask(0, digest * 16)
        assert peer.next(REBUILD, JOB_RESPONSE) == (REBUILD, bytes(8))
    # what was computed in doubt is done again
    assert not server.dispatcher.work.done
    for peer, digest in (a, b"a"), (b, b"b"):
        peer.ask(0, digest * 16)
        assert peer.silent()
    assert "start another worker, which decides" in server.said
    c = Peer2(server, name="c")
    c.ask(0, b"b" * 16)                                                     # b is waiting for just this
    assert c.next(JOB_RESPONSE)[0] == JOB_RESPONSE and b.next(JOB_RESPONSE)[0] == JOB_RESPONSE
    with refused("banned: its state at step 0"):
        a.next(JOB_RESPONSE)
    turned_away("banned: its state at step 0", server, name="a")


# --- votes ------------------------------------------------------------------------------------------------------------

def audit(step, *results):
    """Gives results (holder, packed) of chunk 0; the names of those who are found to have lied."""
    return [author.name for holder, packed in results for author in given(step, holder, 0, packed)]


def test_three_names_on_one_host_have_one_vote():
    sybils, one, other = [Holder("1.1.1.1", f"s{i}") for i in range(3)], Holder("2.2.2.2", "a"), Holder("3.3.3.3", "b")
    step, votes = Step(CFG, [0]), Trust()
    step.by_host = True
    assert audit(step, *((s, BAD) for s in sybils), (one, GOOD)) == [] and not step.done
    assert audit(step, (other, GOOD)) == ["s0", "s1", "s2"] and step.done[0][0] == GOOD
    liars = [sybil.author for sybil in sybils]
    for liar in liars:
        votes.judge(1, liar, b"lie", False)
    assert votes.judge(1, one.author, b"right", False)[0] == trust.REBUILD            # one against one
    assert votes.judge(1, other.author, b"right", False)[:2] == (AGREES, {*liars})
    assert votes.judge(1, liars[0], b"lie", True)[0] == trust.BAN
    certified = {liar._replace(certificate=liar.name) for liar in liars}
    assert tally({b"lie": certified}) == {b"lie": 3}                               # machines behind one address


def test_one_host_cannot_fill_both_sides_of_an_audit():
    one, two, other = Holder("1.1.1.1", "one"), Holder("1.1.1.1", "two"), Holder("2.2.2.2", "other")
    step = Step(CFG, [0])
    step.by_host = True
    assert step.take(one, 0) == 0
    assert [step.take(two, 0) for _ in range(4)] == [1, 2, 3, None]
    assert step.take(other, 0) == 0
    # at the last one results differ: now everybody is heard, and one wrong device of a host does not stop the others
    for result in (one, BAD), (two, BAD), (other, GOOD):
        assert audit(step, result) == [] and 0 not in step.done
    assert audit(step, (Holder("1.1.1.1", "third"), GOOD)) == ["one", "two"] and step.done[0][0] == GOOD


@mark.parametrize("kind", ["connections", "addresses of one /64", "certificates of one key"])
def test_one_liar_keeps_no_lie_and_gets_nobody_banned(kind, tmp_path, monkeypatch):
    """Every chunk is audited: three sybils of one liar, and two honest hosts."""
    cfg, access, plain = changed(AUDIT_RATE=1.0), Access(), hub.host_of
    if kind == "addresses of one /64":                           # 2001:db8:0:2::20 to 22, 2001:db8:0:3::3, ...:4::4
        monkeypatch.setattr(hub, "host_of", lambda text: plain(f"2001:db8:0:{text[8]}::{text[8:]}"))
    if kind == "certificates of one key":
        ca, ca_key, signed = authority(tmp_path)
        made = [certificate(tmp_path, name, "-subj", f"/CN={name}", *signed) for name in ("w3", "w4", "s0")]
        (cert, key), again, another = made[2], tmp_path / "s1", tmp_path / "s2"
        write_twin(again, cert)
        subprocess.run(["openssl", "req", "-x509", "-key", key, "-subj", "/CN=another", "-set_serial", "7", *signed,
                        "-out", another], check=True, capture_output=True)
        made += [(again, key), (another, key)]
        access = Access(SECRET, server_tls(ca, ca_key, ca=ca))
    with Server(tmp_path, cfg, access=access) as server:
        if kind == "certificates of one key":
            honest = [Peer2(server, access=Access(SECRET, client_tls(ca, *pair)), name=pair[0].name) for pair in made]
            sybils = [honest.pop() for _ in range(3)]
        else:
            sybils = [caller(f"127.0.0.2{i if 'addresses' in kind else ''}", server, name=f"s{i}") for i in range(3)]
            honest = callers(server, 3, 4)
        for _ in range(40):
            for peer, packed in [(s, BAD) for s in sybils] + [(h, GOOD) for h in honest]:
                with suppress(egg_net.NetError, OSError):
                    peer.ask(0, b"a lie" if packed == BAD else b"")
                    answer = peer.answer(0.02)                   # TimeoutError is an OSError
                    if answer.step == 0:
                        peer.result(0, answer.first, packed)
            if server.run.step:
                break
        assert server.run.step == 1 and "banned s" in server.said and "banned w" not in server.said
        assert server.run.fitness(0) == GOOD_STEP


def test_what_a_banned_author_left_is_done_again_even_when_it_has_gone(server):
    (liar, other), done = callers(server, 2, 3), server.dispatcher.work.done
    assert liar.chunk(0) == 0
    liar.result(0, 0, BAD)
    until(lambda: 0 in done)
    author = server.author("w2")
    liar.close()
    server.has_workers(1)
    server.ban(author, "it lied about another chunk")
    assert 0 not in done and 0 in [other.chunk(0) for _ in range(4)]


def test_a_lying_peer_of_version_1_does_not_ban_its_host(tmp_path):
    with Server(tmp_path, save=True) as server:
        liar = Peer(server)
        assert liar.chunk(0) == 0
        server.ban(server.author(), "it lied")
        assert liar.closed()
        assert Peer(server).chunk(0) == 0
    assert not os.path.exists(tmp_path / BANNED_FILE)


LIE, RIGHT = "ab" * 32, "cd" * 32


def test_the_digest_of_the_training_data_is_voted_on(tmp_path):
    words = "other training data than most workers"
    with Server(tmp_path, save=True) as server:
        liar = caller("127.0.0.2", server, data=LIE)
        for _ in range(3):                                       # one host has one vote
            turned_away(words, server, host="127.0.0.3", data=RIGHT)
        assert server.run.data.hex() == LIE
        Peer2(server)                                            # which tells none, as without any, is let in
        honest = caller("127.0.0.4", server, data=RIGHT)
        assert server.run.data.hex() == RIGHT and honest.chunk(0) == 0
        with refused(words):
            liar.chunk(0)
    with Server(tmp_path, save=True) as server:                  # what is kept has a vote after a restart
        turned_away(words, server, host="127.0.0.2", data=LIE)
        caller("127.0.0.3", server, data=RIGHT)
    assert (tmp_path / history.DATA_FILE).read_text().strip() == RIGHT


def test_so_is_that_of_the_held_out_data(tmp_path):
    """Until the coordinator is started again; workers that do not validate, or are older, join."""
    words = "other held-out data .* the same VAL_FILE"
    with Server(tmp_path, save=True) as server:
        liar = caller("127.0.0.2", server, validation=LIE)
        for _ in range(3):
            turned_away(words, server, host="127.0.0.3", validation=RIGHT)
        assert liar.chunk(0) == 0 and caller("127.0.0.5", server).chunk(0) > 0
        assert caller("127.0.0.4", server, validation=RIGHT).chunk(0) == 0      # which was handed to the liar
        with refused(words):
            liar.chunk(0)
    with Server(tmp_path, save=True) as server:
        assert caller("127.0.0.2", server, validation=LIE).chunk(0) == 0


# --- leases -----------------------------------------------------------------------------------------------------------

def beat(holders, done, seconds=60):
    """Heartbeats of holders that deliver nothing, until done()."""
    def done_after_a_beat():
        for holder in holders:
            holder.send(wire.HEARTBEAT)
            with suppress(TimeoutError):              # asks for a chunk of every step, and for a second one
                holder.ask(holder.answer(0.001).step)
        sleep(0.05)
        return done()

    until(done_after_a_beat, seconds)


class Working(Holder):
    def __init__(self, *author):
        super().__init__(*author)
        self.conduct, self.session = Conduct(), SimpleNamespace(heard=0.0)

    def take(self, seconds):
        self.conduct.turn += seconds
        self.conduct.came(self.conduct.turn - seconds)
        self.conduct.delivered(True)


@mark.parametrize("hosts", [("2.2.2.2", "3.3.3.3"), ("2.2.2.2",), ("1.1.1.1",)])
def test_a_slow_walk_of_one_host_does_not_become_usual(hosts):
    slow, honest = [Working("1.1.1.1", f"a{k}") for k in range(6)], [Working(host, "b") for host in hosts]
    workers = {*slow, *honest}
    rules = Fairness(CFG, None, workers)
    for worker in workers:
        worker.take(1.0)
    for _ in range(50):
        rules.measure()
        for worker in slow:
            worker.take(1.4 * rules.usual)
        for worker in honest:
            worker.take(1.0)
    assert rules.usual == approx(1.0)


def test_who_takes_too_long_in_one_step_after_another_is_named_once(tmp_path):
    with idle(tmp_path) as coordinator:
        dispatcher, slow = coordinator.dispatcher, Working("10.0.0.9", "slow")
        slow.session.title, dispatcher.fairness.usual = "slow", 0.001

        def lines(steps):
            for _ in range(steps):
                dispatcher.work.accounts[slow].held[0] = 0.0
                dispatcher.begin_step()
            return coordinator.console.stream.text.count("slow took longer than 1.5 times as long as is usual in 3 st")

        assert not slow.conduct.late and lines(2 * fairness.SLOW_STEPS) == 0         # all are of one host
        slow.conduct = Conduct()
        dispatcher.by_host = True
        assert lines(2) == 0 and slow.conduct.punctual is False
        slow.take(1.0)                                           # in time
        assert lines(2) == 0 and lines(1) == 1
        slow.take(1.0)
        assert lines(2 * fairness.SLOW_STEPS) == 1


def test_who_was_late_waits_for_a_punctual_one_only_if_chunks_are_scarce():
    late, punctual = Working("1.1.1.1", "a"), Working("1.1.1.1", "b")
    rules, now, step = Fairness(CFG, SimpleNamespace(step=0), {late, punctual}), monotonic(), Step(CFG)
    for worker in late, punctual:
        worker.trusted, worker.step, worker.waiting = True, 0, False
        worker.conduct.punctual = worker is punctual
    punctual.conduct.turn = punctual.session.heard = now

    def late_waits(seconds=0.0):
        return rules.must_wait(late, step, now + seconds)

    assert len(step.queue) == 4 and not late_waits()             # there is enough for everybody
    step.take(punctual, now), step.take(punctual, now)
    assert not late_waits()                                      # the other has something to do
    step.give_back(punctual, 0), step.give_back(punctual, 1)
    step.queue.pop(), step.queue.pop()
    assert late_waits() and rules.passed_over and not rules.must_wait(punctual, step, now)
    assert not late_waits(fairness.ASK_WITHIN)                   # it does not ask
    late.conduct.pace = 0.1                                      # it waits no longer than it needs for a chunk itself
    assert late_waits(0.05) and not late_waits(0.15)


def test_no_worker_walks_its_own_lease_away():
    slow, honest = Working("1.1.1.1", "a"), Working("2.2.2.2", "b")
    rules = Fairness(CFG, None, {slow, honest})
    honest.take(1.0)
    for _ in range(30):
        slow.take(3.9 * (slow.conduct.pace or 1.0))
    rules.measure()
    held, most = {0: 0.0}, CFG.STRAGGLER_TIMEOUT
    for heard, why in ((0.0, "silent for"), (most, "has not delivered for")):
        slow.session.heard = heard
        assert not rules.expired(slow, held, most - 1)
        assert [e[0] for e in rules.expired(slow, held, most + 1)] == [why]
    honest.conduct.pace = 10.0                           # what takes everybody long has time
    rules.measure()
    assert not rules.expired(slow, held, 159.0)
    honest.conduct.pace = 1e9                            # and no usual time is longer than a lease without one
    rules.measure()
    assert rules.usual == most


def test_a_lease_ends_though_no_usual_time_is_known(tmp_path):
    with Server(tmp_path, changed(POPULATION_SIZE=32, STRAGGLER_TIMEOUT=0.4)) as server:
        holder, honest = callers(server, 2, 3)
        assert holder.chunk(0) == 0
        honest.ask(0)
        beat([holder], lambda: "has not delivered for 0.4 s, its chunk 0 is handed out again" in server.said)
        assert honest.answer().first == 0
        honest.result(0, 0)
        server.reaches(1)


@mark.parametrize("audited", [0.0, 1.0])
def test_six_holders_that_only_beat_do_not_stop_eight_chunks(tmp_path, monkeypatch, audited):
    """Audited chunks wait for the holders, which are another host, until one of them is found out."""
    cfg = changed(POPULATION_SIZE=32 * 8, STRAGGLER_TIMEOUT=0.8, VALIDATE_EVERY=0, AUDIT_RATE=audited)
    monkeypatch.setattr(fairness, "LEAST_LEASE", 0.3)
    monkeypatch.setattr(egg_net, "AUDIT_PATIENCE", 0.5)
    with Server(tmp_path, cfg) as server:
        holders = [caller("127.0.0.2", server, name=f"h{i}") for i in range(6)]
        honest = caller("127.0.0.3", server, name="honest")
        for worker in *holders, honest:
            worker.ask(0)

        def work():
            with suppress(TimeoutError):
                while server.run.step < 3:
                    answer = honest.answer(0.02)
                    if not answer.packed:
                        sleep(0.01)
                        honest.result(answer.step, answer.first)
                    honest.ask(server.run.step)
            return server.run.step >= 3

        beat(holders, work, 8)


def test_copies_go_to_another_host_and_do_not_run_out():
    step = Step(CFG)
    step.by_host = True
    assert step.take(Holder("1", "one"), 0) == 0
    assert step.copy(Holder("1", "two"), 9, [0]) is None and step.copy(Holder("2", "other"), 9, [0]) == 0
    assert step.late(11, 1.0) == [] and step.late(13, 1.0) == [0] and step.copy(Holder("3", "more"), 13, [0]) == 0
