"""Frames of the demo: images that ship with scikit-image, or the user's own files. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_SAMPLES: Final = (
    "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "ihc.png", "camera.png",
    "motorcycle_left.png", "motorcycle_right.png",
)  # fmt: skip
_IMAGES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
SUFFIXES: Final = (*_IMAGES, ".npy", ".pt", ".safetensors")
_MOST_BYTES: Final = 512 << 20

Frame = tuple[str, Any]
"""(name, dense CPU tensor with at least one element)"""


class InputError(Exception):
    """There are no frames; the text says what to do."""


def paths(source: str | None) -> list[Path]:
    """The files that the frames come from; `InputError` if there are none."""
    if source is None:
        spec = importlib.util.find_spec("skimage")
        if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("PIL") is None:
            raise InputError(
                "the demo streams scikit-image's sample images, and it is not installed: pip install 'shmtensor[demo]' "
                "or pass --input with a file or a directory of images, .npy, .pt or .safetensors"
            )
        folder = Path(next(iter(spec.submodule_search_locations))) / "data"
        found = [folder / name for name in _SAMPLES if (folder / name).is_file()]
        if not found:
            raise InputError(f"this scikit-image ships none of {', '.join(_SAMPLES)} in {folder}: pass --input")
        return found
    path = Path(source)
    if not path.exists():
        raise InputError(f"--input {source}: there is no such file or directory")
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"--input {source}: expected a file of {', '.join(SUFFIXES)}")
        return [path]
    found = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
    if not found:
        raise InputError(f"--input {source}: no file of {', '.join(SUFFIXES)} lies in this directory")
    return found


def load(source: str | None) -> list[Frame]:
    """Every frame, up to 512 MiB of them."""
    frames: list[Frame] = []
    total = 0
    for path in paths(source):
        try:
            for name, tensor in _read(path):
                if total and total + tensor.nbytes > _MOST_BYTES:
                    return frames
                if tensor.numel():
                    frames.append((name, tensor))
                    total += tensor.nbytes
        except Exception as error:
            raise InputError(f"cannot read {path}: {type(error).__name__}: {error}") from None
    if not frames:
        raise InputError(f"{source}: its files hold no dense tensor with an element in it")
    return frames


def _read(path: Path) -> Iterator[Frame]:
    import torch

    suffix = path.suffix.lower()
    if suffix in _IMAGES:
        yield path.name, _image(path)
    elif suffix == ".npy":
        import numpy as np

        array = np.load(path, allow_pickle=False)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        batch = array if array.ndim == 4 and array.shape[-1] in (1, 3, 4) else [array]
        for number, item in enumerate(batch):
            yield f"{path.name}[{number}]", torch.from_numpy(np.array(item, order="C"))
    elif suffix == ".safetensors":
        if importlib.util.find_spec("safetensors") is None:
            raise InputError("pip install safetensors")
        from safetensors.torch import load_file

        for key, tensor in load_file(path).items():
            yield f"{path.name}:{key}", tensor.contiguous()
    else:
        yield from _tensors(path.name, torch.load(path, map_location="cpu", weights_only=True))


def _image(path: Path) -> Any:
    if importlib.util.find_spec("PIL") is None:
        raise InputError("pip install pillow")
    import numpy as np
    import torch
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.array(image if image.mode in ("L", "RGB") else image.convert("RGB")))


def _tensors(name: str, value: Any) -> Iterator[Frame]:
    """The dense tensors in a .pt file."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_quantized:
            yield name, value.detach().resolve_conj().resolve_neg().contiguous()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}:{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors(f"{name}[{number}]", item)
