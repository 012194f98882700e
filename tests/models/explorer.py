"""A small explicit-state model checker: every interleaving of a few processes, and a death between any two steps.

A model is a set of shared words plus a few processes. A process is a class whose methods are its atomic steps:

    class Publisher(Process):
        start = "publish"
        def publish(self, mem, me):      # mem: what is shared; me: this process's own variables
            mem["published"] = me.n      # at most one shared access per step (checked)
            return "peek"                # the next step; a tuple: any of these; WAIT: not possible now; END

The explorer walks the whole graph breadth first, so the trace that it prints for a failure is a shortest one. It checks

* `Model.invariant` in every state;
* that no step and no death changes the state of a slot (`Model.slot_states`) but as `Model.changes` allows;
* that a state in which no process can move satisfies `Model.final` (so no deadlock);
* that from every state such a good end can still be reached without a further death (so no livelock, no lost wake-up).

With `tso = True` stores go through a first-in first-out store buffer per process, as on x86: a process sees its own
buffer, the others see a store once it has drained. A system call drains the caller's buffer, `barrier` everybody's.
A death drops the process's locks and its variables; its buffer drains, since no processor forgets a store.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

END, DEAD = "end", "dead"
WAIT = "(wait)"  # returned by a step that cannot happen now: the process stays where it was


def named(**values: Any) -> Mapping[str, Any]:
    """Names and their values, not to be changed."""
    return MappingProxyType(values)


class Process:
    """A program: methods are steps, `variables` the process's own variables with their first values."""

    start = "begin"
    variables: Mapping[str, Hashable] = named()
    killable = False

    def __init__(self, name: str, broken: str | None = None, killable: bool | None = None, **settings: Any):
        assert not {END, DEAD, WAIT}.intersection(dir(self)), "a step has the name of an end"
        self.name, self.broken = name, broken
        if killable is not None:
            self.killable = killable
        self.__dict__.update(settings)


class Model:
    """What to explore. Subclasses fill the dictionaries in `__init__` and override the checks."""

    MUTATIONS: Mapping[str, str] = named()  # name of a wrong variant -> what is wrong with it
    tso = False
    crashes = 0  # at most this many deaths in one run
    changes: frozenset[tuple[Hashable, Hashable]] = frozenset()  # of the state of a slot: from, to

    def __init__(self, broken: str | None = None):
        assert broken is None or broken in self.MUTATIONS, broken
        self.broken = broken
        self.words: dict[Hashable, Hashable] = {}  # shared memory
        self.sys: dict[Hashable, Hashable] = {}  # kernel objects: semaphores, inboxes, names
        self.ghost: dict[Hashable, Hashable] = {}  # bookkeeping of the checks; no process acts on it
        self.locks: set[tuple[Hashable, str]] = set()  # exclusive locks (lock, process) held at the start
        self.processes: list[Process] = []

    def invariant(self, s: State) -> str | None:
        """What is wrong with this state, or None."""

    def slot_states(self, s: State) -> Mapping[Hashable, Hashable]:
        """The state of each slot, as each of its recipients sees it."""
        return {}

    def final(self, s: State) -> str | None:
        """What is wrong with this state, in which nothing can move any more, or None."""


class Frozen(NamedTuple):
    """One state of the whole model; `procs` holds (step, variables, store buffer) of each process."""

    words: tuple[Hashable, ...]
    sys: tuple[Hashable, ...]
    ghost: tuple[Hashable, ...]
    locks: frozenset[tuple[Hashable, int, bool]]
    procs: tuple[tuple[str, tuple[Hashable, ...], tuple[tuple[Hashable, Hashable], ...]], ...]
    crashes_left: int


class Violation(AssertionError):
    """A check failed; `trace` holds the steps that lead there."""

    def __init__(self, problem: str, trace: list[str]):
        super().__init__("\n".join([problem, *(f"  {i:3}. {line}" for i, line in enumerate(trace, 1))]))
        self.problem, self.trace = problem, trace


Log = list[tuple[str, Hashable, Hashable]]  # what happened in a step: text with two gaps, key, value


class Cells:
    """Named cells over one tuple, which is copied on write."""

    __slots__ = ("index", "log", "values")

    def __init__(self, index: dict[Hashable, int], values: tuple[Hashable, ...], log: Log | None = None):
        self.index, self.values, self.log = index, values, log

    def __getitem__(self, key: Hashable) -> Any:
        return self.values[self.index[key]]

    def __setitem__(self, key: Hashable, value: Hashable) -> None:
        i = self.index[key]
        self.values = (*self.values[:i], value, *self.values[i + 1 :])
        if self.log is not None:
            self.log.append(("{} := {}", key, value))


class Memory:
    """What one process sees during one step. Every access but those to `ghost` counts as the step's only one."""

    def __init__(self, explorer: Explorer, state: Frozen, pid: int):
        self.log: Log = []
        self.pid, self._tso, self._used, self._procs = pid, explorer.model.tso, False, state.procs
        self._words = Cells(explorer.words, state.words)
        self._sys = Cells(explorer.sys, state.sys, self.log)
        self.ghost = Cells(explorer.ghost, state.ghost)
        self.locks = state.locks
        self.buffers = [proc[2] for proc in state.procs] if self._tso else [()] * len(state.procs)

    def _access(self, text: str, key: Hashable = "", value: Hashable = "", syscall: bool = True) -> None:
        assert not self._used, f"a second shared access in one step: {text} {key} after {self.log}"
        self._used = True
        if text:
            self.log.append((text, key, value))
        if syscall and self.buffers[self.pid]:
            self.drain(self.pid)

    def drain(self, pid: int, limit: int | None = None) -> None:
        """The oldest `limit` stores of a process (all by default) become visible to everybody."""
        for key, value in self.buffers[pid][:limit]:
            self._words[key] = value
        self.buffers[pid] = () if limit is None else self.buffers[pid][limit:]

    def __getitem__(self, key: Hashable) -> Any:
        """Load a word: the own buffer's newest store of it, else what everybody sees."""
        value = self._words[key]
        if self.buffers[self.pid]:
            value = next((v for k, v in reversed(self.buffers[self.pid]) if k == key), value)
        self._access("{} is {}", key, value, syscall=False)
        return value

    def __setitem__(self, key: Hashable, value: Hashable) -> None:
        """Store a word."""
        self._access("{} := {}", key, value, syscall=False)
        if self._tso:
            self.buffers[self.pid] += ((key, value),)
        else:
            self._words[key] = value

    def barrier(self) -> None:
        """`membarrier`: everybody's stores so far become visible."""
        self._access("barrier", syscall=False)
        for pid in range(len(self.buffers)):
            self.drain(pid)

    @property
    def sys(self) -> Cells:
        """Kernel objects; fetch once per step, then read and write them as one system call would."""
        self._access("")
        return self._sys

    def try_lock(self, lock: Hashable, shared: bool = False) -> bool:
        """Take a byte-range lock without blocking."""
        free = all(shared and not x for k, p, x in self.locks if k == lock and p != self.pid)
        self._access("shared lock({}){}" if shared else "lock({}){}", lock, "" if free else ": EAGAIN")
        if free:
            self.locks |= {(lock, self.pid, not shared)}
        return free

    def unlock(self, lock: Hashable) -> None:
        """Drop a lock."""
        self._access("unlock({})", lock)
        self.locks = frozenset(held for held in self.locks if held[:2] != (lock, self.pid))

    def locked(self, lock: Hashable) -> bool:
        """`F_OFD_GETLK`: does another process hold this lock?"""
        held = any(k == lock and p != self.pid for k, p, _ in self.locks)
        self._access("lock({}) is {}", lock, "held" if held else "free")
        return held

    def drop_everything(self) -> None:
        """What the kernel does when a process is gone."""
        self.locks = frozenset(held for held in self.locks if held[1] != self.pid)

    def others_over(self) -> bool:
        """Bookkeeping: is every other process gone?"""
        steps = [proc[0] for pid, proc in enumerate(self._procs) if pid != self.pid]
        return all(step in (END, DEAD) for step in steps) and all(held[1] == self.pid for held in self.locks)


class State:
    """A state as the checks see it: `s.words[...]`, `s.sys[...]`, `s.ghost[...]`, `s.at(process)`, `s.me(process)`."""

    def __init__(self, explorer: Explorer, frozen: Frozen):
        self._explorer, self._frozen = explorer, frozen
        self.words = Cells(explorer.words, frozen.words)
        self.sys = Cells(explorer.sys, frozen.sys)
        self.ghost = Cells(explorer.ghost, frozen.ghost)
        self.crashed = explorer.model.crashes - frozen.crashes_left

    def at(self, process: str) -> str:
        return self._frozen.procs[self._explorer.pids[process]][0]

    def me(self, process: str) -> SimpleNamespace:
        pid = self._explorer.pids[process]
        return self._explorer.variables(pid, self._frozen)

    def over(self, process: str) -> bool:
        return self.at(process) in (END, DEAD)

    def holder(self, lock: Hashable) -> str | None:
        """The process that has this lock for itself."""
        pids = [pid for key, pid, exclusive in self._frozen.locks if key == lock and exclusive]
        return self._explorer.model.processes[pids[0]].name if pids else None


class Explorer:
    """The state graph of one model."""

    def __init__(self, model: Model):
        self.model = model
        self.words = {key: i for i, key in enumerate(model.words)}
        self.sys = {key: i for i, key in enumerate(model.sys)}
        self.ghost = {key: i for i, key in enumerate(model.ghost)}
        self.pids = {process.name: pid for pid, process in enumerate(model.processes)}
        self.first = Frozen(
            tuple(model.words.values()),
            tuple(model.sys.values()),
            tuple(model.ghost.values()),
            frozenset((lock, self.pids[name], True) for lock, name in model.locks),
            tuple((p.start, tuple(p.variables.values()), ()) for p in model.processes),
            model.crashes,
        )

    def variables(self, pid: int, state: Frozen) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self.model.processes[pid].variables, state.procs[pid][1], strict=True)))

    def moves(self, state: Frozen) -> Iterator[tuple[Frozen, bool, int, str, Log]]:
        """Every (next state, is it a death?, process, step, what happened)."""
        for pid, process in enumerate(self.model.processes):
            step, values, buffer = state.procs[pid]
            if step == DEAD:
                continue
            mem = Memory(self, state, pid)
            if step != END:
                me = self.variables(pid, state)
                following = getattr(process, step)(mem, me)
                after = tuple(me.__dict__.values())
                assert following is not None, f"{process.name}.{step} names no next step"
                assert len(after) == len(values), f"{process.name}.{step} made up a variable: {me}"
                if following is not WAIT:
                    for label in (following,) if isinstance(following, str) else following:
                        yield self._next(state, mem, label, after), False, pid, step, mem.log
            elif any(holder == pid for _, holder, _ in state.locks):
                mem.drain(pid)
                mem.drop_everything()
                yield self._next(state, mem, END, values), False, pid, "exits", mem.log
            if buffer:
                mem = Memory(self, state, pid)
                mem.drain(pid, 1)
                visible = [("{} := {} becomes visible", *buffer[0])]
                yield self._next(state, mem, step, values), False, pid, "(store buffer)", visible
            if process.killable and state.crashes_left and step != END:
                mem = Memory(self, state, pid)
                mem.drain(pid)
                mem.drop_everything()
                lost = self._next(state, mem, DEAD, tuple(process.variables.values()))
                lost = lost._replace(crashes_left=state.crashes_left - 1)
                yield lost, True, pid, step, [("DIES BEFORE THIS STEP", "", "")]

    def _next(self, state: Frozen, mem: Memory, label: str, values: tuple[Hashable, ...]) -> Frozen:
        procs = list(state.procs)
        if self.model.tso:
            procs = [(s, v, b) for (s, v, _), b in zip(procs, mem.buffers, strict=True)]
        procs[mem.pid] = (label, values, mem.buffers[mem.pid])
        return Frozen(mem._words.values, mem._sys.values, mem.ghost.values, mem.locks, tuple(procs), state.crashes_left)

    def run(self, limit: int = 300_000) -> int:
        """Explore everything; the number of states, or a Violation."""
        number = {self.first: 0}
        order, parent = [self.first], [-1]
        before: list[list[int]] = [[]]  # per state: the states that lead to it by a step that is no death
        good: list[int] = []
        slots = [self.model.slot_states(State(self, self.first))]
        for i, state in enumerate(order):  # `order` grows while it is walked
            view = State(self, state)
            problem = self.model.invariant(view)
            if problem:
                raise Violation(problem, self.trace(order, parent, i))
            stuck = True
            for following, death, *_ in self.moves(state):
                j = number.setdefault(following, len(order))
                if j == len(order):
                    assert j < limit, f"more than {limit} states"
                    order.append(following)
                    parent.append(i)
                    before.append([])
                    slots.append(self.model.slot_states(State(self, following)))
                problem = self.illegal(slots[i], slots[j])
                if problem:
                    raise Violation(
                        problem, [*self.trace(order, parent, i), *self.trace([state, following], [-1, 0], 1)]
                    )
                if not death:
                    stuck = False
                    before[j].append(i)
            if stuck:
                problem = self.model.final(view)
                if problem:
                    raise Violation(f"nothing can move, and {problem}", self.trace(order, parent, i))
                good.append(i)
        reaches = set(good)
        while good:
            for i in before[good.pop()]:
                if i not in reaches:
                    reaches.add(i)
                    good.append(i)
        if len(reaches) < len(order):
            lost = next(i for i in range(len(order)) if i not in reaches)
            raise Violation("no good end can be reached from here", self.trace(order, parent, lost))
        return len(order)

    def illegal(self, before: Mapping[Hashable, Hashable], after: Mapping[Hashable, Hashable]) -> str | None:
        """A change of a slot that is in no table."""
        for slot, state in before.items():
            if after[slot] is not state and (state, after[slot]) not in self.model.changes:
                return f"slot {_name(slot)} goes from {state} to {after[slot]}"
        return None

    def trace(self, order: list[Frozen], parent: list[int], i: int) -> list[str]:
        """The steps from the first state to state i, as lines."""
        path = [i]
        while path[-1]:
            path.append(parent[path[-1]])
        lines = []
        for j, k in zip(path[:0:-1], path[-2::-1], strict=True):
            *_, pid, step, log = next(move for move in self.moves(order[j]) if move[0] == order[k])
            happened = "; ".join(text.format(_name(key), value) for text, key, value in log)
            lines.append(f"{self.model.processes[pid].name:10} {step:18} {happened}".rstrip())
        return lines


def explore(model: Model) -> int:
    """Explore a model completely; returns its number of states or raises Violation."""
    collecting = gc.isenabled()
    gc.disable()  # millions of small tuples and no cycle among them
    try:
        return Explorer(model).run()
    finally:
        if collecting:
            gc.enable()


def _name(key: Hashable) -> str:
    return f"{key[0]}[{','.join(map(str, key[1:]))}]" if isinstance(key, tuple) else str(key)
