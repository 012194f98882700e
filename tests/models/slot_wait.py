"""protocols.md section 4: a sender waits for a slot that receivers give back.

In C: protocol/reader.c (reader_give_back).
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

BATCHED = 1000
"""In `asleep`: a receiver posts only from message `TARGET` on."""
TARGET = 2


class Sender(Process):
    """Needs each of the slots in turn; a slot is free when both receivers have released it.

    The first sleep of a wait is batched and ends by itself; those that follow it last until somebody posts."""

    start, variables = "look", named(slot=0, reader=0, naps=0, batched=1)

    def look(self, mem, me):
        return self.scan(mem, me, "look", "drain")

    def scan(self, mem, me, again, nothing):
        """One load of a release word; on to the next one, or to `nothing` at the first that is not released."""
        if not mem["released", me.reader, me.slot]:
            me.reader = 0
            return nothing
        me.slot, me.reader = me.slot + me.reader, 1 - me.reader
        me.batched = me.batched or me.reader == 0
        return END if me.slot == 2 else again

    def drain(self, mem, me):
        mem.sys["semaphore"] = 0
        return "look_again" if self.broken == "same_number" and me.naps else "fall_asleep"

    def fall_asleep(self, mem, me):
        me.naps += 1
        mem["asleep"] = me.naps * 2 - 1 + BATCHED * me.batched
        return "look_again" if self.broken == "no_barrier" else "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return "wait" if self.broken == "no_second_look" else "look_again"

    def look_again(self, mem, me):
        slot = me.slot
        following = self.scan(mem, me, "look_again", "late_drain" if self.broken == "drain_last" else "wait")
        return "wake" if me.slot > slot and following != END else following

    def late_drain(self, mem, me):
        mem.sys["semaphore"] = 0
        return "wait"

    def wait(self, mem, me):
        choices = ["posted"] if mem.sys["semaphore"] else []
        if me.batched and self.broken != "batched_for_ever":
            choices.append("time_is_up")
        return tuple(choices) or WAIT

    def posted(self, mem, me):
        mem.sys["semaphore"] -= 1
        me.batched = me.batched and self.broken == "batched_for_ever"
        return "drain" if self.broken == "same_number" else "wake"

    def time_is_up(self, mem, me):
        me.batched = 0
        return "wake"

    def wake(self, mem, me):
        mem["asleep"] = me.naps * 2
        return "look"


class Receiver(Process):
    """Gives back its slots, one by one, in its own order."""

    start, variables = "begin", named(next=0, posted=0, last_target=0)

    def begin(self, mem, me):
        return "peek" if self.broken == "peek_before_release" else "release"

    def release(self, mem, me):
        mem["released", self.index, self.slots[me.next]] = 1
        me.next += 1
        return "more" if self.broken == "peek_before_release" else "peek"

    def peek(self, mem, me):
        following = "release" if self.broken == "peek_before_release" else "more"
        asleep = mem["asleep"]
        if self.broken == "flag":
            asleep = asleep % 2 + BATCHED * (asleep >= BATCHED)
            me.posted = me.posted if asleep else 0
        released = self.slots[me.next - 1] + 1
        if self.broken == "target_of_the_last" and asleep >= BATCHED:
            me.last_target = TARGET
        target = TARGET if asleep >= BATCHED else me.last_target
        if asleep % 2 and asleep != me.posted and released >= target:
            me.posted = asleep
            return "post"
        return following

    def post(self, mem, me):
        mem.sys["semaphore"] += 1
        return "release" if self.broken == "peek_before_release" else "more"

    def more(self, mem, me):
        return END if me.next == len(self.slots) else "begin"


class SlotWait(Model):
    """No tick and no death; with x86 store buffers."""

    MUTATIONS = named(
        no_barrier="the sender issues no barrier between `asleep` and its second look",
        no_second_look="the sender does not look again after `asleep`",
        drain_last="the semaphore is drained after the second look",
        same_number="the sender that was woken in vain waits again under the same number",
        batched_for_ever="no sleep ends by itself, and each is batched",
        target_of_the_last="the receiver keeps the target of a sleep for the sleeps after it",
        peek_before_release="the receiver reads `asleep` before it stores the released word",
        flag="`asleep` is a flag instead of a count",
    )
    tso = True

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {("released", r, s): 0 for r in (0, 1) for s in (0, 1)} | {"asleep": 0}
        self.sys = {"semaphore": 0}
        self.processes = [
            Sender("P", broken),
            Receiver("R0", broken, index=0, slots=(0, 1)),
            Receiver("R1", broken, index=1, slots=(1, 0)),
        ]

    def final(self, s: State):
        return None if s.over("P") else "the sender sleeps although every slot is free"


class HeldUp(Process):
    """A sender that is held up by member 0 with uid 1: at each tick it asks whether that member still lives."""

    start = "look"

    def look(self, mem, me):
        return END if mem["released"] else "ask_uid"

    def ask_uid(self, mem, me):
        if self.broken == "asks_only_the_lock":
            return "ask_lock"
        return "ask_lock" if mem["uid"] == 1 else END

    def ask_lock(self, mem, me):
        return "look" if mem.locked(("life", 0)) else END


class Holder(Process):
    start = "release"

    def release(self, mem, me):
        mem["released"] = 1
        return "uid_0"

    def uid_0(self, mem, me):
        mem["uid"] = 0
        return END


class Newcomer(Process):
    """Joins under the same index as soon as the kernel has dropped its life lock, then holds nothing but lives on."""

    start, variables = "reap", named()

    def reap(self, mem, me):
        return WAIT if mem.locked(("life", 0)) else "reaped"

    def reaped(self, mem, me):
        mem["uid"] = 0
        return "life"

    def life(self, mem, me):
        assert mem.try_lock(("life", 0))
        return "uid"

    def uid(self, mem, me):
        mem["uid"] = 2
        return "lives"

    def lives(self, mem, me):
        return WAIT


class SlotWaitDeath(Model):
    """The receiver that holds the sender up may die, and its index may be taken by another one (section 2)."""

    MUTATIONS = named(asks_only_the_lock="the sender asks for the life lock of an index, and not for the uid")
    crashes = 1

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"released": 0, "uid": 1}
        self.locks = {(("life", 0), "R")}
        self.processes = [HeldUp("P", broken), Holder("R", broken, killable=True), Newcomer("N", broken)]

    def final(self, s: State):
        return None if s.over("P") else "the sender hangs"
