"""Networks of torch_geometric on graphs of random edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..training import Maker, Training, with_criterion

NODES, FEATURES, HIDDEN, CLASSES = 300, 32, 32, 7


def edges(count: int = 1500) -> Tensor:
    """Return random edges."""
    return torch.randint(NODES, (2, count))


def nodes(name: str, **sizes: Any) -> Training:
    """Return the training of a network that classifies nodes, some of which have labels."""
    from torch_geometric.nn import models

    model = getattr(models, name)(FEATURES, HIDDEN, num_layers=3, out_channels=CLASSES, dropout=0.5, **sizes).train()
    labelled = torch.rand(NODES) < 0.5
    target = torch.randint(CLASSES, (NODES,)), labelled
    return with_criterion(model, _labelled_loss, torch.randn(NODES, FEATURES), edges(), target=target)


class GraphClassifier(nn.Module):
    """Layers on nodes, then a mean over each graph of a batch."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        return self.head(global_mean_pool(self.layers(x, edge_index), batch))


def gin() -> Training:
    from torch_geometric.nn import GIN

    batch = torch.arange(NODES) // 30
    model = GraphClassifier(GIN(FEATURES, HIDDEN, 3)).train()
    x, target = torch.randn(NODES, FEATURES), torch.randint(2, (10,))
    return with_criterion(model, nn.functional.cross_entropy, x, edges(), batch, target=target)


class Convolutions(nn.Module):
    """Layers that are given kinds or features of edges."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, *rest))
        return x


def rgcn() -> Training:
    from torch_geometric.nn import RGCNConv

    model = Convolutions(RGCNConv(FEATURES, HIDDEN, 3), RGCNConv(HIDDEN, CLASSES, 3)).train()
    kinds, target = torch.randint(3, (1500,)), torch.randint(CLASSES, (NODES,))
    return with_criterion(
        model, nn.functional.cross_entropy, torch.randn(NODES, FEATURES), edges(), kinds, target=target
    )


def transformer_conv() -> Training:
    from torch_geometric.nn import TransformerConv

    first = TransformerConv(FEATURES, HIDDEN // 4, heads=4, edge_dim=8, dropout=0.1)
    model = Convolutions(first, TransformerConv(HIDDEN, CLASSES, edge_dim=8, dropout=0.1)).train()
    features, target = torch.randn(1500, 8), torch.randint(CLASSES, (NODES,))
    return with_criterion(
        model, nn.functional.cross_entropy, torch.randn(NODES, FEATURES), edges(), features, target=target
    )


def top_k_pool() -> Training:
    from torch_geometric.nn import GraphUNet

    model = GraphUNet(FEATURES, HIDDEN, CLASSES, depth=2).train()
    target = torch.randint(CLASSES, (NODES,))
    return with_criterion(model, nn.functional.cross_entropy, torch.randn(NODES, FEATURES), edges(), target=target)


def _labelled_loss(outputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    classes, labelled = target
    return nn.functional.cross_entropy(outputs[labelled], classes[labelled])


GRAPHS: dict[str, Maker] = {
    "gcn": lambda: nodes("GCN"),
    "gat": lambda: nodes("GAT", heads=4),
    "gatv2": lambda: nodes("GAT", heads=4, v2=True),
    "graph_sage": lambda: nodes("GraphSAGE"),
    "pna": lambda: nodes(
        "PNA", aggregators=["mean", "max", "std"], scalers=["identity", "amplification"],
        deg=torch.bincount(torch.randint(12, (NODES,))),
    ),
    "gin": gin,
    "rgcn": rgcn,
    "transformer_conv": transformer_conv,
    "graph_unet": top_k_pool,
}  # fmt: skip
