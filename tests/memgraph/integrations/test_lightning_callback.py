"""A callback gives Lightning's Trainer a budget, and all else stays as without it."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memgraph
from passes import Stream

lightning = pytest.importorskip("lightning.pytorch")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
WIDTH, ROWS = 32, 16
pytestmark = pytest.mark.filterwarnings("ignore:.*", "default::RuntimeWarning:memgraph")


def net(hidden: int = 8 * WIDTH) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, WIDTH)) for _ in range(3)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


class Called(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module whose training step calls its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = net(), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def answered(self, x: Tensor) -> Tensor:
        y: Tensor = self(x)
        return y

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = F.cross_entropy(self.answered(batch[0]), batch[1])
        self.log("train", loss)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        loss = F.cross_entropy(self.answered(batch[0]), batch[1])
        self.log("valid", loss)
        self.seen.append(float(loss))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Wide(Called):
    """A module whose states are large enough to be offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(64 * WIDTH)


class Inner(Called):
    """A module without a forward, whose training step calls a child."""

    forward = lightning.LightningModule.forward

    def answered(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


class Generates(Called):
    """A module whose validation makes rows one by one."""

    def generate(self, x: Tensor) -> Tensor:
        for count in range(1, len(x)):
            x[count] = x[count] + self.net(x[:count])[-1].sum()
        return x

    def validation_step(self, batch: Any, number: int) -> None:
        self.seen.append(float(self.generate(batch[0][:4]).sum()))


def loader(seed: int = 0) -> Any:
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6 * ROWS, WIDTH, generator=made), torch.randint(0, 4, (6 * ROWS,), generator=made)
    return DataLoader(TensorDataset(x, y), batch_size=ROWS)


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    told: dict[str, Any] = {
        "max_steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 2,
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "check_val_every_n_epoch": None, **options,
    }  # fmt: skip
    saved = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    return lightning.Trainer(default_root_dir=folder, callbacks=[saved, *callbacks], **told)


def fitted(kind: type[Called], folder: Path, *callbacks: Any, resume: Path | None = None, **options: Any) -> Called:
    module = kind()
    torch.manual_seed(1)
    trainer(folder, *callbacks, **options).fit(module, loader(), loader(1), ckpt_path=resume and str(resume))
    return module


def budget_of(**options: Any) -> int:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH)
    return int(0.97 * memgraph.plan(model, x, budget="1GB", optimizer=optimizer, accumulate=True).peak)


def test_what_validation_generates_is_made_by_the_plain_forward(tmp_path: Path) -> None:
    callback = memgraph.LightningBudget("1GB", module="net", time_limit=0)
    ours, plain = fitted(Generates, tmp_path / "ours", callback), fitted(Generates, tmp_path / "plain")
    assert ours.seen == plain.seen
    assert callback._budget.compiled is not None
    assert len(callback._budget.compiled.plans) == 2  # gradients are made, or added to


@pytest.mark.long
def test_loggers_have_the_bytes_of_steps(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path, name="log", version="0")
    callback, budget = memgraph.LightningBudget(budget_of(), time_limit=0), budget_of() / 1e6
    fitted(Called, tmp_path, callback, logger=logger, log_every_n_steps=1)
    rows = list(csv.DictReader((tmp_path / "log/0/metrics.csv").open()))
    told = [row for row in rows if row["memory_peak_mb"]]
    assert told and all(0 < float(row["memory_peak_mb"]) <= float(row["memory_budget_mb"]) for row in told)
    assert {round(float(row["memory_budget_mb"]), 3) for row in told} == {round(budget, 3)}  # in 32 bits


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [Called, Inner])
def test_it_trains_validates_and_saves_as_without_it(kind: type[Called], precision: Any, tmp_path: Path) -> None:
    plain = fitted(kind, tmp_path / "plain", precision=precision)
    callback = memgraph.LightningBudget(budget_of(), time_limit=0)
    ours = fitted(kind, tmp_path / "ours", callback, precision=precision)
    assert ours.seen == plain.seen
    same(ours, plain)
    assert callback._budget.compiled is not None
    reports = [step.report for step in callback._budget.compiled._kept.steps]
    assert any(report.plan for report in reports) and all(report.counted for report in reports)
    assert all(report.measured is None or report.measured <= report.peak <= budget_of() for report in reports)
    saved = [torch.load(tmp_path / name / "step=4.ckpt", weights_only=True) for name in ("plain", "ours")]
    for name, value in saved[0]["state_dict"].items():
        assert torch.equal(saved[1]["state_dict"][name], value), name
    assert "forward" not in vars(ours) and "forward" not in vars(ours.net)


def test_a_checkpoint_of_it_is_resumed_with_and_without_it(tmp_path: Path) -> None:
    folder, budget = tmp_path / "whole", budget_of()
    whole = fitted(Called, folder, memgraph.LightningBudget(budget, time_limit=0))
    middle = folder / "step=2.ckpt"
    plain = fitted(Called, tmp_path / "plain", resume=middle)
    ours = fitted(Called, tmp_path / "ours", memgraph.LightningBudget(budget, time_limit=0), resume=middle)
    same(ours, plain)
    assert ours.seen == plain.seen
    assert whole.state_dict().keys() == ours.state_dict().keys()


def test_a_budget_below_the_states_offloads_them_and_trains_the_same(tmp_path: Path) -> None:
    model = Wide().net
    needs = memgraph.plan(
        model, torch.randn(ROWS, WIDTH), budget="1GB", optimizer=torch.optim.AdamW(model.parameters())
    )
    states = needs.forecast.by_kind["state"].max()
    callback = memgraph.LightningBudget(int(needs.peak - states // 3), time_limit=0)
    ours = fitted(Wide, tmp_path / "ours", callback, accumulate_grad_batches=1)
    plain = fitted(Wide, tmp_path / "plain", accumulate_grad_batches=1)
    assert callback._budget.compiled is not None
    reports = [step.report for step in callback._budget.compiled._kept.steps]
    assert any(isinstance(decision, Stream) for report in reports for decision in report.plan)
    assert all(report.measured is None or report.measured <= report.peak <= report.budget for report in reports)
    assert ours.seen == plain.seen
    same(ours, plain)


def test_without_a_name_an_unclear_module_is_refused(tmp_path: Path) -> None:
    class Two(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.other = net()

    with pytest.raises(ValueError, match=r"no forward and 2 children with parameters.*there are: net, other"):
        fitted(Two, tmp_path, memgraph.LightningBudget("1GB"))
    with pytest.raises(ValueError, match="module='body' is no submodule"):
        fitted(Two, tmp_path, memgraph.LightningBudget("1GB", module="body"))
    callback = memgraph.LightningBudget("1GB", module="net", time_limit=0)
    fitted(Two, tmp_path, callback)
    assert callback.plan is not None


def test_a_budget_that_no_plan_fits_is_raised_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(memgraph.BudgetError):
        fitted(Called, tmp_path, memgraph.LightningBudget(20_000, time_limit=0), num_sanity_val_steps=0)


@pytest.mark.parametrize("name", ["optimizer", "loss", "microbatches", "fuse_update"])
def test_what_is_the_trainers_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="the trainer has the optimizer"):
        memgraph.LightningBudget("1GB", **{name: 2})  # type: ignore[arg-type]


def same(ours: nn.Module, plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
