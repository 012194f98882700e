"""checkpoint-protocol.md, "Uploads": what is durable reaches the URL, whoever dies, and is not deleted before.

One writing process at a time, by a lock; it saves two checkpoints, keeps the newest, and uploads. Two more follow it,
as after deaths, or when the next trainer has come. The list at the URL is replaced as a whole, from what was read.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

SAVES = (0, 1)


class Writer(Process):
    start, variables = "lock", named(i=-1, saved=(), listed=())

    @property
    def leaves_early(self):
        return self.broken == "unlocked_early" and self.name == "W0"

    def lock(self, mem, me):
        return "read" if mem.try_lock("writer") else WAIT

    def read(self, mem, me):
        """Under the lock nobody else changes the local list."""
        me.saved = mem["saved"]
        return "check"

    def check(self, mem, me):
        """Is the last one's file there? Else its writer died before the rename: it is renamed now."""
        if not me.saved:
            return "enter"
        return "delete" if mem.sys["file", len(me.saved) - 1] else "rename"

    def enter(self, mem, me):
        """The next checkpoint goes into the list, then its files get their name."""
        me.saved = mem["saved"] = (*me.saved, "pending")
        return "rename"

    def rename(self, mem, me):
        mem.sys["file", len(me.saved) - 1] = True
        return "delete"

    def delete(self, mem, me):
        """keep_last=1; what is pending stays."""
        if len(me.saved) == len(SAVES) and (me.saved[0] == "done" or self.broken == "deletes_pending"):
            if me.saved[0] == "pending":
                mem.ghost["wrong"] = "a checkpoint was deleted before it was uploaded"
            mem.sys["file", 0] = False
        return "choose"

    def choose(self, mem, me):
        """The oldest that is pending; or the next save comes first."""
        me.i = next((i for i, state in enumerate(me.saved) if state == "pending"), -1)
        first = {"noted_first": "note", "listed_first": "read_list"}.get(self.broken or "", "copy")
        if len(me.saved) < len(SAVES):
            return "enter" if me.i < 0 else ("enter", first)
        return "leave" if me.i < 0 else first

    def copy(self, mem, me):
        mem.sys["object", me.i] = True
        return "note" if self.broken == "listed_first" else "read_list"

    def read_list(self, mem, me):
        me.listed = mem["listed"]
        return "unlock_early" if self.leaves_early else "write_list"

    def unlock_early(self, mem, me):
        mem.unlock("writer")
        return "write_list"

    def write_list(self, mem, me):
        before = () if self.broken == "forgets" else me.listed
        mem["listed"] = tuple(sorted({*before, me.i}))
        return "is_there"

    def is_there(self, mem, me):
        if not mem.sys["object", me.i]:
            mem.ghost["wrong"] = "the list at the URL names what is not there"
        if self.leaves_early:
            return END
        return {"noted_first": "delete", "listed_first": "copy"}.get(self.broken or "", "note")

    def note(self, mem, me):
        me.saved = mem["saved"] = tuple("done" if i == me.i else state for i, state in enumerate(me.saved))
        return "copy" if self.broken == "noted_first" else "delete"

    def leave(self, mem, me):
        mem.unlock("writer")
        return END


class Uploads(Model):
    """Three writing processes, one after the other; two may die at any step."""

    MUTATIONS = named(
        listed_first="the list at the URL is written before the files are there",
        noted_first="the local list says uploaded before the files are there",
        deletes_pending="keep_last does not look at what is pending",
        unlocked_early="a process that hands over may still write the list at the URL",
        forgets="the list at the URL is begun anew",
    )
    crashes = 2

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"saved": (), "listed": ()}
        self.sys = {(what, i): False for what in ("file", "object") for i in SAVES}
        self.ghost = {"wrong": None}
        self.processes = [Writer(f"W{number}", broken, killable=number < 2) for number in range(3)]

    def invariant(self, s: State):
        return s.ghost["wrong"]

    def final(self, s: State):
        if s.words["saved"] != ("done",) * len(SAVES):
            return "a checkpoint is not uploaded"
        if s.words["listed"] != SAVES:
            return "the list at the URL lacks a checkpoint"
        if not all(s.sys["object", i] for i in SAVES):
            return "a checkpoint is not at the URL"
        return None if s.sys["file", len(SAVES) - 1] else "the newest checkpoint is not there"
