"""What torch.distributed passes on unchecked is refused by our groups, which stay usable."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unisono import torch_private as private
from unisono.errors import CollectiveMismatch, MeshError, PartitionError, UnisonoError

on_shm = pytest.mark.ranks(2, backend="shm")


def assert_usable() -> None:
    """Collectives and messages of the world still do what they should."""
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    peer = 1 - dist.get_rank()
    received = torch.empty(2)
    ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    assert received.tolist() == [2.0, 2.0]


@on_shm
@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_root_or_peer_that_is_no_rank_is_refused_before_the_call(rank):
    x = torch.tensor([1.0, 2.0])
    calls = {
        "broadcast(src=": lambda: dist.broadcast(x, rank),
        "reduce(dst=": lambda: dist.reduce(x, rank),
        "gather(dst=": lambda: dist.gather(x, None, rank),
        "scatter(src=": lambda: dist.scatter(x, None, rank),
        "send(dst=": lambda: dist.send(x, rank),
        "recv(src=": lambda: dist.recv(x, rank),
    }
    for text, call in calls.items():
        with pytest.raises(MeshError, match=f"0 <= {rank} < 2 does not hold") as caught:
            call()
        assert f"torch.distributed.{text}{rank})" in str(caught.value)
    assert x.tolist() == [1.0, 2.0]
    assert_usable()


@on_shm
def test_zeros_without_memory_are_sent_and_refused_as_targets():
    zeros, rank = torch._efficientzerotensor((2,)), dist.get_rank()
    out, pair = torch.ones(2), [torch.ones(2), torch.ones(2)]
    dist.all_gather(pair, zeros)
    assert [x.tolist() for x in pair] == [[0.0, 0.0]] * 2
    private.reduce_scatter_single(out, torch._efficientzerotensor((4,)))
    assert out.tolist() == [0.0, 0.0]
    if rank == 0:
        dist.send(zeros, 1)
    else:
        dist.recv(out.fill_(1), 0)
    assert out.tolist() == [0.0, 0.0]
    for call in (
        lambda: dist.all_reduce(zeros),
        lambda: dist.all_reduce(zeros, async_op=True),
        lambda: dist.broadcast(zeros, 0),
        lambda: private.all_gather_single(torch._efficientzerotensor((4,)), out),
        lambda: dist.recv(zeros, 1 - rank),
    ):
        with pytest.raises(UnisonoError, match="no memory"):
            call()
    assert_usable()


@pytest.mark.ranks(1, backend="shm")
def test_a_group_of_one_rank_has_root_0_only():
    with pytest.raises(MeshError, match="the group has 1 rank"):
        dist.broadcast(torch.ones(1), 1)


@on_shm
def test_inputs_and_outputs_of_unlike_dtypes_are_refused_before_the_call():
    floats, ints = torch.ones(2), torch.zeros(2, dtype=torch.int32)
    four = torch.zeros(4, dtype=torch.int32)
    world = dist.group.WORLD
    calls = {
        "all_gather": lambda: private.all_gather_single(four, floats),
        "reduce_scatter": lambda: private.reduce_scatter_single(ints, torch.ones(4)),
        # As C++ calls them: in Python torch.distributed looks at these itself.
        "all_to_all_single": lambda: world.all_to_all_single(ints, floats, [], []),
        "all_gather ": lambda: world.allgather([[floats, ints]], [floats]),
        "reduce_scatter ": lambda: world.reduce_scatter([ints], [[floats, floats]]),
        "all_to_all ": lambda: world.alltoall([ints, ints], [floats, floats]),
    }
    for text, call in calls.items():
        with pytest.raises(UnisonoError, match=f"{text.strip()} with tensors of float32 and int32"):
            call()
    assert ints.tolist() == [0, 0]
    assert four.tolist() == [0] * 4
    if dist.get_rank() == 0:
        with pytest.raises(UnisonoError, match="gather with tensors of float32 and int32"):
            world.gather([[ints, ints]], [floats], options(dist.GatherOptions()))
        with pytest.raises(UnisonoError, match="scatter with tensors of float32 and int32"):
            world.scatter([ints], [[floats, floats]], options(dist.ScatterOptions()))
    assert_usable()


def options(given):
    """Options of a call as torch.distributed passes them, with root 0."""
    given.rootRank, given.asyncOp = 0, False
    return given


@on_shm
@pytest.mark.parametrize("is_late", [False, True], ids=["expected", "put aside"])
def test_a_message_of_another_dtype_is_refused_by_its_receiver(is_late):
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1, tag=1)
        dist.send(torch.ones(1), 1, tag=2)
    else:
        if is_late:  # the message behind it is wanted first
            dist.recv(torch.empty(1), 0, tag=2)
        with pytest.raises(CollectiveMismatch, match="float32 != int32"):
            dist.recv(torch.zeros(2, dtype=torch.int32), 0, tag=1)


@on_shm
def test_a_message_of_another_length_is_refused_by_its_receiver():
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        with pytest.raises(CollectiveMismatch, match=r"16 != 3 \* 4 = 12 bytes"):
            dist.recv(torch.empty(3, 1), 0, tag=0)


@on_shm
@pytest.mark.parametrize("count", [1, 3])
def test_a_list_without_one_tensor_for_each_rank_is_refused_before_the_call(count):
    x, outs, ins = torch.ones(2), [torch.zeros(2)] * count, [torch.ones(2)] * count
    two = [torch.zeros(2), torch.zeros(2)]
    calls = {
        f"all_gather with a list of {count} output": lambda: dist.all_gather(outs, x),
        f"reduce_scatter with a list of {count} input": lambda: dist.reduce_scatter(x, ins),
        f"all_to_all with a list of {count} output": lambda: dist.all_to_all(outs, ins),
        f"all_to_all with a list of {count} input": lambda: dist.all_to_all(two, ins),
        f"all_gather_coalesced with a list of {count + 1} output": lambda: (
            dist.group.WORLD.allgather_coalesced([two[:1], [*outs, x]], [x])
        ),
    }
    if dist.get_rank() == 0:
        calls |= {
            f"gather with a list of {count} output": lambda: dist.gather(x, outs),
            f"scatter with a list of {count} input": lambda: dist.scatter(x, ins),
        }
    for text, call in calls.items():
        with pytest.raises(PartitionError, match=text) as caught:
            call()
        assert "!=" in str(caught.value)
    assert outs[0].tolist() == [0.0, 0.0]
    assert_usable()
