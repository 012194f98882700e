"""protocols.md section 14: a member's area of a trace, which wraps, and the tracer, which reads it meanwhile.

In C: protocol/events.c (add_event).
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

SIZE = 2
EACH = 2


class Member(Process):
    """Writes `EACH` events, each of two words. The second one comes when the first has ended, and goes on behind it."""

    variables = named(count=0, left=EACH)

    @property
    def start(self):
        return "first_word" if self.name == "M1" else "join"

    def join(self, mem, me):
        return "count" if mem.try_lock("life") else WAIT

    def count(self, mem, me):
        me.count = 0 if self.broken == "restart" else mem["written"]
        return "first_word"

    def first_word(self, mem, me):
        if self.broken == "count_first":
            mem["written"] = me.count + 1
            return "late_word"
        mem["a", me.count % SIZE] = me.count + 1
        return "second_word"

    def late_word(self, mem, me):
        mem["a", me.count % SIZE] = me.count + 1
        return "second_word"

    def second_word(self, mem, me):
        mem["b", me.count % SIZE] = me.count + 1
        return "written"

    def written(self, mem, me):
        if self.broken != "count_first":
            mem["written"] = me.count + 1
        mem.ghost["made"] += 1
        me.count += 1
        me.left -= 1
        return "first_word" if me.left else "leave"

    def leave(self, mem, me):
        mem.unlock("life")
        return "over" if self.name == "M2" else END

    def over(self, mem, me):
        mem.unlock("over")
        return END


class Tracer(Process):
    """Reads twice: at any time, and when nobody writes any more."""

    start = "look"
    variables = named(position=0, end=0, at=0, a=0, copied=(), got=(), lost=0, last=False)

    def look(self, mem, me):
        me.end = mem["written"]
        if me.end <= me.position:
            return "wait" if not me.last else END
        me.at = max(me.position, me.end - SIZE)
        me.copied = ()
        return "copy_a"

    def copy_a(self, mem, me):
        me.a = mem["a", me.at % SIZE]
        return "copy_b"

    def copy_b(self, mem, me):
        me.copied = (*me.copied, (me.at, me.a, mem["b", me.at % SIZE]))
        me.at += 1
        return "copy_a" if me.at < me.end else "look_again"

    def look_again(self, mem, me):
        newest = me.end if self.broken == "looked_once" else mem["written"]
        whole = newest - SIZE + (0 if self.broken == "one_too_many" else 1)
        kept = tuple(each for each in me.copied if each[0] >= whole)
        me.lost += me.end - me.position - len(kept)
        me.position = me.end
        me.got = (*me.got, *kept)
        return "wait" if not me.last else END

    def wait(self, mem, me):
        if mem.locked("over"):
            return WAIT
        me.last = True
        return "look"


class Traces(Model):
    """Two members at one index, one after the other, of which the first may die, and the tracer; with store buffers."""

    MUTATIONS = named(
        count_first="`written` is stored before the event",
        looked_once="`written` is not loaded again after the events were copied",
        one_too_many="the event that may be being overwritten just now is kept",
        restart="a newcomer begins at 0, in the place of what its predecessor has written",
    )
    tso, crashes = True, 1

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"written": 0} | {(word, at): 0 for word in "ab" for at in range(SIZE)}
        self.ghost = {"made": 0}
        self.locks = {("life", "M1"), ("over", "M2")}
        self.processes = [
            Member("M1", broken, killable=True), Member("M2", broken), Tracer("T", broken),
        ]  # fmt: skip

    def invariant(self, s: State):
        for number, a, b in s.me("T").got:
            if not a == b == number + 1:
                return f"event {number} was read as {a}, {b}"
        return None

    def final(self, s: State):
        me = s.me("T")
        if not s.over("T"):
            return "the tracer hangs"
        if len(me.got) + me.lost != s.ghost["made"]:
            return f"{s.ghost['made']} events were written, {len(me.got)} read and {me.lost} counted as lost"
        return None
