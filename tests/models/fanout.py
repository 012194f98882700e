"""protocols.md section 1: publish and give back, with reuse of slots, leaving receivers and deaths.

In C: protocol/writer.c (all_gave_back, is_free, writer_acquire, writer_publish), protocol/reader.c (take_broadcast,
reader_give_back).
"""

from __future__ import annotations

from shmtensor.ring import states
from shmtensor.ring.states import State as Slot

from .explorer import DEAD, END, Model, Process, State, named
from .writing import Writer

LIVING, LEAVING, LEFT = "living", "leaving", "left"


class Publisher(Writer):
    """Sends `messages` messages through `slots` slots; every receiver is a recipient of all of them."""

    start = "next_slot"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        # holds[s]: the message that slot s was last used for (0: never)
        self.variables = named(n=1, slot=0, reader=0, holds=(0,) * self.slots)

    def next_slot(self, mem, me):
        """Is the slot free? One question per step; with a no, go on to the next slot."""
        return "clear" if not me.holds[me.slot] else self.first_question()

    def first_question(self):
        return "ask_lease" if self.broken == "lease_before_state" else "ask_state"

    def verdict(self, me, free):
        if not free:
            me.slot, me.reader = (me.slot + 1) % self.slots, 0
            return "next_slot"
        me.reader += 1
        if me.reader < self.readers:
            return self.first_question()
        me.reader = 0
        return "clear"

    def ask_state(self, mem, me):
        state = mem["state", me.reader]
        if state == LEFT or (state == LEAVING and self.broken in ("leaving_is_gone", "lease_before_state")):
            return self.verdict(me, True)
        if self.broken == "lease_before_state":
            return self.verdict(me, False)
        return "ask_lease_of_leaving" if state == LEAVING else "ask_lease"

    def ask_lease(self, mem, me):
        lease, n = mem["lease", me.reader, me.slot], me.holds[me.slot]
        if lease == 2 * n + 1 or (self.broken == "free_when_read" and lease >= 2 * n):
            return self.verdict(me, True)
        if self.broken == "lease_before_state":  # not leased now: free if it is leaving
            return self.verdict(me, False) if lease == 2 * n else "ask_state"
        return "ask_life"

    def ask_lease_of_leaving(self, mem, me):
        free = mem["lease", me.reader, me.slot] != 2 * me.holds[me.slot]
        return self.verdict(me, True) if free else "ask_life"

    def ask_life(self, mem, me):
        return self.verdict(me, self.broken != "life_not_asked" and not mem.locked(("life", me.reader)))

    def clear(self, mem, me):
        mem["seq", me.slot] = 0
        me.holds = (*me.holds[: me.slot], me.n, *me.holds[me.slot + 1 :])
        return "publish" if self.broken == "publish_first" else "payload_1"

    def order(self, mem, me):
        after = super().order(mem, me)
        return "sent" if self.broken == "publish_first" else after

    def publish(self, mem, me):
        mem["published"] = me.n
        return "payload_1" if self.broken == "publish_first" else self.sent(mem, me)

    def sent(self, mem, me):
        me.n, me.slot = me.n + 1, me.n % self.slots
        return END if me.n > self.messages else "next_slot"


class Receiver(Process):
    """Takes messages in order, holds up to `most` views, drops them in any order; may close with views alive."""

    start = "any"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.variables = named(p=0, slot=0, views=(), leaving=False)

    def any(self, mem, me):
        """What the user does next."""
        if me.leaving:
            return "drop_0" if me.views else "leave"
        take = ("look",) if len(me.views) < self.most else ()
        drop = tuple(f"drop_{i}" for i in range(len(me.views)))
        return take + drop + (("close",) if self.may_leave else ())

    def look(self, mem, me):
        if mem["published"] > me.p:
            return "order"
        if me.p == self.messages:
            return "any" if me.views else END
        return "publisher_lives"

    def publisher_lives(self, mem, me):
        """Nothing to take: poll, until the publisher is gone."""
        return "any" if mem.locked("life of P") else "last_look"

    def last_look(self, mem, me):
        if mem["published"] > me.p:
            return "order"
        return "any" if me.views else END

    def order(self, mem, me):
        me.slot = mem["order", (me.p + 1) % self.slots]
        return "record"

    def record(self, mem, me):
        seq = mem["seq", me.slot]
        if seq != me.p + 1:
            mem.ghost["wrong"] = f"{self.name} expects message {me.p + 1} and finds {seq}"
        return "lease"

    def lease(self, mem, me):
        me.p += 1
        mem["lease", self.index, me.slot] = 2 * me.p
        mem.ghost["got", self.index] += (me.p,)
        me.views += ((me.p, me.slot),)
        return "any"

    def drop(self, mem, me, i):
        """The storage of the i-th view is dead."""
        n, slot = me.views[i]
        if self.broken != "release_early":
            me.views = me.views[:i] + me.views[i + 1 :]
        mem["lease", self.index, slot] = 2 * n + 1
        return "dies" if self.broken == "release_early" else "any"

    def dies(self, mem, me):
        me.views = me.views[1:]
        return "any"

    def drop_0(self, mem, me):
        return self.drop(mem, me, 0)

    def drop_1(self, mem, me):
        return self.drop(mem, me, 1)

    def close(self, mem, me):
        me.leaving = True
        mem["state", self.index] = LEAVING
        return "any"

    def leave(self, mem, me):
        mem["state", self.index] = LEFT
        return END


class Fanout(Model):
    """One publisher, two receivers, everybody lives: in order, exactly once, bytes stand still, slots come back."""

    MUTATIONS = named(
        publish_first="`published` is stored before the payload and the record",
        free_when_read="a slot counts as free as soon as its message has been read",
        release_early="the released word is stored before the view's storage is dead",
    )
    slots, messages, views = 2, 4, (1, 2)
    may_leave, mortal = (), ()
    changes = states.visible(states.FAN_OUT)

    def __init__(self, broken=None):
        super().__init__(broken)
        readers = range(len(self.views))
        slots = range(self.slots)
        self.words = {"published": 0}
        self.words |= {(word, s): 0 for word in ("seq", "a", "b", "order") for s in slots}
        self.words |= {("lease", r, s): 0 for r in readers for s in slots}
        self.words |= {("state", r): LIVING for r in readers}
        self.ghost = {"wrong": None} | {("got", r): () for r in readers}
        self.locks = {("life of P", "P")} | {(("life", r), f"R{r}") for r in readers}
        self.processes = [
            Publisher(
                "P", broken, "P" in self.mortal, slots=self.slots, messages=self.messages, readers=len(self.views)
            ),
            *(
                Receiver(
                    f"R{r}",
                    broken,
                    f"R{r}" in self.mortal,
                    index=r,
                    most=most,
                    slots=self.slots,
                    messages=self.messages,
                    may_leave=f"R{r}" in self.may_leave,
                )
                for r, most in enumerate(self.views)
            ),
        ]

    def slot_states(self, s: State):
        return {(r, slot): self.slot_state(s, r, slot) for r in range(len(self.views)) for slot in range(self.slots)}

    def slot_state(self, s: State, r: int, slot: int):
        """As receiver r sees it. What one that closes or is dead has not leased waits for it no more."""
        seq = s.words["seq", slot]
        if not 0 < seq <= s.words["published"]:
            return Slot.WRITING
        found = states.of_recipient(s.words["lease", r, slot], seq)
        gone = s.at(f"R{r}") == DEAD
        return Slot.RELEASED if gone or (found is Slot.PUBLISHED and s.words["state", r] != LIVING) else found

    def invariant(self, s: State):
        if s.ghost["wrong"]:
            return s.ghost["wrong"]
        for r in range(len(self.views)):
            got = s.ghost["got", r]
            if got != tuple(range(1, len(got) + 1)):
                return f"R{r} got {got}"
            for n, slot in s.me(f"R{r}").views:
                if not s.words["a", slot] == s.words["b", slot] == n:
                    return f"the bytes under R{r}'s view of message {n} changed"
        return None

    def final(self, s: State):
        for r in range(len(self.views)):
            left = s.at(f"R{r}") == "dead" or s.words["state", r] == LEFT
            if not left and len(s.ghost["got", r]) != s.words["published"]:
                return f"R{r} missed a message"
        return None if all(s.over(p.name) for p in self.processes) else "somebody hangs"


class FanoutStoreBuffers(Fanout):
    """The same with x86 store buffers, one receiver that holds two views."""

    tso, messages, views = True, 4, (2,)

    def slot_states(self, s: State):
        """Not looked at: a system call makes several stores visible, and with them several changes, at once."""
        return {}


class FanoutLeave(Fanout):
    """One receiver closes with a view alive (and may take its time to drop it)."""

    MUTATIONS = named(
        leaving_is_gone="a leaving receiver counts as gone",
        lease_before_state="the sender reads the lease word first, and then that the receiver is leaving",
    )
    slots, messages, views, may_leave = 1, 2, (1, 1), ("R1",)


class FanoutDeath(Fanout):
    """Any one of them dies, anywhere."""

    MUTATIONS = named(life_not_asked="a sender that is held up does not ask whether the receiver still lives")
    slots, messages, views, mortal, crashes = 2, 3, (1, 1), ("P", "R0", "R1"), 1
