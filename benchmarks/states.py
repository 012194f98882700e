"""What checkpoints are measured with: flat tensors, and a language model with the state of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TENSORS = 64
GPT2 = {"vocabulary": 50257, "context": 1024, "width": 768, "heads": 12, "layers": 12}
"""124 million parameters."""
TRAINED = {"vocabulary": 256, "context": 64, "width": 384, "heads": 6, "layers": 6}
"""11 million parameters: 128 MiB with the state of Adam."""
TOY = {"vocabulary": 256, "context": 64, "width": 32, "heads": 2, "layers": 2}


def flat(nbytes: int) -> dict[str, Any]:
    """64 tensors of float32 with random values, of so many bytes together."""
    import torch

    return {f"layer.{index}": torch.randn(nbytes // TENSORS // 4) for index in range(TENSORS)}


def make_model(vocabulary: int, context: int, width: int, heads: int, layers: int) -> Any:
    """A transformer of GPT-2's form: learned places, norm first, the output tied to the embedding."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Any) -> Any:
            length = tokens.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            x = self.tokens(tokens) + self.places(torch.arange(length))
            return self.head(self.layers(x, mask=mask, is_causal=True))

    torch.manual_seed(0)
    return Model()


class Training:
    """Real steps of AdamW on random tokens; `state` is what a trainer saves."""

    def __init__(self, shape: dict[str, int], batch: int, length: int) -> None:
        import torch

        self.model = make_model(**shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(shape["vocabulary"], (batch, length + 1))
        self.steps = 0

    def step(self) -> None:
        from torch.nn.functional import cross_entropy

        tokens = self._tokens
        loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps}


def gpt2(shape: dict[str, int]) -> dict[str, Any]:
    """The state of a model and its optimizer after one step."""
    training = Training(shape, batch=1, length=8)
    training.step()
    training.optimizer.zero_grad(set_to_none=True)
    return training.state


def tensors(state: Any) -> Iterator[Any]:
    """The tensors of a state, tied ones as often as they are in it."""
    import torch

    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for child in state.values():
            yield from tensors(child)
    elif isinstance(state, (list, tuple)):
        for child in state:
            yield from tensors(child)


def storages(state: Any) -> list[Any]:
    """The tensors of a state, each storage once."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors(state)}.values())


def size(state: Any) -> int:
    """Bytes of a state, each storage once."""
    return sum(tensor.nbytes for tensor in storages(state))
