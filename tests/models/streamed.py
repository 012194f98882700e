"""checkpoint-protocol.md, "Without a local copy": a save goes from the slots to the URL, whoever dies, and once.

A trainer stages two saves. Its writing process sends one after the other, by a thread beside its loop, and is started
again when it dies. The next trainer's writing process has a save of its own, which wants the name of the second. `sys`
has what lies in the directory (notes) and at the URL (files), each changed by one system call or request. A step with
the name of a crash point `direct.*` is the one in front of that point. Requests are carried out at once, or never.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

OWN = (0, 1)  # the first trainer's saves
NEXT = 2  # the next one's
SAVES = (*OWN, NEXT)
FILES = ("a", "b", "a-2", "b-2")
NAMES = {0: ("a", "a-2"), 1: ("b", "b-2"), NEXT: ("b", "b-2")}  # of each save: the one that it wants, and another
KEPT = 2  # keep_last=


class Trainer(Process):
    """Stages its saves, and waits until it was told of each. Its lock is dropped when it ends."""

    start, variables = "stage", named(i=0)

    def stage(self, mem, me):
        mem["slot", me.i] = "all"
        me.i += 1
        return "wait" if me.i == len(OWN) else "stage"

    def wait(self, mem, me):
        return END if mem["told", OWN[-1]] else WAIT  # they end in their order


class Writer(Process):
    """A writing process: `main` is the next step of its loop, `thread` of the thread that sends save `i`."""

    variables = named(
        main="", thread="", i=0, slot="", alone=False, recorded=(), listed=(), name="", old=-1,
    )  # fmt: skip

    def to(self, me, *, main="", thread=""):
        """Go on with these steps; the thread, if it is at work, comes before or after the loop."""
        me.main, me.thread = main or me.main, thread or me.thread
        return (me.main, me.thread) if me.thread not in ("", "sent") else me.main

    # --- the loop

    def take(self, mem, me):
        """The messages of the oldest save, if they are there. All of them at the start: what one before had taken."""
        if me.i not in self.saves:
            return self.to(me, main="is_alone")
        me.slot = mem["slot", me.i]
        if me.slot == "none":  # it is over
            me.i += 1
            return self.to(me, main="take")
        if me.slot:
            return self.to(me, main="begin")
        return self.to(me, main="leave" if me.alone else "is_alone")

    def is_alone(self, mem, me):
        """Is the trainer dead? Then what it has staged is there by now."""
        me.alone = not mem.locked(self.trainer)
        if self.broken == "looked_before" and me.alone:
            return self.to(me, main="leave")
        if me.i not in self.saves:
            return self.to(me, main="leave") if me.alone else WAIT
        return self.to(me, main="take")

    def leave(self, mem, me):
        """What it holds is dropped."""
        if me.i in self.saves and me.slot:
            mem["slot", me.i] = "none"
        if self.trainer != "trainer":
            mem.ghost["over"] = True  # who sweeps what is noted from now on comes later
        return END

    def begin(self, mem, me):
        me.recorded = mem["recorded"]
        if me.i in me.recorded:
            return self.to(me, main="done")
        if me.slot != "all":
            mem.ghost["wrong"] = "slots were released, and the list of the directory does not have the save"
        return self.to(me, main="digested", thread="sweep" if self.broken == "sent_first" else "")

    def digested(self, mem, me):
        """The headers are in the slots."""
        mem.sys["digested", me.i] = True
        return self.to(me, main="can_step", thread=me.thread or "sweep")

    def can_step(self, mem, me):
        """Has the thread ended?"""
        return self.to(me, main="recorded" if me.thread == "sent" else "is_sending")

    def is_sending(self, mem, me):
        """Is there a thread, at work or not? Else there is nothing to do."""
        if self.broken == "asked_twice" and me.thread == "sent":
            return self.to(me, main="lives")
        return self.to(me, main="can_step")

    def lives(self, mem, me):
        """Only where it was asked twice: it waits for more, or leaves."""
        return self.to(me, main="can_step" if mem.locked(self.trainer) else "leave")

    def recorded(self, mem, me):
        if self.broken == "released_first" and me.slot == "all":
            return self.release(mem, me)
        mem["recorded"] = (*(i for i in me.recorded if i in dict(me.listed)), me.i)
        return self.to(me, main="done")

    def done(self, mem, me):
        """The note is removed."""
        mem.sys["note", me.i] = ""
        return self.to(me, main="report" if self.broken == "released_first" else "release")

    def release(self, mem, me):
        """All messages but the head."""
        me.slot = mem["slot", me.i] = "head"
        return self.to(me, main="recorded" if self.broken == "released_first" else "report")

    def report(self, mem, me):
        mem["told", me.i] = True
        if me.i not in mem.ghost["listed"]:
            mem.ghost["wrong"] = "the trainer was told of a save that the URL never had"
        return self.to(me, main="release_head")

    def release_head(self, mem, me):
        mem["slot", me.i] = "none"
        me.main, me.thread, me.slot, me.i = "take", "", "", me.i + 1
        return "take"

    # --- the thread

    def sweep(self, mem, me):
        """The notes of dead saves."""
        sys = mem.sys
        me.old = next((i for i in SAVES if sys["note", i] and i != me.i), -1)
        me.name = sys["note", me.old] if me.old >= 0 else ""
        return self.to(me, thread="sweep_list" if me.old >= 0 else "look")

    def sweep_list(self, mem, me):
        me.listed = mem["listed"]
        if self.broken == "forgotten_first":
            return self.to(me, thread="forget")
        is_listed = me.name in dict(me.listed).values() and self.broken != "swept_unseen"
        return self.to(me, thread="forget" if is_listed else "swept")

    def swept(self, mem, me):
        mem.sys["file", me.name] = -1
        return self.to(me, thread="sweep" if self.broken == "forgotten_first" else "forget")

    def forget(self, mem, me):
        mem.sys["note", me.old] = ""
        if self.broken == "forgotten_first" and me.name not in dict(me.listed).values():
            return self.to(me, thread="swept")
        return self.to(me, thread="sweep")

    def look(self, mem, me):
        """Has a writing process before this one listed it?"""
        me.listed = mem["listed"]
        if me.i in dict(me.listed) and self.broken != "sent_again":
            return self.to(me, thread="sent")
        return self.to(me, thread="choose")

    def choose(self, mem, me):
        """The name of the note, or one that nothing has."""
        sys = mem.sys
        noted = "" if self.broken == "name_again" else sys["note", me.i]
        me.name = noted or next(name for name in NAMES[me.i] if sys["file", name] < 0)
        return self.to(me, thread="file" if self.broken == "noted_late" else "noted")

    def noted(self, mem, me):
        mem.sys["note", me.i] = me.name
        mem.ghost["late"] = mem.ghost["late"] or mem.ghost["over"]
        return self.to(me, thread="read_list" if self.broken == "noted_late" else "file")

    def file(self, mem, me):
        """It appears as a whole."""
        sys = mem.sys
        sys["file", me.name] = me.i
        if not sys["digested", me.i]:
            mem.ghost["wrong"] = "a file was sent without its digests"
        return self.to(me, thread="noted" if self.broken == "noted_late" else "read_list")

    def read_list(self, mem, me):
        me.listed = mem["listed"]
        return self.to(me, thread="listed")

    def listed(self, mem, me):
        before = () if self.broken == "begun_anew" else me.listed
        me.listed = mem["listed"] = (*(each for each in before if each[0] != me.i), (me.i, me.name))
        mem.ghost["listed"] = tuple(sorted({*mem.ghost["listed"], me.i}))
        return self.to(me, thread="prune")

    def prune(self, mem, me):
        """keep_last: the file of the oldest goes first."""
        if len(me.listed) <= KEPT:
            return self.to(me, thread="sent")
        mem.sys["file", me.listed[0][1]] = -1
        return self.to(me, thread="pruned")

    def pruned(self, mem, me):
        me.listed = mem["listed"] = me.listed[1:]
        return self.to(me, thread="prune")


class Own(Writer):
    """Of the first trainer: the first one, or one that is started when the one before is dead."""

    start, saves, trainer = "before", OWN, "trainer"

    def before(self, mem, me):
        return WAIT if self.k and mem.locked(("life", self.k - 1)) else "lives_still"

    def lives_still(self, mem, me):
        """If the trainer is dead as well, nobody has the slots any more, or everything is over."""
        return "lock" if not self.k or mem.locked("trainer") else END

    def lock(self, mem, me):
        """Byte 1 of the lock file."""
        if not mem.try_lock("writer"):
            return WAIT
        me.main = "take"
        return "take"


class Following(Writer):
    """Of the next trainer, which waits for the end of the first."""

    start, saves, trainer = "before", (NEXT,), "next trainer"

    def before(self, mem, me):
        return WAIT if mem.locked("trainer") else "lock"

    def lock(self, mem, me):
        if self.broken != "unlocked" and not mem.try_lock("writer"):
            return WAIT
        me.main, me.i = "take", NEXT
        return "take"


class Streamed(Model):
    """Two saves of a trainer and one of the next; the first trainer and two of its writing processes may die."""

    MUTATIONS = named(
        asked_twice="the loop asks again whether the thread is at work, and drops a save that was sent in between",
        looked_before="a process whose trainer is dead does not look again for what that had staged",
        sent_first="a file is sent before its headers have the digests",
        released_first="the slots are released before the list of the directory has the save",
        noted_late="a file is sent before the note says that it will be there",
        forgotten_first="a note is removed before the files that it names",
        swept_unseen="what a note names is deleted though the list at the URL has it",
        sent_again="the list at the URL is not asked whether a process before has listed the save",
        name_again="a process does not go by the note of its own save, but looks for a free name",
        begun_anew="the list at the URL is begun anew",
        unlocked="the next trainer's process does not wait for that of the first",
    )
    crashes = 3

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"recorded": (), "listed": ()}
        for i in SAVES:
            self.words |= {("slot", i): "all" if i == NEXT else "", ("told", i): False}
        self.sys = {("note", i): "" for i in SAVES} | {("digested", i): False for i in SAVES}
        self.sys |= {("file", name): -1 for name in FILES}
        self.ghost = {"wrong": None, "listed": (), "over": False, "late": False}
        self.locks = {("trainer", "T"), *((("life", k), f"W{k}") for k in range(3))}
        self.processes = [
            Trainer("T", broken, killable=True),
            *(Own(f"W{k}", broken, killable=k < 2, k=k) for k in range(3)),
            Following("N", broken),
        ]

    def invariant(self, s: State):
        for i, name in s.words["listed"][-KEPT:]:
            if s.sys["file", name] != i:
                return "the list at the URL names what is not there"
        known = {name for _, name in s.words["listed"]} | {s.sys["note", i] for i in SAVES}
        if any(s.sys["file", name] >= 0 and name not in known for name in FILES):
            return "neither list nor note knows what lies at the URL"
        return s.ghost["wrong"]

    def final(self, s: State):
        if not all(s.over(process.name) for process in self.processes):
            return "somebody waits for ever"
        survived = any(s.at(f"W{k}") == END and s.me(f"W{k}").main for k in range(3)) or s.at("T") == END
        for i in SAVES:
            if s.words["slot", i] and i not in s.ghost["listed"] and (survived or i == NEXT):
                return "a save that was staged is lost"
        if any(s.sys["note", i] for i in SAVES) and not s.ghost["late"]:
            return "a note is left"
        if len(s.words["listed"]) > KEPT and not s.ghost["late"]:
            return "what is not kept is listed"
        return None
