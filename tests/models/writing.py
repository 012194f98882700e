"""protocols.md section 1: a message is written into a slot that is free.

In C: protocol/writer.c (writer_acquire, writer_publish).
"""

from __future__ import annotations

from .explorer import Process


class Writer(Process):
    """Writes message `me.n` into slot `me.slot` of `slots`, word by word from `payload_1` on; `publish` comes next."""

    def payload_1(self, mem, me):
        mem["a", me.slot] = me.n
        return "payload_2"

    def payload_2(self, mem, me):
        mem["b", me.slot] = me.n
        return "record"

    def record(self, mem, me):
        mem["seq", me.slot] = me.n
        return "order"

    def order(self, mem, me):
        mem["order", me.n % self.slots] = me.slot
        return "publish"
