"""checkpoint-protocol.md, "Several ranks": two writing processes make one checkpoint of their parts, or give it up.

The parts and the checkpoint's name are files, the outcome is a file that is replaced as a whole: `sys`, since each
change of one is a system call. `N` is a writing process of the next run, which begins when both are gone.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

COMMITTED, GIVEN_UP = "committed", "given up"


class Decider(Process):
    """What follows once a process wants the outcome: `lock` to `unlock`."""

    def lock(self, mem, me):
        if self.broken == "no_mutex":
            mem.barrier()
            return "outcome"
        return "outcome" if mem.try_lock("mutex") else WAIT

    def outcome(self, mem, me):
        me.saw = mem.sys["outcome"]
        return "count" if me.saw is None else "rename" if me.saw == COMMITTED else "remove"

    def decide(self, mem, me):
        mem.sys["outcome"] = COMMITTED
        me.saw = COMMITTED
        return "unlock" if self.broken == "rename_first" else "rename"

    def rename(self, mem, me):
        files = mem.sys
        if files["pending"]:
            if not (files["part", 0] and files["part", 1]):
                mem.ghost["wrong"] = f"{self.name} gives its name to a checkpoint that lacks a part"
            files["pending"], files["name"] = False, True
        return "decide" if self.broken == "rename_first" and me.saw is None else "unlock"

    def give_up(self, mem, me):
        files = mem.sys
        if files["part", 0] and files["part", 1] and not mem.ghost["late"]:
            mem.ghost["wrong"] = f"{self.name} gives up a checkpoint whose parts are all there"
        files["outcome"] = me.saw = GIVEN_UP
        return "remove"

    def remove(self, mem, me):
        files = mem.sys
        files["pending"] = files["part", 0] = files["part", 1] = files["vote", 0] = files["vote", 1] = False
        return "unlock"

    def unlock(self, mem, me):
        if self.broken == "no_mutex":
            mem.barrier()
        else:
            mem.unlock("mutex")
        return "told"


class Writing(Decider):
    """The writing process of rank `r`."""

    start = "begin"
    variables = named(dead=False, saw=None, failed=False, lacks_room=False)

    def begin(self, mem, me):
        """Its part is written under a temporary name, or cannot be."""
        mem.barrier()
        return ("add", "refuse") if self.may_fail else "add"

    def add(self, mem, me):
        """The rename of the part into the directory, which is made if it is missing."""
        files = mem.sys
        files["part", self.r] = files["vote", self.r] = files["pending"] = True
        return "look"

    def look(self, mem, me):
        """Without the mutex; again and again."""
        files = mem.sys
        return "lock" if me.dead or files["part", 1 - self.r] or files["outcome"] else "other_lives"

    def other_lives(self, mem, me):
        me.dead = not mem.locked(("life", 1 - self.r))
        return "lock" if me.dead else "look"

    def count(self, mem, me):
        """Under the mutex; of a rank that was dead before, only a process that starts late adds a part after this."""
        files = mem.sys
        if not files["pending"]:
            me.saw = GIVEN_UP
            return "unlock"
        if self.broken == "counted_before" and me.dead:
            return "give_up"
        if not files["part", 0] or not files["part", 1]:
            return "give_up" if me.dead else "unlock_again"
        step = "rename" if self.broken == "rename_first" else "decide"
        return (step, "cannot") if self.may_fail else step

    def cannot(self, mem, me):
        """There is no room for the manifest, or for the outcome."""
        me.failed, me.saw = True, GIVEN_UP
        mem.unlock("mutex")
        return "told" if self.broken == "told_first" else "refuse"

    def unlock_again(self, mem, me):
        mem.unlock("mutex")
        return "look"

    def late(self, mem, me):
        """Started by a trainer when the first one had died; until now it held no lock."""
        if not mem.try_lock(("life", self.r)):
            return WAIT
        mem.ghost["late"] = True
        return "resume"

    def resume(self, mem, me):
        files = mem.sys
        if files["outcome"] or files["part", self.r]:
            return "look"
        return "refuse" if files["vote", self.r] else "add"  # what it had added has been taken back

    def refuse(self, mem, me):
        """The save has failed: nobody need wait."""
        return "refuse_outcome" if mem.try_lock("mutex") or self.broken == "no_mutex" else WAIT

    def refuse_outcome(self, mem, me):
        me.saw = mem.sys["outcome"]
        if me.saw is None:
            return "refuse_write" if self.broken == "part_stays" else "take_back"
        return "rename" if me.saw == COMMITTED else "unlock"

    def take_back(self, mem, me):
        """From here on nobody can commit it, whatever becomes of the outcome."""
        mem.sys["part", self.r] = False
        return "refuse_write"

    def refuse_write(self, mem, me):
        mem.barrier()
        return ("give_up", "no_room") if me.failed and not me.lacks_room else "give_up"

    def no_room(self, mem, me):
        """The outcome is not written: later."""
        me.lacks_room, me.saw = True, GIVEN_UP
        mem.unlock("mutex")
        return "told"

    def told(self, mem, me):
        """The trainer hears of it."""
        mem.barrier()
        mem.ghost["told", self.r] = me.saw
        if me.failed and not mem.ghost["again"]:
            mem.ghost["again"] = True
            return "refuse"
        return END


class NextRun(Decider):
    """It decides nothing while a process of the run before is alive."""

    start = "first_gone"
    variables = named(saw=None)

    def first_gone(self, mem, me):
        if self.broken == "next_run_waits_for_nobody":
            mem.barrier()
            return "lock"
        return WAIT if mem.locked(("life", 0)) else "second_gone"

    def second_gone(self, mem, me):
        return WAIT if mem.locked(("life", 1)) else "lock"

    def count(self, mem, me):
        files = mem.sys
        if files["part", 0] and files["part", 1] and files["pending"]:
            return "rename" if self.broken == "rename_first" else "decide"
        return "remove"

    def told(self, mem, me):
        mem.barrier()
        return END


class Ranks(Model):
    """Two ranks, one of which may fail to write its part, or be started again; up to two deaths; the next run."""

    MUTATIONS = named(
        no_mutex="who decides does not lock the others out",
        rename_first="the checkpoint gets its name before the outcome is written",
        counted_before="a dead rank's part is not looked for again under the mutex",
        told_first="its trainer hears that a rank has failed before its part is taken back",
        part_stays="a part whose rank has failed stays, and the outcome cannot be written",
        next_run_waits_for_nobody="the next run removes what living processes of this one still make",
    )
    crashes = 2

    def __init__(self, broken=None):
        super().__init__(broken)
        self.sys = {"outcome": None, "pending": False, "name": False}
        self.sys |= {(what, rank): False for what in ("part", "vote") for rank in (0, 1)}
        self.ghost = {"wrong": None, "late": False, "again": False, ("told", 0): None, ("told", 1): None}
        self.locks = {(("life", 0), "W0"), (("life", 1), "W1")}
        self.processes = [
            Writing("W0", broken, killable=True, r=0, may_fail=False),
            Writing("W1", broken, killable=True, r=1, may_fail=True),
            Writing("W1 again", broken, killable=False, r=1, may_fail=False, start="late"),
            NextRun("N", broken),
        ]

    def invariant(self, s: State):
        told = {s.ghost["told", r] for r in (0, 1)}
        if {COMMITTED, GIVEN_UP} <= told:
            return "the ranks were told different outcomes"
        if GIVEN_UP in told and s.sys["name"]:
            return "a checkpoint that was given up has its name"
        if COMMITTED in told and not s.sys["name"]:
            return "a checkpoint that a rank was told of does not have its name"
        return s.ghost["wrong"]

    def final(self, s: State):
        if not all(s.over(process) for process in ("N", "W0", "W1", "W1 again")):
            return "somebody waits for ever"
        if s.sys["pending"]:
            return "what nobody finishes is left"
        if s.sys["name"] != (s.sys["outcome"] == COMMITTED):
            return f"the outcome is {s.sys['outcome']}, and the name is {s.sys['name']}"
        return None
