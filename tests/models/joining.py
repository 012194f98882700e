"""protocols.md section 2: which messages are mine? A receiver joins, dies, and another one takes its index.

In C: protocol/reader.c (has_started, reader_next).
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

MESSAGES = 2


class Publisher(Process):
    """Keeps every message (no reuse here). `reader` is the uid that it counts as a recipient."""

    start, variables = "call_send", named(n=1, epoch=0, reader=0)

    def call_send(self, mem, me):
        """`send` is called: whoever has returned from its constructor by now must get this message."""
        mem.ghost["promised"] = (*mem.ghost["promised"], mem.ghost["joined"])
        return "read_epoch"

    def read_epoch(self, mem, me):
        epoch = mem["epoch"]
        if epoch == me.epoch:
            return "publish"
        me.epoch = epoch
        return "read_table"

    def read_table(self, mem, me):
        uid = mem["uid"]
        following = "epoch_again" if self.broken == "epoch_after_table" else "publish"
        if uid == me.reader:
            return following
        me.reader = uid
        if not uid:
            return following
        return "store_start_uid" if self.broken == "start_uid_first" else "store_start"

    def store_start(self, mem, me):
        mem["start"] = me.n
        return self.stored() if self.broken == "start_uid_first" else "store_start_uid"

    def store_start_uid(self, mem, me):
        mem["start_uid"] = me.reader
        return "store_start" if self.broken == "start_uid_first" else self.stored()

    def stored(self):
        return "epoch_again" if self.broken == "epoch_after_table" else "publish"

    def epoch_again(self, mem, me):
        me.epoch = mem["epoch"]
        return "publish"

    def publish(self, mem, me):
        mem["published"] = me.n
        mem.ghost["recipient"] = (*mem.ghost["recipient"], me.reader)
        me.n += 1
        return END if me.n > MESSAGES else "call_send"


class Receiver(Process):
    """Joins (reaping whoever had the index before), attaches, takes its messages, leaves when the publisher is gone."""

    start = "lock_control"
    variables = named(epoch=0, p=0, mine=False, published=0, last=False)

    def lock_control(self, mem, me):
        return "read_uid" if mem.try_lock("control") else WAIT

    def read_uid(self, mem, me):
        return "life" if mem["uid"] == 0 else "predecessor_lives"

    def predecessor_lives(self, mem, me):
        """The index is taken: wait for its member to die or leave (it may need the control lock for that)."""
        return "give_up" if mem.locked("life") else "reap"

    def give_up(self, mem, me):
        mem.unlock("control")
        return "lock_control"

    def reap(self, mem, me):
        mem["uid"] = 0
        return "reap_epoch"

    def reap_epoch(self, mem, me):
        me.epoch = mem["epoch"]
        return "reap_epoch_store"

    def reap_epoch_store(self, mem, me):
        mem["epoch"] = me.epoch + 1
        return "life"

    def life(self, mem, me):
        if not mem.try_lock("life"):
            return "give_up"
        return "load_epoch" if self.broken == "epoch_before_entry" else "write_uid"

    def write_uid(self, mem, me):
        mem["uid"] = self.uid
        return "unlock_control" if self.broken == "epoch_before_entry" else "load_epoch"

    def load_epoch(self, mem, me):
        me.epoch = mem["epoch"]
        return "store_epoch"

    def store_epoch(self, mem, me):
        mem["epoch"] = me.epoch + 1
        return "write_uid" if self.broken == "epoch_before_entry" else "unlock_control"

    def unlock_control(self, mem, me):
        mem.unlock("control")
        return "constructed"

    def constructed(self, mem, me):
        mem.ghost["joined"] = self.uid
        me.epoch = 0
        return "attach"

    def attach(self, mem, me):
        me.p = mem["published"]
        return "look"

    def look(self, mem, me):
        """What is published, and (as long as it is not known to be) is it mine?"""
        me.published = mem["published"]
        if not me.mine:
            return "look_start_uid"
        return "take" if me.published > me.p else self.nothing(me)

    def look_start_uid(self, mem, me):
        start_uid = mem["start_uid"]
        me.mine = start_uid == self.uid or (self.broken == "uid_ignored" and start_uid != 0)
        if me.mine:
            return "look_start"
        me.p = me.published
        return self.nothing(me)

    def look_start(self, mem, me):
        start = mem["start"]
        me.p = max(me.p, start - 1) if self.broken == "max_position" else start - 1
        return "look"

    def take(self, mem, me):
        me.p += 1
        mem.ghost["got", self.uid] += (me.p,)
        return "look"

    def nothing(self, me):
        return "leave" if me.last else "publisher_lives"

    def publisher_lives(self, mem, me):
        me.last = not mem.locked("life of P")
        return ("look", "leave") if self.uid == 1 and self.leaves and not me.last else "look"

    def leave(self, mem, me):
        return "leave_uid" if mem.try_lock("control") else WAIT

    def leave_uid(self, mem, me):
        mem.ghost["left"] |= {self.uid}
        mem["uid"] = 0
        return "leave_load_epoch"

    def leave_load_epoch(self, mem, me):
        me.epoch = mem["epoch"]
        return "leave_store_epoch"

    def leave_store_epoch(self, mem, me):
        mem["epoch"] = me.epoch + 1
        return END


class Joining(Model):
    """Publisher, a receiver, and a second one that takes over its index once it has left."""

    MUTATIONS = named(
        epoch_before_entry="a joining receiver advances the epoch before it writes its entry",
        epoch_after_table="the publisher remembers the epoch that it reads after the table",
        start_uid_first="the publisher stores start_uid before start",
        max_position="the receiver's position becomes the larger of its own and start-1",
        uid_ignored="the receiver takes any start_uid for its own",
    )
    tso = True
    leaves, mortal = True, ()

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {"epoch": 0, "uid": 0, "published": 0, "start": 0, "start_uid": 0}
        self.ghost = {"joined": 0, "promised": (), "recipient": (), "left": frozenset()}
        self.ghost |= {("got", uid): () for uid in (1, 2)}
        self.locks = {("life of P", "P")}
        self.processes = [
            Publisher("P", broken, "P" in self.mortal),
            Receiver("R1", broken, "R1" in self.mortal, uid=1, leaves=self.leaves),
            Receiver("R2", broken, "R2" in self.mortal, uid=2, leaves=self.leaves),
        ]

    def invariant(self, s: State):
        for uid in (1, 2):
            got = s.ghost["got", uid]
            mine = tuple(n for n, reader in enumerate(s.ghost["recipient"], 1) if reader == uid)
            if got != mine[: len(got)]:
                return f"R{uid} got {got}, but the publisher counts it as a recipient of {mine}"
        return None

    def final(self, s: State):
        for uid in (1, 2):
            got, published = s.ghost["got", uid], s.words["published"]
            mine = tuple(n for n, reader in enumerate(s.ghost["recipient"], 1) if reader == uid)
            stayed = s.at(f"R{uid}") != "dead" and s.me(f"R{uid}").last
            promised = {n for n, joined in enumerate(s.ghost["promised"], 1) if joined == uid and n <= published}
            if stayed and (got != mine or not promised <= set(got)):
                return f"R{uid} got {got}, was a recipient of {mine}, and existed when {promised} were sent"
        return None if all(s.over(p.name) for p in self.processes) else "somebody hangs"


class JoiningDeath(Joining):
    """The publisher or the first receiver dies, anywhere; the second receiver reaps the first. No store buffers."""

    MUTATIONS = named()
    tso, leaves, mortal, crashes = False, False, ("P", "R1"), 1
