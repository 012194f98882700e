"""Executable models of protocols.md and checkpoint-protocol.md (docs/internals), explored by test_models.py."""

from .channel import Channel, ChannelDeath, ChannelOutlive, ChannelThree
from .claims import (
    Claims,
    ClaimsConsumerDeath,
    ClaimsNoTick,
    ClaimsPoison,
    ClaimsProducerDeath,
    ClaimsTwoSlots,
    ClaimsUndone,
    ClaimsUnlockedLate,
    ClaimsUnlockedLateAndDeath,
)
from .device import DeviceRing, Unmapping
from .explorer import Model
from .fanout import Fanout, FanoutDeath, FanoutLeave, FanoutStoreBuffers
from .groups import (
    Groups,
    GroupsAllDie,
    GroupsLeave,
    GroupsLeaveAndDeath,
    GroupsMemberDeath,
    GroupsPoison,
    GroupsPublisherDeath,
    GroupsTwoSlots,
)
from .history import History
from .joining import Joining, JoiningDeath
from .latest import Latest, LatestDeath, LatestOfTwo, LatestTwoSlots
from .loop_wait import LoopWait
from .orphans import Orphans
from .queue_wake import QueueWake
from .ranks import Ranks
from .requests import Requests, RequestsOnce
from .save_order import SaveOrder, SaveOrderOfThree
from .sleep_wake import SleepWake, SleepWakeDeath, SleepWakeRinger, SleepWakeTick
from .slot_wait import SlotWait, SlotWaitDeath
from .streamed import Streamed
from .traces import Traces
from .uploads import Uploads

MODELS: tuple[type[Model], ...] = (
    *(Fanout, FanoutStoreBuffers, FanoutLeave, FanoutDeath),  # section 1
    *(Joining, JoiningDeath),  # 2
    *(SleepWake, SleepWakeRinger, SleepWakeDeath, SleepWakeTick),  # 3
    *(SlotWait, SlotWaitDeath),  # 4
    *(Claims, ClaimsTwoSlots, ClaimsNoTick, ClaimsConsumerDeath, ClaimsProducerDeath, ClaimsPoison, QueueWake),  # 5
    *(ClaimsUnlockedLate, ClaimsUnlockedLateAndDeath, ClaimsUndone),
    *(Latest, LatestTwoSlots, LatestOfTwo, LatestDeath, History),  # 6
    *(Channel, ChannelThree, ChannelDeath, ChannelOutlive, Orphans),  # 7
    *(Requests, RequestsOnce),  # 8
    LoopWait,  # 9
    *(DeviceRing, Unmapping),  # 11
    *(Groups, GroupsTwoSlots, GroupsMemberDeath, GroupsAllDie, GroupsPublisherDeath, GroupsPoison),  # 13
    *(GroupsLeave, GroupsLeaveAndDeath),
    Traces,  # 14
    *(Ranks, SaveOrder, SaveOrderOfThree, Uploads, Streamed),  # docs/internals/checkpoint-protocol.md
)
