"""The inference: a small convolutional network with fixed weights, and the checksum that goes with every tensor."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

_SIDE = 96
_CLASSES = 64


def checksum(tensor: Any) -> int:
    """CRC-32 of a dense tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def make_model() -> nn.Module:
    """The same network in every process."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, _CLASSES),
    ).eval()  # fmt: skip


def as_image(frame: Any) -> Any:
    """Any tensor as a small float picture [1, 3, 96, 96]; images keep their channels."""
    if frame.is_complex():
        frame = torch.view_as_real(frame)
    if frame.ndim == 3 and frame.shape[-1] in (1, 3, 4):
        planes = frame.permute(2, 0, 1)[:3]
    elif frame.ndim == 2:
        planes = frame.unsqueeze(0)
    else:
        planes = frame.reshape(1, 1, -1) if frame.ndim < 2 else frame.reshape(1, -1, frame.shape[-1])
    steps = [max(1, size // _SIDE) for size in planes.shape[1:]]
    small = planes[:, :: steps[0], :: steps[1]][:, :_SIDE, :_SIDE].to(torch.float32)
    picture = torch.zeros(3, _SIDE, _SIDE)
    picture[:, : small.shape[1], : small.shape[2]] = small  # one plane is spread over all three
    return picture.nan_to_num_(0.0, 0.0, 0.0).mul_(1 / 255).unsqueeze(0)
