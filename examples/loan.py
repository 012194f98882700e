"""No copy at all: the producer computes into the slot, and the consumer computes on the slot.

python examples/loan.py
"""

from __future__ import annotations

import multiprocessing

import torch

import shmtensor

CHANNEL, STEPS, SHAPE = "example-loan", 20, (512, 1024)


def consume(answer) -> None:
    sums = []
    with shmtensor.Subscriber(CHANNEL) as sub:
        for msg in sub:
            row = msg.value[3]  # a view of the slot: as long as `row` lives, the slot is not used again
            msg.release()
            sums.append(row.double().sum().item())
    answer.send(sums)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    consumer = context.Process(target=consume, args=(theirs,), daemon=True)
    consumer.start()
    expected = []
    with shmtensor.Publisher(CHANNEL, slots=4, slot_bytes="2MiB") as pub:
        pub.wait_for_subscribers(1, timeout=60)
        for step in range(STEPS):
            with pub.loan(SHAPE, torch.float32, meta={"step": step}) as loan:
                torch.full(SHAPE, float(step), out=loan.tensor)  # computed right where it is read
            expected.append(float(step) * SHAPE[1])
        try:
            with pub.loan(SHAPE, torch.float32) as loan:
                loan.tensor.zero_()
                raise RuntimeError("the camera was unplugged")
        except RuntimeError:
            pass  # an exception discards the loan: nobody sees it
    sums = pipe.recv()
    consumer.join()
    if sums != expected:
        raise SystemExit(f"sums differ: {sums} instead of {expected}")
    print(f"{STEPS} messages of {4 * SHAPE[0] * SHAPE[1]} bytes, none copied, none of the discarded loan")


if __name__ == "__main__":
    main()
