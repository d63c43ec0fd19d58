"""The wrapper as a module among others: compiled, and copied with all that it holds."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from parallel_models import (
    OPTIMIZERS,
    assert_same_parameters,
    batch,
    built,
    cnn,
    loss_of,
    mlp,
    train_alike,
)
from torch import nn

from unisono.comm import world
from unisono.data_parallel import (
    DASO,
    DataParallel,
    DataParallelMultiGPU,
    DataParallelOptimizer,
)


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
        train_alike((compiled, optimizer), (twin, twin_optimizer), 5, (2, 6, 6))
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
    model = Wrapper(module, compression="bf16")
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
    for one in (model, twin):
        one.zero_grad()
        loss_of(one(batch((6,), 1)[1])).backward()
    assert len(twin._forward_hooks) == 1
    assert len(calls) == 3
    for p, q in zip(module.parameters(), twin.module.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p.grad, q.grad)


class Inside(nn.Module):
    """Has a part that is called as the wrapper calls the whole, and one of the same name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.module = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.word = "none"

    def get_extra_state(self):
        return self.word

    def set_extra_state(self, word):
        self.word = word


@pytest.mark.ranks([1, 2], timeout=60)
def test_states_load_with_and_without_the_prefix():
    """States of a plain module, of this wrapper and of torch's DDP, also deeper in a network."""
    torch.manual_seed(1)
    saved = Inside()
    saved.word = "said"
    plain = saved.state_dict()
    assert "module.weight" in plain
    for make in (lambda m: DataParallel(m), _node_wise):
        wrapped = make(copy.deepcopy(saved)).state_dict()
        assert all(name.startswith("module.") for name in wrapped)
        deep = {f"0.{name}": x for name, x in plain.items()}
        for state, is_deep in ((plain, False), (wrapped, False), (deep, True)):
            names = list(state)
            model = make(Inside())
            whole = nn.Sequential(model) if is_deep else model
            whole.load_state_dict(state)
            assert list(state) == names  # what was given is as it was
            assert model.module.word == "said"
            for name, x in model.module.state_dict().items():
                assert name == "_extra_state" or torch.equal(x, plain[name]), name
            Inside().load_state_dict(model.module.state_dict())  # the way to plain torch
        for more, told in (({"nobody": torch.ones(1)}, '"nobody"'), ({}, '"module.weight"')):
            short = {name: x for name, x in plain.items() if more or name != "weight"}
            with pytest.raises(RuntimeError, match=told):
                make(Inside()).load_state_dict({**short, **more})


def _node_wise(module):
    daso = DASO(torch.optim.SGD(module.parameters(), lr=0.1), 3)
    return DataParallelMultiGPU(module, daso)


@pytest.mark.ranks(2, timeout=90)
def test_a_whole_step_can_be_compiled():
    def trained(backend: str | None) -> torch.Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        model = DataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        call = step if backend is None else torch.compile(step, backend=backend)
        data = torch.Generator().manual_seed(world().rank)
        for _ in range(4):
            call(torch.randn(8, 4, generator=data))
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # read by the compiler itself
        compiled = trained("aot_eager")
    torch.testing.assert_close(compiled, trained(None))
