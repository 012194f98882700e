"""Checkpoints of Hugging Face's `Trainer`, written in the background: a `TrainerCallback` over `CheckpointWriter`.

    args = TrainingArguments(save_strategy="no", eval_strategy="steps", ...)
    trainer = Trainer(..., args=args, callbacks=[Checkpoints("runs/a")])

Model, optimizer, schedule and step are saved after each evaluation, with its numbers as metrics; the last two and the
best stay, and `best` leads to the one with the least loss. The next run goes on from the newest complete state (its
data begin anew). Needs the packages `transformers` and `accelerate`.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import shmtensor


class Checkpoints(TrainerCallback):
    """Saves after each evaluation, and resumes. Takes the options of `CheckpointWriter`."""

    def __init__(self, directory: str | Path, **options: Any) -> None:
        self._directory = directory
        self._options = {"keep_last": 2, "keep_best": ("eval_loss", "min", 1), **options}
        self._writer: shmtensor.CheckpointWriter | None = None
        self._best = math.inf
        self.resumed_at = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        saved = shmtensor.load_newest(self._directory)
        if saved is not None:
            for name in ("model", "optimizer", "lr_scheduler"):
                parts[name].load_state_dict(saved[name])
            self._best = saved["best"]
            self.resumed_at = state.global_step = saved["step"]
        if state.is_world_process_zero:
            self._writer = shmtensor.CheckpointWriter(self._directory, **self._options)
            self._writer.start()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, float],
        **parts: Any,
    ) -> None:  # fmt: skip
        if self._writer is None:
            return
        is_best = metrics["eval_loss"] < self._best
        self._best = min(self._best, metrics["eval_loss"])
        parts = {name: parts[name].state_dict() for name in ("model", "optimizer", "lr_scheduler")}
        self._writer.save(
            {**parts, "step": state.global_step, "best": self._best}, metrics=metrics, alias="best" if is_best else None
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Wait until everything is durable."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def train(folder: Path, steps: int) -> tuple[Checkpoints, Trainer]:
    """Train a small model on numbers that follow each other."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    texts = [torch.arange(first, first + 8) % 16 for first in range(16)]
    data = [{"input_ids": text, "labels": text} for text in texts]
    checkpoints = Checkpoints(folder / "checkpoints")
    args = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=4, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=[checkpoints])
    trainer.train()
    return checkpoints, trainer


def main() -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        _, first = train(folder, 12)
        weights = {name: value.clone() for name, value in first.model.state_dict().items()}
        saved = shmtensor.load_newest(folder / "checkpoints")
        assert saved["step"] == 12
        assert all(torch.equal(saved["model"][name], weights[name]) for name in weights)
        checkpoints, second = train(folder, 20)
        assert (checkpoints.resumed_at, second.state.global_step) == (12, 20)
        print(f"resumed at step {checkpoints.resumed_at}")
        found = shmtensor.list_checkpoints(folder / "checkpoints")
        for each in found:
            print(each.step, f"{each.metrics['eval_loss']:.3f}", ", ".join(each.aliases))
        best = min(found, key=lambda each: each.metrics["eval_loss"])
        assert "best" in best.aliases
        assert {each.step for each in found} >= {16, 20}


if __name__ == "__main__":
    main()
