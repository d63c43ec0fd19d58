"""Meshes: named axes, the arithmetic when they do not fit, and torch's DeviceMesh beside ours."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.comm import Communicator, groups, world
from unisono.errors import MeshError
from unisono.topology import Mesh


def test_axes_may_be_given_as_a_mapping_with_any_name() -> None:
    mesh = Mesh({"comm": 1, "device": 1}, comm=world(), device="cpu")
    assert mesh.names == ("comm", "device")
    assert mesh == Mesh({"comm": 1, "device": 1})


def test_meshes_are_values() -> None:
    mesh = Mesh(data=1, space=1)
    assert mesh == Mesh(data=1, space=1)
    assert hash(mesh) == hash(Mesh(data=1, space=1))
    assert mesh != Mesh(space=1, data=1), "the order of axes is part of a mesh"
    assert mesh != "mesh"
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert copy.deepcopy(mesh) is mesh
    assert repr(mesh) == "Mesh(data=1, space=1)"
    mesh.axes["data"] = 5
    assert mesh.axes["data"] == 1
    with pytest.raises(AttributeError, match="frozen"):
        mesh._comm = world()  # type: ignore[misc]


@pytest.mark.ranks(4)
def test_ranks_are_row_major_with_the_last_axis_fastest() -> None:
    mesh = Mesh(data=2, graph=2)
    me = dist.get_rank()
    assert mesh.index == divmod(me, 2)
    assert mesh.coordinate("data") == me // 2
    assert mesh.coordinate("graph") == me % 2
    assert mesh.comm("graph").ranks == ((0, 1) if me < 2 else (2, 3))
    assert mesh.comm("data").ranks == (me % 2, me % 2 + 2)
    assert mesh.ranks_along("data", rank=3) == (1, 3)
    assert mesh.ranks_along("graph", "data") == (0, 2, 1, 3)
    assert mesh.ranks_along() == (me,)


@pytest.mark.ranks(4)
def test_sums_run_along_the_named_axis() -> None:
    mesh = Mesh(data=2, graph=-1)
    mine = torch.tensor([float(dist.get_rank())])
    assert mesh.comm("graph").all_reduce(mine).item() == (1.0 if dist.get_rank() < 2 else 5.0)
    assert mesh.comm("data").all_reduce(mine).item() == 2.0 + 2.0 * (dist.get_rank() % 2)
    assert mesh.comm("data", "graph").all_reduce(mine).item() == 6.0


@pytest.mark.ranks(4)
def test_groups_are_shared_and_the_world_is_reused() -> None:
    mesh = Mesh(data=2, graph=2)
    assert mesh.comm().group is dist.group.WORLD
    assert mesh.comm("graph", "data").group is dist.group.WORLD
    assert Mesh(data=4).comm("data").group is dist.group.WORLD
    first = mesh.comm("data").group
    made = groups.count()
    assert mesh.comm("data").group is first
    assert Mesh(a=2, b=2).comm("a").group is first
    assert groups.count() == made


@pytest.mark.ranks(4)
def test_communicators_are_found_by_axis_name_and_number() -> None:
    mesh = Mesh(data=2, graph=2)
    assert Communicator.of(mesh, axis="graph") == mesh.comm("graph")
    assert Communicator.of(mesh, axis=0) == mesh.comm("data")
    assert Communicator.of(Mesh(all=4)).size == 4


@pytest.mark.ranks(4)
def test_a_sub_mesh_goes_through_this_rank() -> None:
    mesh = Mesh(data=2, h=2, w=1)
    plane = mesh.sub("w", "h")
    assert plane.axes == {"h": 2, "w": 1}, "axes keep the order of the mesh"
    assert plane.comm().ranks == mesh.comm("h").ranks
    assert plane.index == (mesh.coordinate("h"), 0)
    nested = plane.sub("h")
    assert nested.comm("h").ranks == mesh.comm("h").ranks


@pytest.mark.ranks(4)
def test_a_mesh_that_does_not_fit_shows_the_product_on_every_rank() -> None:
    with pytest.raises(MeshError) as caught:
        Mesh(data=2, graph=3)
    text = str(caught.value)
    assert "data(2) * graph(3) = 6 != ranks(4)" in text
    assert "HINT: Mesh(data=2, graph=2)" in text
    with pytest.raises(MeshError, match=r"graph\(3\) = 3 does not divide ranks\(4\): 4 % 3 = 1"):
        Mesh(data=-1, graph=3)


@pytest.mark.ranks(4)
def test_the_device_mesh_stands_on_the_same_groups() -> None:
    mesh = Mesh(data=2, graph=2)
    made = groups.count()
    device_mesh = mesh.device_mesh
    assert mesh.device_mesh is device_mesh
    assert device_mesh.mesh_dim_names == ("data", "graph")
    assert device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert device_mesh.get_group("graph") is mesh.comm("graph").group
    assert device_mesh.get_group("data") is mesh.comm("data").group
    assert groups.count() == made + 2
    assert device_mesh.get_coordinate() == mesh.index


@pytest.mark.ranks(4, timeout=60)
def test_dtensor_runs_on_the_device_mesh() -> None:
    mesh = Mesh(data=2, tensor=2)
    x = torch.arange(12.0).reshape(4, 3)
    split = distribute_tensor(x, mesh.device_mesh["tensor"], [Shard(0)])
    assert isinstance(split, DTensor)
    assert torch.equal(split.full_tensor(), x)
    assert split.to_local().shape == (2, 3)


@pytest.mark.ranks(4)
def test_a_mesh_over_half_of_the_world() -> None:
    half = world().sub((0, 2)) if dist.get_rank() % 2 == 0 else world().sub((1, 3))
    mesh = Mesh({"data": 2}, comm=half)
    assert mesh.coordinate("data") == dist.get_rank() // 2
    assert mesh.device_mesh.mesh.tolist() == ([0, 2] if dist.get_rank() % 2 == 0 else [1, 3])
