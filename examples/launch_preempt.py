"""Train, be preempted, save, start again, and end with the same loss as if nothing had happened.

    python examples/launch_preempt.py

`simulate_preemption` delivers the signal that a scheduler would send.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.launch import simulate_preemption


def train(folder, steps, preempt_at=None):
    comm = unisono.world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, first = [], 0
    checkpoint = Path(folder, "checkpoint.pt")
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        losses, first = saved["losses"], len(saved["losses"])
    for step in range(first, steps):
        x = torch.randn(32, 2, generator=torch.Generator().manual_seed(step))
        mine = x[comm.rank :: comm.size]
        optimiser.zero_grad()
        loss = (model(mine) - mine.prod(1, keepdim=True)).square().sum() / len(x)
        loss.backward()
        for parameter in model.parameters():
            comm.all_reduce_(parameter.grad)
        optimiser.step()
        losses.append(comm.all_reduce(loss.detach()).item())
        if step == preempt_at and unisono.restart_count() == 0 and comm.rank == 0:
            simulate_preemption()
        if unisono.should_stop():
            if comm.rank == 0:
                state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                torch.save({**state, "losses": losses}, checkpoint)
                print(f"saved after step {step}, leaving")
            unisono.requeue()
    return losses


def main():
    with tempfile.TemporaryDirectory() as folder:
        smooth = unisono.run(train, folder, 30, on="cpu", ranks=2)
        broken = unisono.run(train, folder, 30, preempt_at=11, on="cpu", ranks=2)
    print(f"loss {broken[0][0]:.3f} -> {broken[0][-1]:.3f} in {broken.restarts + 1} attempts")
    assert broken.restarts == 1
    assert broken[0] == smooth[0], "the curves differ"


main()
