"""DASO's arguments, checked: what is asked, what was found, what is expected."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.comm import Communicator
from unisono.data_parallel.nodes import NodeLayout
from unisono.errors import explain
from unisono.expect import expect, expect_choice, expect_float, expect_int

__all__ = ["WIRES", "check_arguments", "check_loss", "node_layout"]

WIRES = (torch.float32, torch.bfloat16, torch.float16)


def check_arguments(
    *,
    local_optimizer: Any,
    scheduler: Any,
    sending_chunk_size: int,
    downcast_type: torch.dtype,
    outer_momentum: float,
    outer_lr: float,
    local_merge: str,
    scheduler_step: str,
    **flags: bool,
) -> None:
    """Raise TypeError or ValueError for the first argument that DASO cannot use."""
    expect(
        "local_optimizer", local_optimizer, Optimizer, "torch.optim.SGD(model.parameters(), 0.1)"
    )
    if hasattr(local_optimizer, "local_optimizer") or hasattr(local_optimizer, "torch_optimizer"):
        raise TypeError(
            explain(
                f"local_optimizer={type(local_optimizer).__name__}(...)",
                "an optimizer that synchronises ranks itself",
                None,
                "pass the torch optimizer inside it",
            )
        )
    if scheduler is not None:
        expect("scheduler", scheduler, LRScheduler, "StepLR(local_optimizer, 10), an instance")
        if scheduler.optimizer is not local_optimizer:
            raise ValueError(
                explain(
                    f"scheduler={type(scheduler).__name__}(...)",
                    "it was made for another optimizer than local_optimizer",
                    None,
                    f"{type(scheduler).__name__}(local_optimizer, ...)",
                )
            )
    expect_int("sending_chunk_size", sending_chunk_size, 1)
    expect("downcast_type", downcast_type, torch.dtype, "torch.bfloat16")
    if downcast_type not in WIRES:
        raise ValueError(
            explain(
                f"downcast_type={downcast_type}", None, None, f"one of {', '.join(map(str, WIRES))}"
            )
        )
    expect_float("outer_momentum", outer_momentum, 0.0, below=1.0)
    expect_float("outer_lr", outer_lr, 0.0)
    expect_choice("local_merge", local_merge, ("mean", "rank"))
    expect_choice("scheduler_step", scheduler_step, ("batch", "epoch"))
    for name, value in flags.items():
        expect(name, value, bool)


def check_loss(loss: Any) -> float:
    """Return the loss of an epoch as a number."""
    expect("loss", loss, (int, float, torch.Tensor))
    if not isinstance(loss, torch.Tensor):
        return float(loss)
    if loss.numel() != 1:
        raise ValueError(
            explain(
                f"epoch_loss_logic of a tensor of shape {list(loss.shape)}",
                f"{loss.numel()} values",
                f"{loss.numel()} != 1",
                "loss.mean()",
            )
        )
    return float(loss.detach())


def node_layout(comm: Communicator, ranks_per_node: Any) -> NodeLayout:
    """Return which ranks share a node. Collective over `comm` when hostnames decide."""
    if ranks_per_node is None:
        return NodeLayout.of_hosts(comm.hosts)
    expect("ranks_per_node", ranks_per_node, (int, list, tuple, type(None)), "2, or [2, 3]")
    for size in [ranks_per_node] if isinstance(ranks_per_node, int) else ranks_per_node:
        expect("ranks_per_node", size, int)
    return NodeLayout.of_blocks(comm.size, ranks_per_node)
