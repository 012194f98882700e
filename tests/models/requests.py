"""protocols.md section 8: one request, a client that looks around and may give it up, two servers, one may die.

What a work queue does by itself (section 5) is kept to the lock, `done` and the count of attempts.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named


class Server(Process):
    start, variables = "lock", named(again=False)

    def lock(self, mem, me):
        return "is_done" if mem.try_lock("n") else WAIT

    def is_done(self, mem, me):
        return "unlock" if mem["done"] else "attempt"

    def attempt(self, mem, me):
        me.again = mem["attempt"] > 0
        return "count"

    def count(self, mem, me):
        mem["attempt"] = 2 if me.again else 1
        return "claim"

    def claim(self, mem, me):
        mem["claimed"] = 1
        return "note"

    def note(self, mem, me):
        if mem["note"]:
            return "done"
        if self.once and me.again and self.broken != "started_again":
            return "verdict"
        return "run"

    def verdict(self, mem, me):
        mem["verdict"] = 1
        return "done"

    def run(self, mem, me):
        if mem.ghost["withdrawn"]:
            mem.ghost["wrong"] = "a request was started after its client had taken it back"
        if self.once and mem.ghost["runs"]:
            mem.ghost["wrong"] = "a request that is tried once was started twice"
        mem.ghost["runs"] += 1
        return "done" if self.broken == "done_first" else "reply"

    def reply(self, mem, me):
        mem["reply", self.index] = 1
        mem.ghost["replied"] = True
        return "unlock" if self.broken == "done_first" else "done"

    def done(self, mem, me):
        mem["done"] = 1
        return "reply" if self.broken == "done_first" and not mem.ghost["replied"] and not me.again else "unlock"

    def unlock(self, mem, me):
        mem.unlock("n")
        return END


class Client(Process):
    """Reads replies and looks around in any order. `why`: what it will end the request with."""

    start, variables = "wait", named(why="")

    def wait(self, mem, me):
        return ("receive_0", "receive_1", "tick", *(("cancel",) if self.cancels else ()))

    def receive_0(self, mem, me):
        return "end_reply" if mem["reply", 0] else "wait"

    def receive_1(self, mem, me):
        return "end_reply" if mem["reply", 1] else "wait"

    def tick(self, mem, me):
        """A request that is done has its reply, if it has one, among those that are there afterwards."""
        me.why = "unanswered"
        if self.broken == "replies_first":
            return "early_0"
        if mem["done"]:
            return "drain_0"
        return "taken" if self.once else "wait"

    def early_0(self, mem, me):
        return "end_reply" if mem["reply", 0] else "early_1"

    def early_1(self, mem, me):
        return "end_reply" if mem["reply", 1] else "early_done"

    def early_done(self, mem, me):
        return "finish" if mem["done"] else "wait"

    def taken(self, mem, me):
        me.why = "died"
        return "withdraw" if mem["claimed"] else "wait"

    def cancel(self, mem, me):
        me.why = "cancelled"
        mem["note"] = 1
        return "withdraw"

    def withdraw(self, mem, me):
        if self.broken == "withdrawn_unlocked":
            return "still_open"
        if mem.try_lock("n"):
            return "still_open"
        return "finish" if me.why == "cancelled" else "wait"

    def still_open(self, mem, me):
        return "unlock" if mem["done"] else "take_back"

    def take_back(self, mem, me):
        mem["done"] = 1
        mem.ghost["withdrawn"] = True
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock("n")
        if me.why == "cancelled":
            return "finish"
        return "finish" if self.broken == "not_drained" else "drain_0"

    def drain_0(self, mem, me):
        return "end_reply" if mem["reply", 0] else "drain_1"

    def drain_1(self, mem, me):
        return "end_reply" if mem["reply", 1] else "finish"

    def end_reply(self, mem, me):
        me.why = "reply"
        return "finish"

    def finish(self, mem, me):
        if me.why in ("unanswered", "died") and mem.ghost["replied"]:
            mem.ghost["wrong"] = f"a request with a reply ended otherwise ({me.why})"
        mem.ghost["ended"] = me.why
        return END


class Requests(Model):
    """The request may be tried again: there is a reply, unless it is given up."""

    MUTATIONS = named(
        done_first="a server says that a request is done before its reply is there",
        replies_first="the client looks for replies before it asks whether the request is done",
        withdrawn_unlocked="the client takes a request back without its lock",
    )
    crashes = 1
    once, cancels = False, True

    def __init__(self, broken=None):
        super().__init__(broken)
        names = ("note", "claimed", "done", "verdict", "attempt", ("reply", 0), ("reply", 1))
        self.words = dict.fromkeys(names, 0)
        self.ghost = {"wrong": None, "withdrawn": False, "replied": False, "runs": 0, "ended": None}
        self.processes = [
            Client("K", broken, once=self.once, cancels=self.cancels),
            Server("A", broken, killable=True, index=0, once=self.once),
            Server("B", broken, index=1, once=self.once),
        ]

    def invariant(self, s: State):
        return s.ghost["wrong"]

    def final(self, s: State):
        if s.ghost["ended"] is None:
            return "the client waits for ever"
        if s.ghost["ended"] not in self.good_ends:
            return f"the request ended {s.ghost['ended']}"
        return None if s.words["done"] else "the request's slot is never given back"

    good_ends = ("reply", "cancelled")


class RequestsOnce(Requests):
    """It is tried once: a server's death ends it, and no second one starts it."""

    MUTATIONS = named(
        started_again="a server does not ask whether another one may have run the request",
        not_drained="the client takes a dead server's request back, and looks for no reply afterwards",
    )
    once, cancels = True, False
    good_ends = ("reply", "died", "unanswered")
