"""Batches from DataLoader's workers through shared-memory slots.

The only difference from a program without this library is the argument `multiprocessing_context`; before, it was

    loader = DataLoader(Squares(), batch_size=16, num_workers=2)
"""

import torch
from torch.utils.data import DataLoader, Dataset

import shmtensor


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"image": torch.full((3, 64, 64), float(index)), "label": index**2}


if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=16, num_workers=2, multiprocessing_context=shmtensor.get_context("fork"))
    for epoch in range(2):
        right = 0
        for batch in loader:
            right += int((batch["image"].amax((1, 2, 3)) ** 2 == batch["label"]).sum())
        print(f"epoch {epoch}: {right} of 64 samples are right")
        assert right == 64
