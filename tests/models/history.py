"""protocols.md section 6, last paragraph: a subscriber joins a publisher that keeps a history.

Modelled is the variant without a gap: when the publisher notices the new receiver it makes it a recipient of the last
`HISTORY` messages too (start := published+1-HISTORY). Until then the receiver takes history under shared locks, and
stores its lease words as a recipient does, so that nothing is delivered twice.

In C: protocol/writer.c (writer_welcome, is_free), protocol/reader.c (reader_begin, has_started, lock_shared).
"""

from __future__ import annotations

from .explorer import END, Model, Process, State, named
from .writing import Writer

HISTORY, MESSAGES, SLOTS = 1, 3, 2


class Publisher(Writer):
    start = "read_epoch"
    slots = SLOTS
    variables = named(n=1, epoch=0, start=0, slot=0, holds=(0,) * SLOTS)

    def read_epoch(self, mem, me):
        epoch = mem["epoch"]
        if epoch == me.epoch:
            return "next_slot"
        me.epoch = epoch
        return "store_start"

    def store_start(self, mem, me):
        kept = 0 if self.broken == "gap" else HISTORY
        me.start = max(1, me.n - kept)
        mem["start"] = me.start
        return "store_start_uid"

    def store_start_uid(self, mem, me):
        mem["start_uid"] = 1
        return "next_slot"

    def next_slot(self, mem, me):
        old = me.holds[me.slot]
        if not old:
            return "clear"
        if old >= me.n - HISTORY and self.broken != "history_reused":  # one of the last: keep it
            me.slot = (me.slot + 1) % SLOTS
            return "next_slot"
        return "ask_lease" if me.start and old >= me.start else "lock"

    def ask_lease(self, mem, me):
        if mem["lease", me.slot] == 2 * me.holds[me.slot] + 1:
            return "lock"
        me.slot = (me.slot + 1) % SLOTS
        return "next_slot"

    def lock(self, mem, me):
        if mem.try_lock(("seq", me.holds[me.slot])):
            return "clear"
        me.slot = (me.slot + 1) % SLOTS
        return "next_slot"

    def clear(self, mem, me):
        mem["seq", me.slot] = 0
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock(("seq", me.holds[me.slot]))
        me.holds = (*me.holds[: me.slot], me.n, *me.holds[me.slot + 1 :])
        return "payload_1"

    def publish(self, mem, me):
        mem["published"] = me.n
        mem.ghost["sent"] = me.n
        me.n = me.n + 1
        if self.broken != "history_reused":
            me.slot = (me.slot + 1) % SLOTS
        return END if me.n > MESSAGES else "read_epoch"


class Subscriber(Process):
    start = "join"
    variables = named(p=0, published=0, mine=False, slot=0, view=0, last=False)

    def join(self, mem, me):
        mem["epoch"] = 1
        return "unlock_control"

    def unlock_control(self, mem, me):
        mem.unlock("control")
        mem.ghost["joined_at"] = mem.ghost["sent"]
        return "look" if self.broken == "no_barrier" else "barrier"

    def barrier(self, mem, me):
        """A message that was sent before is visible from here on; one that is being sent may still follow."""
        mem.barrier()
        return "look"

    def look(self, mem, me):
        me.published = mem["published"]
        return "look_start_uid" if not me.mine else self.next(me)

    def look_start_uid(self, mem, me):
        me.mine = mem["start_uid"] == 1
        if me.mine:
            return "look_start"
        me.p = max(me.p, me.published - HISTORY)
        return self.next(me)

    def look_start(self, mem, me):
        """Now it is a recipient, from `start` on, except for what it has already taken."""
        me.p = max(me.p, mem["start"] - 1)
        return "look"

    def next(self, me):
        if me.published > me.p:
            return "order"
        return END if me.last else "publisher_lives"

    def publisher_lives(self, mem, me):
        me.last = not mem.locked("life of P")
        return "look"

    def order(self, mem, me):
        me.slot = mem["order", (me.p + 1) % SLOTS]
        return "record" if me.mine else "lock"

    def lock(self, mem, me):
        return "record" if mem.try_lock(("seq", me.p + 1), shared=True) else "look"

    def record(self, mem, me):
        if mem["seq", me.slot] == me.p + 1:
            return "lease"
        if me.mine:
            mem.ghost["wrong"] = f"message {me.p + 1} is no longer there"
        return "give_up"

    def give_up(self, mem, me):
        mem.unlock(("seq", me.p + 1))
        return "look"

    def lease(self, mem, me):
        me.p += 1
        me.view = me.p
        mem["lease", me.slot] = 2 * me.p
        mem.ghost["got"] += (me.p,)
        return "view_dies"

    def view_dies(self, mem, me):
        me.view = 0
        if self.broken == "history_not_released" and not me.mine:
            return "unlock"
        mem["lease", me.slot] = 2 * me.p + 1
        return "look" if me.mine else "unlock"

    def unlock(self, mem, me):
        mem.unlock(("seq", me.p))
        return "look"


class History(Model):
    """A publisher that keeps the last message, and may die, and a subscriber that joins at any time; store buffers."""

    MUTATIONS = named(
        no_barrier="no barrier after joining: what was sent before may still be in the publisher's store buffer",
        gap="the publisher counts the new receiver from published+1 on: what it sends meanwhile is lost",
        history_reused="the publisher reuses the slots of the last messages",
        history_not_released="the subscriber stores no released word for what it took under a lock",
    )
    tso, crashes = True, 1

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"epoch": 0, "published": 0, "start": 0, "start_uid": 0}
        self.words |= {(word, s): 0 for word in ("seq", "a", "b", "order", "lease") for s in range(SLOTS)}
        self.ghost = {"got": (), "sent": 0, "joined_at": 0, "wrong": None}
        self.locks = {("life of P", "P"), ("control", "S")}
        self.processes = [Publisher("P", broken, killable=True), Subscriber("S", broken)]

    def invariant(self, s: State):
        me, got = s.me("S"), s.ghost["got"]
        if s.ghost["wrong"]:
            return s.ghost["wrong"]
        if me.view and not s.words["a", me.slot] == s.words["b", me.slot] == me.view:
            return f"the bytes under the view of message {me.view} changed"
        if got and got != tuple(range(got[0], got[0] + len(got))):
            return f"the subscriber got {got}"
        return None

    def final(self, s: State):
        got, joined_at, published = s.ghost["got"], s.ghost["joined_at"], s.words["published"]
        if not all(s.over(p.name) for p in self.processes):
            return "somebody hangs"
        latest = max(1, joined_at + 2 - HISTORY)  # one message may have been on its way when the subscriber joined
        if published and (not got or got[-1] != published or got[0] > latest):
            return f"the subscriber joined when {joined_at} messages were sent, and got {got} of {published}"
        return None
