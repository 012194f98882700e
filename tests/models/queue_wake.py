"""protocols.md section 5, the last paragraph: who wakes whom in the work queue.

Two producers with one message each, two consumers. A consumer may process its message for as long as it likes, so no
message may wait for a sleeper that nobody rings. A claim is one step here (it is the lock of section 5), and
processing takes until everything has been claimed.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

PRODUCERS = (0, 1)


class Producer(Process):
    start, variables = "publish", named(consumer=0)

    def publish(self, mem, me):
        mem["published", self.index] = 1
        return "peek"

    def peek(self, mem, me):
        """Find one consumer that sleeps (one that was not rung for this sleep: there is only one message here)."""
        if mem["asleep", me.consumer] % 2:
            return "ring"
        me.consumer += 1
        return "peek" if me.consumer < 2 else END

    def ring(self, mem, me):
        mem.sys["inbox", me.consumer] = 1
        return END


class Consumer(Process):
    """Has just gone to sleep. Once awake it looks for more than its own message before it processes that."""

    start, variables = "look_again", named(at=0, seen=(), naps=1, mine=False, rung=0)

    def look(self, mem, me, again, found, nothing):
        """One load: is there a message of producer number `at` that I have not looked at?"""
        producer, me.at = me.at, (me.at + 1) % len(PRODUCERS)
        if producer not in me.seen and mem["published", producer]:
            me.at = 0
            me.seen = tuple(sorted((*me.seen, producer)))
            return found[producer]
        return again if me.at else nothing

    def walk(self, mem, me):
        return self.look(mem, me, "walk", ("claim_0", "claim_1"), "drain")

    def claim_0(self, mem, me):
        return self.claim(mem, me, 0)

    def claim_1(self, mem, me):
        return self.claim(mem, me, 1)

    def claim(self, mem, me, message):
        sys = mem.sys
        if message in sys["claimed"]:
            return "walk"
        sys["claimed"] |= {message}
        me.mine = True
        return "process" if self.broken == "nobody_passes_it_on" else "look_for_more"

    def look_for_more(self, mem, me):
        """Another message: ring the other consumer if it sleeps, and leave the message alone."""
        return self.look(mem, me, "look_for_more", ("ring_the_other", "ring_the_other"), "process")

    def ring_the_other(self, mem, me):
        asleep = mem["asleep", 1 - self.index]
        if asleep % 2 and asleep != me.rung:
            me.rung = asleep
            return "ring"
        return "process"

    def ring(self, mem, me):
        mem.sys["inbox", 1 - self.index] = 1
        return "process"

    def process(self, mem, me):
        """Takes for ever, or at least until nothing is left to claim."""
        return END if len(mem.sys["claimed"]) == len(PRODUCERS) else WAIT

    def drain(self, mem, me):
        mem.sys["inbox", self.index] = 0
        return "fall_asleep"

    def fall_asleep(self, mem, me):
        me.naps += 1
        mem["asleep", self.index] = 2 * me.naps - 1
        return "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return "look_again"

    def look_again(self, mem, me):
        seen = me.seen
        following = self.look(mem, me, "look_again", ("wake", "wake"), "wait")
        me.seen = seen
        return following

    def wait(self, mem, me):
        sys = mem.sys
        if len(sys["claimed"]) == len(PRODUCERS):
            return END
        if not sys["inbox", self.index]:
            return WAIT
        sys["inbox", self.index] = 0
        return "wake"

    def wake(self, mem, me):
        mem["asleep", self.index] = 2 * me.naps
        return "walk" if self.broken == "no_barrier_after_waking" else "barrier_after_waking"

    def barrier_after_waking(self, mem, me):
        """A producer that still read `asleep` as odd had published before: whoever looks now sees its message."""
        mem.barrier()
        return "walk"


class QueueWake(Model):
    """Nobody ticks and nobody dies; with x86 store buffers."""

    MUTATIONS = named(
        no_barrier_after_waking="no barrier between `asleep := even` and the look for more messages",
        nobody_passes_it_on="a consumer that woke and finds two messages rings nobody",
    )
    tso = True

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {("published", i): 0 for i in PRODUCERS} | {("asleep", i): 1 for i in (0, 1)}
        self.sys = {("inbox", 0): 0, ("inbox", 1): 0, "claimed": frozenset()}
        self.processes = [
            *(Producer(f"P{i}", broken, index=i) for i in PRODUCERS),
            *(Consumer(f"C{i}", broken, index=i) for i in (0, 1)),
        ]

    def final(self, s: State):
        if len(s.sys["claimed"]) < len(PRODUCERS):
            return "a message waits although a consumer sleeps"
        return None if all(s.over(p.name) for p in self.processes) else "somebody hangs"
