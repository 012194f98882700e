"""checkpoint-protocol.md, "Several ranks": ranks that save other names, or in another order, do not wait for ever.

Each rank chooses what it saves. Its writing process adds the parts in that order and polls in between; then its trainer
closes or dies, so that it ends when each checkpoint that it has a part in is decided. Parts come without the mutex: a
listing of one directory after another is no snapshot. `sys`, since parts, outcomes and the run are files.
"""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

A, B = "step-1", "step-2"
COMMITTED, GIVEN_UP = "committed", "given up"
NOBODY: frozenset = frozenset()


class Writing(Process):
    """The writing process of rank `r` of `count`."""

    start = "choose"
    killable = True
    variables = named(
        saves=(), added=0, told=(), ended=False, key=None, alive=(), theirs=NOBODY, mine=NOBODY, lost=None
    )

    def choose(self, mem, me):
        mem.barrier()
        return tuple(f"saves_{''.join(key[-1] for key in saves)}" for saves in self.choices)

    def saves_1(self, mem, me):
        return self._saves(mem, me, (A,))

    def saves_2(self, mem, me):
        return self._saves(mem, me, (B,))

    def saves_12(self, mem, me):
        return self._saves(mem, me, (A, B))

    def saves_21(self, mem, me):
        return self._saves(mem, me, (B, A))

    def saves_(self, mem, me):
        return self._saves(mem, me, ())

    def _saves(self, mem, me, saves):
        mem.barrier()
        me.saves = mem.ghost["saves", self.r] = saves
        return self._next(me)

    def _next(self, me):
        me.key, me.lost, me.alive = None, None, ()
        me.theirs = me.mine = NOBODY
        if me.added < len(me.saves):
            return ("add", "lock") if len(me.told) < me.added else "add"
        if len(me.told) == me.added:
            return "over"
        return "lock" if me.ended else "closes"

    def closes(self, mem, me):
        """Each of its parts is there. (The run is replaced under the mutex, which is left out here.)"""
        files = mem.sys
        files["ended"] = files["ended"] | {self.r}
        me.ended = True
        return self._next(me)

    def over(self, mem, me):
        mem.barrier()
        return END

    def add(self, mem, me):
        """What is decided by now fails."""
        key, files = me.saves[me.added], mem.sys
        if files["outcome", key] is None:
            files["parts", key] = files["parts", key] | {(self.r, me.added)}  # with the number of the save
        else:
            me.told = (*me.told, key)
            assert files["outcome", key] == GIVEN_UP
        me.added += 1
        return self._next(me)

    def lock(self, mem, me):
        """To check the oldest that is not decided."""
        me.key = next(key for key in me.saves[: me.added] if key not in me.told)
        return "outcome" if mem.try_lock("mutex") else WAIT

    def outcome(self, mem, me):
        if mem.sys["outcome", me.key] is None:
            return "lives_0"
        me.told = (*me.told, me.key)
        return "unlock"

    def lives_0(self, mem, me):
        return self._lives(mem, me, 0)

    def lives_1(self, mem, me):
        return self._lives(mem, me, 1)

    def lives_2(self, mem, me):
        return self._lives(mem, me, 2)

    def _lives(self, mem, me, rank):
        if mem.locked(("life", rank)) or rank == self.r:
            me.alive = (*me.alive, rank)
        if rank + 1 < self.count:
            return f"lives_{rank + 1}"
        return "read_other" if self.broken == "votes_before" else "who_ended"

    def _votes(self, mem, key):
        files = mem.sys
        return files["parts", key] if files["outcome", key] is None else NOBODY

    def who_ended(self, mem, me):
        ended = mem.sys["ended"]
        me.alive = tuple(rank for rank in me.alive if rank not in ended)
        return {"votes_before": "judge", "own_first": "read_own"}.get(self.broken, "read_other")

    def read_other(self, mem, me):
        me.theirs = self._votes(mem, A if me.key == B else B)
        return "judge" if self.broken == "own_first" else "read_own"

    def read_own(self, mem, me):
        me.mine = self._votes(mem, me.key)
        return {"votes_before": "who_ended", "own_first": "read_other"}.get(self.broken, "judge")

    def judge(self, mem, me):
        """Of the two that this rank's oldest makes with another one: which of them some rank has left out."""
        mem.barrier()
        other = A if me.key == B else B
        mine, theirs = dict(me.mine), dict(me.theirs)
        ahead, order = theirs.keys() - mine, [theirs[rank] - mine[rank] for rank in mine.keys() & theirs]
        if self.r not in theirs and min(order, default=0) < 0:
            me.lost = other
        elif ahead and (max(order, default=0) > 0 or self.broken == "guess"):
            me.lost = me.key
        if me.lost:
            return "give_up"
        if len(mine) == self.count:
            return "commit"
        if len({*mine, *me.alive}) < self.count and self.broken != "waits":
            me.lost = me.key
            return "give_up"
        return "unlock"

    def give_up(self, mem, me):
        files = mem.sys
        files["outcome", me.lost] = GIVEN_UP
        mem.ghost["given_up"] = mem.ghost["given_up"] | {me.lost}
        return "unlock"

    def commit(self, mem, me):
        mem.sys["outcome", me.key] = COMMITTED
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock("mutex")
        return self._next(me)


class NextRun(Process):
    """It replaces the record of the run at some time, and waits for the processes of the run before."""

    def begin(self, mem, me):
        files = mem.sys
        if self.broken == "forgets":
            files["ended"] = NOBODY
        return END


class SaveOrder(Model):
    """Two ranks, each with one or both of two names in either order, and one death."""

    MUTATIONS = named(
        own_first="its own directory is read first: parts that come to both meanwhile look like another order",
        waits="what a rank has left out that has ended, or is dead, is waited for",
        votes_before="who has ended is read after the parts: the last one may come in between",
        forgets="the record of the next run has no notes of this one",
        guess="of two that have no rank in common, each rank gives up its own",
    )
    CHOICES = ((A, B), (B, A), (A,), (B,)), ((A, B), (B, A), (A,), (B,))
    crashes = 1

    def __init__(self, broken=None):
        super().__init__(broken)
        ranks = range(len(self.CHOICES))
        self.sys = {"ended": NOBODY} | {
            (what, key): None if what == "outcome" else NOBODY for what in ("outcome", "parts") for key in (A, B)
        }
        self.ghost = {"given_up": NOBODY, **{("saves", r): None for r in ranks}}
        self.locks = {(("life", r), f"W{r}") for r in ranks}
        self.processes = [
            Writing(f"W{r}", broken, r=r, count=len(self.CHOICES), choices=self.CHOICES[r]) for r in ranks
        ] + [NextRun("N", broken)]

    def invariant(self, s: State):
        saves = {s.ghost["saves", r] for r in range(len(self.CHOICES))}
        if s.crashed or None in saves:
            return None
        if len(saves) == 1 and s.ghost["given_up"]:
            return "all save the same in the same order, and a checkpoint is given up"
        if saves == {(A, B), (B,)} and B in s.ghost["given_up"]:
            return "some have left the first out, and the second is given up, which all save"
        return None

    def final(self, s: State):
        if not all(s.over(f"W{r}") for r in range(len(self.CHOICES))):
            return "somebody waits for ever"
        return None


class SaveOrderOfThree(SaveOrder):
    """A third rank, which some have in common with others."""

    MUTATIONS = named(waits="what a rank has left out that has ended, or is dead, is waited for")
    CHOICES = ((A, B),), ((A, B), (B,)), ((A, B), (A,), ())
    crashes = 0
