"""protocols.md section 9: two tasks of an event loop wait in line at one endpoint; one of them may be cancelled.

The loop is one process, whose steps are the parts of its turns. Between the turn in which the first in line is called
and the one in which it looks, anything may happen, its cancellation included.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

COUNT = 2


class Sender(Process):
    """Publishes, and rings once per sleep, as in section 3; for a sender's line it is who gives slots back."""

    start, variables = "publish", named(sent=0, rung=0)

    def publish(self, mem, me):
        me.sent += 1
        mem["published"] = me.sent
        return "peek"

    def peek(self, mem, me):
        asleep = mem["asleep"]
        if asleep % 2 and asleep != me.rung:
            me.rung = asleep
            return "ring"
        return "more"

    def ring(self, mem, me):
        mem.sys["inbox"] = 1
        return "more"

    def more(self, mem, me):
        return END if me.sent == COUNT else "publish"


class Canceller(Process):
    start = "cancel"

    def cancel(self, mem, me):
        mem.sys["cancel"] = True
        return END


class Loop(Process):
    """Tasks A and B, each waiting for one message; A may be cancelled."""

    start, variables = "attempt", named(line=("A", "B"), called=False, position=0, naps=0, got=0, given=0)

    def attempt(self, mem, me):
        """The first in line looks, and takes what is there in the step in which it leaves."""
        me.called = False
        if me.given or mem["published"] > me.position:
            me.position += not me.given
            me.given = 0
            me.got += 1
            me.line = me.line[1:]
            if not me.line:
                return "rest"
            return "turn" if self.broken == "next_is_forgotten" else "drain"
        return "drain"

    def drain(self, mem, me):
        mem.sys["inbox"] = 0
        return "fall_asleep"

    def fall_asleep(self, mem, me):
        me.naps += 1
        mem["asleep"] = 2 * me.naps - 1
        return "look_again" if self.broken == "no_barrier" else "barrier"

    def barrier(self, mem, me):
        mem.barrier()
        return "turn" if self.broken == "no_second_look" else "look_again"

    def look_again(self, mem, me):
        return "wake" if mem["published"] > me.position else "turn"

    def wake(self, mem, me):
        mem["asleep"] = 2 * me.naps
        return "attempt"

    def turn(self, mem, me):
        sys = mem.sys
        choices = []
        if sys["cancel"] and "A" in me.line:
            choices.append("cancelled")
        if me.called:
            choices.append("attempt")
        elif sys["inbox"]:
            choices.append("heard")
        return tuple(choices) or WAIT

    def cancelled(self, mem, me):
        first = me.line[0] == "A"
        me.line = tuple(task for task in me.line if task != "A")
        if not me.line:
            return "rest"
        if self.broken == "call_dies_with_its_task":
            me.called = me.called and not first
            return "turn"
        me.given = 0
        return "attempt" if first else "turn"

    def heard(self, mem, me):
        mem.sys["inbox"] = 0
        return "awake"

    def awake(self, mem, me):
        mem["asleep"] = 2 * me.naps
        me.called = True
        return "hand_over" if self.broken == "handed_over" else "turn"

    def hand_over(self, mem, me):
        """Wrong: the loop takes the message, and gives it to the task through its future."""
        if mem["published"] > me.position:
            me.position += 1
            me.given = 1
        return "turn"

    def rest(self, mem, me):
        mem["asleep"] = 2 * me.naps
        return END


class LoopWait(Model):
    """Nobody ticks and nobody dies; with x86 store buffers."""

    MUTATIONS = named(
        no_barrier="no barrier between `asleep := odd` and the second look",
        no_second_look="the line falls asleep without looking again",
        next_is_forgotten="who leaves with a message neither falls asleep for the next in line nor calls it",
        call_dies_with_its_task="the first in line is cancelled after it was called, and nobody calls the next",
        handed_over="the message is taken by the loop and handed to the task, which may be cancelled by then",
    )
    tso = True

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"published": 0, "asleep": 0}
        self.sys = {"inbox": 0, "cancel": False}
        self.processes = [Sender("S", broken), Loop("L", broken), Canceller("C", broken)]

    def final(self, s: State):
        if not s.over("L"):
            return "a task waits although there is a message"
        loop = s.me("L")
        if loop.got + s.words["published"] - loop.position != COUNT:
            return "a message is lost"
        return None
