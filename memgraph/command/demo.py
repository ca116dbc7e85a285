"""Train a small transformer eagerly and under a budget, and show that memory differs and losses do not."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from ..api.compiler import compile, plan
from ..report.tables import mb
from .output import NewPage, NewPlan, save, say, write

WIDTH, LAYERS, TOKENS, BATCH, CLASSES = 256, 8, 128, 8, 512
SHARE = 0.6  # of what eager's step takes beyond parameters and gradients


class Language(nn.Module):
    """A transformer that predicts the next token, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss, f32[], of tokens, i64[batch, tokens]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        logits = self.head(hidden[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def demo(
    output: NewPlan = None,
    html: NewPage = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 5,
) -> int:
    """Train a small transformer eagerly and under 60 % of its activations: equal losses, less memory.

    \b
        memgraph demo
        memgraph demo --html plan.html
    """
    tokens = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    eager, model = _made(), _made()
    optimizer = torch.optim.AdamW(model.parameters())
    needs = plan(model, tokens, budget=1.0, optimizer=optimizer)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budget = int(4 * weights + SHARE * (needs.peak - 4 * weights))  # parameters, gradients and two states stay
    say(f"eager's step needs {mb(needs.peak)}; the budget is {mb(budget)}")
    compiled = compile(model, budget, optimizer=optimizer)
    losses = [_trained(each, tokens, steps, chosen) for each, chosen in ((eager, None), (compiled, optimizer))]
    write(compiled.plan, as_json=False)
    for step, (one, other) in enumerate(zip(*losses, strict=True), 1):
        print(f"step {step}: eager's loss {one:.6f}, under the budget {other:.6f}")
    save(compiled.plan, output, html)
    same = losses[0] == losses[1]
    print("the losses are equal to the bit" if same else "THE LOSSES DIFFER: please report it")
    return 0 if same else 1


def _made() -> Language:
    torch.manual_seed(0)
    return Language()


def _trained(model: nn.Module, tokens: Tensor, steps: int, optimizer: torch.optim.Optimizer | None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
