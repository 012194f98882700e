"""protocols.md section 7: joining, leaving, reaping, sweeping; the control segment's name and its inodes."""

from __future__ import annotations

from .explorer import END, WAIT, Model, Process, State, named

INDEXES, INODES = (0, 1), (1, 2, 3, 4, 5)


class User(Process):
    """What a member and a sweeper have in common: open the control segment and lock the right one."""

    variables = named(inode=0, index=0, dead=0, own=0, late=False, runs=0)

    def open(self, mem, me):
        """Open the control segment by its name; a member creates it where there is none."""
        sys = mem.sys
        if not sys["name"]:
            if not self.creates:
                return "nothing_there"
            sys["name"] = sys["inodes"] = sys["inodes"] + 1
        me.inode = sys["name"]
        if self.broken == "gc_unlocked" and not self.creates:
            return "locked"
        return "open_unlocked" if self.broken == "no_inode_check" else "lock"

    def open_unlocked(self, mem, me):
        return "locked" if mem.try_lock(("control", me.inode)) else WAIT

    def lock(self, mem, me):
        return "check_name" if mem.try_lock(("control", me.inode)) else WAIT

    def check_name(self, mem, me):
        """Does the name still lead here? If not, somebody swept it."""
        return "locked" if mem.sys["name"] == me.inode else "close"

    def close(self, mem, me):
        mem.unlock(("control", me.inode))
        return "open"

    def look_for_life(self, mem, me, nobody, somebody):
        """One question: is the life lock of the next index held by somebody else?"""
        if mem.locked(("life", me.inode, me.index)):
            me.index = 0
            return somebody
        me.index += 1
        if me.index < len(INDEXES):
            return "again"
        me.index = 0
        return nobody

    # sweep everything that a channel left: segments first, the control segment's name last

    def sweep_segments(self, mem, me):
        mem.sys["segments"] = frozenset()
        return self.swept(me) if self.broken == "control_first" else "sweep_control"

    def sweep_control(self, mem, me):
        mem.sys["name"] = 0
        return "sweep_segments" if self.broken == "control_first" else self.swept(me)


class Member(User):
    """Joins, lives, reaps one dead member if there is one, leaves."""

    start, creates = "open", True

    def locked(self, mem, me):
        return "anybody" if mem["magic", me.inode] else "initialise"

    def initialise(self, mem, me):
        mem["magic", me.inode] = 1
        return "anybody"

    def anybody(self, mem, me):
        following = self.look_for_life(mem, me, "wipe_segments", "reap_or_join")
        return "anybody" if following == "again" else following

    def wipe_segments(self, mem, me):
        """No life lock at all is held: wipe what a dead channel left."""
        mem.sys["segments"] = frozenset()
        return "wipe_uid"

    def wipe_uid(self, mem, me):
        mem["uid", me.inode, me.index] = 0
        me.index += 1
        if me.index < len(INDEXES):
            return "wipe_uid"
        me.index = 0
        return self.join()

    def join(self):
        return "create_early" if self.broken == "create_before_entry" else "find_index"

    def create_early(self, mem, me):
        mem.sys["segments"] |= {self.uid}
        return "find_index"

    def reap_or_join(self, mem, me):
        """Reap whoever is dead (life lock free, uid not 0), under the control lock."""
        me.dead = mem["uid", me.inode, me.index]
        return "reap_ask" if me.dead else self.reap_next(me)

    def reap_next(self, me):
        me.dead, me.index = 0, me.index + 1
        if me.index < len(INDEXES):
            return "reap_or_join"
        me.index = 0
        return self.join()

    def reap_ask(self, mem, me):
        return self.reap_next(me) if mem.locked(("life", me.inode, me.index)) else "reap_unlink"

    def reap_unlink(self, mem, me):
        mem.sys["segments"] -= {me.dead}
        return "reap_uid"

    def reap_uid(self, mem, me):
        mem["uid", me.inode, me.index] = 0
        return self.reap_next(me)

    def find_index(self, mem, me):
        """The first index without a uid."""
        if mem["uid", me.inode, me.index]:
            me.index += 1
            return "find_index" if me.index < len(INDEXES) else "full"
        return "life"

    def full(self, mem, me):
        """Every index is taken: leave again (the model has more members than indexes)."""
        me.index = 0
        mem.unlock(("control", me.inode))
        return END

    def life(self, mem, me):
        if not mem.try_lock(("life", me.inode, me.index)):
            mem.ghost["wrong"] = "there is an index without a uid whose life lock is held"
        return "write_uid"

    def write_uid(self, mem, me):
        mem["uid", me.inode, me.index] = self.uid
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock(("control", me.inode))
        return "create"

    def create(self, mem, me):
        mem.sys["segments"] |= {self.uid}
        return "lives"

    def lives(self, mem, me):
        """Between here and `leave` the channel must be whole (`Channel.invariant`)."""
        return ("lives_on", "notice") if self.outlives else "leave"

    def lives_on(self, mem, me):
        """Outlive all others, reap the dead, then nothing of anybody else may be left."""
        me.late = mem.others_over()
        return "notice" if me.late else WAIT

    def notice(self, mem, me):
        """Looks at the table without a lock: is the other one dead?"""
        me.dead = mem["uid", me.inode, 1 - me.index]
        return "notice_ask" if me.dead else self.noticed(me)

    def noticed(self, me):
        return "lives_alone" if me.late else "lives_on"

    def lives_alone(self, mem, me):
        left = mem.sys["segments"] - {self.uid}
        if left:
            mem.ghost["wrong"] = f"segments of the dead are left: {sorted(left)}"
        return "leave"

    def notice_ask(self, mem, me):
        return self.noticed(me) if mem.locked(("life", me.inode, 1 - me.index)) else "notice_lock"

    def notice_lock(self, mem, me):
        if not mem.try_lock(("control", me.inode)):
            return WAIT
        return "notice_unlink" if self.broken == "no_second_question" else "notice_again"

    def notice_again(self, mem, me):
        """Under the lock: is it still the same one?"""
        return "notice_unlink" if mem["uid", me.inode, 1 - me.index] == me.dead else "notice_unlock"

    def notice_unlink(self, mem, me):
        mem.sys["segments"] -= {me.dead}
        return "notice_uid"

    def notice_uid(self, mem, me):
        mem["uid", me.inode, 1 - me.index] = 0
        return "notice_unlock"

    def notice_unlock(self, mem, me):
        mem.unlock(("control", me.inode))
        return self.noticed(me)

    def leave(self, mem, me):
        if not mem.try_lock(("control", me.inode)):
            return WAIT
        me.dead = 0
        return "remove_own"

    def remove_own(self, mem, me):
        mem.sys["segments"] -= {self.uid}
        return "uid_0"

    def uid_0(self, mem, me):
        mem["uid", me.inode, me.index] = 0
        if self.broken != "life_dropped_last":
            return "drop_life"
        me.own, me.index = me.index, 0
        return "leave_ask"

    def drop_life(self, mem, me):
        """Before the control lock: else two that leave together both see the other one alive, and nobody sweeps."""
        mem.unlock(("life", me.inode, me.own if self.broken == "life_dropped_last" else me.index))
        me.index = 0
        return END if self.broken == "life_dropped_last" else "leave_ask"

    def leave_ask(self, mem, me):
        """`me.index` runs over all indexes; the own life lock is no hindrance (nobody is told of its own locks)."""
        first = "sweep_control" if self.broken == "control_first" else "sweep_segments"
        if self.broken == "sweep_unlocked":
            first = "unlock_early"
        following = self.look_for_life(mem, me, first, "leave_unlock")
        return "leave_ask" if following == "again" else following

    def unlock_early(self, mem, me):
        mem.unlock(("control", me.inode))
        return "sweep_segments"

    def swept(self, me):
        return END if self.broken == "sweep_unlocked" else "leave_unlock"

    def leave_unlock(self, mem, me):
        mem.unlock(("control", me.inode))
        return "drop_life" if self.broken == "life_dropped_last" else END


class Sweeper(User):
    """`gc`: sweeps channels that nobody lives in. It runs twice at any time, and once more when all is over."""

    start, creates = "idle", False

    def idle(self, mem, me):
        me.late = mem.others_over()
        if me.runs == 2 and not me.late:
            return WAIT
        me.runs = min(me.runs + 1, 2)
        return "open"

    def nothing_there(self, mem, me):
        return END if me.late else "idle"

    def locked(self, mem, me):
        following = self.look_for_life(mem, me, "sweep_segments", "unlock")
        return "locked" if following == "again" else following

    def swept(self, me):
        return "unlock"

    def unlock(self, mem, me):
        mem.unlock(("control", me.inode))
        me.inode = 0
        return END if me.late else "idle"


class Channel(Model):
    """Members that live, at most two at a time: whoever leaves last leaves nothing behind."""

    MUTATIONS = named(
        life_dropped_last="a member that leaves drops its life lock only after the control lock",
        no_inode_check="an opener does not check that the name still leads to what it has locked",
        sweep_unlocked="the last one sweeps after it has unlocked the control segment",
        control_first="the last one unlinks the control segment's name before the segments",
    )
    members, mortal, outlives, sweeper = ("A", "B"), (), (), False

    def __init__(self, broken=None):
        super().__init__(broken)
        self.words = {("magic", i): 0 for i in INODES} | {("uid", i, k): 0 for i in INODES for k in INDEXES}
        self.sys = {"name": 0, "inodes": 0, "segments": frozenset()}
        self.ghost = {"wrong": None}
        self.processes = [
            Member(name, broken, name in self.mortal, uid=name, outlives=name in self.outlives) for name in self.members
        ]
        if self.sweeper:
            self.processes.append(Sweeper("gc", broken))

    def invariant(self, s: State):
        if s.ghost["wrong"]:
            return s.ghost["wrong"]
        for name in self.members:
            if not s.at(name).startswith(("lives", "notice")):
                continue
            me = s.me(name)
            if s.sys["name"] != me.inode:
                return f"{name} lives in a channel that the name does not lead to"
            if name not in s.sys["segments"]:
                return f"somebody unlinked the segments of {name}, which lives"
            if s.words["uid", me.inode, me.index] != name:
                return f"somebody wiped the entry of {name}, which lives"
        return None

    def final(self, s: State):
        if not all(s.over(p.name) for p in self.processes):
            return "somebody hangs"
        if self.outlives and not all(s.me(name).late for name in self.outlives):
            return None  # there was no room for it
        if s.sys["name"] or s.sys["segments"]:
            return f"names are left: {sorted(s.sys['segments'])}, control segment: {bool(s.sys['name'])}"
        return None


class ChannelThree(Channel):
    """A third one that comes while the others leave."""

    MUTATIONS = named()
    members = ("A", "B", "C")


class ChannelDeath(Channel):
    """A member dies anywhere; a later opener or `gc` (which may run at any time) cleans up after it."""

    MUTATIONS = named(
        gc_unlocked="gc asks for life locks and sweeps without the control lock",
        no_inode_check="an opener (here: gc too) does not check that the name still leads to what it has locked",
    )
    mortal, sweeper, crashes = ("A",), True, 1


class ChannelOutlive(Channel):
    """A dies anywhere, C comes and may take its index, B outlives both: the dead leave nothing in a living channel."""

    MUTATIONS = named(
        create_before_entry="a member creates its segments before its entry says whose they are",
        no_second_question="who saw a dead member reaps it without looking again under the control lock",
    )
    members, mortal, outlives, crashes = ("A", "B", "C"), ("A",), ("B",), 1
