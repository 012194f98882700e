"""protocols.md section 5: claim and redelivery in the work queue, and the producer's reuse of slots.

In C: protocol/writer.c (is_free, writer_reclaim, writer_publish), protocol/reader.c (claim, take_competing,
reader_scan, reader_acknowledge, reader_give_back).
"""

from __future__ import annotations

from shmtensor.ring import states
from shmtensor.ring.states import State as Slot

from .explorer import END, WAIT, Model, Process, State, named
from .writing import Writer


class Producer(Writer):
    """Reuses a slot when its message is released, or done and its claim held by nobody (the consumer died)."""

    start = "next_slot"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.variables = named(n=1, slot=0, holds=(0,) * self.slots)

    def next_slot(self, mem, me):
        return "ask_released" if me.holds[me.slot] else self.free(me)

    def free(self, me):
        me.holds = (*me.holds[: me.slot], me.n, *me.holds[me.slot + 1 :])
        return "clear"

    def busy(self, me):
        me.slot = (me.slot + 1) % self.slots
        return "ask_released" if me.holds[me.slot] else self.free(me)

    def ask_released(self, mem, me):
        if mem["released", me.slot] == me.holds[me.slot]:
            return self.free(me)
        if self.broken == "kernel_not_asked":
            return self.busy(me)
        return "ask_lock" if self.broken in ("lock_before_done", "takes_back_undone") else "ask_done"

    def ask_done(self, mem, me):
        if mem["done", me.slot] != me.holds[me.slot]:
            return self.busy(me)
        return self.free(me) if self.broken in ("lock_before_done", "lock_not_asked") else "ask_lock"

    def ask_lock(self, mem, me):
        if mem.locked(lock_of(self, me.holds[me.slot], me.slot)):
            return self.busy(me)
        if self.broken == "lock_before_done":
            return "ask_done"
        return "ask_claimed" if self.broken == "takes_back_undone" else self.free(me)

    def ask_claimed(self, mem, me):
        return self.free(me) if mem["claimed", me.slot] == me.holds[me.slot] else self.busy(me)

    def clear(self, mem, me):
        mem["seq", me.slot] = 0
        return "record" if self.broken == "publish_first" else "payload_1"

    def payload_2(self, mem, me):
        after = super().payload_2(mem, me)
        return "sent" if self.broken == "publish_first" else after

    def publish(self, mem, me):
        mem["published"] = me.n
        return "payload_1" if self.broken == "publish_first" else self.sent(mem, me)

    def sent(self, mem, me):
        me.n, me.slot = me.n + 1, me.n % self.slots
        return END if me.n > self.messages else self.next_slot(mem, me)


CLAIMING = ("reread_done", "reread_seq", "give_up", "read_attempt", "write_attempt", "write_claimed")


def lock_of(process, n, slot):
    return ("slot", slot) if process.broken == "lock_per_slot" else ("seq", n)


class Consumer(Process):
    """Walks by sequence number; with nothing to walk to it scans all records (a join, a death, a tick)."""

    start = "scan"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.variables = named(p=0, n=0, slot=0, walks=False, count=0, published=0, view=False, kept=())

    # where next?

    def walk(self, mem, me):
        if self.quota and mem.ghost["taken_by", self.name] == self.quota:
            return "unlock_kept" if me.kept else END
        if mem["published"] == me.p:
            if me.kept:
                return "unlock_kept"
            if not self.ticks:
                return END if len(mem.ghost["finished"]) == self.messages else WAIT
            return "tick"
        me.p += 1
        me.n, me.walks = me.p, True
        return "order"

    def order(self, mem, me):
        me.slot = mem["order", me.n % self.slots]
        return "skip_done"

    def tick(self, mem, me):
        return self.nothing() if mem.locked("life of P") else "all_done"

    def all_done(self, mem, me):
        """The producer is gone: go when every message that it published is done (section 7 says how one knows)."""
        published = mem["published"]
        return END if len(mem.ghost["finished"]) == published else self.nothing()

    def nothing(self):
        return "walk" if self.broken == "no_scan" else "scan"

    def scan(self, mem, me):
        me.slot, me.walks = 0, False
        me.published = mem["published"]
        return "scan_record"

    def scan_record(self, mem, me):
        """A record may be ahead of `published`: it is not sent yet (its producer may die before it is)."""
        me.n = mem["seq", me.slot]
        visible = me.n <= me.published or self.broken == "scan_ahead"
        return "skip_done" if me.n and visible else self.go_on(me)

    def go_on(self, me):
        """Not this one."""
        me.n, me.count = 0, 0
        if me.walks:
            return "walk"
        me.slot += 1
        if me.slot < self.slots:
            return "scan_record"
        me.slot = 0
        return "walk"

    # take it

    def skip_done(self, mem, me):
        if mem["done", me.slot] == me.n:
            return self.go_on(me)
        return "skip_claimed" if me.walks or self.broken == "scan_skips_claimed" else "claim"

    def skip_claimed(self, mem, me):
        return self.go_on(me) if mem["claimed", me.slot] == me.n else "claim"

    def claim(self, mem, me):
        if not mem.try_lock(lock_of(self, me.n, me.slot)):
            return self.go_on(me)
        if self.broken == "no_reread":
            return "read_attempt"
        return "reread_seq" if self.broken == "seq_before_done" else "reread_done"

    def reread_done(self, mem, me):
        """First `done`, then `record.seq`: a slot that was reused in between shows in the second one."""
        if mem["done", me.slot] == me.n:
            return "give_up"
        return "read_attempt" if self.broken in ("seq_before_done", "seq_not_reread") else "reread_seq"

    def reread_seq(self, mem, me):
        if mem["seq", me.slot] != me.n:
            return "give_up"
        return "reread_done" if self.broken == "seq_before_done" else "read_attempt"

    def give_up(self, mem, me):
        mem.unlock(lock_of(self, me.n, me.slot))
        return self.go_on(me)

    def read_attempt(self, mem, me):
        n, count = mem["attempt", me.slot]
        me.count = count if n == me.n else 0
        return "write_claimed" if self.broken == "attempt_late" else "write_attempt"

    def write_attempt(self, mem, me):
        me.count += 1
        mem["attempt", me.slot] = (me.n, me.count)
        return "done" if self.broken == "attempt_late" else "write_claimed"

    def write_claimed(self, mem, me):
        mem["claimed", me.slot] = me.n
        if self.undoes:
            return "undo_attempt"
        if me.count + (self.broken == "attempt_late") > self.max_attempts:
            mem.ghost["reported"] |= {me.n}
            return "done"
        me.view = True
        mem.ghost["taken"] = (*mem.ghost["taken"], me.n)
        if self.quota:
            mem.ghost["taken_by", self.name] += 1
        if self.broken == "attempt_late":
            return "write_attempt"
        return "unlock" if self.broken in ("unlock_before_done", "unlock_with_view") else "done"

    def undo_attempt(self, mem, me):
        """It cannot read the message: a package is missing. What was stored is undone before the unlock."""
        mem["attempt", me.slot] = (me.n, me.count - 1)
        return "undo_claimed" if me.count == 1 else "unlock"

    def undo_claimed(self, mem, me):
        mem["claimed", me.slot] = 0
        return "unlock"

    def done(self, mem, me):
        mem["done", me.slot] = me.n
        mem.ghost["finished"] |= {me.n}
        return "view_dies" if self.broken == "unlock_with_view" else "released"

    def view_dies(self, mem, me):
        """(Wrong variants only.)"""
        me.view = False
        return "unlock" if self.broken == "release_with_view" else self.go_on(me)

    def released(self, mem, me):
        """The storage of the view is dead."""
        me.view = self.broken == "release_with_view"
        mem["released", me.slot] = me.n
        if self.broken == "unlock_before_done":
            return self.go_on(me)
        if self.broken == "release_with_view":
            return "view_dies"
        return ("unlock", "keep") if self.keeps else "unlock"

    def keep(self, mem, me):
        """The compiled module unlocks later, finished messages together; before it finds none, at the latest."""
        me.kept = (*me.kept, me.n)
        return self.go_on(me)

    def unlock_kept(self, mem, me):
        mem.unlock(lock_of(self, me.kept[0], me.slot))
        me.kept = me.kept[1:]
        return "unlock_kept" if me.kept else "walk"

    def unlock(self, mem, me):
        mem.unlock(lock_of(self, me.n, me.slot))
        return "done" if self.broken in ("unlock_before_done", "unlock_with_view") else self.go_on(me)


class Claims(Model):
    """A producer and two consumers that live: exactly once, bytes stand still, slots come back."""

    MUTATIONS = named(
        seq_before_done="under the lock record.seq is read before done, and done is compared for equality",
        no_reread="nothing is read again under the lock",
        seq_not_reread="record.seq is not read again under the lock",
        lock_before_done="the producer asks for the lock first, and for done afterwards",
        lock_not_asked="the producer takes back a slot that is done without asking for the lock",
        unlock_before_done="done is stored after the unlock",
        release_with_view="released is stored while the view is alive",
        publish_first="the record and `published` are stored before the payload",
    )
    slots, messages, max_attempts, mortal = 1, 2, 9, ()
    # does a consumer scan at ticks; how many messages does it take before it leaves; may it unlock late
    ticks, quotas, keeps = True, (0, 0), False
    undoes = ()  # consumers that cannot read any message
    changes = states.visible(states.WORK_QUEUE)

    def __init__(self, broken=None):
        super().__init__(broken)
        slots = range(self.slots)
        self.words = {"published": 0}
        words = ("order", "seq", "a", "b", "claimed", "done", "released")
        self.words |= {(word, s): 0 for word in words for s in slots}
        self.words |= {("attempt", s): (0, 0) for s in slots}
        self.ghost = {"taken": (), "reported": frozenset(), "finished": frozenset()}
        self.ghost |= {("taken_by", c): 0 for c in ("C1", "C2")}
        self.locks = {("life of P", "P")}
        settings = {"slots": self.slots, "messages": self.messages, "max_attempts": self.max_attempts}
        self.processes = [
            Producer("P", broken, "P" in self.mortal, **settings),
            *(
                Consumer(
                    c,
                    broken,
                    c in self.mortal,
                    ticks=self.ticks,
                    quota=quota,
                    keeps=self.keeps,
                    undoes=c in self.undoes,
                    **settings,
                )
                for c, quota in zip(("C1", "C2"), self.quotas, strict=True)
            ),
        ]

    def slot_states(self, s: State):
        return {slot: self.slot_state(s, slot) for slot in range(self.slots)}

    def slot_state(self, s: State, slot: int):
        """By the words and the lock, which is the claim once what it is for was read again."""
        seq = s.words["seq", slot]
        if not 0 < seq <= s.words["published"]:
            return Slot.WRITING
        if s.words["released", slot] == seq:
            return Slot.RELEASED
        holder = s.holder(lock_of(self, seq, slot))
        claimed = holder is not None and s.at(holder) not in CLAIMING
        if s.words["done", slot] == seq:
            return Slot.DONE if claimed else Slot.RELEASED
        return Slot.LEASED if claimed and s.words["claimed", slot] == seq else Slot.PUBLISHED

    def invariant(self, s: State):
        views = []
        for c in ("C1", "C2"):
            me = s.me(c)
            if me.view:
                views.append(me.n)
                if not s.words["a", me.slot] == s.words["b", me.slot] == me.n:
                    return f"the bytes under {c}'s view of message {me.n} changed, or were never there"
                if me.n > s.words["published"]:
                    return f"{c} took message {me.n}, which was not published yet"
        if len(views) != len(set(views)):
            return "two consumers have the same message"
        taken = s.ghost["taken"]
        if len(taken) - len(set(taken)) > s.crashed:
            return f"taken: {taken}, after {s.crashed} deaths"
        for n in set(taken):
            if taken.count(n) > self.max_attempts:
                return f"message {n} was handed out more than {self.max_attempts} times"
        return None

    def final(self, s: State):
        if not all(s.over(p.name) for p in self.processes):
            return "somebody hangs"
        sent = set(range(1, s.words["published"] + 1))
        if any(s.at(c) == END for c in ("C1", "C2")) and set(s.ghost["taken"]) | s.ghost["reported"] != sent:
            return f"sent {sent}, taken {s.ghost['taken']}, reported {set(s.ghost['reported'])}"
        return None


class ClaimsTwoSlots(Claims):
    """The same with two slots; nobody ticks."""

    MUTATIONS = named()
    slots, messages, ticks = 2, 2, False


class ClaimsNoTick(Claims):
    """Nobody dies and nobody ticks: every message is found on the walk, even if a consumer leaves after its first."""

    MUTATIONS = named(lock_per_slot="the lock belongs to the slot instead of the message")
    messages, ticks, quotas = 3, False, (1, 0)


class ClaimsUnlockedLate(Claims):
    """A consumer keeps the locks of messages that it has finished with, for a while: nobody misses them."""

    MUTATIONS = named(
        release_with_view="released is stored while the view is alive",
    )
    slots, messages, ticks, keeps = 1, 2, False, True


class ClaimsUnlockedLateAndDeath(ClaimsUnlockedLate):
    """The same, and a consumer dies anywhere."""

    MUTATIONS = named()
    slots, ticks, mortal, crashes = 2, True, ("C1",), 1


class ClaimsConsumerDeath(Claims):
    """A consumer dies anywhere: its messages go to the other one, and its slot comes back."""

    MUTATIONS = named(
        kernel_not_asked="the producer does not ask whether the consumer that was done has died",
        takes_back_undone="the producer takes back a message that was claimed and that nobody holds",
        scan_skips_claimed="a scan skips what is claimed",
        no_scan="there is no scan: only the walk",
        unlock_with_view="the claim is unlocked before done is stored, while the view lives",
    )
    messages, mortal, crashes = 2, ("C1",), 1


class ClaimsUndone(Claims):
    """A consumer that can read no message undoes each claim, and dies anywhere: the other one gets all of them."""

    MUTATIONS = named(no_scan="there is no scan: only the walk")
    messages, mortal, crashes, undoes = 2, ("C1",), 1, ("C1",)


class ClaimsProducerDeath(Claims):
    """The producer dies anywhere: what was published is drained, what was not is never seen."""

    MUTATIONS = named(scan_ahead="a scan takes a record whose number is above `published`")
    messages, mortal, crashes = 2, ("P",), 1


class ClaimsPoison(Claims):
    """A message that kills its consumer is handed out `max_attempts` times, then dropped and reported."""

    MUTATIONS = named(attempt_late="the attempt is counted after the processing")
    messages, max_attempts, mortal, crashes = 1, 1, ("C1",), 1
