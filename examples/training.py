"""Train a small transformer, kill the trainer with SIGKILL in the middle, resume, and get the same loss curve.

The text is the documentation that ships with Python. Every few steps the model, its optimizer and the step are saved
in the background; the second trainer starts from `latest`. A third one, which nobody interrupts, tells what the losses
should have been.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

import shmtensor

STEPS, EVERY, KILLED_AT = 12, 3, 7
CONTEXT, WIDTH, BATCH = 64, 64, 16
TEXT = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(128, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.out(self.layers(self.bytes(text) + self.places.weight, mask=mask, is_causal=True))


def train(directory: Path, killed_at: int) -> None:
    """Train from the newest checkpoint, if there is one; print the loss of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if (directory / "latest").exists():
        state = shmtensor.load_checkpoint(directory / "latest")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first = state["step"]
    with shmtensor.CheckpointWriter(directory, keep_last=2) as writer:
        writer.start()
        for step in range(first, STEPS):
            starts = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,))
            batch = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts])
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item().hex(), flush=True)
            if (step + 1) % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                handle = writer.save({**state, "rng": torch.get_rng_state(), "step": step + 1})
                if step < killed_at:
                    handle.durable.result()  # only so that there is something to resume from, however slow the disk
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)


def losses(directory: Path, killed_at: int = -1) -> tuple[dict[int, float], int]:
    """Run a trainer in a process of its own: its losses by step, its exit code."""
    command = [sys.executable, __file__, str(directory), str(killed_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    pairs = (line.split() for line in done.stdout.splitlines())
    return {int(step): float.fromhex(loss) for step, loss in pairs}, done.returncode


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        killed, code = losses(Path(path) / "run", KILLED_AT)
        print(f"killed by signal {-code} after step {max(killed)}")
        resumed, code = losses(Path(path) / "run")
        print(f"resumed at step {min(resumed)}, exit code {code}")
        straight, _ = losses(Path(path) / "uninterrupted")
    curve = {**killed, **resumed}
    for step in range(0, STEPS, EVERY):
        print(f"step {step:3d}   loss {curve[step]:.6f}   uninterrupted {straight[step]:.6f}")
    if 0 < min(resumed) <= KILLED_AT and curve == straight:
        print("the same loss curve, bit for bit")
    else:
        sys.exit("the loss curves differ")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
