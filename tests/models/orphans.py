"""protocols.md section 7, last paragraph: a sender is gone, and the receiver that finishes it last reaps it.

Nobody ticks here: a receiver looks again when it finishes and when another receiver dies or leaves.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

MESSAGES = 2


class Sender(Process):
    start, variables = "publish", named(n=0)

    def publish(self, mem, me):
        me.n += 1
        mem["published"] = me.n
        return END if me.n == MESSAGES else "publish"


class Receiver(Process):
    """A recipient from the first message on. `attached`: has it opened the sender's segments (by their names)?"""

    start = "life_first"
    variables = named(p=0, dead=False, attached=False, finished=False, alone=False)

    def life_first(self, mem, me):
        """Is the sender dead? Asked before `published` is read for the last time."""
        if self.broken == "published_first":
            return "attach" if not me.attached else "look"
        me.dead = me.dead or not mem.locked("life of P")
        return "look" if me.attached else "attach"

    def attach(self, mem, me):
        if not mem.sys["segments"]:
            mem.ghost["wrong"] = f"the segments were reaped before {self.name} had opened them"
        me.attached = True
        return "look"

    def look(self, mem, me):
        if mem["published"] > me.p:
            me.p += 1
            mem.ghost["got", self.index] = me.p
            return "life_first"
        if self.broken == "published_first":
            return "life_last"
        return "finish" if me.dead else "life_first"

    def life_last(self, mem, me):
        return "life_first" if mem.locked("life of P") else "finish"

    def finish(self, mem, me):
        me.finished = True
        mem["finished", self.index] = 1
        return "other_finished" if self.broken == "asked_unlocked" else "lock"

    def lock(self, mem, me):
        return "other_finished" if mem.try_lock("control") else WAIT

    def other_finished(self, mem, me):
        if self.broken == "any_dead_member" or mem["finished", 1 - self.index]:
            return "lock_to_reap" if self.broken == "asked_unlocked" else "reap"
        return "other_lives"

    def other_lives(self, mem, me):
        if mem.locked(("life", 1 - self.index)):
            return "wait" if self.broken == "asked_unlocked" else "unlock"
        me.alone = True
        return "lock_to_reap" if self.broken == "asked_unlocked" else "reap"

    def lock_to_reap(self, mem, me):
        return "reap" if mem.try_lock("control") else WAIT

    def reap(self, mem, me):
        mem.sys["segments"] = False
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock("control")
        return "wait"

    def wait(self, mem, me):
        """Lives on; looks again when the other receiver dies."""
        if me.alone or self.broken == "last_finisher_only":
            return WAIT
        if mem.locked(("life", 1 - self.index)):
            return WAIT
        me.alone = True
        return "lock"


class Orphans(Model):
    """A sender that closes or dies, two recipients of which one may die too; with x86 store buffers."""

    MUTATIONS = named(
        published_first="a receiver reads `published` before it asks whether the sender still lives",
        asked_unlocked="whether the other one has finished is asked without the control lock",
        any_dead_member="a dead sender is reaped although a living recipient has not finished it",
        last_finisher_only="nobody looks again when a recipient dies that had not finished",
    )
    tso, crashes = True, 2

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"published": 0, ("finished", 0): 0, ("finished", 1): 0}
        self.sys = {"segments": True}
        self.ghost = {"wrong": None, ("got", 0): 0, ("got", 1): 0}
        self.locks = {("life of P", "P"), (("life", 0), "R0"), (("life", 1), "R1")}
        self.processes = [
            Sender("P", broken, killable=True),
            Receiver("R0", broken, index=0),
            Receiver("R1", broken, killable=True, index=1),
        ]

    def invariant(self, s: State):
        return s.ghost["wrong"]

    def final(self, s: State):
        for r in (0, 1):
            if not s.over(f"R{r}"):
                if s.at(f"R{r}") != "wait":
                    return f"R{r} hangs"
                if s.ghost["got", r] != s.words["published"]:
                    return f"R{r} missed a message"
        return "the dead sender's segments are left" if s.sys["segments"] else None
