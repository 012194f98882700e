"""Lightning's checkpoints, written in the background: a `CheckpointIO` over `CheckpointWriter`.

    trainer = lightning.Trainer(plugins=[BackgroundCheckpoints()], callbacks=[ModelCheckpoint(...)])

`ModelCheckpoint` and `ckpt_path=` work as ever. Each path that Lightning names is a link to a file that the writing
process makes; the link appears, or moves, when the file is durable. Needs the package `lightning`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import shmtensor


class BackgroundCheckpoints(CheckpointIO):
    """Saves without holding the trainer up. Takes the options of `CheckpointWriter`."""

    def __init__(self, **options: Any) -> None:
        self._options = {"keep_last": 1, **options}  # what a path leads to stays whatever `keep_last` says
        self._writers: dict[Path, shmtensor.CheckpointWriter] = {}
        self._last: Future | None = None
        self._failed: list[BaseException] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("storage_options are not for local files: pass options to BackgroundCheckpoints()")
        self._raise_failed()
        folder = Path(path).absolute().parent
        if folder not in self._writers:
            self._writers[folder] = shmtensor.CheckpointWriter(folder, **self._options)
        meta = {"step": checkpoint["global_step"]}
        self._last = self._writers[folder].save(checkpoint, meta=meta, alias=Path(path).name).durable

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if map_location is not None:
            raise TypeError("tensors come on the CPU: leave out map_location, load_state_dict copies them")
        return shmtensor.load_checkpoint(path)  # nothing is unpickled, whatever weights_only says

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove one when those that were saved before this call are durable: one of them takes its place."""
        if self._last is None:
            remove(Path(path))
        else:
            self._last.add_done_callback(partial(self._remove, Path(path)))

    def _remove(self, path: Path, done: Future) -> None:
        error = done.exception()
        if error is None:
            remove(path)
        elif error not in self._failed:
            self._failed.append(error)

    def _raise_failed(self) -> None:
        if self._failed:
            raise self._failed.pop()

    def teardown(self) -> None:
        """Wait until everything is durable."""
        while self._writers:
            self._writers.popitem()[1].close()
        self._raise_failed()


def remove(path: Path) -> None:
    """Remove a link, and before it what it leads to."""
    target = path.resolve()
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class Model(lightning.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


def fit(folder: Path, epochs: int, checkpoint: Path | None = None) -> tuple[Model, lightning.Trainer]:
    """Train; of all epochs the two with the least loss are kept, and the last one."""
    torch.manual_seed(0)
    model = Model()
    keeps = ModelCheckpoint(folder, monitor="loss", save_top_k=2, save_last=True, filename="{epoch}")
    x = torch.linspace(0, 1, 32).reshape(-1, 1)
    plugin = BackgroundCheckpoints()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[keeps], plugins=[plugin],
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(x, 3 * x + 1), 8), ckpt_path=checkpoint)
    plugin.teardown()
    return model, trainer


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path).resolve()
        model, trainer = fit(folder, 4)
        for found in shmtensor.list_checkpoints(folder):
            print(found.step, ", ".join(found.aliases))
        links = {each.name for each in folder.iterdir() if each.is_symlink()}
        assert links == {
            "last.ckpt",
            "latest",
            *(Path(name).name for name in trainer.checkpoint_callback.best_k_models),
        }
        assert len(shmtensor.list_checkpoints(folder)) == 3
        saved = shmtensor.load_checkpoint(folder / "last.ckpt")
        assert all(torch.equal(saved["state_dict"][name], value) for name, value in model.state_dict().items())
        _, resumed = fit(folder, 6, folder / "last.ckpt")
        assert (trainer.global_step, resumed.global_step) == (16, 24)
        print(f"resumed at step {trainer.global_step}, ended at step {resumed.global_step}")


if __name__ == "__main__":
    main()
