"""What the workloads need of a GPU: torch.cuda in one place, so that their logic runs over host memory in the tests."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, ClassVar

SIDE: int = 4096
"""Rows and columns of the matrices that are multiplied where a workload computes."""


class Gpu:
    """The first CUDA device. Made in the parent process, pickled into those that use it."""

    device: ClassVar[str] = "cuda"

    def lacks(self) -> str | None:
        """Why there is none here; None if there is one. torch is not imported where there is no driver."""
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "no NVIDIA driver (libcuda.so.1)"
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "torch finds no CUDA device"

    def describe(self) -> dict[str, Any] | None:
        """Name, memory, CUDA version and driver, for the page; None without a device."""
        if self.lacks():
            return None
        import torch

        found = torch.cuda.get_device_properties(0)
        return {
            "name": found.name,
            "memory_bytes": found.total_memory,
            "capability": f"{found.major}.{found.minor}",
            "cuda": torch.version.cuda,
            "devices": torch.cuda.device_count(),
        }

    def pinned(self, tensor: Any) -> Any:
        """A copy in page-locked host memory."""
        return tensor.pin_memory()

    def upload(self, tensor: Any) -> Any:
        """A copy on the device; from pinned memory it is under way."""
        return tensor.to(self.device, non_blocking=True)

    def host(self, tensor: Any) -> Any:
        """A copy in host memory."""
        return tensor.cpu()

    def random(self, elements: int) -> Any:
        """So many random float32 on the device."""
        import torch

        return torch.randn(elements, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        import torch

        torch.cuda.synchronize()

    def seconds(self, function: Callable[[], object]) -> float:
        """Seconds from the call until the device has done everything, on the host's clock; idle before."""
        self.synchronize()
        start = time.perf_counter()
        kept = function()
        self.synchronize()
        spent = time.perf_counter() - start
        del kept  # what it made is not freed on the clock
        return spent

    def work(self) -> Callable[[int, Any], None]:
        """`work(count, tensor)`: so many products of matrices on the current stream, after one read of the tensor."""
        import torch

        left, right = (torch.randn(SIDE, SIDE, device=self.device) for _ in range(2))
        out, total = torch.empty_like(left), torch.zeros((), device=self.device)

        def run(count: int, tensor: Any) -> None:
            total.add_(tensor.sum())
            for _ in range(count):
                torch.mm(left, right, out=out)

        return run


GPU = Gpu()


def lacks() -> str | None:
    """Why the cases of a workload cannot run here."""
    return GPU.lacks()
