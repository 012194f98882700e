"""protocols.md section 11: a ring in device memory, whose bytes are written and read later than the host says.

A stream is a process of its own: it does what its host queued, in order, whenever it likes. What one of its operations
touches (the queue, the slot's bytes, the events) is device state, all of it reached by one access.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

MESSAGES, SLOTS = 3, 2


class Stream(Process):
    """Runs the operations of its host's queue: ("write", slot, n), ("wait", slot, n), ("read", slot, n), ("end", n)."""

    start, variables = "run", named()

    def run(self, mem, me):
        host, life = self.host, ("life", self.host)
        alive = any(lock == life for lock, _, _ in mem.locks)
        sys = mem.sys
        queue = sys["queue", host]
        if not alive:
            return END  # the driver tears the context of a dead process down, and what was queued with it
        if not queue:
            return WAIT
        operation, rest = queue[0], queue[1:]
        kind, slot, n = operation
        if kind == "write":  # the first half; the second one is another operation
            sys["a", slot] = n
        elif kind == "write more":
            sys["b", slot] = n
        elif kind == "record":
            sys["written", slot] = n
        elif kind == "wait":
            if sys["written", slot] < n:
                return WAIT
        elif kind == "read":
            if not sys["a", slot] == sys["b", slot] == n:
                mem.ghost["wrong"] = f"{host} reads message {n} and finds {sys['a', slot]}, {sys['b', slot]}"
        else:
            sys["ended", slot] = n
        sys["queue", host] = rest
        return "run"


class Publisher(Process):
    """Queues the copy and the event, and publishes without waiting for either."""

    start, variables = "next_slot", named(n=1, holds=(0,) * SLOTS)

    def next_slot(self, mem, me):
        if me.n > MESSAGES:
            return "settled"
        return "ask_lease" if me.holds[me.n % SLOTS] else "queue"

    def ask_lease(self, mem, me):
        slot = me.n % SLOTS
        return "queue" if mem["lease", slot] == 2 * me.holds[slot] + 1 else "ask_life"

    def ask_life(self, mem, me):
        return "ask_lease" if mem.locked(("life", "R")) else "queue"

    def queue(self, mem, me):
        slot, n = me.n % SLOTS, me.n
        me.holds = (*me.holds[:slot], n, *me.holds[slot + 1 :])
        work = (("write", slot, n), ("write more", slot, n), ("record", slot, n))
        if self.broken == "recorded_before_the_copy":
            work = (work[2], *work[:2])
        mem.sys["queue", "P"] += work
        return "publish"

    def publish(self, mem, me):
        mem["published"] = me.n
        me.n += 1
        return "next_slot"

    def settled(self, mem, me):
        """Its memory ends with it: it stays until nobody needs it."""
        if self.broken == "left_early" or mem["lease", MESSAGES % SLOTS] == 2 * MESSAGES + 1:
            return "leave"
        return "ask_last"

    def ask_last(self, mem, me):
        return "settled" if mem.locked(("life", "R")) else "leave"

    def leave(self, mem, me):
        for slot in range(SLOTS) if (sys := mem.sys) else ():
            sys["a", slot] = sys["b", slot] = -1
        return END


class Reader(Process):
    """Queues a wait for the event, then its work; drops the view, and gives the slot back when the work is done."""

    start, variables = "look", named(p=0, ending=())

    def look(self, mem, me):
        if mem["published"] > me.p:
            return "lease"
        return self.rest(me, "look")

    def rest(self, me, otherwise):
        if me.p == MESSAGES and not me.ending:
            return END
        return ("ended", "look") if me.ending and me.p < MESSAGES else "ended" if me.ending else otherwise

    def lease(self, mem, me):
        me.p += 1
        mem["lease", me.p % SLOTS] = 2 * me.p
        return "queue"

    def queue(self, mem, me):
        slot, n = me.p % SLOTS, me.p
        work = (("wait", slot, n), ("read", slot, n), ("end", slot, n))
        if self.broken == "no_wait":
            work = work[1:]
        mem.sys["queue", "R"] += work
        me.ending = (*me.ending, n)
        return "give_back" if self.broken == "given_back_at_once" else self.rest(me, "look")

    def ended(self, mem, me):
        """The event that was recorded when the view died: asked, not waited for."""
        done = mem.sys["ended", me.ending[0] % SLOTS] == me.ending[0]
        return "give_back" if done else self.rest(me, "look")

    def give_back(self, mem, me):
        n, me.ending = me.ending[0], me.ending[1:]
        mem["lease", n % SLOTS] = 2 * n + 1
        return self.rest(me, "look")


class DeviceRing(Model):
    """A publisher, a reader that may die, and a stream of each: bytes are read after they are written, and only then
    written again."""

    MUTATIONS = named(
        recorded_before_the_copy="the slot's event is recorded before the copy is queued",
        no_wait="the reader's stream does not wait for the slot's event",
        given_back_at_once="the lease ends with the view, not with the work that was queued on it",
        left_early="the publisher frees its memory when it has published everything",
    )
    crashes = 1

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"published": 0} | {("lease", s): 0 for s in range(SLOTS)}
        self.sys = {("queue", host): () for host in "PR"}
        self.sys |= {(word, s): 0 for word in ("a", "b", "written", "ended") for s in range(SLOTS)}
        self.ghost = {"wrong": None}
        self.locks = {(("life", "P"), "P"), (("life", "R"), "R")}
        self.processes = [
            Publisher("P", broken),
            Reader("R", broken, True),
            Stream("stream of P", broken, host="P"),
            Stream("stream of R", broken, host="R"),
        ]

    def invariant(self, s: State):
        return s.ghost["wrong"]

    def final(self, s: State):
        return None if s.over("P") and s.over("R") else "somebody hangs"


class Owner(Process):
    """Frees what it has exported once nobody who lives has it mapped."""

    start, variables = "say", named()

    def say(self, mem, me):
        mem["freed"] = 1
        return "look" if self.broken == "no_barrier" else "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return "look"

    def look(self, mem, me):
        return "ask_life" if mem["mapped"] else "free"

    def ask_life(self, mem, me):
        return "unsay" if mem.locked(("life", "R")) else "free"

    def unsay(self, mem, me):
        mem["freed"] = 0
        return "say"

    def free(self, mem, me):
        if mem.ghost["mapped"] and any(lock == ("life", "R") for lock, _, _ in mem.locks):
            mem.ghost["wrong"] = "memory was freed while a living reader had it mapped"
        mem.sys["memory"] = False
        return END


class Importer(Process):
    """Maps the memory late, and unmaps it."""

    start, variables = "say", named()

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        if self.broken == "mapped_first":
            self.start = "map"

    def say(self, mem, me):
        mem["mapped"] = 1
        return "look"

    def look(self, mem, me):
        if not mem["freed"]:
            return "unmap" if self.broken == "mapped_first" else "map"
        return "unmap" if self.broken == "mapped_first" else "unsay"

    def map(self, mem, me):
        if not mem.sys["memory"]:
            mem.ghost["wrong"] = "memory was mapped that its owner had freed"
        mem.ghost["mapped"] = True
        return "say" if self.broken == "mapped_first" else "unsay" if self.broken == "unsaid_first" else "unmap"

    def unmap(self, mem, me):
        mem.ghost["mapped"] = False
        return END if self.broken == "unsaid_first" else "unsay"

    def unsay(self, mem, me):
        mem["mapped"] = 0
        return "unmap" if self.broken == "unsaid_first" else END


class Unmapping(Model):
    """The owner's last question against a reader that maps the ring late; x86 store buffers; the reader may die."""

    MUTATIONS = named(
        no_barrier="the owner asks who has it mapped without a barrier after saying that it is freed",
        mapped_first="the reader maps the ring before it says so",
        unsaid_first="the reader says that it has unmapped the ring before it does",
    )
    tso, crashes = True, 1

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"freed": 0, "mapped": 0}
        self.sys = {"memory": True}
        self.ghost = {"wrong": None, "mapped": False}
        self.locks = {(("life", "R"), "R")}
        self.processes = [Owner("P", broken), Importer("R", broken, True)]

    def invariant(self, s: State):
        return s.ghost["wrong"]

    def final(self, s: State):
        return None if s.over("P") and s.over("R") else "somebody hangs"
