"""protocols.md section 3: a receiver sleeps, a publisher (which may have only just joined) wakes it.

In C: writer.c (Writer_send).
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

MESSAGES = 3


class Publisher(Process):
    start, variables = "join", named(sent=0, rung=0)

    def join(self, mem, me):
        mem["epoch"] = 1
        return "peek" if self.broken == "peek_before_publish" else "publish"

    def publish(self, mem, me):
        me.sent += 1
        mem["published"] = me.sent
        return "more" if self.broken == "peek_before_publish" else "peek"

    def peek(self, mem, me):
        asleep = mem["asleep"]
        if self.broken == "flag":  # 0 or 1: "have I rung since I saw it awake?"
            asleep = asleep % 2
            me.rung = me.rung if asleep else 0
        if asleep % 2 and asleep != me.rung:
            me.rung = asleep
            return "ring"
        return "publish" if self.broken == "peek_before_publish" else "more"

    def ring(self, mem, me):
        mem.sys[self.rings_at] = 1  # the inbox holds one; a full inbox is no error
        return "publish" if self.broken == "peek_before_publish" else "more"

    def more(self, mem, me):
        if me.sent == MESSAGES:
            return END
        return "peek" if self.broken == "peek_before_publish" else "publish"


class Notifier(Process):
    """Another thread of the publisher's, which does what it was given, later."""

    start = "take"

    def take(self, mem, me):
        sys = mem.sys
        if not sys["job"]:
            return WAIT
        sys["job"] = 0
        return "write"

    def write(self, mem, me):
        mem.sys["inbox"] = 1
        return "take"


class Receiver(Process):
    start = "look_epoch"
    variables = named(known=0, taken=0, naps=0, dead=False)

    def look_epoch(self, mem, me):
        me.known = mem["epoch"]
        if me.known:
            return "look"
        return END if me.dead else "drain"

    def look(self, mem, me):
        if mem["published"] > me.taken:
            me.taken += 1
            return END if me.taken == MESSAGES else "look"
        return END if me.dead else "drain"

    def drain(self, mem, me):
        mem.sys["inbox"] = 0
        return "fall_asleep"

    def fall_asleep(self, mem, me):
        me.naps = me.naps % 2 + 1 if self.tick else me.naps + 1  # with ticks R may sleep for ever: bound the count
        mem["asleep"] = me.naps * 2 - 1
        return "look_again_epoch" if self.broken == "no_barrier" else "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return {"no_second_look": "wait", "epoch_not_looked_at": "look_again"}.get(self.broken, "look_again_epoch")

    def look_again_epoch(self, mem, me):
        epoch = mem["epoch"]
        return "wake" if epoch != me.known else "look_again"

    def look_again(self, mem, me):
        if me.known and mem["published"] > me.taken:
            return "wake"
        return "drain_late" if self.broken == "drain_last" else "wait"

    def drain_late(self, mem, me):
        mem.sys["inbox"] = 0
        return "wait"

    def wait(self, mem, me):
        sys = mem.sys
        if sys["inbox"]:
            sys["inbox"] = 0
            return "wake"
        return "ask" if self.tick else WAIT

    def ask(self, mem, me):
        me.dead = not mem.locked("life of P")
        return "wake"

    def wake(self, mem, me):
        mem["asleep"] = me.naps * 2
        return "look_epoch"


class SleepWake(Model):
    """No tick and no death: a lost wake-up is a deadlock. With x86 store buffers."""

    MUTATIONS = named(
        no_barrier="the receiver issues no barrier between `asleep` and its second look",
        no_second_look="the receiver does not look again after `asleep`",
        epoch_not_looked_at="the second look leaves out the epoch: a publisher that joined meanwhile is not seen",
        drain_last="the inbox is drained after the second look",
        peek_before_publish="the publisher reads `asleep` before it stores `published`",
        flag="`asleep` is a flag instead of a count",
    )
    tso, tick, rings_at = True, False, "inbox"

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"epoch": 0, "published": 0, "asleep": 0}
        self.sys = {"inbox": 0}
        self.locks = {("life of P", "P")}
        self.processes = [
            Publisher("P", broken, killable=bool(self.crashes), rings_at=self.rings_at),
            Receiver("R", broken, tick=self.tick),
        ]

    def final(self, s: State):
        if s.me("R").taken != s.words["published"]:
            return "a published message was not taken"
        return None if s.over("R") else "the receiver sleeps for ever"


class SleepWakeRinger(SleepWake):
    """The doorbells are written by another thread: they may come in a later sleep than the one they were for."""

    rings_at = "job"

    def __init__(self, broken=None):
        super().__init__(broken)
        self.sys["job"] = 0
        self.processes.append(Notifier("thread of P"))


class SleepWakeDeath(SleepWake):
    """The publisher may die anywhere, for instance before it rings: the receiver's tick finds what was published."""

    MUTATIONS = named()
    tick, crashes = True, 1


class SleepWakeTick(SleepWakeDeath):
    """With a tick even a missing barrier costs a tick only."""

    crashes = 0

    def __init__(self, broken=None):
        super().__init__(broken)
        self.processes[1].broken = "no_barrier"
