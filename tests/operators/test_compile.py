"""Operators inside torch.compile: whole graphs, same values and gradients as eager."""

from __future__ import annotations

import pytest
import torch

from unisono import torch_private as private
from unisono.comm import world
from unisono.operators import (
    all_gather,
    all_sum_reduce,
    all_to_all,
    concat_replicated,
    copy,
    reduce_scatter,
    slice_replicated,
    sum_to_replicated,
)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # at breaks of a graph
@pytest.mark.ranks(3, timeout=90)
def test_operators_compile_into_one_graph():
    """All in one function, each with an input of its own: one compilation is much of the cost."""
    comm = world()
    sizes = tuple(range(1, comm.size + 1))
    back = tuple(sizes[comm.rank] for _ in sizes)
    steps = torch.arange(7.0).double()
    cases = {
        "all_gather": lambda t: all_gather(t, 0, sizes, comm=comm) ** 2,
        "all_gather dim 1": lambda t: all_gather(t.t(), 1, sizes, comm=comm) ** 2,
        "reduce_scatter": lambda t: (
            reduce_scatter(t.repeat(sum(sizes), 1)[: sum(sizes)], 0, sizes, comm=comm) ** 2
        ),
        "all_sum_reduce": lambda t: all_sum_reduce(t.sum(), comm=comm) ** 2,
        "copy": lambda t: copy(t.sum(), comm=comm) ** 2,
        "sum_to_replicated": lambda t: sum_to_replicated(t.sum(), comm=comm) ** 2,
        "slice_replicated": lambda t: slice_replicated(t.sum() * steps, 0, comm=comm) ** 2,
        "concat_replicated": lambda t: concat_replicated(t, 0, sizes, comm=comm) ** 2,
        "all_to_all": lambda t: all_to_all(t.repeat(comm.size, 1), back, sizes, comm=comm) ** 2,
    }
    x = torch.arange(2.0 * sizes[comm.rank]).view(-1, 2).double() + comm.rank

    def all_cases(inputs):
        return {name: function(inputs[name]) for name, function in cases.items()}

    def run(function):
        inputs = {name: x.clone().requires_grad_() for name in cases}
        outputs = function(inputs)
        sum(y.sum() for y in outputs.values()).backward()
        return {name: (outputs[name], inputs[name].grad) for name in cases}

    expected = run(all_cases)
    torch._dynamo.reset()
    whole = private.TRACES_OPERATORS
    found = run(torch.compile(all_cases, fullgraph=whole, backend="aot_eager"))
    for name, (value, gradient) in expected.items():
        assert torch.allclose(found[name][0], value), name
        assert torch.allclose(found[name][1], gradient), name
