"""protocols.md section 13: groups on a fan-out: each message to one member, and the publisher's reuse of slots.

In C: protocol/writer.c (all_gave_back), protocol/reader.c (claim, take_competing, reader_scan, reader_acknowledge,
reader_give_back).
"""

from __future__ import annotations

from shmtensor.ring import states
from shmtensor.ring.states import State as Slot

from .explorer import END, WAIT, Model, Process, State, named
from .writing import Writer

CLAIMED, DONE, RELEASED = range(3)
CLAIMING = ("reread", "read_attempt", "reread_seq", "give_up", "finish", "write_claimed")
LIVING, LEAVING = "living", "leaving"


class Publisher(Writer):
    """Knows the group as one recipient: its word for a slot, whether it is leaving, and the life lock of its entry."""

    start = "next_slot"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.variables = named(n=1, slot=0, member=0, leaving=False, holds=(0,) * self.slots)

    def next_slot(self, mem, me):
        return "clear" if not me.holds[me.slot] else "ask_state"

    def busy(self, me):
        me.slot = (me.slot + 1) % self.slots
        return "next_slot"

    def ask_state(self, mem, me):
        me.leaving = mem["state"] == LEAVING
        return "ask_word"

    def ask_word(self, mem, me):
        """A slot of a group that is leaving is free unless a view may live: claimed, or done and not released."""
        n, phase, _ = mem["word", me.slot]
        if (n, phase) == (me.holds[me.slot], RELEASED):
            return "clear"
        if me.leaving and n != me.holds[me.slot]:
            return "clear"
        if self.broken == "leaving_is_gone" and me.leaving:
            return "clear"
        return "ask_life"

    def ask_life(self, mem, me):
        if self.broken != "life_not_asked" and not mem.locked("life of G"):
            return "clear"
        return self.busy(me) if self.broken == "no_reap" else "ask_member"

    def ask_member(self, mem, me):
        """Has a member died? Then its entry is removed, and the group may have to leave with what is left of it."""
        if not mem.locked(("life", me.member)):
            return "reap"
        me.member = 1 - me.member
        return self.busy(me)

    def reap(self, mem, me):
        return "count_others" if mem.try_lock("control") else WAIT

    def count_others(self, mem, me):
        """Of two members one is dead: it is leaving, or gone, if the other is."""
        return "group_leaves" if mem["closed", 1 - me.member] else "reaped"

    def group_leaves(self, mem, me):
        mem["state"] = LEAVING
        return "reaped"

    def reaped(self, mem, me):
        mem.unlock("control")
        me.member = 1 - me.member
        return self.busy(me)

    def clear(self, mem, me):
        mem["seq", me.slot] = 0
        me.holds = (*me.holds[: me.slot], me.n, *me.holds[me.slot + 1 :])
        return "payload_1"

    def publish(self, mem, me):
        mem["published"] = me.n
        me.n, me.slot = me.n + 1, me.n % self.slots
        return END if me.n > self.messages else "next_slot"


class Subscriber(Process):
    """A member of the group: walks by sequence number, and scans all records when it finds nothing."""

    start = "scan"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.variables = named(p=0, n=0, slot=0, walks=False, count=0, published=0, view=False, closing=False)

    def exits(self, mem, me):
        """(One that never takes anything.) Without a word to anybody, as after a kill."""
        me.closing = True
        return END

    def walk(self, mem, me):
        if mem["published"] == me.p:
            return "tick"
        me.p += 1
        me.n, me.walks = me.p, True
        return "order"

    def order(self, mem, me):
        me.slot = mem["order", me.n % self.slots]
        return "look"

    def tick(self, mem, me):
        return self.nothing() if mem.locked("life of P") else "all_done"

    def all_done(self, mem, me):
        published = mem["published"]
        return END if len(mem.ghost["finished"]) == published else self.nothing()

    def nothing(self):
        return "walk" if self.broken == "no_scan" else "scan"

    def scan(self, mem, me):
        me.slot, me.walks = 0, False
        me.published = mem["published"]
        return "scan_record"

    def scan_record(self, mem, me):
        me.n = mem["seq", me.slot]
        return "look" if me.n and (me.n <= me.published or self.broken == "scan_ahead") else self.go_on(me)

    def go_on(self, me):
        me.n, me.count = 0, 0
        if me.walks:
            return "walk"
        me.slot += 1
        if me.slot < self.slots:
            return "scan_record"
        me.slot = 0
        return "walk"

    # take it

    def look(self, mem, me):
        n, phase, _ = mem["word", me.slot]
        if n > me.n or (n == me.n and phase == RELEASED):
            return self.go_on(me)
        if n == me.n and phase == DONE and (me.walks or self.broken == "done_ignored"):
            return self.go_on(me)
        if n == me.n and (me.walks or self.broken == "scan_skips_claimed"):
            return self.go_on(me)
        return "claim"

    def claim(self, mem, me):
        if not mem.try_lock(("of group", me.n)):
            return self.go_on(me)
        return "read_attempt" if self.broken == "no_reread" else "reread"

    def reread(self, mem, me):
        """As long as it is not released and we have the lock, the slot keeps this message, if it has it."""
        n, phase, me.count = mem["word", me.slot]
        if n != me.n:
            me.count = 0
        if n > me.n or (n == me.n and phase == RELEASED):
            return "give_up"
        if n == me.n and phase == DONE:
            return "give_up" if self.broken == "done_ignored" else "finish"
        return "write_claimed" if self.broken == "seq_not_reread" else "reread_seq"

    def read_attempt(self, mem, me):
        """(Wrong variant only.)"""
        n, _, count = mem["word", me.slot]
        me.count = count if n == me.n else 0
        return "write_claimed"

    def reread_seq(self, mem, me):
        return "write_claimed" if mem["seq", me.slot] == me.n else "give_up"

    def give_up(self, mem, me):
        mem.unlock(("of group", me.n))
        return self.go_on(me)

    def finish(self, mem, me):
        """The member that had it said that it is done, and died with a view: nobody else could free the slot."""
        mem["word", me.slot] = (me.n, RELEASED, 0)
        return "give_up"

    def write_claimed(self, mem, me):
        me.count += 1
        mem["word", me.slot] = (me.n, CLAIMED, me.count)
        if me.count > self.max_attempts:
            mem.ghost["finished"] |= {me.n}
            mem.ghost["reported"] |= {me.n}
            return "released"
        me.view = True
        mem.ghost["taken"] = (*mem.ghost["taken"], me.n)
        if self.closes and not me.closing:
            return "close"
        return "unlock" if self.broken == "unlock_before_done" else "done"

    def done(self, mem, me):
        mem["word", me.slot] = (me.n, DONE, me.count)
        mem.ghost["finished"] |= {me.n}
        if self.broken == "unlock_with_view":
            return "unlock"
        return "released"

    def released(self, mem, me):
        """The storage of the view is dead."""
        me.view = self.broken == "release_with_view"
        mem["word", me.slot] = (me.n, RELEASED, 0)
        if self.broken in ("unlock_before_done", "unlock_with_view"):
            return self.go_on(me)
        return "view_dies" if self.broken == "release_with_view" else "unlock"

    def view_dies(self, mem, me):
        """(Wrong variant only.)"""
        me.view = False
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock(("of group", me.n))
        if self.broken == "unlock_before_done":
            return "done"
        if self.broken == "unlock_with_view":
            return "released"
        return "leave" if me.closing else self.go_on(me)

    # leave

    def close(self, mem, me):
        """With a view alive, which it will be done with."""
        me.closing = True
        return "say_closed" if mem.try_lock("control") else WAIT

    def say_closed(self, mem, me):
        mem["closed", self.index] = True
        return "last_of_all"

    def last_of_all(self, mem, me):
        return "group_leaves" if mem["closed", 1 - self.index] else "other_lives"

    def other_lives(self, mem, me):
        return "closed" if mem.locked(("life", 1 - self.index)) else "group_leaves"

    def group_leaves(self, mem, me):
        mem["state"] = LEAVING
        return "closed"

    def closed(self, mem, me):
        mem.unlock("control")
        return "keep_view" if self.keeps else "done"

    def keep_view(self, mem, me):
        """As long as anybody else is there."""
        return "done" if mem.others_over() else WAIT

    def leave(self, mem, me):
        """Its locks drop with it."""
        return END


class Groups(Model):
    """A publisher and a group of two: each message to one of them, bytes stand still, slots come back."""

    MUTATIONS = named(
        no_reread="nothing is read again under the lock",
        unlock_before_done="done is stored after the unlock",
        release_with_view="the slot is given back while the view is alive",
    )
    slots, messages, max_attempts, mortal, closes, keeps = 1, 2, 9, (), (), False
    starts = ("scan", "scan")
    changes = states.visible(states.FAN_OUT, states.GROUP)

    def __init__(self, broken=None):
        super().__init__(broken)
        slots = range(self.slots)
        self.words = {"published": 0, "state": LIVING}
        self.words |= {(word, s): 0 for word in ("order", "seq", "a", "b") for s in slots}
        self.words |= {("word", s): (0, RELEASED, 0) for s in slots}
        self.words |= {("closed", m): False for m in (0, 1)}
        self.ghost = {"taken": (), "reported": frozenset(), "finished": frozenset()}
        self.locks = {("life of P", "P"), ("life of G", "S0"), ("life of G", "S1")}
        self.locks |= {(("life", m), f"S{m}") for m in (0, 1)}
        settings = {"slots": self.slots, "messages": self.messages, "max_attempts": self.max_attempts}
        self.processes = [
            Publisher("P", broken, "P" in self.mortal, **settings),
            *(
                Subscriber(
                    s,
                    broken,
                    s in self.mortal,
                    index=m,
                    start=start,
                    closes=s in self.closes,
                    keeps=self.keeps,
                    **settings,
                )
                for m, (s, start) in enumerate(zip(("S0", "S1"), self.starts, strict=True))
            ),
        ]

    def slot_states(self, s: State):
        return {slot: self.slot_state(s, slot) for slot in range(self.slots)}

    def slot_state(self, s: State, slot: int):
        """As the group sees it: by its word and the lock, which is the claim once the word was read again."""
        seq = s.words["seq", slot]
        if not 0 < seq <= s.words["published"]:
            return Slot.WRITING
        n, phase, _ = s.words["word", slot]
        if s.holder("life of G") is None or (n == seq and phase == RELEASED):
            return Slot.RELEASED
        if n != seq:
            return Slot.RELEASED if s.words["state"] == LEAVING else Slot.PUBLISHED
        if phase == DONE:
            return Slot.DONE
        holder = s.holder(("of group", seq))
        return Slot.LEASED if holder is not None and s.at(holder) not in CLAIMING else Slot.PUBLISHED

    def invariant(self, s: State):
        views = []
        for name in ("S0", "S1"):
            me = s.me(name)
            if me.view:
                views.append(me.n)
                if not s.words["a", me.slot] == s.words["b", me.slot] == me.n:
                    return f"the bytes under {name}'s view of message {me.n} changed, or were never there"
                if me.n > s.words["published"]:
                    return f"{name} took message {me.n}, which was not published yet"
        if len(views) != len(set(views)):
            return "two members have the same message"
        taken = s.ghost["taken"]
        if len(taken) - len(set(taken)) > s.crashed:
            return f"taken: {taken}, after {s.crashed} deaths"
        for n in set(taken):
            if taken.count(n) > self.max_attempts:
                return f"message {n} was handed out more than {self.max_attempts} times"
        return None

    def final(self, s: State):
        if not all(s.over(p.name) for p in self.processes):
            return "somebody hangs"
        sent = set(range(1, s.words["published"] + 1))
        stays = [name for name in ("S0", "S1") if s.at(name) == END and not s.me(name).closing]
        if stays and set(s.ghost["taken"]) | s.ghost["reported"] != sent:
            return f"sent {sent}, taken {s.ghost['taken']}, reported {set(s.ghost['reported'])}"
        return None


class GroupsTwoSlots(Groups):
    """The same with two slots."""

    MUTATIONS = named()
    slots = 2


class GroupsMemberDeath(Groups):
    """A member dies anywhere: what it had goes to the other one, and its slots come back."""

    MUTATIONS = named(
        no_scan="there is no scan: only the walk",
        scan_skips_claimed="a scan skips what is claimed",
        done_ignored="a message that is done, whose member has died, is left as it is",
        unlock_with_view="the claim is unlocked while the view lives",
    )
    messages, mortal, crashes = 2, ("S0",), 1


class GroupsAllDie(Groups):
    """Both die: the group has ended, and holds the publisher up no more."""

    MUTATIONS = named(life_not_asked="a publisher that is held up does not ask whether anybody in the group lives")
    messages, mortal, crashes = 2, ("S0", "S1"), 2


class GroupsPublisherDeath(Groups):
    """The publisher dies anywhere: what was published is drained, what was not is never seen."""

    MUTATIONS = named(scan_ahead="a scan takes a record whose number is above `published`")
    messages, mortal, crashes = 2, ("P",), 1


class GroupsPoison(Groups):
    """A message that kills its member is handed out `max_attempts` times, then dropped and reported."""

    MUTATIONS = named()
    messages, max_attempts, mortal, crashes = 1, 1, ("S0",), 1


class GroupsLeave(Groups):
    """Both close with a view alive, after their first message: the last one takes the group with it."""

    MUTATIONS = named(leaving_is_gone="a slot of a group that is leaving counts as free although a view lives")
    messages, closes = 3, ("S0", "S1")


class GroupsLeaveAndDeath(Groups):
    """One closes and keeps a view, the other dies: somebody has to say that the group is leaving."""

    MUTATIONS = named(no_reap="nobody looks whether the group is leaving when a member has died")
    slots, messages, closes, keeps, starts = 2, 4, ("S0",), True, ("scan", "exits")
