"""Damaged messages for the compiled codec under sanitizers: `fuzz_codec.py PACKAGE_DIRECTORY SEED COUNT`.

Run by tests/codec/test_sanitized.py, in a process whose compiled module was built for it.
"""

from __future__ import annotations

import random
import struct
import sys
import warnings
from pathlib import Path

sys.path[:0] = [sys.argv[1], str(Path(__file__).parents[2])]
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from shmtensor.codec import implementation as chosen  # noqa: E402
from shmtensor.codec.decode import decode as reference_decode  # noqa: E402
from shmtensor.errors import WireError  # noqa: E402
from tests.codec.test_codec import KINDS, METAS  # noqa: E402
from tests.wire.test_spec_fuzz import BAD, looks, seeds  # noqa: E402

NUMBERS = [0, 1, 2, 63, 64, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def arrives(codec, value, meta):
    encoded = codec.encode(value, meta)
    room = bytearray(encoded.total)
    encoded.write(room, 0)
    return encoded.description, bytes(room[: encoded.nbytes])


def damage(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            data[at] = rng.randrange(256)
        case 1:
            data[at] = rng.randrange(13)
        case 2:
            del data[at : at + rng.randint(1, 9)]
        case 3:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        case _ if len(data) >= at + 8:
            struct.pack_into("<Q", data, at, rng.choice(NUMBERS))


def read(decode, description: bytes, data: bytes):
    # memory of exactly this size: one byte more is the sanitizer's
    payload = np.ndarray((len(data),), np.uint8, bytearray(data) or bytearray(1))
    try:
        return decode(description, payload, readonly=True)
    except WireError:
        return None


def main(seed: int, count: int) -> None:
    if chosen.codec is None or not chosen.__file__.startswith(sys.argv[1]):
        raise SystemExit(f"not the module that was built: {chosen.__file__}")
    # both ways to look at tensors; where torch lacks the exchange interface, they are one
    codecs = [chosen.codec, chosen.Compiled(exchange=False).codec]
    for codec in codecs:
        codec.encode(torch.ones(1))
    rng = random.Random(seed)
    values = [*seeds(), *((make(), METAS[i % len(METAS)]) for i, make in enumerate(KINDS.values()))]
    messages = [arrives(codec, value, meta) for value, meta in values for codec in codecs]
    messages += [(description, bytes(1024)) for description in BAD.values() if len(description) < 1 << 20]
    for description, data in messages:
        for codec in codecs:
            read(codec.decode, description, data)
    small = [message for message in messages if len(message[1]) < 100_000]
    for _ in range(count):
        description, data = map(bytearray, rng.choice(small))
        for _ in range(rng.randint(1, 4)):
            part = description if rng.random() < 0.8 or not data else data
            if part:
                damage(rng, part)
        ways = rng.choice(codecs).decode, reference_decode
        found, wanted = (read(each, bytes(description), bytes(data)) for each in ways)
        if (found is None) != (wanted is None) or (found is not None and looks(found) != looks(wanted)):
            raise SystemExit(f"{bytes(description)!r} {bytes(data)!r}: {found!r}, the reference: {wanted!r}")
    print(count)


main(int(sys.argv[2]), int(sys.argv[3]))
