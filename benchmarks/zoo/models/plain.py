"""Networks written with torch alone, recurrent ones first."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..training import Maker, Training, with_criterion

RecurrentKind = type[nn.LSTM] | type[nn.GRU]
ROWS, LENGTH, WIDTH, VOCABULARY = 8, 24, 64, 256


def text() -> Tensor:
    """Return rows of tokens."""
    return torch.randint(VOCABULARY, (ROWS, LENGTH))


def next_tokens(outputs: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of a language model."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Recurrent(nn.Module):
    """A language model: an embedding, a recurrent net with dropout between its layers, a head."""

    def __init__(self, kind: RecurrentKind) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = kind(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens))[0])


def recurrent(kind: RecurrentKind) -> Training:
    tokens = text()
    return with_criterion(Recurrent(kind).train(), next_tokens, tokens, target=tokens)


class Packed(nn.Module):
    """A classifier of rows of several lengths, which its recurrent net reads packed."""

    def __init__(self, kind: RecurrentKind) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows: PackedSequence = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, _ = pad_packed_sequence(self.body(rows)[0], batch_first=True)
        return self.head(outputs.mean(1))


def packed(kind: RecurrentKind) -> Training:
    lengths, target = torch.tensor([24, 7, 19, 12, 3, 24, 16, 9]), torch.randint(2, (ROWS,))
    return with_criterion(Packed(kind).train(), F.cross_entropy, text(), lengths, target=target)


class Cells(nn.Module):
    """A language model whose time steps are a loop in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = memory = torch.zeros(len(tokens), WIDTH, device=tokens.device)
        outputs = []
        for token in self.embedding(tokens).unbind(1):
            hidden, memory = self.cell(token, (hidden, memory))
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))


def cells() -> Training:
    tokens = text()
    return with_criterion(Cells().train(), next_tokens, tokens, target=tokens)


class Encoder(nn.Module):
    """A classifier of padded rows, on torch's own encoder with its stock dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens), src_key_padding_mask=tokens == 0).mean(1))


def encoder() -> Training:
    tokens = text()
    tokens[1:, 18:] = 0
    return with_criterion(Encoder().train(), F.cross_entropy, tokens, target=torch.randint(2, (ROWS,)))


class Translator(nn.Module):
    """torch's own encoder and decoder, with causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.body.generate_square_subsequent_mask(target.shape[1])
        padded = source == 0
        out = self.body(
            self.embedding(source), self.embedding(target), tgt_mask=mask, src_key_padding_mask=padded,
            memory_key_padding_mask=padded, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(out)


def translator() -> Training:
    source, tokens = text(), text()
    source[2:, 20:] = 0
    return with_criterion(Translator().train(), next_tokens, source, tokens, target=tokens)


class Siamese(nn.Module):
    """One body for two images; the loss is of the distance between them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, WIDTH),
        )  # fmt: skip

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(one), self.body(other)


def siamese() -> Training:
    images = torch.randn(2, ROWS, 1, 28, 28)
    sign = torch.randint(2, (ROWS,)) * 2 - 1
    return with_criterion(Siamese().train(), _cosine_loss, *images, target=sign)


def _cosine_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cosine_embedding_loss(*outputs, target)


class Variational(nn.Module):
    """A variational autoencoder, which draws its code in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 2 * 16))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = torch.distributions.Normal(mean, (0.5 * log_variance).exp()).rsample()
        return self.decoder(code), mean, log_variance


def variational() -> Training:
    images = torch.rand(256, 784)
    return with_criterion(Variational().train(), _elbo, images, target=images)


def _elbo(outputs: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    logits, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (F.binary_cross_entropy_with_logits(logits, target, reduction="sum") + divergence) / len(target)


class Routed(nn.Module):
    """Experts in a loop: each reads the tokens that a mask selects."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            selected = chosen == i
            if selected.any():
                out[selected] = weights[selected, None] * expert(x[selected])
        return out


def routed() -> Training:
    x = torch.randn(512, WIDTH)
    return with_criterion(Routed().train(), F.mse_loss, x, target=torch.randn_like(x))


class Recommender(nn.Module):
    """Bags of categories beside dense features, and their products, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, 16, mode="sum") for _ in range(4))
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        first = self.dense(dense)
        stacked = torch.stack([first, *(bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True))], 1)
        row, column = torch.tril_indices(5, 5, -1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, row, column]
        return self.top(torch.cat((first, products), 1)).squeeze(1)


def recommender() -> Training:
    dense, categories = torch.randn(512, 13), torch.randint(100, (512, 4, 3))
    clicked = torch.randint(2, (512,)).float()
    return with_criterion(Recommender().train(), F.binary_cross_entropy_with_logits, dense, categories, target=clicked)


class Critic(nn.Module):
    """A critic under spectral norm, whose buffers change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.body = nn.Sequential(
            norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(16, 32, 4, 2, 1)), nn.LeakyReLU(0.2),
            nn.Flatten(), norm(nn.Linear(2048, 1)),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


def critic() -> Training:
    return with_criterion(Critic().train(), _hinge, torch.randn(16, 3, 32, 32))


def _hinge(outputs: Tensor, target: None) -> Tensor:
    return F.relu(1 - outputs).mean()


class UNet(nn.Module):
    """Convolutions down and up, with shortcuts between equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, 16), _double(16, 32), _double(32, 64)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.after = nn.ModuleList([_double(64, 32), _double(32, 16)])
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, after, shortcut in zip(self.up, self.after, reversed(kept[:-1]), strict=True):
            x = after(torch.cat((up(x), shortcut), 1))
        return self.head(x)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    return nn.Sequential(
        *first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def unet() -> Training:
    target = torch.randint(4, (4, 32, 32))
    return with_criterion(UNet().train(), F.cross_entropy, torch.randn(4, 3, 32, 32), target=target)


class Flow(nn.Module):
    """An ordinary differential equation, solved by Runge-Kutta in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        step = 0.1
        for _ in range(10):
            first = self.slope(x)
            second = self.slope(x + step / 2 * first)
            third = self.slope(x + step / 2 * second)
            x = x + step / 6 * (first + 2 * second + 2 * third + self.slope(x + step * third))
        return x


def flow() -> Training:
    return with_criterion(Flow().train(), F.mse_loss, torch.randn(256, 8), target=torch.randn(256, 8))


def aligned() -> Training:
    """Return the training of a recognizer with the loss of connectionist temporal classification."""
    body = nn.Sequential(
        nn.Conv1d(16, 64, 5, 2, 2), nn.GELU(), nn.Conv1d(64, 64, 5, 1, 2), nn.GELU(), nn.Conv1d(64, 20, 1)
    )
    lengths, target = torch.tensor([60, 64, 50, 56]), torch.randint(1, 20, (4, 10))
    return with_criterion(
        body.train(), _ctc, torch.randn(4, 16, 128), target=(target, lengths, torch.tensor([10, 8, 9, 5]))
    )


def _ctc(outputs: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.ctc_loss(outputs.permute(2, 0, 1).log_softmax(-1), *target)


PLAIN: dict[str, Maker] = {
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU),
    "packed_lstm": lambda: packed(nn.LSTM),
    "packed_gru": lambda: packed(nn.GRU),
    "lstm_cells": cells,
    "transformer_encoder": encoder,
    "transformer": translator,
    "siamese": siamese,
    "vae": variational,
    "routed": routed,
    "recommender": recommender,
    "critic": critic,
    "unet": unet,
    "ode": flow,
    "ctc": aligned,
}
