"""The wrapper as a module among others: compiled, and copied with all that it holds."""

from __future__ import annotations

import copy

import pytest
import torch
from parallel_models import OPTIMIZERS, assert_same_parameters, batch, built, cnn, loss_of, mlp
from torch import nn

from unisono.data_parallel import DataParallel, DataParallelOptimizer, PowerSGD


@pytest.mark.ranks(2, timeout=90)
def test_a_compiled_wrapper_is_compiled_once():
    for blocking in (True, False):
        graphs = []
        module, twin = built(cnn)
        optimizer = DataParallelOptimizer(OPTIMIZERS["sgd"](module.parameters()))
        model = DataParallel(module, None, optimizer, blocking, bucket_mb=0.001)

        def keep(graph, inputs, graphs=graphs):
            graphs.append(inputs)
            return graph

        compiled = torch.compile(model, backend=keep)
        twin_optimizer = OPTIMIZERS["sgd"](twin.parameters())
        for step in range(5):
            everything, mine = batch((2, 6, 6), step)
            for one, its_optimizer, x in (
                (compiled, optimizer, mine),
                (twin, twin_optimizer, everything),
            ):
                its_optimizer.zero_grad()
                loss_of(one(x)).backward()
                its_optimizer.step()
            assert len(graphs) == 1
        model.finalize()
        assert_same_parameters(module, twin)


class Wrapper(DataParallel):
    """A subclass with an attribute and a layer of its own."""

    def __init__(self, module, **options):
        super().__init__(module, **options)
        self.label = ["mine"]
        self.head = nn.Linear(2, 2)


@pytest.mark.ranks(2, timeout=60)
def test_a_deepcopy_has_all_that_the_wrapper_had():
    module, _ = built(mlp)
    model = Wrapper(module, compression=PowerSGD(rank=1, start_step=0, min_ratio=0))
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    module[1].eval()
    loss_of(model(batch((6,))[1])).backward()
    twin = copy.deepcopy(model)
    assert twin.label == ["mine"]
    assert twin.label is not model.label
    assert torch.equal(twin.head.weight, model.head.weight)
    assert twin.head.weight is not model.head.weight
    assert [part.training for part in twin.modules()] == [p.training for p in model.modules()]
    for one in (model, twin):  # with the errors that the first backward left
        one.zero_grad()
        loss_of(one(batch((6,), 1)[1])).backward()
    assert len(twin._forward_hooks) == 1
    assert len(calls) == 3
    for p, q in zip(module.parameters(), twin.module.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p.grad, q.grad)
