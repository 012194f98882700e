"""protocols.md section 6: take-back from latest-only readers.

In C: protocol/writer.c (is_free), protocol/reader.c (lock_shared, take_broadcast, reader_give_back).
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named
from .writing import Writer


class Publisher(Writer):
    """Takes back the oldest slot that no latest-only reader has leased; sleeps (no tick) while all are leased."""

    start = "next_slot"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.variables = named(n=1, slot=0, holds=(0,) * self.slots, tried=0, naps=0, awake=True)

    def next_slot(self, mem, me):
        """Try the slots in turn; when each has been tried (and again after `asleep := odd`): sleep."""
        if me.tried == self.slots:
            me.tried = 0
            return "drain" if me.awake else "wait"
        old = me.holds[me.slot]
        if not old or self.broken == "no_lock":
            return self.found(me)
        if not mem.try_lock(("seq", old)):
            me.slot, me.tried = (me.slot + 1) % self.slots, me.tried + 1
            return "next_slot"
        return self.found(me)

    def found(self, me):
        me.tried = 0
        if not me.awake:
            return "wake"
        if self.broken == "not_cleared":
            return "unlock"
        return "unlock" if self.broken == "unlock_before_clear" else "clear"

    def clear(self, mem, me):
        mem["seq", me.slot] = 0
        return self.cleared(me) if self.broken == "unlock_before_clear" else "unlock"

    def unlock(self, mem, me):
        if me.holds[me.slot]:
            mem.unlock(("seq", me.holds[me.slot]))
        return "clear" if self.broken == "unlock_before_clear" else self.cleared(me)

    def cleared(self, me):
        me.holds = (*me.holds[: me.slot], me.n, *me.holds[me.slot + 1 :])
        return "payload_1"

    def publish(self, mem, me):
        mem["published"] = me.n
        me.n, me.slot = me.n + 1, me.n % self.slots
        return END if me.n > self.messages else "next_slot"

    # section 4

    def drain(self, mem, me):
        mem.sys["semaphore"] = 0
        return "fall_asleep"

    def fall_asleep(self, mem, me):
        me.naps, me.awake = me.naps % 2 + 1 if self.ticks else me.naps + 1, False  # (a bound for the ticks)
        mem["asleep"] = 2 * me.naps - 1
        return "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return "next_slot"

    def wait(self, mem, me):
        sys = mem.sys
        if not sys["semaphore"] and not self.ticks:
            return WAIT
        sys["semaphore"] = 0
        return "wake"

    def wake(self, mem, me):
        """A lock that the second look got is simply asked for again."""
        me.awake = True
        mem["asleep"] = 2 * me.naps
        return "next_slot"


class LatestReader(Process):
    """Takes the oldest of the newest `depth` messages that it has not had; holds one view at a time."""

    start = "look"
    depth = 1
    variables = named(seen=0, p=0, slot=0, view=False, posted=0, last=False)

    def look(self, mem, me):
        """`seen` is the newest number that it has had or has lost: it waits for a newer one."""
        published = mem["published"]
        me.p = max(me.seen, published - self.depth) + 1
        if published > me.seen:
            return "order"
        return END if me.last else "publisher_lives"

    def publisher_lives(self, mem, me):
        me.last = not mem.locked("life of P")
        return "look"

    def order(self, mem, me):
        me.slot = mem["order", me.p % self.slots]
        if self.broken == "unlocked_read":
            return "read_again"
        return "lock"

    def lock(self, mem, me):
        if not mem.try_lock(("seq", me.p), shared=True):
            return self.lost(me)
        return "leased" if self.broken in ("unlocked_read", "no_second_read") else "read_again"

    def read_again(self, mem, me):
        if mem["seq", me.slot] != me.p:
            return "unlock"
        return "lock" if self.broken == "unlocked_read" else self.leased(mem, me)

    def leased(self, mem, me):
        assert mem.ghost["got"] < me.p
        me.view, me.seen = True, me.p
        mem.ghost["got"] = me.p
        return "unlock" if self.broken == "unlock_early" else "view_dies"

    def view_dies(self, mem, me):
        me.view = False
        return "look" if self.broken == "unlock_early" else "unlock"

    def unlock(self, mem, me):
        """Also after a lease that was none: the sender may have met this lock, and sleep."""
        mem.unlock(("seq", me.p))
        if me.view:
            return "view_dies"
        me.seen = max(me.seen, me.p)
        return "look" if self.broken == "nobody_posts" else "peek"

    def lost(self, me):
        """The publisher takes it back: look for a newer one."""
        me.seen = me.p
        return "look"

    def peek(self, mem, me):
        asleep = mem["asleep"]
        if asleep % 2 and asleep != me.posted:
            me.posted = asleep
            return "post"
        return "look"

    def post(self, mem, me):
        mem.sys["semaphore"] = 1
        return "look"


class Latest(Model):
    """One publisher, one latest-only reader; with x86 store buffers."""

    MUTATIONS = named(
        no_lock="the publisher reuses a slot without asking for the lock",
        not_cleared="the publisher does not set record.seq to 0 before it unlocks",
        unlock_before_clear="the publisher unlocks before it sets record.seq to 0",
        unlocked_read="the reader reads record.seq before it has the lock, and not again",
        no_second_read="the reader does not read record.seq under the lock",
        unlock_early="the reader unlocks while the view is alive",
        nobody_posts="a reader that unlocks does not wake the sender that waits for a slot",
    )
    tso = True
    slots, messages, mortal, ticks, depth = 1, 3, (), False, 1

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"published": 0, "asleep": 0}
        self.words |= {(word, s): 0 for word in ("seq", "a", "b", "order") for s in range(self.slots)}
        self.sys = {"semaphore": 0}
        self.ghost = {"got": 0}
        self.locks = {("life of P", "P")}
        settings = {"slots": self.slots, "messages": self.messages, "ticks": self.ticks}
        self.processes = [
            Publisher("P", broken, "P" in self.mortal, **settings),
            LatestReader("L", broken, "L" in self.mortal, **settings, depth=self.depth),
        ]

    def invariant(self, s: State):
        me = s.me("L")
        if me.view and not s.words["a", me.slot] == s.words["b", me.slot] == me.p:
            return f"the bytes under the reader's view of message {me.p} changed"
        return None

    def final(self, s: State):
        if not all(s.over(p.name) for p in self.processes):
            return "somebody hangs"
        if s.at("L") == END and s.at("P") == END and s.ghost["got"] != self.messages:
            return "the reader missed the last message"
        return None


class LatestTwoSlots(Latest):
    """The same with two slots: the newest message is not the first that is taken back."""

    MUTATIONS = named()
    slots, messages = 2, 4


class LatestOfTwo(LatestTwoSlots):
    """The newest two messages, in order: one may be taken back while the newer one stays."""

    slots, messages, depth = 2, 4, 2


class LatestDeath(Latest):
    """Either of them dies, anywhere. A death of the reader wakes nobody: the sender's tick sees the free lock."""

    MUTATIONS = named()
    mortal, ticks, crashes = ("P", "L"), True, 1
